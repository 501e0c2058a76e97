#include "offline/tune/evaluate.h"

#include "core/error.h"

namespace hearth::offline {
namespace {

engine::EngineOptions engine_options(int64_t window) {
  engine::EngineOptions o;
  o.n_ctx = window;
  o.sparsity = engine::Sparsity::off;  // the thresholds are the device's business
  o.use_graph = false;
  return o;
}

}  // namespace

void to_json(nlohmann::json& j, const Measurement& m) {
  j = {{"comparison", m.comparison}, {"active", m.active}, {"neurons", m.neurons}, {"windows", m.windows}};
}
void from_json(const nlohmann::json& j, Measurement& m) {
  j.at("comparison").get_to(m.comparison);
  j.at("active").get_to(m.active), j.at("neurons").get_to(m.neurons), j.at("windows").get_to(m.windows);
}

Evaluator::Evaluator(model::Model& model, Device& device, ThreadTeam& team, int64_t window)
    : device_(device, team, model), engine_(model, device_, engine_options(window)) {}

std::vector<int32_t> Evaluator::inputs(const TextPart& part, const Window& w) const {
  std::vector<int32_t> ids;
  if (part.bos) ids.push_back(*part.bos);
  const auto begin = part.ids.begin() + w.begin;
  ids.insert(ids.end(), begin, begin + w.n_inputs);
  return ids;
}

void Evaluator::run_dense(const TextPart& part, size_t window) {
  device_.set_thresholds({});
  text_.truncate(0);
  engine_.eval(text_, inputs(part, part.windows[window]));
}

void Evaluator::compare(const TextPart& part, size_t window, std::span<const Thresholds> thresholds,
                        std::span<Measurement> out) {
  HEARTH_CHECK(thresholds.size() == out.size());
  const Window& w = part.windows[window];
  const std::vector<int32_t> ids = inputs(part, w);
  const int64_t skipped = static_cast<int64_t>(ids.size()) - w.n_targets;  // positions that an earlier window scored
  std::vector<DensePosition> dense;
  dense.reserve(static_cast<size_t>(w.n_targets));
  device_.set_thresholds({});
  text_.truncate(0);
  engine_.eval_all(text_, ids, [&](int64_t i, std::span<const float> logits) {
    if (i < skipped) return;
    dense.emplace_back(logits, part.ids[static_cast<size_t>(w.first_target + i - skipped)]);
  });
  for (size_t c = 0; c < thresholds.size(); ++c) {
    device_.set_thresholds(thresholds[c], true);
    text_.truncate(0);
    engine_.eval_all(text_, ids, [&](int64_t i, std::span<const float> logits) {
      if (i >= skipped) out[c].comparison.add(dense[static_cast<size_t>(i - skipped)], logits);
    });
    out[c].active += device_.counted_active();
    out[c].neurons += device_.counted_neurons();
    ++out[c].windows;
  }
  device_.set_thresholds({});
}

}  // namespace hearth::offline
