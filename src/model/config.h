#pragma once
// What a model is: shapes and conventions read from GGUF metadata (llama.cpp's keys) and, where the metadata is silent,
// from the tensors that are there.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/device.h"
#include "gguf/gguf.h"
#include "model/experts.h"

namespace hearth::model {

// The FFN of a model in the words of docs/architecture.md.
struct FfnDescription {
  std::string family;      // "ReGLU", "SwiGLU", "dReLU", "ReLU", "relu² (ungated)", ...
  std::string activation;  // "relu", "silu", ...
  std::string reason;      // why: which key, tensor or convention says so
  Activation act = Activation::silu;
  float act_threshold = 0.0f;  // fat_relu's, clamped_silu's
  bool gated = true;           // a separate `up` matrix multiplies the activated gate
  bool up_relu = false;        // dReLU
  // A neuron is exactly zero for many tokens, so that skipping it loses nothing.
  bool sparse() const { return act != Activation::silu && act != Activation::gelu && act != Activation::clamped_silu; }
};

// The activation's name as written in `hearth.ffn.activation`, or what a user may give to override it:
// relu, fat_relu, relu2, silu, gelu, clamped_silu, drelu. Throws Error for another name.
struct ActivationName {
  Activation act;
  bool up_relu;
};
ActivationName parse_activation(std::string_view name);

// What the file's FFN is taken to be. `override_activation` (a name as above) wins over everything. Throws Error when
// the architecture is not known and nothing says what the activation is.
FfnDescription describe_ffn(const gguf::File& file,
                            const std::optional<std::string>& override_activation = std::nullopt);

struct Config {
  std::string arch;  // general.architecture
  std::string name;  // general.name, or the file's name
  int64_t n_layer = 0, n_embd = 0, n_vocab = 0;
  int64_t n_ff = 0;  // of dense layers; where there are none, of an expert
  int64_t n_head = 0, n_head_kv = 0, head_dim = 0;
  int64_t n_ctx_train = 0;
  NormKind norm = NormKind::rms;
  float norm_eps = 1e-5f;
  RopeKind rope = RopeKind::interleaved;
  int64_t n_rot = 0;
  double rope_base = 10000.0;
  double rope_linear_factor = 1.0;  // positions are divided by this
  float rope_attention_factor = 1.0f;
  int64_t sliding_window = 0;   // 0 = none
  bool parallel_block = false;  // Falcon: x + attention(n_a(x)) + ffn(n_f(x))
  int64_t position_offset = 0;  // OPT: learned positions start at row 2
  FfnDescription ffn;  // of experts, too
  ExpertsDescription experts;
};

// Throws Error naming the key when one is missing, of the wrong type, or out of range.
Config read_config(const gguf::File& file, const std::optional<std::string>& override_activation = std::nullopt);

}  // namespace hearth::model
