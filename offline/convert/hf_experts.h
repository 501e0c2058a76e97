#pragma once
// Mixtures of experts in config.json and in a checkpoint's tensor names.
#include <cstdint>
#include <string>
#include <string_view>

#include "core/experts.h"
#include "gguf/gguf.h"
#include "offline/convert/json.h"

namespace hearth::convert {

// How a checkpoint names and stores the tensors of its experts.
enum class ExpertStyle {
  none,
  mixtral,       // block_sparse_moe.gate, .experts.E.w1 (gate), .w3 (up), .w2 (down)
  mlp,           // mlp.gate, mlp.experts.E.gate_proj, .up_proj, .down_proj
  smallthinker,  // block_sparse_moe.primary_router, .experts.E.gate, .up, .down
  // mlp.router, mlp.experts.gate_up_proj [E][n_embd][2 n_ff], gate and up in turn, .down_proj [E][n_ff][n_embd]; or their
  // transposes in MXFP4: .gate_up_proj_blocks [E][2 n_ff][n_embd / 32][16], ..._scales [E][2 n_ff][n_embd / 32]. Biases.
  gpt_oss,
};

struct HfExperts {
  ExpertStyle style = ExpertStyle::none;
  Routing routing;
  int64_t n_ff = 0;
  int64_t n_ff_shared = 0, n_shared = 0;
  std::string_view shared_prefix;  // "mlp.shared_expert."
  bool shared_gate = false;        // a sigmoid gate on the shared expert (Qwen2MoE)
  bool correction = false;         // mlp.gate.e_score_correction_bias
  int64_t n_dense_layers = 0;
  explicit operator bool() const { return routing.n_expert > 0; }
  bool in_layer(int64_t layer) const { return routing.n_expert > 0 && layer >= n_dense_layers; }
};

// `hf_architecture`: "MixtralForCausalLM". Throws Error for what hearth cannot compute, or for a mixture of an
// architecture that is not known to have one.
HfExperts read_hf_experts(const Fields& config, std::string_view hf_architecture);

// llama.cpp's keys; `prefix`: "qwen3moe.". Nothing for a dense model.
void write_experts(const HfExperts& experts, const std::string& prefix, gguf::Writer& writer);

}  // namespace hearth::convert
