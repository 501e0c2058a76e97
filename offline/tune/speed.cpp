#include "offline/tune/speed.h"

#include "core/error.h"

namespace hearth::offline {

SpeedModel::SpeedModel(ModelShape shape, const PlanRequest& request, const std::vector<ThresholdCounts>& counts)
    : shape_(std::move(shape)), request_(request), counts_(counts) {
  HEARTH_CHECK(counts.size() == shape_.layers.size());
  request_.sparsity = engine::Sparsity::exact;
  const std::vector<size_t> none(counts.size(), 0);
  for (size_t l = 0; l < counts.size(); ++l) shape_.layers[l] = layer_under(l, 0);
  const Planner planner(shape_, frequencies(none), request_);
  base_ = planner.plan();
  gpu_ = base_.gpu.total() > 0;
  request_.n_ctx = planner.request().n_ctx;  // as the planner chose it
}

Frequencies SpeedModel::frequencies(const std::vector<size_t>& choice) const {
  Frequencies f;
  f.known = true;
  f.source = "hearth tune";
  for (size_t l = 0; l < counts_.size(); ++l) f.p.push_back(frequencies(l, choice[l]));
  return f;
}

std::vector<double> SpeedModel::frequencies(size_t l, size_t k) const {
  std::vector<double> p = counts_[l].frequencies(k);
  return shape_.layers[l].experts ? with_shared(shape_.layers[l], std::move(p)) : p;
}

LayerShape SpeedModel::layer_under(size_t l, size_t k) const {
  LayerShape layer = shape_.layers[l];
  if (layer.experts) layer.active_inside = counts_[l].density(k);
  return layer;
}

PlannedSpeed SpeedModel::speed(const std::vector<size_t>& choice) const {
  ModelShape under = shape_;
  for (size_t l = 0; l < choice.size(); ++l) under.layers[l] = layer_under(l, choice[l]);
  const Plan plan = Planner(std::move(under), frequencies(choice), request_).plan();
  return {plan.seconds, plan.hit_rate};
}

double SpeedModel::layer_seconds(size_t l, size_t k) const {
  const LayerCosts costs(layer_under(l, k), frequencies(l, k), request_.cost, request_.reserve, 0, base_.n_kv);
  const LayerChoice& choice = base_.layers[l].choice;
  return gpu_ ? costs.seconds(choice) : costs.seconds_cpu_only(choice.selection);
}

double SpeedModel::saved(size_t layer, size_t k) const {
  return layer_seconds(layer, 0) - layer_seconds(layer, k);
}

}  // namespace hearth::offline
