#include "model/sidecar.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <span>

#include "core/error.h"

namespace hearth::model {
namespace {

constexpr uint32_t kVersion = 1;
constexpr const char* kArchitecture = "hearth-sparse";
constexpr std::string_view kModel = "hearth-sparse.model.";
constexpr std::string_view kProfile = "hearth-sparse.profile.";
constexpr std::string_view kThresholds = "hearth-sparse.thresholds.";
constexpr const char* kVersionKey = "hearth-sparse.version";
constexpr std::string_view kTensors = "profile.";
constexpr int64_t kMaxLayers = 4096, kMaxWidth = int64_t{1} << 24;

std::string key(std::string_view group, std::string_view name) {
  return std::string(group) + std::string(name);
}
std::string tensor_name(size_t layer, std::string_view what) {
  return fmt::format("profile.blk.{}.{}", layer, what);
}
// k: index into kUnionTokens.
std::string union_key(size_t k, std::string_view what) {
  return fmt::format("union_{}_{}", kUnionTokens[k], what);
}
bool own_key(std::string_view k) {
  return k == "general.architecture" || k == kVersionKey || k.starts_with(kModel) || k.starts_with(kProfile) ||
         k.starts_with(kThresholds);
}

// Reads one sidecar and checks every part of it.
class Reader {
 public:
  Reader(const gguf::File& file, Sidecar& sidecar) : file_(file), s_(sidecar), name_(file.path().string()) {}

  void read() {
    read_model();
    read_profile();
    for (size_t l = 0; l < s_.n_ff.size(); ++l) read_layer(l);
    read_thresholds();
  }

 private:
  template <typename T>
  T model(std::string_view k) const {
    return file_.require<T>(key(kModel, k));
  }
  template <typename T>
  T profile(std::string_view k) const {
    return file_.require<T>(key(kProfile, k));
  }

  void read_model() {
    const auto arch = file_.get<std::string>("general.architecture").value_or("");
    if (arch != kArchitecture) {
      fail("'{}' is no sidecar: its architecture is '{}', expected '{}'; `hearth profile` makes one", name_, arch,
           kArchitecture);
    }
    if (const auto version = file_.require<uint32_t>(kVersionKey); version != kVersion) {
      fail("'{}' is a sidecar of version {}, this hearth reads version {}; make it again with `hearth profile`", name_,
           version, kVersion);
    }
    s_.model_fingerprint = model<std::string>("fingerprint");
    s_.model_name = model<std::string>("name");
    s_.n_embd = model<int64_t>("n_embd");
    const auto n_ff = model<std::vector<int32_t>>("n_ff");
    if (n_ff.empty() || n_ff.size() > kMaxLayers || s_.n_embd < 1 || s_.n_embd > kMaxWidth) {
      fail("'{}': {} layers of width {}, expected 1 to {} layers of 1 to {}", name_, n_ff.size(), s_.n_embd, kMaxLayers,
           kMaxWidth);
    }
    s_.n_ff.assign(n_ff.begin(), n_ff.end());
    for (const int64_t n : s_.n_ff) {
      if (n < 1 || n > kMaxWidth) fail("'{}': a layer of {} neurons, expected 1 to {}", name_, n, kMaxWidth);
    }
    read_experts_used();
  }

  // Sidecars that were made before mixtures could be profiled do not say.
  void read_experts_used() {
    s_.n_expert_used.assign(s_.n_ff.size(), 0);
    if (file_.find(key(kModel, "n_expert_used")) == nullptr) return;
    const auto used = model<std::vector<int32_t>>("n_expert_used");
    if (used.size() != s_.n_ff.size()) {
      fail("'{}': n_expert_used is of {} layers and n_ff of {}", name_, used.size(), s_.n_ff.size());
    }
    for (size_t l = 0; l < used.size(); ++l) {
      if (used[l] < 0 || used[l] > s_.n_ff[l]) {
        fail("'{}': a token uses {} of layer {}'s {} experts", name_, used[l], l, s_.n_ff[l]);
      }
      s_.n_expert_used[l] = used[l];
    }
  }

  void read_profile() {
    Statistics& p = s_.statistics;
    p.source = profile<std::string>("source");
    p.tokens = profile<uint64_t>("tokens");
    p.tokens_heldout = profile<uint64_t>("tokens_heldout");
    p.tokens_estimated = profile<bool>("tokens_estimated");
    p.threshold = profile<float>("threshold");
    p.window = profile<uint64_t>("window");
    p.heldout_every = profile<uint64_t>("heldout_every");
    p.sequences_done = profile<uint64_t>("sequences_done");
    p.complete = profile<bool>("complete");
    if (!(p.threshold >= 0) || !std::isfinite(p.threshold)) fail("'{}': the threshold is {}", name_, p.threshold);
    read_texts(p);
    p.layers.resize(s_.n_ff.size());
    set_shares("coactive_previous", &LayerStatistics::previous);
    set_shares("coactive_recent", &LayerStatistics::recent);
    if (has_shares(kProfile, "foreseen")) set_shares("foreseen", &LayerStatistics::foreseen);
    if (has_shares(kProfile, "inside")) set_shares("inside", &LayerStatistics::inside);
    read_named();
    for (size_t k = 0; k < kUnionTokens.size(); ++k) read_union(k);
  }

  // Optional, as the figures of predictors are. k: index into kUnionTokens.
  void read_union(size_t k) {
    const std::string neurons_key = union_key(k, "neurons");
    if (file_.find(key(kProfile, neurons_key)) == nullptr) return;
    const auto neurons = u64_array(neurons_key), windows = u64_array(union_key(k, "windows"));
    if (neurons.size() != s_.n_ff.size() || windows.size() != s_.n_ff.size()) {
      fail("'{}': {} and {} figures of unions of {} tokens for {} layers", name_, neurons.size(), windows.size(),
           kUnionTokens[k], s_.n_ff.size());
    }
    for (size_t l = 0; l < neurons.size(); ++l) {
      if (windows[l] > s_.statistics.tokens || neurons[l] > windows[l] * static_cast<uint64_t>(s_.n_ff[l])) {
        fail("'{}': unions of {} tokens of layer {} have {} neurons in {} windows of {} tokens", name_, kUnionTokens[k],
             l, neurons[l], windows[l], s_.statistics.tokens);
      }
      s_.statistics.layers[l].unions[k] = {neurons[l], windows[l]};
    }
  }

  // Sidecars that were made before there were such figures do not have them.
  void read_named() {
    if (file_.find(key(kProfile, "predictor_named")) == nullptr) return;
    const auto named = u64_array("predictor_named"), active = u64_array("predictor_active");
    if (named.size() != s_.n_ff.size() || active.size() != s_.n_ff.size()) {
      fail("'{}': {} and {} figures of predictors for {} layers", name_, named.size(), active.size(), s_.n_ff.size());
    }
    for (size_t l = 0; l < named.size(); ++l) s_.statistics.layers[l].named = {named[l], active[l]};
  }

  void read_thresholds() {
    const std::string by_layer = key(kThresholds, "by_layer");
    if (file_.find(by_layer) == nullptr) return;
    TunedThresholds t{array<float>(by_layer, "f32"), file_.require<std::string>(key(kThresholds, "record")), {}, 0};
    if (t.by_layer.size() != s_.n_ff.size()) {
      fail("'{}': {} thresholds for {} layers; make them again with `hearth tune`", name_, t.by_layer.size(),
           s_.n_ff.size());
    }
    for (const float v : t.by_layer) {
      if (!(v >= 0) || !std::isfinite(v)) fail("'{}': a layer's threshold is {}, expected 0 or more", name_, v);
    }
    t.tokens = file_.get<uint64_t>(key(kThresholds, "tokens")).value_or(0);
    for (size_t l = 0; l < s_.n_ff.size() && t.tokens > 0; ++l) t.active.push_back(counts(l, "active_tuned", t.tokens));
    if (has_shares(kThresholds, "inside")) t.inside = shares(kThresholds, "inside");
    s_.thresholds = std::move(t);
  }

  void read_texts(Statistics& p) {
    const auto names = profile<std::vector<std::string>>("text_names");
    const auto hashes = profile<std::vector<std::string>>("text_hashes");
    const std::vector<uint64_t> bytes = u64_array("text_bytes");
    if (hashes.size() != names.size() || bytes.size() != names.size()) {
      fail("'{}': {} texts' names with {} hashes and {} sizes", name_, names.size(), hashes.size(), bytes.size());
    }
    for (size_t i = 0; i < names.size(); ++i) p.texts.push_back({names[i], hashes[i], bytes[i]});
  }

  template <typename T>
  std::vector<T> array(const std::string& full, const char* wanted) const {
    const gguf::Value* value = file_.find(full);
    const auto* any = value != nullptr ? std::get_if<gguf::Array>(value) : nullptr;
    const auto* elements = any != nullptr ? std::get_if<std::vector<T>>(any) : nullptr;
    if (elements == nullptr) fail("'{}': {} is absent or no array of {}", name_, full, wanted);
    return *elements;
  }
  std::vector<uint64_t> u64_array(std::string_view k) const { return array<uint64_t>(key(kProfile, k), "u64"); }

  bool has_shares(std::string_view group, const std::string& k) const {
    return file_.find(key(group, k + "_sums")) != nullptr;
  }
  // By layer.
  std::vector<MeanShare> shares(std::string_view group, const std::string& k) const {
    const auto sums = array<double>(key(group, k + "_sums"), "f64");
    const auto tokens = array<uint64_t>(key(group, k + "_tokens"), "u64");
    if (sums.size() != s_.n_ff.size() || tokens.size() != s_.n_ff.size()) {
      fail("'{}': {} has {} sums and {} counts for {} layers", name_, k, sums.size(), tokens.size(), s_.n_ff.size());
    }
    std::vector<MeanShare> all;
    for (size_t l = 0; l < sums.size(); ++l) {
      const bool valid = sums[l] >= 0 && sums[l] <= static_cast<double>(tokens[l]) * (1 + 1e-9);
      if (!valid) fail("'{}': {} of layer {} is {} over {} tokens", name_, k, l, sums[l], tokens[l]);
      all.push_back({sums[l], tokens[l]});
    }
    return all;
  }
  void set_shares(const std::string& k, MeanShare LayerStatistics::*field) {
    const std::vector<MeanShare> all = shares(kProfile, k);
    for (size_t l = 0; l < all.size(); ++l) s_.statistics.layers[l].*field = all[l];
  }

  void read_layer(size_t l) {
    LayerStatistics& stats = s_.statistics.layers[l];
    stats.active = counts(l, "active", s_.statistics.tokens);
    if (file_.find_tensor(tensor_name(l, "active_heldout")) != nullptr) {
      stats.active_heldout = counts(l, "active_heldout", s_.statistics.tokens_heldout);
    }
    if (file_.find_tensor(tensor_name(l, "inside_used")) != nullptr) stats.inside_counts = inside(l);
    if (file_.find_tensor(tensor_name(l, "impact")) != nullptr) {
      stats.impact = numbers<double>(l, "impact", DType::f64, {s_.n_ff[l]});
      for (const double v : stats.impact) {
        if (!(v >= 0) || !std::isfinite(v)) fail("'{}': an impact of layer {} is {}", name_, l, v);
      }
    }
    if (file_.find_tensor(tensor_name(l, "moments")) != nullptr) {
      stats.moments = numbers<float>(l, "moments", DType::f32, {s_.n_embd, s_.n_embd});
      if (!std::all_of(stats.moments.begin(), stats.moments.end(), [](float v) { return std::isfinite(v); })) {
        fail("'{}': the second moments of layer {} are not finite", name_, l);
      }
    }
  }

  InsideCounts inside(size_t l) const {
    const std::string name = tensor_name(l, "inside_active");
    const gguf::TensorInfo* t = file_.find_tensor(name);
    if (t == nullptr || t->ne.empty()) fail("'{}': the tensor {} is missing", name_, name);
    InsideCounts c;
    c.n_ff = t->ne[0];
    const LayerStatistics& stats = s_.statistics.layers[l];
    const auto as_counts = [](const std::vector<int64_t>& v) { return std::vector<uint64_t>(v.begin(), v.end()); };
    c.used = as_counts(numbers<int64_t>(l, "inside_used", DType::i64, {s_.n_ff[l]}));
    c.active = as_counts(numbers<int64_t>(l, "inside_active", DType::i64, {c.n_ff, s_.n_ff[l]}));
    if (const auto fault = c.fault(stats.active, s_.n_expert_used[l], stats.inside.tokens)) {
      fail("'{}': {} {}", name_, name, *fault);
    }
    return c;
  }

  template <typename T>
  std::vector<T> numbers(size_t l, std::string_view what, DType type, const std::vector<int64_t>& ne) const {
    const std::string n = tensor_name(l, what);
    const gguf::TensorInfo* t = file_.find_tensor(n);
    if (t == nullptr) fail("'{}': the tensor {} is missing", name_, n);
    if (t->traits->type != type || t->ne != ne) {
      fail("'{}': {} is {} [{}], expected {} [{}]", name_, n, t->traits->name, fmt::join(t->ne, ", "),
           traits(type).name, fmt::join(ne, ", "));
    }
    const std::span<const std::byte> data = file_.data(*t);
    std::vector<T> values(data.size() / sizeof(T));
    std::memcpy(values.data(), data.data(), values.size() * sizeof(T));
    return values;
  }

  std::vector<uint64_t> counts(size_t l, std::string_view what, uint64_t tokens) const {
    const std::vector<int64_t> stored = numbers<int64_t>(l, what, DType::i64, {s_.n_ff[l]});
    std::vector<uint64_t> values(stored.begin(), stored.end());
    uint64_t sum = 0;
    for (const uint64_t v : values) {
      if (v > tokens) fail("'{}': {} counts {} of {} tokens", name_, tensor_name(l, what), v, tokens);
      sum += v;
    }
    const auto used = static_cast<uint64_t>(s_.n_expert_used[l]);
    if (used > 0 && sum != tokens * used) {
      fail("'{}': {} counts {} experts, expected {} for each of {} tokens", name_, tensor_name(l, what), sum, used,
           tokens);
    }
    return values;
  }

  const gguf::File& file_;
  Sidecar& s_;
  std::string name_;
};

// A tensor to be written: from memory here, or from the file that was read.
struct Pending {
  size_t index;
  std::span<const std::byte> data;
};

template <typename T>
void add(gguf::Writer& out, std::vector<Pending>& pending, size_t layer, std::string_view what, DType type,
         std::vector<int64_t> ne, const std::vector<T>& values) {
  if (values.empty()) return;
  pending.push_back({out.add_tensor(tensor_name(layer, what), type, std::move(ne)), std::as_bytes(std::span(values))});
}

template <typename T, typename F>
gguf::Array by_layer(const Statistics& p, F&& field) {
  std::vector<T> values;
  for (const LayerStatistics& l : p.layers) values.push_back(field(l));
  return values;
}

void set_inside(gguf::Writer& out, const std::vector<MeanShare>& inside) {
  std::vector<double> sums;
  std::vector<uint64_t> tokens;
  for (const MeanShare& s : inside) sums.push_back(s.sum), tokens.push_back(s.tokens);
  out.set(key(kThresholds, "inside_sums"), gguf::Array(sums));
  out.set(key(kThresholds, "inside_tokens"), gguf::Array(tokens));
}

void set_texts(gguf::Writer& out, const Statistics& p) {
  std::vector<std::string> names, hashes;
  std::vector<uint64_t> bytes;
  for (const ProfiledText& t : p.texts) {
    names.push_back(t.name);
    hashes.push_back(t.hash);
    bytes.push_back(t.bytes);
  }
  out.set(key(kProfile, "text_names"), gguf::Array(names));
  out.set(key(kProfile, "text_hashes"), gguf::Array(hashes));
  out.set(key(kProfile, "text_bytes"), gguf::Array(bytes));
}

void set_profile(gguf::Writer& out, const Statistics& p) {
  out.set(key(kProfile, "source"), p.source);
  out.set(key(kProfile, "tokens"), p.tokens);
  out.set(key(kProfile, "tokens_heldout"), p.tokens_heldout);
  out.set(key(kProfile, "tokens_estimated"), p.tokens_estimated);
  out.set(key(kProfile, "threshold"), p.threshold);
  out.set(key(kProfile, "window"), p.window);
  out.set(key(kProfile, "heldout_every"), p.heldout_every);
  out.set(key(kProfile, "sequences_done"), p.sequences_done);
  out.set(key(kProfile, "complete"), p.complete);
  set_texts(out, p);
  out.set(key(kProfile, "coactive_previous_sums"), by_layer<double>(p, [](auto& l) { return l.previous.sum; }));
  out.set(key(kProfile, "coactive_previous_tokens"), by_layer<uint64_t>(p, [](auto& l) { return l.previous.tokens; }));
  out.set(key(kProfile, "coactive_recent_sums"), by_layer<double>(p, [](auto& l) { return l.recent.sum; }));
  out.set(key(kProfile, "coactive_recent_tokens"), by_layer<uint64_t>(p, [](auto& l) { return l.recent.tokens; }));
  out.set(key(kProfile, "foreseen_sums"), by_layer<double>(p, [](auto& l) { return l.foreseen.sum; }));
  out.set(key(kProfile, "foreseen_tokens"), by_layer<uint64_t>(p, [](auto& l) { return l.foreseen.tokens; }));
  out.set(key(kProfile, "inside_sums"), by_layer<double>(p, [](auto& l) { return l.inside.sum; }));
  out.set(key(kProfile, "inside_tokens"), by_layer<uint64_t>(p, [](auto& l) { return l.inside.tokens; }));
  out.set(key(kProfile, "predictor_named"), by_layer<uint64_t>(p, [](auto& l) { return l.named.named; }));
  out.set(key(kProfile, "predictor_active"), by_layer<uint64_t>(p, [](auto& l) { return l.named.active; }));
  for (size_t k = 0; k < kUnionTokens.size(); ++k) {
    out.set(key(kProfile, union_key(k, "neurons")),
            by_layer<uint64_t>(p, [k](auto& l) { return l.unions[k].neurons; }));
    out.set(key(kProfile, union_key(k, "windows")),
            by_layer<uint64_t>(p, [k](auto& l) { return l.unions[k].windows; }));
  }
}

// By layer, what statistics are counted of: neurons, or a router's experts.
struct LayerUnits {
  std::vector<int64_t> n, used;
};
LayerUnits units_of(const Config& c) {
  LayerUnits units;
  for (int64_t l = 0; l < c.n_layer; ++l) {
    const bool mixture = c.experts.in_layer(l);
    units.n.push_back(mixture ? c.experts.routing.n_expert : c.n_ff);
    units.used.push_back(mixture ? c.experts.routing.n_used : 0);
  }
  return units;
}

}  // namespace

std::vector<double> Statistics::frequencies(size_t layer) const {
  std::vector<double> p(layers[layer].active.size());
  for (size_t i = 0; i < p.size() && tokens > 0; ++i) {
    p[i] = static_cast<double>(layers[layer].active[i]) / static_cast<double>(tokens);
  }
  return p;
}

double Statistics::density(size_t layer) const {
  double sum = 0;
  for (const double p : frequencies(layer)) sum += p;
  return sum / static_cast<double>(layers[layer].active.size());
}

Sidecar::Sidecar(std::string model_fp, std::string name, int64_t width, std::vector<int64_t> neurons,
                 std::vector<int64_t> experts_used)
    : model_fingerprint(std::move(model_fp)),
      model_name(std::move(name)),
      n_embd(width),
      n_ff(std::move(neurons)),
      n_expert_used(std::move(experts_used)),
      path_("the new sidecar") {
  n_expert_used.resize(n_ff.size());
  statistics.layers.resize(n_ff.size());
  for (size_t l = 0; l < n_ff.size(); ++l) statistics.layers[l].active.assign(static_cast<size_t>(n_ff[l]), 0);
}

Sidecar Sidecar::empty_for(const gguf::File& model, const Config& c) {
  LayerUnits units = units_of(c);
  return {fingerprint(model), c.name, c.n_embd, std::move(units.n), std::move(units.used)};
}

Sidecar Sidecar::read(const std::filesystem::path& path) {
  Sidecar s;
  auto file = std::make_shared<gguf::File>(gguf::File::open(path));
  s.path_ = path.string();
  Reader(*file, s).read();
  s.file = std::move(file);
  return s;
}

std::optional<Sidecar> Sidecar::find(const gguf::File& model, const Config& config,
                                     const std::optional<std::filesystem::path>& path) {
  const std::filesystem::path where = path.value_or(sidecar_path(model.path()));
  if (!path && !std::filesystem::exists(where)) return std::nullopt;
  Sidecar s = read(where);
  s.check_matches(model, config);
  return s;
}

void Sidecar::check_matches(const gguf::File& model, const Config& c) const {
  const LayerUnits units = units_of(c);
  if (n_embd != c.n_embd || n_ff != units.n || n_expert_used != units.used) {
    const auto text = [](const std::vector<int64_t>& n, const std::vector<int64_t>& used) {
      // The last layer tells: the first ones of a mixture may be dense.
      return fmt::format("{} layers of {} {}", n.size(), n.back(), used.back() > 0 ? "experts" : "neurons");
    };
    fail(
        "'{}' was made for '{}' ({}, width {}), and the model '{}' has {}, width {}; profile this model or give its "
        "own sidecar",
        path_, model_name, text(n_ff, n_expert_used), n_embd, c.name, text(units.n, units.used), c.n_embd);
  }
  for (const LayerStatistics& l : statistics.layers) {
    if (!l.inside_counts || l.inside_counts.n_ff == c.experts.n_ff) continue;
    fail("'{}' counts {} neurons of an expert, and those of '{}' have {}; profile this model or give its own sidecar",
         path_, l.inside_counts.n_ff, c.name, c.experts.n_ff);
  }
  if (const std::string actual = fingerprint(model); actual != model_fingerprint) {
    fail(
        "'{}' was made for another model than '{}' (fingerprint {}, expected {}); profile this model or give its own "
        "sidecar",
        path_, model.path().string(), model_fingerprint, actual);
  }
}

void Sidecar::write(const std::filesystem::path& path) const {
  gguf::Writer out(path);
  out.set("general.architecture", std::string(kArchitecture));
  out.set(kVersionKey, kVersion);
  out.set(key(kModel, "fingerprint"), model_fingerprint);
  out.set(key(kModel, "name"), model_name);
  out.set(key(kModel, "n_embd"), static_cast<uint32_t>(n_embd));
  out.set(key(kModel, "n_ff"), gguf::Array(std::vector<uint32_t>(n_ff.begin(), n_ff.end())));
  if (has_mixtures()) {
    out.set(key(kModel, "n_expert_used"),
            gguf::Array(std::vector<uint32_t>(n_expert_used.begin(), n_expert_used.end())));
  }
  set_profile(out, statistics);
  if (thresholds) {
    HEARTH_CHECK(thresholds->by_layer.size() == n_ff.size());
    out.set(key(kThresholds, "by_layer"), gguf::Array(thresholds->by_layer));
    out.set(key(kThresholds, "record"), thresholds->record);
    out.set(key(kThresholds, "tokens"), thresholds->tokens);
    HEARTH_CHECK(thresholds->active.size() == (thresholds->tokens > 0 ? n_ff.size() : 0));
    if (!thresholds->inside.empty()) set_inside(out, thresholds->inside);
  }
  std::vector<Pending> pending;
  for (size_t l = 0; l < n_ff.size(); ++l) {
    const LayerStatistics& s = statistics.layers[l];
    add(out, pending, l, "active", DType::i64, {n_ff[l]}, s.active);
    add(out, pending, l, "active_heldout", DType::i64, {n_ff[l]}, s.active_heldout);
    add(out, pending, l, "inside_used", DType::i64, {n_ff[l]}, s.inside_counts.used);
    add(out, pending, l, "inside_active", DType::i64, {s.inside_counts.n_ff, n_ff[l]}, s.inside_counts.active);
    add(out, pending, l, "impact", DType::f64, {n_ff[l]}, s.impact);
    add(out, pending, l, "moments", DType::f32, {n_embd, n_embd}, s.moments);
    if (thresholds && thresholds->tokens > 0) {
      add(out, pending, l, "active_tuned", DType::i64, {n_ff[l]}, thresholds->active[l]);
    }
  }
  std::vector<detail::PendingTensor> predictors;
  const bool replaced = !new_predictors.empty();
  if (replaced) detail::add_predictors(out, new_predictors, predictors);
  for (const detail::PendingTensor& t : predictors) {
    pending.push_back({t.index, {static_cast<const std::byte*>(t.data), t.bytes}});
  }
  if (file != nullptr) {
    for (const gguf::KeyValue& kv : file->metadata()) {
      if (!own_key(kv.key) && !(replaced && detail::is_predictor_key(kv.key))) out.set(kv.key, kv.value);
    }
    for (const gguf::TensorInfo& t : file->tensors()) {
      if (t.name.starts_with(kTensors) || (replaced && detail::is_predictor_tensor(t.name))) continue;
      pending.push_back({out.add_tensor(t.name, t.traits->type, t.ne), file->data(t)});
    }
  }
  out.begin();
  for (const Pending& p : pending) out.write(p.index, 0, p.data);
  out.finish();
}

}  // namespace hearth::model
