#pragma once
// Chooses one threshold of |act(gate)| for each layer: how much quality to give for how much speed.
//
//  1. Where do the magnitudes lie? A dense pass counts them; levels of density follow, for all layers together (one
//     global threshold) and for each layer alone.
//  2. What does a level save? A second dense pass counts each neuron at each level; the planner's cost model turns that
//     into time.
//  3. What does it cost? The global thresholds are run and compared with the dense model. For layers alone, the energy
//     that a level takes from the layer's output, times what a unit of that energy costs, measured once per layer.
//  4. A greedy path through the layers' levels, by loss per time saved; points on it are run and compared.
//  5. The fastest setting within the bound on the part that was tuned on, by the upper end of a one-sided 95 %
//  interval,
//     is judged on the other part, and goes back along the path until the bound holds there too.
// All choices depend on counted and compared figures and the cost model alone, never on a clock.
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/thread_team.h"
#include "model/model.h"
#include "model/sidecar.h"
#include "offline/plan/planner.h"
#include "offline/tune/evaluate.h"
#include "offline/tune/texts.h"

namespace hearth::offline {

// At most one of these; without any, the knee of the curve of loss against speed.
struct TuneGoal {
  std::optional<double> max_kl;            // nats
  std::optional<double> max_ppl_increase;  // 0.01 = 1 %
  std::optional<double> target_tps;        // tokens/s by the plan
  std::optional<double> density;           // every layer to this one
};

struct TuneProgress {
  int64_t done = 0, total = 0;  // windows evaluated; the total is an estimate that grows with the search
  std::string stage;
};

struct TuneRequest {
  TuneGoal goal;
  int64_t window = 512;
  PlanRequest plan;             // the machine, the budget
  std::filesystem::path state;  // measurements so far
  std::string key;              // what they are valid for, beyond the model: texts and their limits
};

struct CurveSetting {
  Thresholds thresholds;
  std::optional<float> global;  // set when all layers have the same one
  Measurement fit;              // empty where it was not run
  Measurement validation;
  double planned_tps = 0, hit_rate = 0;
  std::optional<double> measured_tps;
};

struct TuneResult {
  std::vector<CurveSetting> global;   // by rising threshold, 0 first
  std::vector<CurveSetting> layered;  // along the greedy path, its start first
  size_t global_knee = 0, layered_knee = 0;
  CurveSetting chosen;
  // Of the dense model under `chosen`, as TunedThresholds has them.
  std::vector<std::vector<uint64_t>> chosen_active;
  std::vector<model::MeanShare> chosen_inside;  // of mixtures
  uint64_t counted_tokens = 0;
  std::string chosen_by;  // in words: which bound or knee, which family of thresholds
  int steps_back = 0;     // because the bound did not hold on validation
};

// `keep_going` is asked after every window; when it answers false, what was measured is saved and nullopt returned.
// Throws Error when the goal cannot be reached.
std::optional<TuneResult> tune(model::Model& model, Device& device, ThreadTeam& team, const TextPart& fit,
                               const TextPart& validation, const TuneRequest& request, ModelShape shape,
                               const std::function<bool(const TuneProgress&)>& keep_going);

}  // namespace hearth::offline
