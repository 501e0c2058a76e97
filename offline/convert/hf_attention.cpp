// Attention by layer, and the factors of the halves of layers: config.json's keys of today and
// of older releases become llama.cpp's keys, and hearth's own where llama.cpp has none.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.h"
#include "model/architectures.h"
#include "model/rope.h"
#include "offline/convert/hf_architectures.h"

namespace hearth::convert {
namespace {

constexpr const char* kFullAttention = "full_attention";
constexpr double kLatentNormEps = 1e-6;  // the modelling code's, whatever rms_norm_eps says
constexpr const char* kSlidingAttention = "sliding_attention";

// False for the last layer of each period, or the first.
std::vector<bool> by_period(int64_t n_layer, int64_t period, bool first = false) {
  std::vector<bool> layers;
  for (int64_t l = 0; l < n_layer; ++l) layers.push_back((first ? l : l + 1) % period != 0);
  return layers;
}

double positive(const Fields& f, const char* key, std::optional<double> otherwise) {
  const double value = otherwise ? f.number(key).value_or(*otherwise) : f.require_number(key);
  if (!(value > 0)) fail("{}: {} is {}, expected a positive number", f.where(), key, value);
  return value;
}

std::vector<float> read_factors(const Fields& f, const char* key, int64_t n) {
  const Json* list = f.find(key);
  const std::string found = list == nullptr ? std::string("missing") : shown(*list);
  if (list == nullptr || !list->is_array() || std::ssize(*list) != n) {
    fail("{}: {} is {}, expected a list of {} numbers", f.where(), key, found, n);
  }
  std::vector<float> factors;
  for (const Json& item : *list) {
    if (!item.is_number() || !(item.get<double>() > 0)) {
      fail("{}: {} holds {}, expected positive numbers", f.where(), key, shown(item));
    }
    factors.push_back(item.get<float>());
  }
  return factors;
}

// transformers, modeling_rope_utils.py: _compute_longrope_parameters.
void read_longrope(const Fields& top, const Fields& f, HfConfig& c) {
  RopeScaling& r = c.rope;
  r.kind = RopeScaling::Kind::longrope;
  const Fields& holder = f.find("original_max_position_embeddings") != nullptr ? f : top;
  r.original_context = positive(holder, "original_max_position_embeddings", {});
  r.short_factors = read_factors(f, "short_factor", c.n_rot / 2);
  r.long_factors = read_factors(f, "long_factor", c.n_rot / 2);
  const double factor = f.number("factor").value_or(static_cast<double>(c.n_ctx) / r.original_context);
  const double scaled = factor > 1 ? std::sqrt(1 + std::log(factor) / std::log(r.original_context)) : 1.0;
  r.attention_factor = positive(f, "attention_factor", scaled);
}

// transformers, modeling_rope_utils.py: _compute_yarn_parameters.
void read_yarn(const Fields& f, HfConfig& c) {
  RopeScaling& r = c.rope;
  r.kind = RopeScaling::Kind::yarn;
  r.factor = positive(f, "factor", {});
  r.original_context = positive(f, "original_max_position_embeddings", static_cast<double>(c.n_ctx));
  r.beta_fast = positive(f, "beta_fast", 32.0), r.beta_slow = positive(f, "beta_slow", 1.0);
  r.truncate = f.flag("truncate", true);
  const double m = f.number("mscale").value_or(0), all = f.number("mscale_all_dim").value_or(0);
  r.mscale_all_dim = all;
  const double scaled = m != 0 && all != 0 ? model::yarn_magnitude(r.factor, m) / model::yarn_magnitude(r.factor, all)
                                           : model::yarn_magnitude(r.factor);
  r.attention_factor = positive(f, "attention_factor", scaled);
}

void read_scaling(const Fields& top, const Fields& f, HfConfig& c) {
  const std::string type = f.text("rope_type").value_or(f.text("type").value_or("default"));
  if (type == "default") return;
  RopeScaling& r = c.rope;
  if (type == "linear") {
    r.kind = RopeScaling::Kind::linear;
    r.factor = positive(f, "factor", {});
  } else if (type == "llama3") {
    r.kind = RopeScaling::Kind::llama3;
    r.factor = positive(f, "factor", {});
    r.low_freq_factor = positive(f, "low_freq_factor", 1.0);
    r.high_freq_factor = positive(f, "high_freq_factor", 4.0);
    r.original_context = positive(f, "original_max_position_embeddings", 8192.0);
    if (r.high_freq_factor <= r.low_freq_factor) {
      fail("{}: high_freq_factor {} must be above low_freq_factor {}", f.where(), r.high_freq_factor,
           r.low_freq_factor);
    }
  } else if (type == "longrope" || type == "su") {
    read_longrope(top, f, c);
  } else if (type == "yarn") {
    read_yarn(f, c);
  } else {
    fail("{}: RoPE scaling '{}' is not supported; default, linear, llama3, longrope and yarn are", f.where(), type);
  }
}

// A list of 0 or 1 for each layer; empty where the key is absent.
std::vector<bool> read_layout(const Fields& f, const char* key, int64_t n_layer) {
  const Json* list = f.find(key);
  if (list == nullptr) return {};
  const auto is_flag = [](const Json& item) {
    return item.is_number_integer() && (item.get<int64_t>() == 0 || item.get<int64_t>() == 1);
  };
  if (!list->is_array() || std::ssize(*list) != n_layer || !std::all_of(list->begin(), list->end(), is_flag)) {
    fail("{}: {} is {}, expected 0 or 1 for each of {} layers", f.where(), key, shown(*list), n_layer);
  }
  std::vector<bool> layers;
  for (const Json& item : *list) layers.push_back(item.get<int64_t>() == 1);
  return layers;
}

void read_rotated_layers(const Fields& f, const HfArchitecture& a, HfConfig& c) {
  c.rotated_layers = read_layout(f, "rope_layout", c.n_layer);  // SmallThinker
  if (a.no_rope_period == 0) return;
  c.rotated_layers = read_layout(f, "no_rope_layers", c.n_layer);
  if (!c.rotated_layers.empty()) return;
  c.rotated_layers = by_period(c.n_layer, f.integer("no_rope_layer_interval", 1, 4096).value_or(a.no_rope_period));
}

// The layers that are rotated where a file says which ones have windows, and no more.
std::vector<bool> rotated_by_default(const HfConfig& c, const model::Architecture& described) {
  if (described.full_unrotated && c.sliding_window > 0) return c.window_layers;
  if (described.no_rope_period > 0) return by_period(c.n_layer, described.no_rope_period);
  return std::vector<bool>(static_cast<size_t>(c.n_layer), true);
}

// The period that by_period() makes these of; 0: there is none.
int64_t period_of(const std::vector<bool>& layers, bool first) {
  for (int64_t p = 2; p <= std::ssize(layers); ++p) {
    if (by_period(std::ssize(layers), p, first) == layers) return p;
  }
  return 0;
}

}  // namespace

void read_windows(const Fields& f, const Json& config, const HfArchitecture& a, HfConfig& c) {
  if (!f.flag("use_sliding_window", true)) return;
  const bool smallthinker = f.has("sliding_window_layout");
  const char* const key = smallthinker ? "sliding_window_size" : "sliding_window";
  c.sliding_window = f.integer(key, 0, kMaxContext).value_or(0);
  if (const auto types = config.find("layer_types"); types != config.end() && types->is_array()) {
    if (std::ssize(*types) != c.n_layer) {
      fail("{}: layer_types has {} entries, expected one for each of {} layers", f.where(), types->size(), c.n_layer);
    }
    for (const Json& type : *types) {
      const std::string name = type.is_string() ? type.get<std::string>() : shown(type);
      refuse_if(name != kFullAttention && name != kSlidingAttention, f, "a layer of type " + name,
                "full_attention and sliding_attention are");
      c.window_layers.push_back(name == kSlidingAttention);
    }
  } else if (smallthinker) {
    c.window_layers = read_layout(f, "sliding_window_layout", c.n_layer);
  } else if (a.window_period > 0) {
    const char* const period =
        f.find("sliding_window_pattern") != nullptr ? "sliding_window_pattern" : "_sliding_window_pattern";
    c.window_layers = by_period(c.n_layer, f.integer(period, 1, 4096).value_or(a.window_period));
  } else if (f.find("use_sliding_window") != nullptr && c.sliding_window > 0) {
    const int64_t first = f.integer("max_window_layers", 0, kMaxDim).value_or(28);
    for (int64_t l = 0; l < c.n_layer; ++l) c.window_layers.push_back(l >= first);
  } else {
    c.window_layers.assign(static_cast<size_t>(c.n_layer), true);
  }
  const bool any = std::find(c.window_layers.begin(), c.window_layers.end(), true) != c.window_layers.end();
  if (!any) c.sliding_window = 0;
}

void read_latent(const Fields& f, HfConfig& c) {
  constexpr int64_t kMaxLength = 4096;
  c.latent.n_latent = f.require_integer("kv_lora_rank", 1, kMaxDim);
  c.latent.n_q_latent = f.integer("q_lora_rank", 1, kMaxDim).value_or(0);
  c.latent.n_plain = f.require_integer("qk_nope_head_dim", 1, kMaxLength);
  c.latent.n_value = f.require_integer("v_head_dim", 1, kMaxLength);
  c.head_dim = f.require_integer("qk_rope_head_dim", 1, kMaxLength);
  c.explicit_head_dim = true;
  refuse_if(f.flag("attention_bias", false), f, "attention_bias beside latent attention", "false is");
  refuse_if(!f.flag("rope_interleave", true), f, "rope_interleave = false", "true is");
}

// Today's `rope_parameters` holds the base and the scaling, by type of layer where they differ; older files have
// `rope_theta`, `rope_scaling` and `rope_local_base_freq`.
void read_rope(const Fields& f, const HfArchitecture& a, HfConfig& c) {
  std::optional<Fields> parameters = f.object("rope_parameters");
  const bool local_base = a.window_rope_theta > 0;
  if (parameters && parameters->find(kSlidingAttention) != nullptr) {
    refuse_if(!local_base, f, "RoPE that differs between layers", "one setting for all layers is");
    const Fields local = *parameters->object(kSlidingAttention);
    refuse_if(local.text("rope_type").value_or("default") != "default", local, "a scaling of layers with a window",
              "rope_type default is");
    c.window_rope_theta = positive(local, "rope_theta", a.window_rope_theta);
    parameters = parameters->object(kFullAttention);
  } else if (local_base) {
    c.window_rope_theta = positive(f, "rope_local_base_freq", a.window_rope_theta);
  }
  const auto scaling = parameters ? parameters : f.object("rope_scaling");
  std::optional<double> theta = parameters ? parameters->number("rope_theta") : std::nullopt;
  if (!theta) theta = f.number("rope_theta");
  c.rope_theta = theta.value_or(a.rope_theta);
  if (!(c.rope_theta > 0)) fail("{}: rope_theta is {}, expected a positive number", f.where(), c.rope_theta);
  const Fields& partial = parameters && parameters->find("partial_rotary_factor") != nullptr ? *parameters : f;
  const double share = partial.number("partial_rotary_factor").value_or(a.partial_rotary);
  if (!(share > 0 && share <= 1)) {
    fail("{}: partial_rotary_factor is {}, expected a number above 0, and 1 at most", partial.where(), share);
  }
  refuse_if(share != 1 && a.permute_rope, f, "a partial_rotary_factor", "1 is");
  c.n_rot = static_cast<int64_t>(static_cast<double>(c.head_dim) * share);
  refuse_if(c.head_dim % 2 != 0, f, fmt::format("an odd head size ({})", c.head_dim), "RoPE needs an even one");
  refuse_if(c.n_rot % 2 != 0, f, fmt::format("a rotation of {} elements of a head", c.n_rot),
            "RoPE needs an even number");
  if (scaling) read_scaling(f, *scaling, c);
  read_rotated_layers(f, a, c);
}

void read_scales(const Fields& f, const HfArchitecture& a, HfConfig& c) {
  const auto cap = [&](const char* key, double otherwise) {
    const double value = f.has(key) ? f.number(key).value_or(0) : otherwise;  // null: none
    if (value < 0) fail("{}: {} is {}, expected a positive number or null", f.where(), key, value);
    return value;
  };
  c.attn_soft_cap = cap("attn_logit_softcapping", a.attn_soft_cap);
  c.logit_soft_cap = cap("final_logit_softcapping", a.logit_soft_cap);
  refuse_if(f.flag("use_bidirectional_attention", false), f, "use_bidirectional_attention", "false is");
  if (a.query_scalar > 0) c.attention_scale = 1 / std::sqrt(positive(f, "query_pre_attn_scalar", a.query_scalar));
  if (!a.multipliers) return;
  c.embedding_scale = positive(f, "embedding_multiplier", 1), c.residual_scale = positive(f, "residual_multiplier", 1);
  c.logit_scale = positive(f, "logits_scaling", 1), c.attention_scale = positive(f, "attention_multiplier", 1);
}

void write_attention(const HfConfig& c, gguf::Writer& writer) {
  const std::string p = c.arch + ".";
  const auto u32 = [&](const char* key, double value) { writer.set(p + key, static_cast<uint32_t>(value)); };
  const auto f32 = [&](const char* key, double value) { writer.set(p + key, static_cast<float>(value)); };
  const model::Architecture* described = model::find_architecture(c.arch);
  const bool mixed = std::find(c.window_layers.begin(), c.window_layers.end(), false) != c.window_layers.end();
  if (c.sliding_window > 0 || described->window > 0)
    u32("attention.sliding_window", static_cast<double>(c.sliding_window));
  if (c.sliding_window > 0 && (mixed || described->window_period > 0)) {
    const int64_t period = period_of(c.window_layers, described->full_first);
    if (period > 0) {
      u32("attention.sliding_window_pattern", static_cast<double>(period));
    } else {
      writer.set(p + "attention.sliding_window_pattern", gguf::Array(c.window_layers));
    }
  }
  if (c.latent) {
    const auto size = [&](const char* key, int64_t n) { u32(key, static_cast<double>(n)); };
    if (c.latent.n_q_latent > 0) size("attention.q_lora_rank", c.latent.n_q_latent);
    size("attention.kv_lora_rank", c.latent.n_latent);
    size("attention.key_length", c.latent.n_latent + c.n_rot), size("attention.value_length", c.latent.n_latent);
    size("attention.key_length_mla", c.latent.n_plain + c.n_rot);
    size("attention.value_length_mla", c.latent.n_value);
    if (c.norm_eps != kLatentNormEps) {
      writer.set("hearth.attention.latent_norm_epsilon", static_cast<float>(kLatentNormEps));
    }
  }
  if (c.attention_scale > 0) f32("attention.scale", c.attention_scale);
  if (c.attn_soft_cap > 0 || described->attn_soft_cap > 0) f32("attn_logit_softcapping", c.attn_soft_cap);
  if (c.logit_soft_cap > 0 || described->logit_soft_cap > 0) f32("final_logit_softcapping", c.logit_soft_cap);
  if (c.embedding_scale > 0) f32("embedding_scale", c.embedding_scale);
  if (c.residual_scale > 0) f32("residual_scale", c.residual_scale);
  if (c.logit_scale > 0) f32("logit_scale", c.logit_scale);
  if (described->rope == RopeKind::none) return;

  u32("rope.dimension_count", static_cast<double>(c.n_rot));
  f32("rope.freq_base", c.rope_theta);
  if (c.window_rope_theta > 0) f32("rope.freq_base_swa", c.window_rope_theta);
  const std::vector<bool> all(static_cast<size_t>(c.n_layer), true);
  if (const auto& rotated = c.rotated_layers.empty() ? all : c.rotated_layers;
      rotated != rotated_by_default(c, *described)) {
    writer.set("hearth.rope.layers", gguf::Array(rotated));
  }
  const RopeScaling& r = c.rope;
  switch (r.kind) {
    case RopeScaling::Kind::none:
    case RopeScaling::Kind::llama3:  // a tensor
      return;
    case RopeScaling::Kind::linear:
      writer.set(p + "rope.scaling.type", std::string("linear"));
      return f32("rope.scaling.factor", r.factor);
    case RopeScaling::Kind::longrope:
      writer.set(p + "rope.scaling.type", std::string("longrope"));
      u32("rope.scaling.original_context_length", r.original_context);
      return f32("rope.scaling.attn_factor", r.attention_factor);
    case RopeScaling::Kind::yarn:
      writer.set(p + "rope.scaling.type", std::string("yarn"));
      f32("rope.scaling.factor", r.factor);
      u32("rope.scaling.original_context_length", r.original_context);
      f32("rope.scaling.yarn_beta_fast", r.beta_fast), f32("rope.scaling.yarn_beta_slow", r.beta_slow);
      if (c.latent && r.mscale_all_dim != 0) {  // llama.cpp corrects the softmax, and not the rotation
        f32("rope.scaling.yarn_log_multiplier", 0.1 * r.mscale_all_dim);
        f32("rope.scaling.attn_factor", r.attention_factor);
      } else {
        f32("rope.scaling.attn_factor", r.attention_factor / model::yarn_magnitude(r.factor));
      }
      return writer.set("hearth.rope.yarn_truncates", r.truncate);
  }
}

std::vector<RopeFactors> rope_factors(const HfConfig& c) {
  const RopeScaling& r = c.rope;
  if (r.kind == RopeScaling::Kind::longrope) {
    return {{"rope_factors_short.weight", r.short_factors}, {"rope_factors_long.weight", r.long_factors}};
  }
  if (r.kind != RopeScaling::Kind::llama3) return {};
  std::vector<float> factors;
  for (int64_t i = 0; i < c.n_rot; i += 2) {
    // Wavelengths that fit the original context often enough stay, long ones are stretched by `factor`, and the band
    // between is blended (transformers, _compute_llama3_parameters).
    const double frequency = std::pow(c.rope_theta, -static_cast<double>(i) / static_cast<double>(c.n_rot));
    const double turns = r.original_context * frequency / (2.0 * std::numbers::pi);  // within the original context
    if (turns > r.high_freq_factor) {
      factors.push_back(1.0f);
    } else if (turns < r.low_freq_factor) {
      factors.push_back(static_cast<float>(r.factor));
    } else {
      const double smooth = (turns - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor);
      factors.push_back(static_cast<float>(1.0 / ((1.0 - smooth) / r.factor + smooth)));
    }
  }
  return {{"rope_freqs.weight", factors}};
}

}  // namespace hearth::convert
