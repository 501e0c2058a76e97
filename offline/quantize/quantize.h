#pragma once
// GGUF in, GGUF out, with the matrices in other types. Tensor by tensor and row by row: memory stays at a few MiB a
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
#include "offline/quantize/mix.h"

namespace hearth::offline {

// How the FFN's down matrices are written.
enum class DownLayout {
  // As the input has them where it already has ffn_down_t; else transposed for ReLU-family FFNs, standard for others and
  // for mixtures of experts.
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

// A type for the matrices whose name, in the input or in the output, a regular expression (ECMAScript) finds.
struct TensorTypeRule {
  std::string pattern;
  DType type;
};

struct QuantizeOptions {
  FileType type = DType::q8_0;          // of 2-D (and higher) *.weight tensors; norms, biases and vectors become f32
  std::optional<DType> embedding_type;  // of token_embd.weight; what `type` says when absent
  std::optional<DType> head_type;       // of output.weight; an Error when the model's head is tied to the embedding
  // For blk.N.fc1.weight and fc2.weight, the predictors of PowerInfer's files and of sidecars. When absent, `type` where
  // that has 8 bits or more. Otherwise q8_0, or what they are where that has fewer bits already: thresholds are kept,
  // and predictors rounded to four bits would miss more of the active neurons.
  std::optional<DType> predictor_type;
  std::vector<TensorTypeRule> tensor_types;  // the first that matches decides, after the three above, before `type`
  // A file as Importance reads it: errors of columns with larger inputs count for more. Rows of transposed down
  // matrices have none: a row belongs to one neuron, whose importance scales the whole row's error and changes nothing.
  std::filesystem::path importance;  // empty: none
  DownLayout down = DownLayout::automatic;
  bool allow_requantize = false;  // quantised input may be converted again, losing precision twice
  bool dry_run = false;           // find out types and sizes, write nothing
  std::function<void(const QuantizeProgress&)> progress;
};

struct QuantizedTensor {
  std::string name;  // in the output
  DType from = DType::f32, to = DType::f32;
  uint64_t bytes_in = 0, bytes_out = 0;
};

struct QuantizeReport {
  std::vector<QuantizedTensor> tensors;
  uint64_t bytes_in = 0, bytes_out = 0;  // whole files; bytes_out is 0 in a dry run
  int n_down = 0;                        // ffn_down matrices, in either layout
  bool down_transposed = false;          // how they were written
  std::string down_reason;               // why, in words
  int n_converted = 0, n_copied = 0;     // tensors
  // Matrices whose rows are no whole blocks of the wanted type: one line for each wanted type and length of rows.
  std::vector<std::string> fallbacks;
  int n_weighted = 0;                   // matrices converted with an importance
  std::vector<std::string> unweighted;  // those that could have had one, and the file has none
};

// Throws Error when a file cannot be read or written, when OUT is IN, when a tensor cannot be converted (quantised
// already, or of a type without row conversions), when a rule of tensor_types is no regular expression or matches
// nothing, when the importance is no importance matrix or of other shapes, and when a value is not finite or too large
// for the type.
// Results do not depend on the number of threads.
QuantizeReport quantize(const std::filesystem::path& in, const std::filesystem::path& out,
                        const QuantizeOptions& options, ThreadTeam& team);

}  // namespace hearth::offline
