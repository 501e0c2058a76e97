// Attention by layer: llama.cpp's keys, hearth's own where llama.cpp has none, then the description.
#include <string>

#include "model/config_reader.h"

namespace hearth::model {
namespace {

constexpr const char* kRotatedLayersKey = "hearth.rope.layers";  // [n_layer] true: rotated
constexpr const char* kYarnTruncatesKey = "hearth.rope.yarn_truncates";
constexpr const char* kLatentNormEpsKey = "hearth.attention.latent_norm_epsilon";

bool has_long_factors(const gguf::File& file) {
  return file.find_tensor("rope_factors_long.weight") != nullptr;
}

Yarn read_yarn(const KeyReader& keys, const Architecture& arch) {
  Yarn yarn;
  yarn.factor = keys.file().require<float>(keys.key("rope.scaling.factor"));
  if (!(yarn.factor >= 1) || !std::isfinite(yarn.factor)) {
    keys.refuse("{} is {}, expected 1 or more", keys.key("rope.scaling.factor"), yarn.factor);
  }
  yarn.original_context = static_cast<double>(keys.dimension("rope.scaling.original_context_length", int64_t{1} << 30));
  yarn.beta_fast = keys.positive("rope.scaling.yarn_beta_fast", 32);
  yarn.beta_slow = keys.positive("rope.scaling.yarn_beta_slow", 1);
  yarn.truncates = keys.file().get<bool>(kYarnTruncatesKey).value_or(arch.yarn_truncates);
  return yarn;
}

// Sizes of a whole head are attention.key_length_mla and value_length_mla; in files before April 2025, which had no
// other ones, key_length and value_length.
int64_t length_of_head(const KeyReader& keys, const char* name) {
  const std::string today = std::string(name) + "_mla";
  return keys.dimension(keys.has(today.c_str()) ? today.c_str() : name);
}

// DeepSeek: how much YaRN's correction of the softmax's temperature multiplies queries, and keys, beyond their rotation.
double latent_magnitude(const KeyReader& keys, const Rope& rope) {
  constexpr const char* kKey = "rope.scaling.yarn_log_multiplier";  // 0.1 mscale_all_dim
  if (!rope.yarn || !keys.has(kKey)) return 1;
  return yarn_magnitude(rope.yarn->factor, keys.positive_or_none(kKey, 0) / 0.1);
}

// The rotation of layers that have none of their own.
Rope read_rope(const KeyReader& keys, const Architecture& arch) {
  const gguf::File& file = keys.file();
  Rope rope;
  rope.base = keys.positive("rope.freq_base", 10000);
  rope.attention_factor = static_cast<float>(keys.positive("rope.scaling.attn_factor", 1));
  if (file.find_tensor("rope_freqs.weight") != nullptr) rope.factors = "rope_freqs.weight";
  const auto type = file.get<std::string>(keys.key("rope.scaling.type")).value_or("none");
  if (type == "linear") {
    if (!keys.has("rope.scaling.factor")) keys.refuse("the key {} is missing", keys.key("rope.scaling.factor"));
    rope.linear_factor = keys.positive("rope.scaling.factor", 1);
  } else if (type == "yarn") {
    rope.yarn = read_yarn(keys, arch);
    // Where the softmax's temperature is corrected by a key, the rotation is not.
    if (!arch.latent_attention || latent_magnitude(keys, rope) == 1) {
      rope.attention_factor *= static_cast<float>(yarn_magnitude(rope.yarn->factor));
    }
  } else if (type == "longrope") {
    if (!has_long_factors(file)) keys.refuse("RoPE scaling 'longrope' needs the tensor rope_factors_long.weight");
  } else if (type != "none") {
    // llama3 scaling arrives as the tensor rope_freqs.weight and needs no key.
    keys.refuse("RoPE scaling '{}' is not supported; none, linear, llama3, longrope and yarn are", type);
  } else {
    rope.linear_factor = keys.positive("rope.scale_linear", 1);
  }
  return rope;
}

void read_ropes(const KeyReader& keys, const Architecture& arch, Config& c) {
  if (!c.latent) c.n_rot = keys.dimension_or("rope.dimension_count", c.head_dim);
  if (c.n_rot > c.head_dim || c.n_rot % 2 != 0) {
    keys.refuse("{} is {}, expected an even number up to the head's {}", keys.key("rope.dimension_count"), c.n_rot,
                c.head_dim);
  }
  c.ropes = {read_rope(keys, arch)};
  if (has_long_factors(keys.file())) {
    c.long_rope_context = keys.dimension("rope.scaling.original_context_length", int64_t{1} << 30);
    Rope long_rope = c.ropes[0];
    c.ropes[0].factors = "rope_factors_short.weight", long_rope.factors = "rope_factors_long.weight";
    c.ropes.push_back(long_rope);
  }
  const auto rotated = keys.by_layer(kRotatedLayersKey, c.n_layer);
  for (int64_t l = 0; l < c.n_layer; ++l) {
    const bool by_period = arch.no_rope_period == 0 || (l + 1) % arch.no_rope_period != 0;
    if (!(rotated ? (*rotated)[static_cast<size_t>(l)] : by_period)) c.layers[static_cast<size_t>(l)].rope = -1;
  }
  if (!keys.has("rope.freq_base_swa") && arch.window_rope_base == 0) return;
  if (c.long_rope_context > 0)
    keys.refuse("long RoPE factors beside a base of their own for windows are not supported");
  c.ropes.push_back({.base = keys.positive("rope.freq_base_swa", arch.window_rope_base)});
  for (LayerAttention& layer : c.layers) {
    if (layer.window > 0 && layer.rope == 0) layer.rope = 1;
  }
}

// A pattern is a period, of which the last layer (or the first) sees everything, or says for each layer whether it has
// the window.
void read_windows(const KeyReader& keys, const Architecture& arch, Config& c) {
  constexpr const char* kWindow = "attention.sliding_window";
  constexpr const char* kPattern = "attention.sliding_window_pattern";
  const auto window = keys.file().get<int64_t>(keys.key(kWindow)).value_or(arch.window);
  if (window < 0 || window > int64_t{1} << 30) {
    keys.refuse("{} is {}, expected 0 (none) to {}", keys.key(kWindow), window, int64_t{1} << 30);
  }
  const gguf::Value* pattern = keys.file().find(keys.key(kPattern));
  const bool is_list = pattern != nullptr && std::holds_alternative<gguf::Array>(*pattern);
  const auto listed = is_list ? keys.by_layer(keys.key(kPattern), c.n_layer) : std::nullopt;
  const int64_t period = is_list ? 0 : keys.dimension_or(kPattern, arch.window_period);
  for (int64_t l = 0; l < c.n_layer; ++l) {
    const bool has_window =
        listed ? (*listed)[static_cast<size_t>(l)] : period == 0 || (arch.full_first ? l : l + 1) % period != 0;
    if (has_window) c.layers[static_cast<size_t>(l)].window = window;
    if (!has_window && window > 0 && arch.full_unrotated) c.layers[static_cast<size_t>(l)].rope = -1;
  }
}

}  // namespace

void read_latent(const KeyReader& keys, Config& c) {
  c.n_head_kv = 1;
  c.n_rot = keys.dimension("rope.dimension_count", 4096);
  c.latent.n_latent = keys.dimension("attention.kv_lora_rank");
  // llama.cpp does not look at the key in V2-Lite and its like.
  if (keys.file().find_tensor("blk.0.attn_q_a.weight") != nullptr) {
    c.latent.n_q_latent = keys.dimension("attention.q_lora_rank");
  }
  const int64_t key = length_of_head(keys, "attention.key_length");
  c.latent.n_plain = key - c.n_rot;
  if (c.latent.n_plain < 1) {
    keys.refuse("heads of {} elements, of which {} are rotated: expected some that are not", key, c.n_rot);
  }
  c.latent.n_value = length_of_head(keys, "attention.value_length");
  c.head_dim = c.n_rot + c.latent.n_latent;
  if (keys.has("attention.key_length_mla") && keys.dimension_or("attention.key_length", c.head_dim) != c.head_dim) {
    keys.refuse("{} is {}, expected {}, the latent and what is rotated", keys.key("attention.key_length"),
                keys.dimension("attention.key_length"), c.head_dim);
  }
}

void read_attention(const KeyReader& keys, const Architecture& arch, Config& c) {
  c.layers.assign(static_cast<size_t>(c.n_layer), {});
  read_windows(keys, arch, c);
  if (arch.rope != RopeKind::none) read_ropes(keys, arch, c);
  const bool wide = arch.wide_scale_layers > 0 && c.n_layer == arch.wide_scale_layers;
  const auto width = static_cast<double>(wide ? c.n_embd / c.n_head : c.n_queries() / c.n_head);
  const double scale = keys.positive_or_none("attention.scale", 0);
  const double magnitude = c.latent ? latent_magnitude(keys, c.ropes[0]) : 1;
  c.attention_scale = static_cast<float>(scale > 0 ? scale : magnitude * magnitude / std::sqrt(width));
  if (c.latent) c.qk_norm_eps = keys.file().get<float>(kLatentNormEpsKey).value_or(c.qk_norm_eps);
  if (!(c.qk_norm_eps >= 0 && c.qk_norm_eps < 1)) {
    keys.refuse("{} is {}, expected 0 to 1", kLatentNormEpsKey, c.qk_norm_eps);
  }
  c.attention_soft_cap = static_cast<float>(keys.positive_or_none("attn_logit_softcapping", arch.attn_soft_cap));
}

}  // namespace hearth::model
