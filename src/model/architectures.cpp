#include "model/architectures.h"

namespace hearth::model {
namespace {

constexpr Architecture kArchitectures[] = {
    // --- families of llama: RMS norms, rotated pairs that are neighbours ---
    {.name = "llama", .rope = RopeKind::interleaved},
    {.name = "mistral", .rope = RopeKind::interleaved},
    {.name = "bamboo", .rope = RopeKind::interleaved, .activation = "drelu", .powerinfer_activation = "drelu"},
    {.name = "arcee", .rope = RopeKind::interleaved, .activation = "relu2", .powerinfer_activation = "relu2"},
    {.name = "granite", .rope = RopeKind::interleaved},
    {.name = "smollm3", .rope = RopeKind::interleaved, .no_rope_period = 4},

    // --- the same with halves of a head as pairs ---
    {.name = "qwen2"},
    {.name = "qwen3"},
    {.name = "phi3", .fused_gate_up = true},
    {.name = "olmo2",
     .attn_norm = {},
     .attn_post_norm = "post_attention_norm",
     .ffn_norm = {},
     .ffn_post_norm = "post_ffw_norm"},

    // --- mixtures of experts, whose routing is in model/experts.cpp ---
    {.name = "qwen2moe"},
    {.name = "qwen3moe"},
    {.name = "olmoe"},
    {.name = "glm4moe", .ffn_norm = "post_attention_norm"},
    {.name = "gpt-oss",
     .activation = "clamped_silu",
     .ffn_norm = "post_attention_norm",
     .window = 128,
     .window_period = 2,
     .yarn_truncates = false},

    {.name = "smallthinker",
     .activation = "relu",
     .early_router = true,
     .window_period = 4,
     .full_first = true,
     .full_unrotated = true},

    // --- multi-head latent attention ---
    {.name = "deepseek2", .rope = RopeKind::interleaved, .latent_attention = true},

    // --- gemma: norms on both sides of each half, windows in most layers ---
    {.name = "gemma2",
     .activation = "gelu_tanh",
     .attn_post_norm = "post_attention_norm",
     .ffn_post_norm = "post_ffw_norm",
     .window = 4096,
     .window_period = 2,
     .embedding_by_width = true,
     .wide_scale_layers = 46,
     .attn_soft_cap = 50,
     .logit_soft_cap = 30},
    {.name = "gemma3",
     .activation = "gelu_tanh",
     .attn_post_norm = "post_attention_norm",
     .ffn_post_norm = "post_ffw_norm",
     .window_period = 6,
     .window_rope_base = 10000,
     .embedding_by_width = true,
     .wide_scale_layers = 62},

    // --- LayerNorm ---
    {.name = "nemotron", .norm = NormKind::layer, .activation = "relu2", .powerinfer_activation = "relu2"},
    {.name = "starcoder2", .norm = NormKind::layer, .activation = "gelu_tanh", .window = 4096},
    {.name = "opt", .norm = NormKind::layer, .rope = RopeKind::none, .activation = "relu", .position_offset = 2},
    {.name = "falcon", .norm = NormKind::layer, .activation = "gelu", .parallel_block = true},
};

}  // namespace

std::span<const Architecture> architectures() {
  return kArchitectures;
}

const Architecture* find_architecture(std::string_view name) {
  for (const Architecture& a : kArchitectures) {
    if (a.name == name) return &a;
  }
  return nullptr;
}

}  // namespace hearth::model
