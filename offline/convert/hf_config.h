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
#include "offline/convert/hf_experts.h"
#include "offline/convert/json.h"

namespace hearth::convert {

// Which table of tensor names a checkpoint follows (tensor_map.h).
enum class Family { llama, opt, falcon };

// RoPE scaling. llama3 becomes per-frequency factors in a tensor, as in llama.cpp.
struct RopeScaling {
  enum class Kind { none, linear, llama3 } kind = Kind::none;
  double factor = 1.0;
  double low_freq_factor = 1.0, high_freq_factor = 4.0;  // llama3
  double original_context = 8192;                        // llama3
};

struct HfConfig {
  std::string hf_architecture;  // "LlamaForCausalLM"
  std::string arch;             // llama.cpp's name: "llama"
  Family family = Family::llama;
  int64_t n_layer = 0, n_embd = 0, n_ff = 0, n_head = 0, n_head_kv = 0, head_dim = 0;
  int64_t n_vocab = 0, n_ctx = 0;
  bool explicit_head_dim = false;  // config.json names it; it need not be n_embd / n_head
  double norm_eps = 0;
  double rope_theta = 10000.0;
  RopeScaling rope;
  int64_t sliding_window = 0;  // 0 = none

  bool permute_rope = false;  // q and k rows are re-ordered for interleaved RoPE
  bool tied_head = false;     // the output head is the embedding
  bool gated = true;          // the FFN has gate and up
  bool qkv_bias = false, output_bias = false, ffn_bias = false;
  bool qk_norm = false;
  bool falcon_single_norm = false;  // one norm feeds attention and FFN (Falcon2 11B)

  // relu, fat_relu, relu2, silu, gelu or drelu (relu on both factors), as `hearth.ffn.activation` says it.
  std::string activation;
  float activation_threshold = 0.0f;  // fat_relu: z > threshold ? z : 0

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

// Divisors of the rotary frequencies for llama3 scaling, head_dim / 2 of them (llama.cpp's rope_freqs.weight).
std::vector<float> llama3_rope_factors(const HfConfig& config);

// "LlamaForCausalLM, MistralForCausalLM, ..." for messages and --help.
std::string supported_architectures();

}  // namespace hearth::convert
