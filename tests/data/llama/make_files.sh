#!/usr/bin/env bash
# Makes the files here: a tiny synthetic model, quantised by llama.cpp's own quantiser (of llama-cpp-python 0.3.36). Rows
# of 320 columns are no multiple of 256, so that its fallbacks are in them, too.
# Usage: make_files.sh HEARTH LLAMA_QUANTIZE
set -euo pipefail
hearth=$1 quantize=$2
cd "$(dirname "${BASH_SOURCE[0]}")"
source=$(mktemp --suffix .gguf)
trap 'rm -f "$source"' EXIT
"$hearth" synth -o "$source" --n-embd 256 --n-head 4 --n-head-kv 1 --n-ff 320 --n-layer 2 --n-vocab 288 --n-ctx 512 \
  --type f32 --down standard
for type in Q4_K_M Q2_K IQ4_XS; do "$quantize" "$source" "$type.gguf" "$type" 1; done
