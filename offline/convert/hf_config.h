#pragma once
// config.json of a Hugging Face model, reduced to what the forward pass needs and checked: what hearth cannot compute
// is refused here, by name, instead of giving wrong tokens later.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/gguf.h"
#include "model/config.h"
#include "offline/convert/hf_experts.h"
#include "offline/convert/json.h"

namespace hearth::convert {

// Which table of tensor names a checkpoint follows (tensor_map.h).
enum class Family { llama, opt, falcon };

// Where norms are: of what a half of a layer reads, of what it adds, or of both. between: before, and llama.cpp names
// the FFN's after the attention that it follows.
enum class Norms { before, between, after, around };
// Names of the FFN's matrices: gate_proj, up_proj and down_proj, or c_fc and c_proj as in GPT-2.
enum class FfnNames { llama, c_fc };
enum class QkNorm { none, by_head, all_heads };

// RoPE scaling. llama3 and longrope become per-frequency factors in tensors, as in llama.cpp.
struct RopeScaling {
  enum class Kind { none, linear, llama3, longrope, yarn } kind = Kind::none;
  double factor = 1.0;
  double low_freq_factor = 1.0, high_freq_factor = 4.0;  // llama3
  double original_context = 8192;                        // llama3, longrope, yarn
  double beta_fast = 32, beta_slow = 1;                  // yarn
  bool truncate = true;                                  // yarn
  double attention_factor = 1;                           // longrope, yarn: multiplies cos and sin
  double mscale_all_dim = 0;                             // yarn: corrects the softmax's temperature (DeepSeek)
  std::vector<float> short_factors, long_factors;        // longrope [n_rot / 2]
};

struct HfConfig {
  std::string hf_architecture;  // "LlamaForCausalLM"
  std::string arch;             // llama.cpp's name: "llama"
  Family family = Family::llama;
  int64_t n_layer = 0, n_embd = 0, n_ff = 0, n_head = 0, n_head_kv = 0, head_dim = 0;
  int64_t n_vocab = 0, n_ctx = 0;
  int64_t n_layers_ahead = 0;       // 1: behind the last layer there may be one that predicts another token
  model::LatentDescription latent;  // with head_dim the rotated part of a head
  bool explicit_head_dim = false;   // config.json names it; it need not be n_embd / n_head
  double norm_eps = 0;
  int64_t n_rot = 0;  // rotated elements of a head
  double rope_theta = 10000.0;
  double window_rope_theta = 0;  // of layers with a window; 0: the same, scaling and all
  RopeScaling rope;
  std::vector<bool> rotated_layers;  // [n_layer], or empty: all
  int64_t sliding_window = 0;        // 0 = none
  std::vector<bool> window_layers;   // [n_layer], or empty: all

  // 0: not said.
  double attention_scale = 0, attn_soft_cap = 0, logit_soft_cap = 0;
  double embedding_scale = 0, residual_scale = 0, logit_scale = 0;

  bool permute_rope = false;  // q and k rows are re-ordered for interleaved RoPE
  bool tied_head = false;     // the output head is the embedding
  bool gated = true;          // the FFN has gate and up
  bool qkv_bias = false, output_bias = false, ffn_bias = false;
  bool fused = false;  // one tensor for q, k and v, and one for gate and up
  FfnNames ffn_names = FfnNames::llama;
  QkNorm qk_norm = QkNorm::none;
  bool sinks = false;  // of attention
  Norms norms = Norms::before;
  bool layer_norm = false;          // norms have a bias
  bool norms_less_one = false;      // their weights are stored less one
  bool falcon_single_norm = false;  // one norm feeds attention and FFN (Falcon2 11B)

  // relu, fat_relu, relu2, silu, gelu, gelu_tanh, clamped_silu or drelu (relu on both factors), as
  // `hearth.ffn.activation` says it.
  std::string activation;
  float activation_threshold = 0.0f;  // fat_relu's, clamped_silu's (core/ops.h)

  HfExperts experts;  // empty: dense

  // Token ids, when config.json or generation_config.json gives them.
  std::optional<int64_t> bos, eos, pad;
  std::vector<int64_t> other_eos;  // more end tokens (eos_token_id may be a list)
};

// Reads `directory`/config.json (and generation_config.json for token ids). `ffn` overrides the activation, for
// checkpoints whose config.json does not tell (dReLU models that say "relu"): one of the names above. Throws Error
// naming the file and member when something is missing, out of range, or not supported.
HfConfig read_hf_config(const std::filesystem::path& directory, const std::optional<std::string>& ffn);
HfConfig parse_hf_config(const Json& config, const std::string& where, const std::optional<std::string>& ffn);

// Writes everything but the tokenizer: llama.cpp's keys, and hearth.ffn.*.
void write_config(const HfConfig& config, gguf::Writer& writer);

// Tensors of divisors of the rotary frequencies, n_rot / 2 each, under llama.cpp's names.
struct RopeFactors {
  std::string name;
  std::vector<float> factors;
};
std::vector<RopeFactors> rope_factors(const HfConfig& config);

// "LlamaForCausalLM, MistralForCausalLM, ..." for messages and --help.
std::string supported_architectures();

}  // namespace hearth::convert
