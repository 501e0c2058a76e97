#include "offline/convert/hf_experts.h"

#include <algorithm>
#include <array>

#include "core/error.h"

namespace hearth::convert {
namespace {

constexpr int64_t kMaxDim = int64_t{1} << 20;

// Facts that config.json does not say.
struct Mixture {
  std::string_view hf_name;
  ExpertStyle style;
  Gating gating;
  const char* n_ff_key;
  bool normalize;                  // where norm_topk_prob is silent
  bool norm_key;                   // norm_topk_prob counts
  std::string_view shared_prefix;  // empty: no shared expert
  bool shared_gate, correction;
};
constexpr std::array kMixtures = {
    Mixture{"MixtralForCausalLM", ExpertStyle::mixtral, Gating::softmax, "intermediate_size", true, false, "", false,
            false},
    Mixture{"Qwen2MoeForCausalLM", ExpertStyle::mlp, Gating::softmax, "moe_intermediate_size", false, true,
            "mlp.shared_expert.", true, false},
    Mixture{"Qwen3MoeForCausalLM", ExpertStyle::mlp, Gating::softmax, "moe_intermediate_size", true, true, "", false,
            false},
    Mixture{"OlmoeForCausalLM", ExpertStyle::mlp, Gating::softmax, "intermediate_size", false, true, "", false, false},
    Mixture{"Glm4MoeForCausalLM", ExpertStyle::mlp, Gating::sigmoid, "moe_intermediate_size", true, true,
            "mlp.shared_experts.", false, true},
    Mixture{"GptOssForCausalLM", ExpertStyle::gpt_oss, Gating::selected_softmax, "intermediate_size", false, false, "",
            false, false},
    Mixture{"SmallThinkerForCausalLM", ExpertStyle::smallthinker, Gating::sigmoid, "moe_ffn_hidden_size", true, false,
            "", false, false},
    Mixture{"DeepseekV2ForCausalLM", ExpertStyle::mlp, Gating::softmax, "moe_intermediate_size", false, false,
            "mlp.shared_experts.", false, false},
    Mixture{"DeepseekV3ForCausalLM", ExpertStyle::mlp, Gating::sigmoid, "moe_intermediate_size", true, true,
            "mlp.shared_experts.", false, true},
};

void refuse_if(bool condition, const Fields& f, std::string_view what, std::string_view supported) {
  if (condition) fail("{}: {} is not supported; {}", f.where(), what, supported);
}

void read_shared(const Fields& f, HfExperts& e) {
  if (const auto width = f.integer("shared_expert_intermediate_size", 1, kMaxDim)) {
    e.n_ff_shared = *width, e.n_shared = 1;
    return;
  }
  e.n_shared = f.integer("n_shared_experts", 0, kMostExperts).value_or(0);
  e.n_ff_shared = e.n_shared * e.n_ff;
  if (e.n_ff_shared > kMaxDim) fail("{}: {} shared experts of {} neurons are too many", f.where(), e.n_shared, e.n_ff);
}

// DeepSeek-V2 limits tokens to groups only where topk_method says so; its successors always do, by another score.
void read_groups(const Fields& f, bool is_v2, Routing& r) {
  const std::string method = f.text("topk_method").value_or("");
  const bool by_best = method == "group_limited_greedy";
  refuse_if(by_best && !is_v2, f, "topk_method group_limited_greedy", "noaux_tc is");
  if (is_v2 && !by_best) return;
  r.n_best_of_group = by_best ? 1 : 2;
  r.n_groups = f.integer("n_group", 1, r.n_expert).value_or(1);
  r.n_groups_used = f.integer("topk_group", 1, r.n_groups).value_or(r.n_groups);
  if (r.n_expert % r.n_groups != 0 || r.n_expert / r.n_groups * r.n_groups_used < r.n_used) {
    fail("{}: {} of {} groups of {} experts cannot give {} experts", f.where(), r.n_groups_used, r.n_groups, r.n_expert,
         r.n_used);
  }
}

}  // namespace

HfExperts read_hf_experts(const Fields& f, std::string_view hf_architecture) {
  HfExperts e;
  Routing& r = e.routing;
  for (const char* key : {"num_local_experts", "num_experts", "n_routed_experts", "moe_num_primary_experts"}) {
    r.n_expert = std::max(r.n_expert, f.integer(key, 0, kMostExperts).value_or(0));
  }
  if (r.n_expert == 0) return e;
  const auto m =
      std::find_if(kMixtures.begin(), kMixtures.end(), [&](const Mixture& x) { return x.hf_name == hf_architecture; });
  if (m == kMixtures.end()) fail("{}: a mixture of experts is not supported in {}", f.where(), hf_architecture);
  e.style = m->style;
  r.gating = m->gating;
  const bool smallthinker = e.style == ExpertStyle::smallthinker;
  r.n_used = f.require_integer(smallthinker ? "moe_num_active_primary_experts" : "num_experts_per_tok", 1, r.n_expert);
  // A softmax over the chosen ones is one over all, divided by the sum of the chosen ones.
  if (smallthinker && f.flag("moe_primary_router_apply_softmax", false)) r.gating = Gating::softmax;
  r.normalize = m->norm_key ? f.flag("norm_topk_prob", m->normalize) : m->normalize;
  e.n_ff = f.require_integer(m->n_ff_key, 1, kMaxDim);
  refuse_if(f.integer("decoder_sparse_step", 1, kMaxDim).value_or(1) != 1, f, "decoder_sparse_step", "1 is");
  if (const Json* dense = f.find("mlp_only_layers"); dense != nullptr && dense->is_array()) {
    refuse_if(!dense->empty(), f, "mlp_only_layers", "experts in every layer, or from one layer on, are");
  }
  if (const auto scoring = f.text("scoring_func")) {
    refuse_if(*scoring != "softmax" && *scoring != "sigmoid", f, "scoring_func " + *scoring, "softmax and sigmoid are");
    r.gating = *scoring == "sigmoid" ? Gating::sigmoid : Gating::softmax;
  }
  r.scale = static_cast<float>(f.number("routed_scaling_factor").value_or(1.0));
  e.n_dense_layers = f.integer("first_k_dense_replace", 0, 4096).value_or(0);
  e.shared_gate = m->shared_gate, e.correction = m->correction, e.shared_prefix = m->shared_prefix;
  if (!m->shared_prefix.empty()) read_shared(f, e);
  read_groups(f, hf_architecture == "DeepseekV2ForCausalLM", r);
  return e;
}

void write_experts(const HfExperts& e, const std::string& prefix, gguf::Writer& writer) {
  if (!e) return;
  const auto u32 = [&](const char* key, int64_t value) { writer.set(prefix + key, static_cast<uint32_t>(value)); };
  const Routing& r = e.routing;
  u32("expert_count", r.n_expert);
  u32("expert_used_count", r.n_used);
  u32("expert_feed_forward_length", e.n_ff);
  u32("expert_gating_func", static_cast<int64_t>(r.gating) + 1);
  writer.set(prefix + "expert_weights_norm", r.normalize);
  if (r.scale != 1.0f) writer.set(prefix + "expert_weights_scale", r.scale);
  if (e.n_ff_shared > 0) {
    u32("expert_shared_count", e.n_shared);
    u32("expert_shared_feed_forward_length", e.n_ff_shared);
  }
  if (e.n_dense_layers > 0) u32("leading_dense_block_count", e.n_dense_layers);
  if (r.n_groups == 1) return;
  u32("expert_group_count", r.n_groups), u32("expert_group_used_count", r.n_groups_used);
  writer.set("hearth.expert_best_of_group", static_cast<uint32_t>(r.n_best_of_group));
}

}  // namespace hearth::convert
