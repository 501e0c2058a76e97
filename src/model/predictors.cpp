#include "model/predictors.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string_view>

#include "core/error.h"

namespace hearth::model {
namespace {

constexpr uint32_t kVersion = 1;
constexpr std::string_view kPrefix = "hearth-sparse.predictor.";
// "signs" belonged to a method that is gone: a new fit replaces them too.
constexpr std::array<std::string_view, 5> kTensors = {"fc1.weight", "fc1.bias", "fc2.weight", "signs",
                                                      "predictor_threshold"};
constexpr std::array<std::string_view, 4> kMethods = {"svd", "mlp", "gate-bits", "powerinfer"};

struct Figure {
  const char* key;
  float PredictorFigures::*field;
};
constexpr std::array kFigures = {Figure{"recall_target", &PredictorFigures::recall_target},
                                 Figure{"recall", &PredictorFigures::recall},
                                 Figure{"loss_recall", &PredictorFigures::loss_recall},
                                 Figure{"precision", &PredictorFigures::precision},
                                 Figure{"density", &PredictorFigures::density},
                                 Figure{"predicted_density", &PredictorFigures::predicted_density}};

std::string key(std::string_view name) {
  return std::string(kPrefix) + std::string(name);
}
std::string tensor_name(size_t layer, std::string_view what) {
  return fmt::format("blk.{}.{}", layer, what);
}

std::optional<PredictorInput> parse_input(std::string_view name) {
  for (const PredictorInput input : {PredictorInput::ffn_input, PredictorInput::residual}) {
    if (name == to_string(input)) return input;
  }
  return std::nullopt;
}

// Reads the predictors of one sidecar and checks every part of them.
class Reader {
 public:
  Reader(const gguf::File& file, int64_t n_embd, const std::vector<int64_t>& n_ff)
      : file_(file), n_embd_(n_embd), n_ff_(n_ff), name_(file.path().string()) {}

  std::vector<StoredPredictor> read() {
    if (const auto version = file_.require<uint32_t>(key("version")); version != kVersion) {
      fail(
          "'{}' holds predictors of version {}, this hearth reads version {}; fit them again with `hearth predictor "
          "fit`",
          name_, version, kVersion);
    }
    const auto methods = by_layer<std::string>("methods"), inputs = by_layer<std::string>("inputs");
    const auto relu = by_layer<bool>("relu");
    const auto tokens = by_layer<uint64_t>("tokens");
    std::vector<StoredPredictor> layers(n_ff_.size());
    for (size_t l = 0; l < layers.size(); ++l) {
      if (methods[l].empty()) continue;
      read_layer(l, methods[l], inputs[l], relu[l], layers[l].predictor);
      layers[l].figures.tokens = tokens[l];
    }
    for (const Figure& f : kFigures) {
      const auto values = by_layer<float>(f.key);
      for (size_t l = 0; l < layers.size(); ++l) {
        if (!(values[l] >= 0 && values[l] <= 1.0001f)) {
          fail("'{}': {} of layer {} is {}, expected 0 to 1", name_, key(f.key), l, values[l]);
        }
        layers[l].figures.*f.field = values[l];
      }
    }
    return layers;
  }

 private:
  template <typename T>
  std::vector<T> by_layer(std::string_view k) const {
    const gguf::Value* value = file_.find(key(k));
    const auto* any = value != nullptr ? std::get_if<gguf::Array>(value) : nullptr;
    const auto* elements = any != nullptr ? std::get_if<std::vector<T>>(any) : nullptr;
    if (elements == nullptr || elements->size() != n_ff_.size()) {
      fail("'{}': {} is absent or has not one entry for each of {} layers; fit again with `hearth predictor fit`",
           name_, key(k), n_ff_.size());
    }
    return *elements;
  }

  void read_layer(size_t l, const std::string& method, const std::string& input, bool relu, LayerPredictor& p) const {
    if (method == "sign" || input == "previous_ffn_input") {
      fail(
          "'{}': the predictor of layer {} is of a kind that hearth no longer runs ({}); fit again with `hearth "
          "predictor fit`",
          name_, l, method == "sign" ? "method 'sign'" : "input 'previous_ffn_input'");
    }
    if (std::find(kMethods.begin(), kMethods.end(), method) == kMethods.end()) {
      fail("'{}': layer {} has a predictor of method '{}', expected one of {}", name_, l, method,
           fmt::join(kMethods, ", "));
    }
    const auto parsed = parse_input(input);
    if (!parsed) {
      fail("'{}': the predictor of layer {} reads '{}', expected ffn_input or residual", name_, l, input);
    }
    p.method = method;
    p.input = *parsed;
    p.weights.relu = relu;
    p.weights.threshold = vector(l, "predictor_threshold", n_ff_[l]);
    for (int64_t i = 0; i < n_ff_[l]; ++i) {
      if (std::isnan(p.weights.threshold.data[i])) fail("'{}': threshold {} of layer {} is NaN", name_, i, l);
    }
    if (method == "gate-bits") {
      p.weights.fc2 = matrix(require(l, "fc2.weight"), n_ff_[l], n_embd_);
    } else {
      const int64_t rank = require(l, "fc1.weight").rows();
      p.weights.fc1 = matrix(require(l, "fc1.weight"), rank, n_embd_);
      p.weights.fc2 = matrix(require(l, "fc2.weight"), n_ff_[l], rank);
      if (file_.find_tensor(tensor_name(l, "fc1.bias")) != nullptr) p.weights.fc1_bias = vector(l, "fc1.bias", rank);
    }
  }

  const gguf::TensorInfo& require(size_t l, std::string_view what) const {
    const gguf::TensorInfo* t = file_.find_tensor(tensor_name(l, what));
    if (t == nullptr) fail("'{}': the tensor {} is missing", name_, tensor_name(l, what));
    return *t;
  }

  void expect(const gguf::TensorInfo& t, DType type, int64_t cols, int64_t rows) const {
    if (t.traits->type == type && t.cols() == cols && t.rows() == rows) return;
    fail("'{}': {} is {} [{}], expected {} [{}, {}]", name_, t.name, t.traits->name, fmt::join(t.ne, ", "),
         traits(type).name, cols, rows);
  }

  Matrix matrix(const gguf::TensorInfo& t, int64_t rows, int64_t cols) const {
    if (!t.traits->computable())
      fail("'{}': {} has type {}, which is no type of weights", name_, t.name, t.traits->name);
    expect(t, t.traits->type, cols, rows);
    return {t.traits->type, rows, cols, file_.data(t).data()};
  }

  Vector vector(size_t l, std::string_view what, int64_t n) const {
    const gguf::TensorInfo& t = require(l, what);
    expect(t, DType::f32, n, 1);
    const std::byte* data = file_.data(t).data();
    if (reinterpret_cast<uintptr_t>(data) % alignof(float) != 0) fail("'{}': {} is not aligned", name_, t.name);
    return {reinterpret_cast<const float*>(data), n};
  }

  const gguf::File& file_;
  int64_t n_embd_;
  const std::vector<int64_t>& n_ff_;
  std::string name_;
};

}  // namespace

OwnedMatrix OwnedMatrix::from(const float* values, int64_t rows, int64_t cols, DType type) {
  OwnedMatrix m{type, rows, cols, {}};
  const size_t bytes = row_bytes(type, cols);
  HEARTH_CHECK(cols % traits(type).block_size == 0, "{} columns in {}", cols, traits(type).name);
  m.data.resize(static_cast<size_t>(rows) * bytes);
  for (int64_t r = 0; r < rows; ++r) {
    traits(type).from_float(values + r * cols, m.data.data() + static_cast<size_t>(r) * bytes, cols);
  }
  return m;
}

LayerPredictor PredictorData::view() const {
  LayerPredictor p;
  p.method = method, p.input = input;
  p.weights.fc1 = fc1.view(), p.weights.fc2 = fc2.view(), p.weights.relu = relu;
  if (!fc1_bias.empty()) p.weights.fc1_bias = {fc1_bias.data(), static_cast<int64_t>(fc1_bias.size())};
  if (!threshold.empty()) p.weights.threshold = {threshold.data(), static_cast<int64_t>(threshold.size())};
  return p;
}

PredictorInput parse_predictor_input(std::string_view name) {
  for (const auto input : {PredictorInput::ffn_input, PredictorInput::residual}) {
    if (name == to_string(input)) return input;
  }
  fail("unknown predictor input '{}'; expected ffn_input or residual", name);
}

uint64_t predictor_bytes(const LayerPredictor& predictor) {
  uint64_t sum = 0;
  LayerPredictor copy = predictor;
  copy.for_each([&](auto& t) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(t)>, Matrix>) {
      sum += t ? t.bytes() : 0;
    } else {
      sum += static_cast<uint64_t>(t.n) * sizeof(float);
    }
  });
  return sum;
}

bool has_predictors(const gguf::File& sidecar) {
  return sidecar.find(key("methods")) != nullptr;
}

std::vector<StoredPredictor> read_predictors(const gguf::File& sidecar, int64_t n_embd,
                                             const std::vector<int64_t>& n_ff) {
  if (!has_predictors(sidecar)) return std::vector<StoredPredictor>(n_ff.size());
  return Reader(sidecar, n_embd, n_ff).read();
}

float below_score(float score) {
  return score == 0 ? -std::numeric_limits<float>::min() : std::nextafter(score, -INFINITY);
}

bool set_score_threshold(Model& model, float score) {
  if (!std::isfinite(score)) fail("the predictors' score threshold is {}, expected a finite number", score);
  const auto n_ff = static_cast<size_t>(model.config().n_ff);
  const auto values = std::make_shared<std::vector<float>>(n_ff, below_score(score));
  std::vector<LayerPredictor> layers;
  bool any = false;
  for (const LayerWeights& l : model.weights().layers) {
    const bool powerinfer = l.predictor.weights && l.predictor.method == "powerinfer";
    layers.push_back(powerinfer ? l.predictor : LayerPredictor{});
    if (powerinfer) layers.back().weights.threshold = {values->data(), static_cast<int64_t>(n_ff)}, any = true;
  }
  if (any) model.set_predictors(layers, values);
  return any;
}

namespace detail {
namespace {

template <typename T, typename F>
gguf::Array array_of(const std::vector<PredictorData>& layers, F&& field) {
  std::vector<T> values;
  for (const PredictorData& p : layers) values.push_back(field(p));
  return values;
}

}  // namespace

void add_predictors(gguf::Writer& out, const std::vector<PredictorData>& layers, std::vector<PendingTensor>& pending) {
  out.set(key("version"), kVersion);
  out.set(key("methods"), array_of<std::string>(layers, [](auto& p) { return p.method; }));
  out.set(key("inputs"), array_of<std::string>(layers, [](auto& p) { return std::string(to_string(p.input)); }));
  out.set(key("relu"), array_of<bool>(layers, [](auto& p) { return p.relu; }));
  out.set(key("tokens"), array_of<uint64_t>(layers, [](auto& p) { return p.figures.tokens; }));
  for (const Figure& f : kFigures) {
    out.set(key(f.key), array_of<float>(layers, [&](auto& p) { return p.figures.*f.field; }));
  }
  const auto tensor = [&](size_t l, std::string_view what, DType type, std::vector<int64_t> ne, const void* data) {
    const size_t index = out.add_tensor(tensor_name(l, what), type, ne);
    size_t bytes = row_bytes(type, ne[0]);
    for (size_t i = 1; i < ne.size(); ++i) bytes *= static_cast<size_t>(ne[i]);
    pending.push_back({index, data, bytes});
  };
  const auto floats = [&](size_t l, std::string_view what, const std::vector<float>& v) {
    if (!v.empty()) tensor(l, what, DType::f32, {static_cast<int64_t>(v.size())}, v.data());
  };
  for (size_t l = 0; l < layers.size(); ++l) {
    const PredictorData& p = layers[l];
    if (p.method.empty()) continue;
    if (p.fc1) tensor(l, "fc1.weight", p.fc1.type, {p.fc1.cols, p.fc1.rows}, p.fc1.data.data());
    if (p.fc2) tensor(l, "fc2.weight", p.fc2.type, {p.fc2.cols, p.fc2.rows}, p.fc2.data.data());
    floats(l, "fc1.bias", p.fc1_bias);
    floats(l, "predictor_threshold", p.threshold);
  }
}

bool is_predictor_key(const std::string& k) {
  return k.starts_with(kPrefix);
}

bool is_predictor_tensor(const std::string& name) {
  if (!name.starts_with("blk.")) return false;
  const size_t dot = name.find('.', 4);
  return dot != std::string::npos &&
         std::find(kTensors.begin(), kTensors.end(), std::string_view(name).substr(dot + 1)) != kTensors.end();
}

}  // namespace detail
}  // namespace hearth::model
