#include "offline/plan/plan_file.h"

#include <array>

#include "core/error.h"
#include "core/file.h"

namespace hearth::offline {
namespace {

using engine::LayerPlacement;
using engine::Placement;
using engine::Selection;
using engine::Where;
using nlohmann::json;

constexpr int kVersion = 5;  // 4 had no gpu_expert_neurons, 3 no gpu_experts, 2 had gpu_gates
constexpr const char* kFormat = "hearth-plan";
constexpr size_t kMaxFile = size_t{1} << 28;
constexpr std::array kPurposes = {Purpose::weights, Purpose::kv_cache,  Purpose::activations,
                                  Purpose::scratch, Purpose::predictor, Purpose::context};

// Reads members of one object; every failure names the member and the file.
class Object {
 public:
  Object(const json& j, std::string where, const std::string& file) : j_(j), where_(std::move(where)), file_(file) {
    if (!j_.is_object()) fail("'{}' is no plan: {} is no object; make one with `hearth plan --save`", file_, where_);
  }
  const json& member(const char* name) const {
    const auto it = j_.find(name);
    if (it == j_.end()) fail("'{}' is no plan: {} lacks '{}'; make one with `hearth plan --save`", file_, where_, name);
    return *it;
  }
  std::string text(const char* name) const {
    const json& v = member(name);
    if (!v.is_string()) wrong(name, "a text");
    return v.get<std::string>();
  }
  uint64_t bytes(const char* name) const {
    const json& v = member(name);
    if (!v.is_number_unsigned()) wrong(name, "a whole number of 0 or more");
    return v.get<uint64_t>();
  }
  int64_t count(const char* name) const {
    const uint64_t v = bytes(name);
    if (v > (uint64_t{1} << 40)) wrong(name, "a number below 2^40");
    return static_cast<int64_t>(v);
  }
  Where place(const char* name) const {
    const std::string v = text(name);
    for (const Where w : {Where::cpu, Where::gpu}) {
      if (v == to_string(w)) return w;
    }
    wrong(name, "cpu or gpu");
  }
  Selection selection(const char* name) const {
    const std::string v = text(name);
    for (const Selection s : {Selection::all, Selection::gate, Selection::predictor}) {
      if (v == to_string(s)) return s;
    }
    wrong(name, "all, gate or predictor");
  }
  bool flag(const char* name) const {
    const json& v = member(name);
    if (!v.is_boolean()) wrong(name, "true or false");
    return v.get<bool>();
  }
  std::vector<int32_t> ids(const char* name) const { return ids(name, member(name)); }
  std::vector<std::vector<int32_t>> lists(const char* name) const {
    const json& v = member(name);
    if (!v.is_array()) wrong(name, "a list of lists of ids");
    std::vector<std::vector<int32_t>> out;
    for (const json& list : v) out.push_back(ids(name, list));
    return out;
  }

 private:
  std::vector<int32_t> ids(const char* name, const json& v) const {
    if (!v.is_array()) wrong(name, "a list of ids");
    std::vector<int32_t> out;
    out.reserve(v.size());
    for (const json& id : v) {
      if (!id.is_number_unsigned() || id.get<uint64_t>() > INT32_MAX) wrong(name, "a list of ids");
      out.push_back(id.get<int32_t>());
    }
    return out;
  }
  [[noreturn]] void wrong(const char* name, const char* wanted) const {
    fail("'{}': '{}' of {} is not {}; make the plan again with `hearth plan --save`", file_, name, where_, wanted);
  }
  const json& j_;
  std::string where_;
  const std::string& file_;
};

json layer_json(const LayerPlacement& l) {
  return {{"attention", to_string(l.attention)},
          {"selection", to_string(l.selection)},
          {"predictor", to_string(l.predictor)},
          {"gpu_bucket", l.gpu_bucket},
          {"gpu_linked", l.gpu_linked},
          {"gpu_experts", l.gpu_experts},
          {"gpu_expert_neurons", l.gpu_expert_neurons},
          {"look_ahead", l.look_ahead}};
}

}  // namespace

json placement_json(const Placement& p) {
  json planned = json::object();
  for (const MemoryUse& use : p.planned) planned[to_string(use.purpose)] = use.bytes;
  json layers = json::array();
  for (const LayerPlacement& l : p.layers) layers.push_back(layer_json(l));
  return {{"format", kFormat},
          {"version", kVersion},
          {"model_fingerprint", p.model_fingerprint},
          {"n_ctx", p.n_ctx},
          {"n_sequences", p.n_sequences},
          {"n_batch", p.n_batch},
          {"vram_budget", p.vram_budget},
          {"embedding", to_string(p.embedding)},
          {"output", to_string(p.output)},
          {"planned", planned},
          {"layers", layers}};
}

void save_placement(const Placement& placement, const std::filesystem::path& path) {
  const std::string text = placement_json(placement).dump() + "\n";
  AtomicFile out(path);
  out.write(text.data(), text.size());
  out.commit();
}

Placement parse_placement(const std::string& text, const std::string& file) {
  const json j = json::parse(text, nullptr, false);
  if (j.is_discarded()) fail("'{}' is no plan: it is not JSON; make one with `hearth plan --save`", file);
  const Object root(j, "the plan", file);
  if (root.text("format") != kFormat) fail("'{}' is no plan: its format is '{}'", file, root.text("format"));
  if (const uint64_t version = root.bytes("version"); version != kVersion) {
    fail("'{}' is a plan of version {}, this hearth reads version {}; plan again", file, version, kVersion);
  }
  Placement p;
  p.model_fingerprint = root.text("model_fingerprint");
  p.n_ctx = root.count("n_ctx"), p.n_sequences = root.count("n_sequences"), p.n_batch = root.count("n_batch");
  p.vram_budget = root.bytes("vram_budget");
  p.embedding = root.place("embedding"), p.output = root.place("output");
  const Object planned(root.member("planned"), "'planned'", file);
  for (const Purpose purpose : kPurposes) {
    if (root.member("planned").contains(to_string(purpose))) {
      p.planned.push_back({purpose, static_cast<size_t>(planned.count(to_string(purpose)))});
    }
  }
  const json& layers = root.member("layers");
  if (!layers.is_array()) fail("'{}' is no plan: 'layers' is no list", file);
  for (size_t l = 0; l < layers.size(); ++l) {
    const Object layer(layers[l], fmt::format("layer {}", l), file);
    p.layers.push_back({layer.place("attention"), layer.selection("selection"), layer.place("predictor"),
                        layer.ids("gpu_bucket"), layer.ids("gpu_linked"), layer.ids("gpu_experts"),
                        layer.lists("gpu_expert_neurons"), layer.flag("look_ahead")});
  }
  return p;
}

Placement load_placement(const std::filesystem::path& path) {
  return parse_placement(read_text_file(path, kMaxFile), path.string());
}

}  // namespace hearth::offline
