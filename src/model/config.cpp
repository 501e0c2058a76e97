#include "model/config.h"

#include <array>
#include <cmath>

#include "core/error.h"

namespace hearth::model {
namespace {

// What the metadata does not say about an architecture. One row each: a new one that fits the forward pass is data.
struct ArchTraits {
  std::string_view arch;
  NormKind norm;
  RopeKind rope;
  std::string_view activation;             // of files written by llama.cpp
  std::string_view powerinfer_activation;  // of PowerInfer's files, which hold ReLU models only
  bool parallel_block;
  int64_t position_offset;
};
constexpr std::array kArchs = {
    ArchTraits{"llama", NormKind::rms, RopeKind::interleaved, "silu", "relu", false, 0},
    ArchTraits{"mistral", NormKind::rms, RopeKind::interleaved, "silu", "relu", false, 0},
    ArchTraits{"bamboo", NormKind::rms, RopeKind::interleaved, "drelu", "drelu", false, 0},
    ArchTraits{"qwen2", NormKind::rms, RopeKind::neox, "silu", "relu", false, 0},
    ArchTraits{"qwen3", NormKind::rms, RopeKind::neox, "silu", "relu", false, 0},
    ArchTraits{"qwen2moe", NormKind::rms, RopeKind::neox, "silu", "silu", false, 0},
    ArchTraits{"qwen3moe", NormKind::rms, RopeKind::neox, "silu", "silu", false, 0},
    ArchTraits{"opt", NormKind::layer, RopeKind::none, "relu", "relu", false, 2},
    ArchTraits{"falcon", NormKind::layer, RopeKind::neox, "gelu", "relu", true, 0},
    ArchTraits{"arcee", NormKind::rms, RopeKind::interleaved, "relu2", "relu2", false, 0},
    ArchTraits{"nemotron", NormKind::layer, RopeKind::neox, "relu2", "relu2", false, 0},
};

const ArchTraits* find_arch(std::string_view arch) {
  for (const ArchTraits& a : kArchs) {
    if (a.arch == arch) return &a;
  }
  return nullptr;
}

const ArchTraits& require_arch(const gguf::File& file) {
  const auto arch = file.require<std::string>("general.architecture");
  const ArchTraits* a = find_arch(arch);
  if (a == nullptr) {
    std::string known;
    for (const ArchTraits& k : kArchs) known += (known.empty() ? "" : ", ") + std::string(k.arch);
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
      return f.gated ? "GeGLU" : "GELU";
    case Activation::clamped_silu:
      return "clamped SwiGLU";
  }
  return "?";
}

// A dimension from the metadata: positive and small enough that products of three stay far below 2^63.
int64_t dimension(const gguf::File& file, const std::string& key, int64_t limit = int64_t{1} << 20) {
  const auto value = file.require<int64_t>(key);
  if (value < 1 || value > limit) fail("'{}': {} is {}, expected 1 to {}", file.path().string(), key, value, limit);
  return value;
}
int64_t dimension_or(const gguf::File& file, const std::string& key, int64_t fallback) {
  return file.find(key) != nullptr ? dimension(file, key) : fallback;
}

void read_rope(const gguf::File& file, const std::string& p, Config& c) {
  if (c.rope == RopeKind::none) return;
  c.n_rot = dimension_or(file, p + "rope.dimension_count", c.head_dim);
  if (c.n_rot > c.head_dim || c.n_rot % 2 != 0) {
    fail("'{}': {}rope.dimension_count is {}, expected an even number up to the head's {}", file.path().string(), p,
         c.n_rot, c.head_dim);
  }
  c.rope_base = file.get<float>(p + "rope.freq_base").value_or(10000.0f);
  if (!(c.rope_base > 0) || !std::isfinite(c.rope_base)) {
    fail("'{}': {}rope.freq_base is {}, expected a positive number", file.path().string(), p, c.rope_base);
  }
  const auto type = file.get<std::string>(p + "rope.scaling.type").value_or("none");
  if (type == "linear") {
    c.rope_linear_factor = file.require<float>(p + "rope.scaling.factor");
  } else if (type != "none") {
    // llama3 scaling arrives as the tensor rope_freqs.weight and needs no key.
    fail("'{}': RoPE scaling '{}' is not supported; none, linear and llama3 are", file.path().string(), type);
  } else if (const auto old = file.get<float>(p + "rope.scale_linear")) {
    c.rope_linear_factor = *old;
  }
  if (!(c.rope_linear_factor > 0) || !std::isfinite(c.rope_linear_factor)) {
    fail("'{}': the linear RoPE scaling factor is {}, expected a positive number", file.path().string(),
         c.rope_linear_factor);
  }
}

}  // namespace

ActivationName parse_activation(std::string_view name) {
  if (name == "relu") return {Activation::relu, false};
  if (name == "fat_relu") return {Activation::fat_relu, false};
  if (name == "relu2") return {Activation::relu2, false};
  if (name == "silu") return {Activation::silu, false};
  if (name == "gelu") return {Activation::gelu, false};
  if (name == "clamped_silu") return {Activation::clamped_silu, false};
  if (name == "drelu") return {Activation::relu, true};
  fail("unknown activation '{}'; expected relu, fat_relu, relu2, silu, gelu, clamped_silu or drelu", name);
}

FfnDescription describe_ffn(const gguf::File& file, const std::optional<std::string>& override_activation) {
  FfnDescription f;
  f.gated = file.find_tensor("blk.0.ffn_gate.weight") != nullptr || has_gated_experts(file);
  if (override_activation) {
    f.activation = *override_activation;
    f.reason = "as asked on the command line";
  } else if (const auto own = file.get<std::string>("hearth.ffn.activation")) {
    f.activation = *own;
    f.reason = "the key hearth.ffn.activation says so";
  } else {
    const ArchTraits& a = require_arch(file);
    f.activation = file.powerinfer() ? a.powerinfer_activation : a.activation;
    f.reason = file.powerinfer() ? fmt::format("a PowerInfer file of architecture '{}'", a.arch)
                                 : fmt::format("no key says otherwise, and '{}' models use it", a.arch);
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
  f.reason += f.gated ? "; ffn_gate is there" : "; there is no ffn_gate";
  f.family = family_name(f);
  return f;
}

Config read_config(const gguf::File& file, const std::optional<std::string>& override_activation) {
  const ArchTraits& a = require_arch(file);
  const std::string p = std::string(a.arch) + ".";
  Config c;
  c.arch = a.arch;
  c.name = file.get<std::string>("general.name").value_or(file.path().stem().string());
  c.norm = a.norm;
  c.rope = a.rope;
  c.parallel_block = a.parallel_block;
  c.position_offset = a.position_offset;
  c.n_layer = dimension(file, p + "block_count", 4096);
  c.n_embd = dimension(file, p + "embedding_length");
  c.experts = read_experts(file, a.arch);
  if (c.experts && c.experts.n_dense_layers >= c.n_layer) {
    fail("'{}': {}leading_dense_block_count is {}, expected less than {}block_count, {}", file.path().string(), p,
         c.experts.n_dense_layers, p, c.n_layer);
  }
  c.n_ff = c.experts && c.experts.n_dense_layers == 0 ? c.experts.n_ff : dimension(file, p + "feed_forward_length");
  c.n_head = dimension(file, p + "attention.head_count", 4096);
  c.n_head_kv = dimension_or(file, p + "attention.head_count_kv", c.n_head);
  if (c.n_head % c.n_head_kv != 0) {
    fail("'{}': {} attention heads cannot share {} key/value heads evenly", file.path().string(), c.n_head,
         c.n_head_kv);
  }
  if (file.find(p + "attention.key_length") == nullptr && c.n_embd % c.n_head != 0) {
    fail("'{}': the embedding length {} does not divide by {} heads", file.path().string(), c.n_embd, c.n_head);
  }
  c.head_dim = dimension_or(file, p + "attention.key_length", c.n_embd / c.n_head);
  if (const auto v = dimension_or(file, p + "attention.value_length", c.head_dim); v != c.head_dim) {
    fail("'{}': keys of length {} with values of length {} are not supported", file.path().string(), c.head_dim, v);
  }
  c.n_ctx_train = dimension(file, p + "context_length", int64_t{1} << 30);
  const std::string eps_key =
      p + (c.norm == NormKind::rms ? "attention.layer_norm_rms_epsilon" : "attention.layer_norm_epsilon");
  c.norm_eps = file.require<float>(eps_key);
  if (!(c.norm_eps >= 0) || !(c.norm_eps < 1))
    fail("'{}': {} is {}, expected 0 to 1", file.path().string(), eps_key, c.norm_eps);
  c.sliding_window = dimension_or(file, p + "attention.sliding_window", 0);
  read_rope(file, p, c);
  c.ffn = describe_ffn(file, override_activation);
  return c;
}

}  // namespace hearth::model
