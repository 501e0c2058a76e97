#pragma once
// Architectures of Hugging Face checkpoints as descriptions: what config.json does not say. For the files that read it.
#include <cstdint>
#include <string>
#include <string_view>

#include "core/error.h"
#include "offline/convert/hf_config.h"

namespace hearth::convert {

struct HfArchitecture {
  std::string_view hf_name;
  std::string_view arch;  // llama.cpp's name
  Family family = Family::llama;
  bool permute_rope = false;  // llama.cpp rotates neighbours
  bool gated = true;
  bool fused = false;     // one tensor for q, k and v, and one for gate and up
  bool qkv_bias = false;  // always there, whatever attention_bias says
  FfnNames ffn_names = FfnNames::llama;
  const char* bias_key = nullptr;  // says whether every matrix has a bias; they have where it is absent
  bool only_qkv_bias = false;      // attention_bias is of q, k and v, and not of the output
  bool drelu = false;              // the modelling code applies hidden_act to both factors
  bool clamped_silu = false;       // its experts', whatever hidden_act says; clamped at swiglu_limit (gpt-oss)
  bool latent_attention = false;   // multi-head latent attention (DeepSeek)
  QkNorm qk_norm = QkNorm::none;
  const char* qk_norm_key = nullptr;  // says whether there are such norms
  bool sinks = false;
  Norms norms = Norms::before;
  bool layer_norm = false;      // with a bias, and weights stored less one
  bool norms_less_one = false;  // weights of RMS norms are stored less one
  bool tied_head = false;       // where tie_word_embeddings is absent
  const char* eps_key = "rms_norm_eps";
  const char* n_ff_key = "intermediate_size";
  const char* activation_key = "hidden_act";
  const char* activation = "silu";
  int64_t head_dim = 0;       // where the key is absent; 0: hidden_size / heads
  double partial_rotary = 1;  // where partial_rotary_factor is absent
  // Windows, where layer_types is absent: every so many-th layer has none, by config.json or by this default.
  int64_t window_period = 0;
  int64_t no_rope_period = 0;  // every so many-th layer is not rotated, by config.json or by this default
  double rope_theta = 10000;
  double window_rope_theta = 0;  // layers with a window have a base of their own (rope_local_base_freq); 0: no
  double query_scalar = 0;       // query_pre_attn_scalar, of which queries are divided by the root; 0: no such key
  double attn_soft_cap = 0, logit_soft_cap = 0;
  bool multipliers = false;  // of embeddings, attention, halves of layers and logits (Granite)
};

// Throws Error naming those that are supported when `architectures` is missing or names another.
const HfArchitecture& find_architecture(const Json& config, const std::string& where);

// --- hf_attention.cpp: what config.json says of attention, for llama's relatives ---
void read_windows(const Fields& fields, const Json& config, const HfArchitecture& arch, HfConfig& c);
void read_rope(const Fields& fields, const HfArchitecture& arch, HfConfig& c);
// Sizes of multi-head latent attention.
void read_latent(const Fields& fields, HfConfig& c);
// Multipliers and caps of attention, embeddings, halves of layers and logits.
void read_scales(const Fields& fields, const HfArchitecture& arch, HfConfig& c);
void write_attention(const HfConfig& config, gguf::Writer& writer);

constexpr int64_t kMaxDim = int64_t{1} << 20;
constexpr int64_t kMaxContext = int64_t{1} << 30;
inline void refuse_if(bool condition, const Fields& f, std::string_view what, std::string_view supported) {
  if (condition) fail("{}: {} is not supported; {}", f.where(), what, supported);
}

}  // namespace hearth::convert
