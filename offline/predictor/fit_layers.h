#pragma once
// Predictors of many layers: their inputs gathered for as many layers at once as there is room for, then fitted layer
// by layer. Interrupted, it goes on where it was.
#include <functional>
#include <memory>
#include <vector>

#include "offline/predictor/choose.h"
#include "offline/predictor/fit_work.h"

namespace hearth::offline {

struct FitPlan {
  FitOptions fit;
  SampleOptions samples;              // without layers, file and identity, which follow from the rest
  std::vector<Candidate> candidates;  // of which each layer gets one
  size_t first_layer = 0, n_layers = 0;
  bool for_gpu = false;                       // see choose_predictor()
  uint64_t sample_bytes = uint64_t{4} << 30;  // most that gathered inputs may take
};

// The key that tells one fit from another: model, texts and options, without the layers.
nlohmann::json fit_key(const model::Model& model, const Corpus& corpus, const FitPlan& plan);

// Layers whose inputs are gathered together: [k * n, (k + 1) * n) for a k. Throws Error when there is no room for even
// one.
size_t layers_at_once(const model::Model& model, const Corpus& corpus, const FitPlan& plan);

struct FitHardware {
  std::function<std::unique_ptr<Device>()> make_device;  // to gather with; it is gone while layers are fitted
  Products& products;
  ThreadTeam& team;
};

class FitListener {
 public:
  virtual ~FitListener() = default;
  virtual void gathering(size_t first_layer, size_t n_layers, const SampleProgress& progress) = 0;
  virtual void fitted(size_t layer, const ChosenPredictor& chosen) = 0;
  virtual bool keep_going() = 0;
};

// Makes sure that `work` has all layers of the plan. False when the listener wanted to stop.
bool fit_layers(model::Model& model, const Corpus& corpus, const FitPlan& plan, const FitWork& work,
                const FitHardware& hardware, FitListener& listener);

}  // namespace hearth::offline
