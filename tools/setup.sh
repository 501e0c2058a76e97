# Sourced by tools/demo and tools/test: installs what the build needs, configures, and says how many jobs to run.
# What a person wants to see goes to stderr; logs go to build/logs.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build/ci # tools/demo sets its own
logs=$root/build/logs

say() { printf '%s\n' "$*" >&2; }
die() {
  say "error: $*"
  exit 1
}

# Runs a command with its output in a log, and shows the log's end when it fails.
logged() {
  local log=$logs/$1.log
  shift
  mkdir -p "$logs"
  "$@" >"$log" 2>&1 || {
    tail -n 30 "$log" >&2
    die "'$*' failed; the whole log is $log"
  }
}

# package, and what shows that it is there: a command, or a header that the compiler finds.
requirements='
cmake             command cmake
ninja-build       command ninja
g++               command g++
pkg-config        command pkg-config
libfmt-dev        header  fmt/core.h
nlohmann-json3-dev header nlohmann/json.hpp
libcli11-dev      header  CLI/CLI.hpp
libeigen3-dev     header  eigen3/Eigen/Core
libpcre2-dev      header  pcre2.h
libhwloc-dev      header  hwloc.h
libxxhash-dev     header  xxhash.h
libcpp-httplib-dev header httplib.h
libedit-dev       header  histedit.h
libcurl4-openssl-dev header curl/curl.h
libssl-dev        header  openssl/evp.h
'
# What the tests need besides.
# shellcheck disable=SC2034  # tools/test's
test_requirements='
libgtest-dev      header  gtest/gtest.h
codespell         command codespell
'

has() {
  case $1 in
    command) command -v "$2" >/dev/null ;;
    header)
      command -v g++ >/dev/null &&
        printf '#include <%s>\n' "$2" | g++ -std=c++20 -DPCRE2_CODE_UNIT_WIDTH=8 -E -x c++ - >/dev/null 2>&1
      ;;
  esac
}

# install_packages [MORE REQUIREMENTS]
install_packages() {
  local package kind what missing=()
  while read -r package kind what; do
    [[ -z $package ]] || has "$kind" "$what" || missing+=("$package")
  done <<<"$requirements${1:-}"
  ((${#missing[@]})) || return 0
  local command="apt-get install -y --no-install-recommends ${missing[*]}"
  command -v apt-get >/dev/null || die "these packages are missing (Debian's names), install them: ${missing[*]}"
  ((EUID == 0)) || die "packages are missing; run: sudo apt-get update && sudo $command"
  say "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  mkdir -p "$logs"
  # The package lists may be absent or old: try with what is there, then with fresh ones.
  # shellcheck disable=SC2086
  if ! $command >"$logs/packages.log" 2>&1; then
    logged package-lists apt-get update
    # shellcheck disable=SC2086
    logged packages $command
  fi
}

# One job a processor, but only as many as memory allows: the largest source takes about 1.5 GiB to compile.
jobs() {
  local cpus available by_memory
  cpus=$(nproc)
  available=$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo)
  by_memory=$((${available:-0} / (1536 * 1024)))
  ((by_memory >= 1)) || by_memory=1
  echo $((cpus < by_memory ? cpus : by_memory))
}

# configure [CMAKE FLAGS]: the preset $preset (ci) in $build.
configure() {
  say "configuring (preset ${preset:-ci})"
  if command -v ccache >/dev/null; then export CMAKE_CXX_COMPILER_LAUNCHER=ccache; fi
  cd "$root" || exit 1
  logged configure cmake --preset "${preset:-ci}" -B "$build" "$@"
}

# compile TARGET (all: everything). Ninja's progress is shown in place on a terminal.
compile() {
  local target=$1
  say "building $target with $(jobs) jobs; log: ${logs#"$root"/}/build.log"
  mkdir -p "$logs"
  if [[ -t 2 ]]; then
    cmake --build "$build" --target "$target" -j "$(jobs)" 2>&1 | tee "$logs/build.log" |
      awk '/^\[[0-9]+\/[0-9]+\]/ {printf "\r\033[K%.100s", $0; fflush(); next} {print} END {print ""}' >&2
    ((PIPESTATUS[0] == 0)) || die "the build failed; the whole log is $logs/build.log"
  else
    logged build cmake --build "$build" --target "$target" -j "$(jobs)"
  fi
}
