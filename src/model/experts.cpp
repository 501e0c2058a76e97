#include "model/experts.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "core/error.h"

namespace hearth::model {
namespace {

// An architecture's routing, as far as the keys do not say it (llama.cpp, src/models/*.cpp). One row each.
struct RoutingTraits {
  std::string_view arch;
  Gating gating;
  bool normalize;
};
constexpr std::array kRouting = {
    RoutingTraits{"llama", Gating::softmax, true},      RoutingTraits{"qwen2moe", Gating::softmax, false},
    RoutingTraits{"qwen3moe", Gating::softmax, true},   RoutingTraits{"olmoe", Gating::softmax, false},
    RoutingTraits{"glm4moe", Gating::sigmoid, true},    RoutingTraits{"gpt-oss", Gating::selected_softmax, false},
    RoutingTraits{"deepseek2", Gating::softmax, false}, RoutingTraits{"smallthinker", Gating::softmax, true},
};

// llama.cpp has no key for it, and ranks groups by two. DeepSeek's models differ in it as in their gating function.
constexpr const char* kBestOfGroupKey = "hearth.expert_best_of_group";
int64_t published_best_of_group(std::string_view arch, Gating gating) {
  return arch == "deepseek2" && gating == Gating::softmax ? 1 : 2;
}

// Reads keys with the architecture's prefix; errors name the file and the key.
class Keys {
 public:
  Keys(const gguf::File& file, std::string_view arch) : file_(file), prefix_(std::string(arch) + ".") {}

  std::string name(const char* key) const { return prefix_ + key; }
  std::string where() const { return fmt::format("'{}'", file_.path().string()); }
  bool has(const char* key) const { return file_.find(name(key)) != nullptr; }
  int64_t count(const char* key, int64_t low, int64_t high) const {
    const auto value = file_.require<int64_t>(name(key));
    if (value < low || value > high) fail("{}: {} is {}, expected {} to {}", where(), name(key), value, low, high);
    return value;
  }
  int64_t count_or(const char* key, int64_t low, int64_t high, int64_t fallback) const {
    return has(key) ? count(key, low, high) : fallback;
  }
  const gguf::File& file() const { return file_; }

 private:
  const gguf::File& file_;
  std::string prefix_;
};

// The first layer with a router, or nothing.
std::optional<int64_t> first_expert_layer(const gguf::File& file) {
  std::optional<int64_t> first;
  for (const gguf::TensorInfo& t : file.tensors()) {
    if (!t.name.starts_with("blk.") || !t.name.ends_with(".ffn_gate_inp.weight")) continue;
    int64_t layer = 0;
    const char* const end = t.name.data() + t.name.size();
    if (const auto [rest, error] = std::from_chars(t.name.data() + 4, end, layer);
        error != std::errc{} || std::string_view(rest, static_cast<size_t>(end - rest)) != ".ffn_gate_inp.weight") {
      continue;
    }
    first = std::min(first.value_or(layer), layer);
  }
  return first;
}

Gating read_gating(const Keys& keys, Gating otherwise) {
  switch (keys.count_or("expert_gating_func", 0, 4, 0)) {
    case 0:
      return otherwise;
    case 1:
      return Gating::softmax;
    case 2:
      return Gating::sigmoid;
    case 3:
      return Gating::selected_softmax;
    default:
      fail("{}: {} is 4 (square root of softplus), which is not supported; 1 to 3 are", keys.where(),
           keys.name("expert_gating_func"));
  }
}

void read_groups(const Keys& keys, std::string_view arch, Routing& r) {
  r.n_groups = std::max<int64_t>(1, keys.count_or("expert_group_count", 0, r.n_expert, 1));
  r.n_groups_used = std::max<int64_t>(1, keys.count_or("expert_group_used_count", 0, r.n_groups, r.n_groups));
  if (r.n_expert % r.n_groups != 0) {
    fail("{}: {} experts do not divide into the {} groups of {}", keys.where(), r.n_expert, r.n_groups,
         keys.name("expert_group_count"));
  }
  if (r.n_expert / r.n_groups * r.n_groups_used < r.n_used) {
    fail("{}: {} is {}, whose {} experts are fewer than {}, {}", keys.where(), keys.name("expert_group_used_count"),
         r.n_groups_used, r.n_expert / r.n_groups * r.n_groups_used, keys.name("expert_used_count"), r.n_used);
  }
  r.n_best_of_group = keys.file().get<int64_t>(kBestOfGroupKey).value_or(published_best_of_group(arch, r.gating));
  if (r.n_best_of_group != 1 && r.n_best_of_group != 2)
    fail("{}: {} is {}, expected 1 or 2", keys.where(), kBestOfGroupKey, r.n_best_of_group);
}

Routing read_routing(const Keys& keys, std::string_view arch, int64_t n_expert) {
  const auto traits = std::find_if(kRouting.begin(), kRouting.end(), [&](const auto& t) { return t.arch == arch; });
  if (traits == kRouting.end()) {
    fail("{}: {} is {}, and mixtures of experts of the architecture '{}' are not supported", keys.where(),
         keys.name("expert_count"), n_expert, arch);
  }
  Routing r;
  r.n_expert = n_expert;
  r.n_used = keys.count("expert_used_count", 1, n_expert);
  r.gating = read_gating(keys, traits->gating);
  r.normalize = keys.file().get<bool>(keys.name("expert_weights_norm")).value_or(traits->normalize);
  r.scale = keys.file().get<float>(keys.name("expert_weights_scale")).value_or(1.0f);
  if (r.scale == 0.0f) r.scale = 1.0f;  // as some writers say that there is none
  if (!std::isfinite(r.scale) || r.scale < 0) {
    fail("{}: {} is {}, expected a positive number", keys.where(), keys.name("expert_weights_scale"), r.scale);
  }
  read_groups(keys, arch, r);
  return r;
}

// The shared expert's neurons: its tensors say, and the keys must not contradict them.
int64_t read_shared(const Keys& keys, int64_t n_ff, int64_t layer) {
  const std::string name = fmt::format("blk.{}.ffn_up_shexp.weight", layer);
  const gguf::TensorInfo* t = keys.file().find_tensor(name);
  const int64_t count = keys.count_or("expert_shared_count", 0, kMostExperts, t != nullptr ? 1 : 0);
  const int64_t said = keys.count_or("expert_shared_feed_forward_length", 0, int64_t{1} << 20, -1);
  if (t == nullptr) {
    if (count > 0 || said > 0)
      fail("{}: the keys tell of a shared expert, and tensor {} is missing", keys.where(), name);
    return 0;
  }
  if (count == 0) fail("{}: {} is 0, and tensor {} is there", keys.where(), keys.name("expert_shared_count"), name);
  const int64_t expected = said > 0 ? said : keys.has("expert_shared_count") ? count * n_ff : t->rows();
  if (t->rows() != expected) {
    fail("{}: tensor {} has {} rows, and the keys say {}", keys.where(), name, t->rows(), expected);
  }
  return t->rows();
}

}  // namespace

bool has_gated_experts(const gguf::File& file) {
  const auto layer = first_expert_layer(file);
  if (!layer) return false;
  const std::string p = fmt::format("blk.{}.", *layer);
  for (const char* name : {"ffn_gate_exps.weight", "ffn_gate_up_exps.weight", "ffn_gate.0.weight"}) {
    if (file.find_tensor(p + name) != nullptr) return true;
  }
  return false;
}

ExpertsDescription read_experts(const gguf::File& file, std::string_view arch) {
  const Keys keys(file, arch);
  ExpertsDescription e;
  const int64_t n_expert = keys.count_or("expert_count", 0, kMostExperts, 0);
  const auto first = first_expert_layer(file);
  if (n_expert == 0) {
    if (first) {
      fail("{}: tensor blk.{}.ffn_gate_inp.weight is there, and {} is {}", keys.where(), *first,
           keys.name("expert_count"), keys.has("expert_count") ? "0" : "missing");
    }
    return e;
  }
  if (!first)
    fail("{}: {} is {}, and no layer has the tensor ffn_gate_inp.weight", keys.where(), keys.name("expert_count"),
         n_expert);
  e.routing = read_routing(keys, arch, n_expert);
  e.n_ff = keys.has("expert_feed_forward_length") ? keys.count("expert_feed_forward_length", 1, int64_t{1} << 20)
                                                  : keys.count("feed_forward_length", 1, int64_t{1} << 20);
  e.n_dense_layers = keys.count_or("leading_dense_block_count", 0, 4096, 0);
  if (e.n_dense_layers != *first) {
    fail("{}: the first layer with experts is {}, and {} is {}", keys.where(), *first,
         keys.name("leading_dense_block_count"), e.n_dense_layers);
  }
  e.n_ff_shared = read_shared(keys, e.n_ff, *first);
  return e;
}

}  // namespace hearth::model
