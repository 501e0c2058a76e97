#include "offline/convert/hf_architectures.h"

#include "core/error.h"

namespace hearth::convert {
namespace {

constexpr HfArchitecture kArchitectures[] = {
    {.hf_name = "LlamaForCausalLM", .arch = "llama", .permute_rope = true},
    {.hf_name = "SparseLlamaForCausalLM", .arch = "llama", .permute_rope = true},  // ProSparse
    {.hf_name = "MistralForCausalLM", .arch = "llama", .permute_rope = true},
    {.hf_name = "BambooForCausalLM", .arch = "llama", .permute_rope = true, .drelu = true},
    {.hf_name = "ArceeForCausalLM", .arch = "arcee", .permute_rope = true, .gated = false},
    {.hf_name = "GraniteForCausalLM", .arch = "granite", .permute_rope = true, .multipliers = true},
    {.hf_name = "SmolLM3ForCausalLM", .arch = "smollm3", .permute_rope = true, .tied_head = true, .no_rope_period = 4},
    {.hf_name = "Qwen2ForCausalLM", .arch = "qwen2", .qkv_bias = true},
    {.hf_name = "Qwen3ForCausalLM", .arch = "qwen3", .qk_norm = QkNorm::by_head, .head_dim = 128},
    {.hf_name = "Phi3ForCausalLM", .arch = "phi3", .fused = true},
    {.hf_name = "Olmo2ForCausalLM", .arch = "olmo2", .qk_norm = QkNorm::all_heads, .norms = Norms::after},
    {.hf_name = "MixtralForCausalLM", .arch = "llama", .permute_rope = true},
    {.hf_name = "Qwen2MoeForCausalLM", .arch = "qwen2moe", .qkv_bias = true},
    {.hf_name = "Qwen3MoeForCausalLM", .arch = "qwen3moe", .qk_norm = QkNorm::by_head},
    {.hf_name = "OlmoeForCausalLM", .arch = "olmoe", .qk_norm = QkNorm::all_heads},
    {.hf_name = "Glm4MoeForCausalLM",
     .arch = "glm4moe",
     .only_qkv_bias = true,
     .qk_norm = QkNorm::by_head,
     .qk_norm_key = "use_qk_norm",
     .norms = Norms::between,
     .head_dim = 128,
     .partial_rotary = 0.5},
    {.hf_name = "GptOssForCausalLM",
     .arch = "gpt-oss",
     .clamped_silu = true,
     .sinks = true,
     .norms = Norms::between,
     .head_dim = 64,
     .window_period = 2,
     .rope_theta = 150000},
    {.hf_name = "DeepseekV2ForCausalLM", .arch = "deepseek2", .latent_attention = true},
    {.hf_name = "DeepseekV3ForCausalLM", .arch = "deepseek2", .latent_attention = true},
    {.hf_name = "SmallThinkerForCausalLM",
     .arch = "smallthinker",
     .n_ff_key = "moe_ffn_hidden_size",
     .activation = "relu"},
    {.hf_name = "Gemma2ForCausalLM",
     .arch = "gemma2",
     .norms = Norms::around,
     .norms_less_one = true,
     .tied_head = true,
     .activation_key = "hidden_activation",
     .activation = "gelu_pytorch_tanh",
     .head_dim = 256,
     .window_period = 2,
     .query_scalar = 256,
     .attn_soft_cap = 50,
     .logit_soft_cap = 30},
    {.hf_name = "Gemma3ForCausalLM",
     .arch = "gemma3",
     .qk_norm = QkNorm::by_head,
     .norms = Norms::around,
     .norms_less_one = true,
     .tied_head = true,
     .activation_key = "hidden_activation",
     .activation = "gelu_pytorch_tanh",
     .head_dim = 256,
     .window_period = 6,
     .rope_theta = 1e6,
     .window_rope_theta = 10000,
     .query_scalar = 256},
    {.hf_name = "NemotronForCausalLM",
     .arch = "nemotron",
     .gated = false,
     .layer_norm = true,
     .norms_less_one = true,
     .eps_key = "norm_eps",
     .activation = "relu2",
     .partial_rotary = 0.5},
    {.hf_name = "Starcoder2ForCausalLM",
     .arch = "starcoder2",
     .gated = false,
     .ffn_names = FfnNames::c_fc,
     .bias_key = "use_bias",
     .layer_norm = true,
     .tied_head = true,
     .eps_key = "norm_epsilon",
     .activation = "gelu_pytorch_tanh"},
    {.hf_name = "OPTForCausalLM", .arch = "opt", .family = Family::opt, .gated = false, .qkv_bias = true},
    {.hf_name = "FalconForCausalLM", .arch = "falcon", .family = Family::falcon, .gated = false},
};

}  // namespace

std::string supported_architectures() {
  std::string names;
  for (const HfArchitecture& a : kArchitectures) {
    names += (names.empty() ? "" : ", ") + std::string(a.hf_name);
  }
  return names;
}

const HfArchitecture& find_architecture(const Json& config, const std::string& where) {
  const auto names = config.find("architectures");
  if (names == config.end() || !names->is_array() || names->empty() || !(*names)[0].is_string()) {
    fail("{}: architectures is missing; expected one of {}", where, supported_architectures());
  }
  const auto name = (*names)[0].get<std::string>();
  for (const HfArchitecture& a : kArchitectures) {
    if (a.hf_name == name) return a;
  }
  fail("{}: the architecture {} is not supported; supported are {}", where, shown((*names)[0]),
       supported_architectures());
}

}  // namespace hearth::convert
