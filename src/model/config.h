#pragma once
// A model: shapes and conventions read from GGUF metadata (llama.cpp's keys) and, where the metadata is silent,
// from the tensors that are there.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/device.h"
#include "gguf/gguf.h"
#include "model/experts.h"
#include "model/rope.h"

namespace hearth::model {

// The FFN of a model in the words of docs/explanation/architecture.md.
struct FfnDescription {
  std::string family;      // "ReGLU", "SwiGLU", "dReLU", "ReLU", "relu² (ungated)", ...
  std::string activation;  // "relu", "silu", ...
  std::string reason;      // why: which key, tensor or convention says so
  Activation act = Activation::silu;
  float act_threshold = 0.0f;  // fat_relu's, clamped_silu's
  bool gated = true;           // a separate `up` matrix multiplies the activated gate
  bool up_relu = false;        // dReLU
  // A neuron is exactly zero for many tokens, so that skipping it loses nothing.
  bool sparse() const {
    return act != Activation::silu && act != Activation::gelu && act != Activation::gelu_tanh &&
           act != Activation::clamped_silu;
  }
};

// The activation's name as written in `hearth.ffn.activation`, or what a user may give to override it:
// relu, fat_relu, relu2, silu, gelu, gelu_tanh, clamped_silu, drelu. Throws Error for another name.
struct ActivationName {
  Activation act;
  bool up_relu;
};
ActivationName parse_activation(std::string_view name);

// The FFN that a file is taken to have. `override_activation` (a name as above) wins over everything. Throws Error when
// the architecture is not known and nothing says what the activation is.
FfnDescription describe_ffn(const gguf::File& file,
                            const std::optional<std::string>& override_activation = std::nullopt);

// One layer's own attention, beside what all have.
struct LayerAttention {
  int64_t window = 0;  // positions that a token sees, its own among them; 0 = all
  int rope = 0;        // of Config::ropes; -1: keys and queries are not rotated
};

// Multi-head latent attention (core/latent_attention.h). A head's query has n_plain elements and Config::n_rot rotated
// ones behind them; a position's key has the rotated ones first, so that Config::head_dim is n_rot + n_latent.
struct LatentDescription {
  int64_t n_latent = 0;              // kv_lora_rank; 0: attention is not of this kind
  int64_t n_q_latent = 0;            // q_lora_rank; 0: queries come straight from the layer's input
  int64_t n_plain = 0, n_value = 0;  // of a head
  explicit operator bool() const { return n_latent > 0; }
};

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
  std::vector<Rope> ropes;
  // Contexts longer than this use the rope after the one that a layer names (Phi-3's long factors); 0: there is none.
  int64_t long_rope_context = 0;
  std::vector<LayerAttention> layers;  // [n_layer], or empty: none has anything of its own
  float qk_norm_eps = 1e-5f;
  LatentDescription latent;
  float attention_scale = 0.0f;                            // of q.k
  float attention_soft_cap = 0.0f, logit_soft_cap = 0.0f;  // c of c tanh(x / c); 0 = none
  // The residual stream is kept divided by `residual_scale` (Granite's multiplier of what each half adds): norms do not
  // see the difference, because norm_eps is divided by its square, and nothing has to be multiplied on the way.
  float residual_scale = 1.0f;
  float embedding_scale = 1.0f;  // multiplies the embeddings; the division above is part of it
  float logit_scale = 1.0f;      // multiplies the logits; part of the last norm's weights
  bool parallel_block = false;   // Falcon: x + attention(n_a(x)) + ffn(n_f(x))
  int64_t position_offset = 0;   // OPT: learned positions start at row 2
  bool post_norms = false;       // x += norm(half) for both halves of every layer
  bool early_router = false;     // routers read their layer's input, before its norm and attention
  FfnDescription ffn;            // of experts, too
  ExpertsDescription experts;

  LayerAttention layer(int64_t l) const { return layers.empty() ? LayerAttention{} : layers[static_cast<size_t>(l)]; }
  // Elements of all heads: of what makes queries, and of what the attention's last product reads.
  int64_t n_queries() const { return n_head * (latent ? latent.n_plain + n_rot : head_dim); }
  int64_t n_attended() const { return n_head * (latent ? latent.n_value : head_dim); }
  // Elements that a layer's cache holds of a position.
  int64_t n_cached() const { return latent ? head_dim : 2 * n_head_kv * head_dim; }
  // Positions that a token sees in a layer, of n that there are.
  int64_t seen(int64_t l, int64_t n) const {
    const int64_t window = layer(l).window;
    return window > 0 && window < n ? window : n;
  }
};

// Throws Error naming the key when one is missing, of the wrong type, or out of range.
Config read_config(const gguf::File& file, const std::optional<std::string>& override_activation = std::nullopt);

}  // namespace hearth::model
