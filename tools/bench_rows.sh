# Sourced by tools/compare and tools/gpu-check: reads what `hearth bench -o json` and `llama-bench -o json` print.
# shellcheck shell=bash

# bench_rows KEY... <JSON: one line for each row, its test ("pp512", "tg128@d4096") and the numbers under these keys,
# "-" where a row has none. Both programs print n_prompt first among the keys that matter here.
bench_rows() {
  local keys="n_prompt n_gen n_depth $*"
  { grep -oE "\"(${keys// /|})\" *: *(-?[0-9][-+.0-9eE]*|null)" || true; } | tr -s '": ' ' ' | awk -v keys="$*" '
    function put(   line, i) {
      if (!begun) return
      line = value["n_prompt"] > 0 ? "pp" value["n_prompt"] : ""
      if (value["n_gen"] > 0) line = line (line == "" ? "" : "+") "tg" value["n_gen"]
      if (value["n_depth"] > 0) line = line "@d" value["n_depth"]
      for (i = 1; i <= n; i++) line = line " " (value[key[i]] == "" || value[key[i]] == "null" ? "-" : value[key[i]])
      print line
      split("", value)
    }
    BEGIN { n = split(keys, key, " ") }
    $1 == "n_prompt" { put(); begun = 1 }
    { value[$1] = $2 }
    END { put() }'
}
