#pragma once
// PowerInfer's model files (magic PWRI) become standard GGUF files, their predictors the sidecar beside them.
#include <filesystem>

#include "offline/convert/convert.h"

namespace hearth::convert {

// True for a file that convert_powerinfer() takes: magic PWRI.
bool is_powerinfer_file(const std::filesystem::path& path);

// Writes `out` with llama.cpp's tensor names and types unchanged: ffn_down_t is transposed back where that is exact
// (f32, f16, bf16; quantised it stays ffn_down_t, and on_notice says that other programs will not read it), the FFN's
// activation is written down in hearth.ffn.activation, fc1 and fc2 go to the sidecar of `out`
// (model::sidecar_path()). Only `ffn` of the options is read besides the callbacks: what the activation is. Throws
// Error when the input is no PowerInfer file, or has tensors that fit no model.
Summary convert_powerinfer(const std::filesystem::path& in, const std::filesystem::path& out, const Options& options);

}  // namespace hearth::convert
