#!/usr/bin/env bash
# Writes docs/commands/*.md from --help: one page per subcommand of the program, and per script in tools/ that has flags.
# Usage: docs/commands.sh HEARTH [DIR]
set -euo pipefail
hearth=$1
dir=${2:-$(dirname "${BASH_SOURCE[0]}")/commands}
mkdir -p "$dir"

page() { # NAME TITLE COMMAND...: the page of what `COMMAND... --help` prints
  local name=$1 title=$2
  shift 2
  {
    # shellcheck disable=SC2016  # the quotes are Markdown's
    printf '# `%s`\n\nMade by docs/commands.sh from `%s --help`.\n\n```\n' "$title" "$title"
    "$@" --help
    # shellcheck disable=SC2016
    printf '```\n'
  } >"$dir/$name.md"
}

mapfile -t names < <("$hearth" --help | sed -n '/^Subcommands:/,/^$/s/^  \([a-z][a-z]*\) .*/\1/p')
((${#names[@]})) || { echo "no subcommands in the output of $hearth --help" >&2; exit 1; }
for name in "${names[@]}"; do page "$name" "hearth $name" "$hearth" "$name"; done
for part in fit eval compare; do page "predictor-$part" "hearth predictor $part" "$hearth" predictor "$part"; done
for script in compare gpu-check package package-check; do page "$script" "tools/$script" "$(dirname "${BASH_SOURCE[0]}")/../tools/$script"; done
