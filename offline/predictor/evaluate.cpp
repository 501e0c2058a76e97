#include "offline/predictor/evaluate.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "core/error.h"
#include "engine/engine.h"
#include "offline/profile/activation_counter.h"
#include "offline/profile/ffn_probe.h"

namespace hearth::offline {
namespace {

using model::PredictorInput;
using Clock = std::chrono::steady_clock;

// Runs every dense FFN as a sparse one over the neurons that its layer's predictor names, and notes how many of the
// active ones those were.
class PredictingDevice final : public FfnProbe {
 public:
  PredictingDevice(Device& inner, const model::Model& model, const std::vector<float>& thresholds,
                   std::vector<EvaluatedLayer>& layers)
      : FfnProbe(inner, model), thresholds_(thresholds), layers_(layers) {
    HEARTH_CHECK(thresholds.empty() || thresholds.size() == layers.size());
    HEARTH_CHECK(inner.is_host(), "activations are looked at in host memory");
    for (const model::LayerWeights& l : model.weights().layers) down_norms_.push_back(down_row_norms(l.ffn));
  }

  void reserve(const Limits& limits) override {
    Limits more = limits;
    more.quantized_weights = true;  // a predictor may be quantised where the model is not
    FfnProbe::reserve(more);
    ids_.resize(static_cast<size_t>(limits.n_ff));
    q8_.resize(static_cast<size_t>(limits.max_tokens) * inner_.q8_bytes(limits.n_embd));
  }

  void ffn_dense(const FfnShard& shard, const Input& input, int64_t T, Vector y_bias, float* y,
                 const NextNorm* next) override {
    HEARTH_CHECK(input.normed(), "an FFN whose residual stream is not known");
    residual_.assign(input.x, input.x + T * input.norm.n);
    const Act in = rows_of(input, T);
    const size_t layer = layer_of(shard);
    const model::LayerPredictor& p = model_.weights().layers[layer].predictor;
    const int64_t n = n_embd_;
    if (!p.weights) {
      inner_.ffn_dense(shard, in, T, y_bias, y, next);
    } else {
      const Act read = input_of(p, in, T);
      evaluate(shard, in, T, true);
      const size_t q8 = inner_.q8_bytes(n);
      const auto row = [&](Act a, int64_t t) {
        return Act{a.x + t * n,
                   a.q8 == nullptr ? nullptr : static_cast<std::byte*>(a.q8) + static_cast<size_t>(t) * q8};
      };
      for (int64_t t = 0; t < T; ++t) {
        int32_t count = 0;
        const auto start = Clock::now();
        const NeuronLists named{ids_.data(), &count, shard.n()};
        PredictArgs args;
        args.n_own = shard.n(), args.own = named;
        inner_.sparse_ffn()->predict(p.weights, row(read, t), 1, args);
        layers_[layer].seconds += std::chrono::duration<double>(Clock::now() - start).count();
        tally(shard, layer, t, count);
        SparseArgs sparse;
        sparse.candidates = named, sparse.threshold = threshold_of(layer);
        inner_.sparse_ffn()->ffn_sparse(shard, sparse, row(in, t), 1, y_bias, y + t * n, nullptr);
      }
      layers_[layer].tokens += T;
    }
  }

 private:
  float threshold_of(size_t layer) const { return thresholds_.empty() ? 0.0f : thresholds_[layer]; }

  // The predictor's input, with its 8-bit form where one of its matrices needs that.
  Act input_of(const model::LayerPredictor& p, Act in, int64_t T) {
    Act read = in;
    if (p.input == PredictorInput::residual) read = {residual_.data(), nullptr};
    const Matrix& first = p.weights.fc1 ? p.weights.fc1 : p.weights.fc2;
    if (first && is_quantized(first.type) && read.q8 == nullptr) {
      read.q8 = q8_.data();
      inner_.quantize(read, T, first.cols);
    }
    return read;
  }

  // Token t of the batch, whose predicted neurons are the first `count` of ids_.
  void tally(const FfnShard& shard, size_t layer, int64_t t, int32_t count) {
    const NeuronRule rule{shard.act, shard.act_threshold, shard.up_relu, threshold_of(layer)};
    const int64_t n_ff = shard.n();
    predictor::Tally& tally = layers_[layer].tally;
    tally.n += n_ff, tally.predicted += count;
    int32_t next = 0;
    for (int64_t i = 0; i < n_ff; ++i) {
      const bool predicted = next < count && ids_[static_cast<size_t>(next)] == i;
      next += predicted ? 1 : 0;
      const float a = rule.activate(gate_[static_cast<size_t>(t * n_ff + i)]);
      if (!(std::fabs(a) > rule.threshold)) continue;
      float value = a;
      if (shard.up) {
        const float u = up_[static_cast<size_t>(t * n_ff + i)];
        value *= rule.up_relu ? std::max(0.0f, u) : u;
      }
      if (value == 0) continue;
      const double loss =
          static_cast<double>(std::fabs(value)) * static_cast<double>(down_norms_[layer][static_cast<size_t>(i)]);
      ++tally.active, tally.loss += loss;
      if (predicted) ++tally.hits, tally.kept += loss;
    }
    HEARTH_CHECK(next == count, "predicted ids are not ascending");
  }

  const std::vector<float>& thresholds_;
  std::vector<EvaluatedLayer>& layers_;
  std::vector<std::vector<float>> down_norms_;
  std::vector<int32_t> ids_;
  std::vector<std::byte> q8_;
  std::vector<float> residual_;  // of the batch
};

std::vector<EvaluatedLayer> describe(const model::Model& model) {
  std::vector<EvaluatedLayer> layers;
  for (const model::LayerWeights& l : model.weights().layers) {
    EvaluatedLayer e;
    const Predictor& p = l.predictor.weights;
    for (const Matrix* m : {&l.ffn.gate, &l.ffn.up, &l.ffn.down, &l.ffn.down_t}) e.ffn_bytes += *m ? m->bytes() : 0;
    if (p) {
      e.method = l.predictor.method;
      e.type = p.fc2 ? traits(p.fc2.type).name : "bits";
      e.rank = p.fc1 ? p.fc1.rows : 0;
      e.bytes = model::predictor_bytes(l.predictor);
    }
    layers.push_back(e);
  }
  return layers;
}

engine::EngineOptions dense_options(int64_t window) {
  engine::EngineOptions o;
  o.n_ctx = window;
  o.sparsity = engine::Sparsity::off;
  o.use_graph = false;
  return o;
}

}  // namespace

double EvaluatedLayer::seconds_per_token() const {
  return tokens > 0 ? seconds / static_cast<double>(tokens) : 0;
}

Evaluation evaluate_predictors(model::Model& model, Device& dense, Device& sparse, std::span<const int32_t> ids,
                               std::optional<int32_t> bos, const EvaluationOptions& options,
                               FunctionRef<bool(const EvaluationProgress&)> keep_going) {
  if (const auto reason = model.prepare_sparse()) fail("predictors cannot be used with this file: {}", *reason);
  Evaluation e;
  e.layers = describe(model);
  if (std::none_of(e.layers.begin(), e.layers.end(), [](const EvaluatedLayer& l) { return l.bytes > 0; })) {
    fail("the model has no predictors; make some with `hearth predictor fit`, or name their --sidecar");
  }
  if (options.max_tokens > 0) ids = ids.first(std::min(ids.size(), static_cast<size_t>(options.max_tokens)));
  const std::vector<Window> windows =
      make_windows(static_cast<int64_t>(ids.size()), options.window, options.window, bos.has_value());
  PredictingDevice predicting(sparse, model, options.thresholds, e.layers);
  engine::Engine dense_engine(model, dense, dense_options(options.window));
  engine::Engine predicted_engine(model, predicting, dense_options(options.window));
  engine::Sequence dense_text = dense_engine.sequence(), predicted_text = predicted_engine.sequence();
  EvaluationProgress progress{0, static_cast<int64_t>(ids.size()), &e.comparison};
  for (const Window& w : windows) {
    std::vector<int32_t> inputs;
    if (bos) inputs.push_back(*bos);
    const auto text = ids.subspan(static_cast<size_t>(w.begin), static_cast<size_t>(w.n_inputs));
    std::copy(text.begin(), text.end(), std::back_inserter(inputs));
    const int64_t skipped = static_cast<int64_t>(inputs.size()) - w.n_targets;
    std::vector<DensePosition> positions;
    dense_text.truncate(0);
    dense_engine.eval_all(dense_text, inputs, [&](int64_t i, std::span<const float> logits) {
      if (i >= skipped) positions.emplace_back(logits, ids[static_cast<size_t>(w.first_target + i - skipped)]);
    });
    predicted_text.truncate(0);
    predicted_engine.eval_all(predicted_text, inputs, [&](int64_t i, std::span<const float> logits) {
      if (i >= skipped) e.comparison.add(positions[static_cast<size_t>(i - skipped)], logits);
    });
    progress.tokens_done += w.n_inputs;
    if (!keep_going(progress)) break;
  }
  return e;
}

std::string evaluation_table(const Evaluation& e) {
  std::string out =
      fmt::format("{:>5}  {:<20}  {:>7}  {:>9}  {:>9}  {:>8}  {:>10}  {:>6}  {:>7}  {:>8}\n", "layer", "predictor",
                  "recall", "by loss", "precision", "density", "predicted", "ratio", "bytes", "us/token");
  const auto row = [&](const std::string& layer, const std::string& name, const predictor::Tally& t, uint64_t bytes,
                       uint64_t ffn, double us) {
    out += fmt::format(
        "{:>5}  {:<20}  {:>6.2f}%  {:>8.3f}%  {:>8.1f}%  {:>7.2f}%  {:>9.2f}%  {:>6.2f}  {:>6.1f}%  {:>8.1f}\n", layer,
        name, 100 * t.recall(), 100 * t.loss_recall(), 100 * t.precision(), 100 * t.density(),
        100 * t.predicted_density(), t.predicted_density() / t.density(),
        100 * static_cast<double>(bytes) / static_cast<double>(ffn), us);
  };
  predictor::Tally sum;
  uint64_t bytes = 0, ffn = 0;
  double us = 0;
  for (size_t l = 0; l < e.layers.size(); ++l) {
    const EvaluatedLayer& x = e.layers[l];
    ffn += x.ffn_bytes;
    if (x.bytes == 0) {
      out += fmt::format("{:>5}  none\n", l);
      continue;
    }
    const std::string name =
        x.rank > 0 ? fmt::format("{} {} {}", x.method, x.rank, x.type) : fmt::format("{} {}", x.method, x.type);
    row(std::to_string(l), name, x.tally, x.bytes, x.ffn_bytes, 1e6 * x.seconds_per_token());
    sum += x.tally, bytes += x.bytes, us += 1e6 * x.seconds_per_token();
  }
  row("all", "", sum, bytes, ffn, us);
  const Comparison& c = e.comparison;
  out += fmt::format(
      "\nperplexity {:.4f}, dense {:.4f}: {:+.3f} % ± {:.3f}; mean KL {:.6f} nats; same likeliest token {:.2f} %; "
      "{} tokens\n"
      "by loss: share of |value| * ||down row|| kept. ratio: predicted / active. bytes: of the FFN's.\n",
      c.other.perplexity(), c.dense.perplexity(), 100 * c.perplexity_increase(), 100 * c.perplexity_increase_error(),
      c.kl.mean(), 100 * c.agreement.mean(), c.n());
  return out;
}

nlohmann::json evaluation_json(const Evaluation& e) {
  nlohmann::json layers = nlohmann::json::array();
  predictor::Tally sum;
  uint64_t bytes = 0, ffn = 0;
  const auto figures = [](const predictor::Tally& t) -> nlohmann::json {
    return {{"recall", t.recall()},
            {"loss_recall", t.loss_recall()},
            {"precision", t.precision()},
            {"density", t.density()},
            {"predicted_density", t.predicted_density()}};
  };
  for (const EvaluatedLayer& l : e.layers) {
    nlohmann::json j = figures(l.tally);
    j["method"] = l.method, j["type"] = l.type, j["rank"] = l.rank;
    j["bytes"] = l.bytes, j["ffn_bytes"] = l.ffn_bytes, j["seconds_per_token"] = l.seconds_per_token();
    layers.push_back(j);
    ffn += l.ffn_bytes;
    if (l.bytes > 0) sum += l.tally, bytes += l.bytes;
  }
  nlohmann::json all = figures(sum);
  all["bytes"] = bytes, all["ffn_bytes"] = ffn;
  return {{"layers", layers}, {"all", all}, {"end_to_end", summary_json(e.comparison)}};
}

}  // namespace hearth::offline
