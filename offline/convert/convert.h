#pragma once
// `hearth convert`: a Hugging Face model directory becomes one GGUF file that llama.cpp reads too.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "core/dtype.h"

namespace hearth::convert {

struct Progress {
  std::string_view tensor;                   // being written
  uint64_t bytes_done = 0, bytes_total = 0;  // of the output's tensors
};

struct Options {
  DType type = DType::f16;                           // of matrices; vectors and learned positions are f32
  std::optional<std::string> ffn;                    // activation override, see HfConfig::activation
  std::optional<std::string> pre;                    // pre-tokenizer override, a name of tokenizer.ggml.pre
  int n_threads = 0;                                 // 0: one per physical core
  std::function<void(const Progress&)> on_progress;  // after each block; from the calling thread
  std::function<void(std::string_view)> on_notice;   // what the user did not ask for but gets
};

struct Summary {
  std::string architecture;  // "llama"
  std::string activation;    // "relu"
  size_t n_tensors = 0;
  uint64_t file_bytes = 0;
};

// Converts `directory` into `out`, which appears only when it is complete. Works tensor by tensor in blocks of rows:
// memory stays bounded (tens of MB a thread) however large the model is. Throws Error when the directory is not a
// checkpoint that hearth can run, when a weight does not fit the wanted type, or when `out` cannot be written.
Summary convert_checkpoint(const std::filesystem::path& directory, const std::filesystem::path& out,
                           const Options& options);

}  // namespace hearth::convert
