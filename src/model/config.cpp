#include "model/config.h"

#include <cmath>

#include "core/error.h"
#include "model/config_reader.h"

namespace hearth::model {
namespace {

const Architecture& require_architecture(const gguf::File& file) {
  const auto arch = file.require<std::string>("general.architecture");
  const Architecture* a = find_architecture(arch);
  if (a == nullptr) {
    std::string known;
    for (const Architecture& k : architectures()) known += (known.empty() ? "" : ", ") + std::string(k.name);
    fail("'{}': the architecture '{}' is not supported; supported are {}", file.path().string(), arch, known);
  }
  return *a;
}

std::string family_name(const FfnDescription& f) {
  if (f.up_relu) return "dReLU";
  switch (f.act) {
    case Activation::relu:
      return f.gated ? "ReGLU" : "ReLU";
    case Activation::fat_relu:
      return f.gated ? "ReGLU (FATReLU)" : "FATReLU";
    case Activation::relu2:
      return f.gated ? "relu² GLU" : "relu²";
    case Activation::silu:
      return f.gated ? "SwiGLU" : "SiLU";
    case Activation::gelu:
    case Activation::gelu_tanh:
      return f.gated ? "GeGLU" : "GELU";
    case Activation::clamped_silu:
      return "clamped SwiGLU";
  }
  return "?";
}

// Layers behind the last one that predict tokens farther ahead, and that nothing here needs (GLM-4.5).
int64_t read_nextn_layers(const KeyReader& keys) {
  return keys.has("nextn_predict_layers") && keys.file().require<int64_t>(keys.key("nextn_predict_layers")) != 0
             ? keys.dimension("nextn_predict_layers", 4096)
             : 0;
}

void read_heads(const KeyReader& keys, Config& c) {
  c.n_head_kv = keys.dimension_or("attention.head_count_kv", c.n_head);
  if (c.n_head % c.n_head_kv != 0) {
    keys.refuse("{} attention heads cannot share {} key/value heads evenly", c.n_head, c.n_head_kv);
  }
  if (!keys.has("attention.key_length") && c.n_embd % c.n_head != 0) {
    keys.refuse("the embedding length {} does not divide by {} heads", c.n_embd, c.n_head);
  }
  c.head_dim = keys.dimension_or("attention.key_length", c.n_embd / c.n_head);
  if (const auto v = keys.dimension_or("attention.value_length", c.head_dim); v != c.head_dim) {
    keys.refuse("keys of length {} with values of length {} are not supported", c.head_dim, v);
  }
}

// Multipliers of embeddings, halves of layers and logits (Granite divides its logits).
void read_scales(const KeyReader& keys, const Architecture& arch, Config& c) {
  const double width = std::sqrt(static_cast<double>(c.n_embd));
  const double residual = keys.positive("residual_scale", 1);
  c.residual_scale = static_cast<float>(residual);
  c.embedding_scale =
      static_cast<float>(keys.positive("embedding_scale", arch.embedding_by_width ? width : 1) / residual);
  c.norm_eps = static_cast<float>(c.norm_eps / (residual * residual));
  c.logit_scale = static_cast<float>(1 / keys.positive("logit_scale", 1));
  c.logit_soft_cap = static_cast<float>(keys.positive_or_none("final_logit_softcapping", arch.logit_soft_cap));
}

}  // namespace

ActivationName parse_activation(std::string_view name) {
  if (name == "relu") return {Activation::relu, false};
  if (name == "fat_relu") return {Activation::fat_relu, false};
  if (name == "relu2") return {Activation::relu2, false};
  if (name == "silu") return {Activation::silu, false};
  if (name == "gelu") return {Activation::gelu, false};
  if (name == "gelu_tanh") return {Activation::gelu_tanh, false};
  if (name == "clamped_silu") return {Activation::clamped_silu, false};
  if (name == "drelu") return {Activation::relu, true};
  fail("unknown activation '{}'; expected relu, fat_relu, relu2, silu, gelu, gelu_tanh, clamped_silu or drelu", name);
}

FfnDescription describe_ffn(const gguf::File& file, const std::optional<std::string>& override_activation) {
  FfnDescription f;
  const auto named = file.get<std::string>("general.architecture");
  const Architecture* arch = named ? find_architecture(*named) : nullptr;
  const bool fused = arch != nullptr && arch->fused_gate_up;
  f.gated = fused || file.find_tensor("blk.0.ffn_gate.weight") != nullptr || has_gated_experts(file);
  if (override_activation) {
    f.activation = *override_activation;
    f.reason = "as asked on the command line";
  } else if (const auto own = file.get<std::string>("hearth.ffn.activation")) {
    f.activation = *own;
    f.reason = "the key hearth.ffn.activation says so";
  } else {
    const Architecture& a = require_architecture(file);
    f.activation = file.powerinfer() ? a.powerinfer_activation : a.activation;
    f.reason = file.powerinfer() ? fmt::format("a PowerInfer file of architecture '{}'", a.name)
                                 : fmt::format("no key says otherwise, and '{}' models use it", a.name);
  }
  const ActivationName parsed = parse_activation(f.activation);
  f.act = parsed.act;
  f.up_relu = parsed.up_relu;
  if (f.up_relu && !f.gated) fail("'{}': dReLU needs ffn_gate tensors, and there are none", file.path().string());
  if (f.act == Activation::fat_relu) {
    f.act_threshold = file.get<float>("hearth.ffn.activation_threshold").value_or(0.01f);
    if (!std::isfinite(f.act_threshold) || f.act_threshold < 0) {
      fail("'{}': hearth.ffn.activation_threshold is {}, expected a number of 0 or more", file.path().string(),
           f.act_threshold);
    }
  }
  if (f.act == Activation::clamped_silu) {
    if (!f.gated) fail("'{}': clamped_silu needs gate tensors, and there are none", file.path().string());
    f.act_threshold = file.get<float>("hearth.ffn.activation_threshold").value_or(7.0f);  // gpt-oss
    if (!std::isfinite(f.act_threshold) || f.act_threshold <= 0) {
      fail("'{}': hearth.ffn.activation_threshold is {}, expected a positive number", file.path().string(),
           f.act_threshold);
    }
  }
  f.reason += fused ? "; ffn_up has the gate too" : f.gated ? "; ffn_gate is there" : "; there is no ffn_gate";
  f.family = family_name(f);
  return f;
}

Config read_config(const gguf::File& file, const std::optional<std::string>& override_activation) {
  const Architecture& a = require_architecture(file);
  const KeyReader keys(file, std::string(a.name) + ".");
  Config c;
  c.arch = a.name;
  c.name = file.get<std::string>("general.name").value_or(file.path().stem().string());
  c.norm = a.norm;
  c.rope = a.rope;
  c.parallel_block = a.parallel_block;
  c.post_norms = !a.attn_post_norm.empty();
  c.position_offset = a.position_offset;
  c.early_router = a.early_router;
  c.n_layer = keys.dimension("block_count", 4096) - read_nextn_layers(keys);
  if (c.n_layer < 1) keys.refuse("every layer predicts tokens farther ahead ({})", keys.key("nextn_predict_layers"));
  c.n_embd = keys.dimension("embedding_length");
  c.experts = read_experts(file, a.name);
  if (c.experts && c.experts.n_dense_layers >= c.n_layer) {
    keys.refuse("{} is {}, expected less than the number of layers, {}", keys.key("leading_dense_block_count"),
                c.experts.n_dense_layers, c.n_layer);
  }
  c.n_ff = c.experts && c.experts.n_dense_layers == 0 ? c.experts.n_ff : keys.dimension("feed_forward_length");
  c.n_head = keys.dimension("attention.head_count", 4096);
  a.latent_attention ? read_latent(keys, c) : read_heads(keys, c);
  c.n_ctx_train = keys.dimension("context_length", int64_t{1} << 30);
  const std::string eps_key =
      keys.key(c.norm == NormKind::rms ? "attention.layer_norm_rms_epsilon" : "attention.layer_norm_epsilon");
  c.norm_eps = c.qk_norm_eps = file.require<float>(eps_key);
  if (!(c.norm_eps >= 0) || !(c.norm_eps < 1)) keys.refuse("{} is {}, expected 0 to 1", eps_key, c.norm_eps);
  read_attention(keys, a, c);
  read_scales(keys, a, c);
  c.ffn = describe_ffn(file, override_activation);
  return c;
}

}  // namespace hearth::model
