#include "model/attach_predictors.h"

#include <algorithm>

#include "model/predictors.h"

namespace hearth::model {

bool attach_predictors(Model& model, const Sidecar& sidecar) {
  sidecar.check_matches(model.file(), model.config());
  if (sidecar.file == nullptr || !has_predictors(*sidecar.file)) return false;
  std::vector<StoredPredictor> stored = read_predictors(*sidecar.file, sidecar.n_embd, sidecar.n_ff);
  std::vector<LayerPredictor> layers;
  for (StoredPredictor& s : stored) layers.push_back(std::move(s.predictor));
  const bool any = std::any_of(layers.begin(), layers.end(), [](auto& p) { return static_cast<bool>(p.weights); });
  model.set_predictors(layers, sidecar.file);
  return any;
}

}  // namespace hearth::model
