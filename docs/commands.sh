#!/usr/bin/env bash
# Writes docs/commands/*.md from the program's own --help: one page per subcommand.
# Usage: docs/commands.sh HEARTH [DIR]
set -euo pipefail
hearth=$1
dir=${2:-$(dirname "${BASH_SOURCE[0]}")/commands}
mkdir -p "$dir"

page() { # NAME WORD...: the page of `hearth WORD...`
  local name=$1
  shift
  {
    # shellcheck disable=SC2016  # the quotes are Markdown's
    printf '# `hearth %s`\n\nMade by docs/commands.sh from `hearth %s --help`.\n\n```\n' "$*" "$*"
    "$hearth" "$@" --help
    # shellcheck disable=SC2016
    printf '```\n'
  } >"$dir/$name.md"
}

mapfile -t names < <("$hearth" --help | sed -n '/^Subcommands:/,/^$/s/^  \([a-z]*\) .*/\1/p')
((${#names[@]})) || { echo "no subcommands in the output of $hearth --help" >&2; exit 1; }
for name in "${names[@]}"; do page "$name" "$name"; done
for part in fit eval compare; do page "predictor-$part" predictor "$part"; done
