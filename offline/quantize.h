#pragma once
// GGUF in, GGUF out, with the matrices in another type. Tensor by tensor and row by row: memory stays at a few MiB a
// thread, whatever the model's size.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/thread_team.h"
#include "gguf/gguf.h"

namespace hearth::offline {

// How the FFN's down matrices are written.
enum class DownLayout {
  // As the input has them where it already has ffn_down_t; else transposed for ReLU-family FFNs, standard for others.
  automatic,
  transposed,  // blk.N.ffn_down_t.weight, ne = [n_embd, n_ff]: a neuron's column is a row; what sparse kernels read
  standard,    // blk.N.ffn_down.weight, ne = [n_ff, n_embd]: what other programs read
};

struct QuantizeProgress {
  size_t tensor = 0, n_tensors = 0;  // the one about to be written, from 0
  std::string name;
  DType from = DType::f32, to = DType::f32;
  uint64_t bytes_done = 0, bytes_total = 0;  // of the output's tensor data
};

struct QuantizeOptions {
  DType type = DType::q8_0;             // of 2-D (and higher) *.weight tensors; norms, biases and vectors become f32
  std::optional<DType> embedding_type;  // of token_embd.weight; `type` when absent
  std::optional<DType> head_type;       // of output.weight; an Error when the model's head is tied to the embedding
  // Of blk.N.fc1.weight and fc2.weight, the predictors of PowerInfer's files and of sidecars. When absent `type`, but
  // q8_0 for q4_0, unless they have four bits already: thresholds are kept, and predictors rounded to four bits would
  // miss more of the active neurons.
  std::optional<DType> predictor_type;
  DownLayout down = DownLayout::automatic;
  bool allow_requantize = false;  // quantised input may be converted again, losing precision twice
  std::function<void(const QuantizeProgress&)> progress;
};

struct QuantizeReport {
  uint64_t bytes_in = 0, bytes_out = 0;  // whole files
  int n_down = 0;                        // ffn_down matrices, in either layout
  bool down_transposed = false;          // how they were written
  std::string down_reason;               // why, in words
  int n_converted = 0, n_copied = 0;     // tensors
  // Matrices whose rows are no whole blocks of the wanted type, kept in 16 or 32 bits.
  std::vector<std::string> fallbacks;
};

// Throws Error when a file cannot be read or written, when OUT is IN, when a tensor cannot be converted (quantised
// already, or of a type hearth does not compute with), and when a value is not finite or too large for the type.
// Results do not depend on the number of threads.
QuantizeReport quantize(const std::filesystem::path& in, const std::filesystem::path& out,
                        const QuantizeOptions& options, ThreadTeam& team);

}  // namespace hearth::offline
