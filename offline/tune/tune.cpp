#include "offline/tune/tune.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>

#include "core/error.h"
#include "offline/tune/knee.h"
#include "offline/tune/speed.h"
#include "offline/tune/state.h"

namespace hearth::offline {
namespace {

// Densities that are tried, as shares of the density without a threshold.
constexpr std::array kLevels = {0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2};
constexpr size_t kProbeLevel = 6;      // the level at which each layer's cost is measured
constexpr size_t kPathPoints = 8;      // settings on the greedy path that are run
constexpr double kOneSided95 = 1.645;  // standard errors
constexpr int kMostStepsBack = 8;

constexpr auto kSaveEvery = std::chrono::seconds(30);  // so that a crash costs no more

struct Interrupted {};

// Three significant digits, so that a threshold can be copied by hand.
float rounded(float threshold) {
  return std::strtof(fmt::format("{:.3g}", threshold).c_str(), nullptr);
}

// The upper end of what a loss may be, from one text.
double upper_kl(const Measurement& m) {
  return m.comparison.kl.mean() + kOneSided95 * m.comparison.kl.standard_error();
}
double upper_ppl_increase(const Measurement& m) {
  return m.comparison.perplexity_increase() + kOneSided95 * m.comparison.perplexity_increase_error();
}

class Tuner {
 public:
  Tuner(model::Model& model, Device& device, ThreadTeam& team, const TextPart& fit, const TextPart& validation,
        const TuneRequest& request, ModelShape shape, const std::function<bool(const TuneProgress&)>& keep_going)
      : evaluator_(model, device, team, request.window),
        fit_(fit),
        validation_(validation),
        request_(request),
        shape_(std::move(shape)),
        keep_going_(keep_going),
        state_(request.state, request.key),
        weights_(model.weights()),
        n_layer_(weights_.layers.size()) {
    // Two dense passes, the global sweep, a probe of each layer, the path, and a few steps of the search.
    progress_.total = static_cast<int64_t>(fit.windows.size() * (2 + kLevels.size() + n_layer_ + kPathPoints + 4) +
                                           validation.windows.size() * (kLevels.size() + kPathPoints + 3));
  }

  TuneResult run() {
    calibrate();
    speed_.emplace(shape_, request_.plan, counts_);
    TuneResult result;
    if (request_.goal.density) {
      result.chosen = setting(levels_for(*request_.goal.density));
      result.chosen_by = fmt::format("every layer at a density of {}", *request_.goal.density);
      compare_both({&result.chosen});
    } else {
      sweep_global(result);
      find_path();
      sweep_path(result);
      choose(result);
    }
    count_chosen(result);
    state_.save();
    return result;
  }

  void save() const { state_.save(); }

 private:
  using Clock = std::chrono::steady_clock;
  using Choice = std::vector<size_t>;  // by layer: which of its counted thresholds

  // --- passes over the text ---
  void step(size_t windows, const char* stage) {
    progress_.done += static_cast<int64_t>(windows);
    progress_.total = std::max(progress_.total, progress_.done);
    progress_.stage = stage;
    if (const auto now = Clock::now(); now - saved_ > kSaveEvery) state_.save(), saved_ = now;
    if (!keep_going_(progress_)) throw Interrupted{};
  }

  void run_dense(const char* stage) {
    for (size_t w = 0; w < fit_.windows.size(); ++w) {
      evaluator_.run_dense(fit_, w);
      step(1, stage);
    }
  }

  // Brings the measurements of all of these up to the end of the part.
  void measure(const std::string& name, const TextPart& part, const std::vector<Thresholds>& wanted,
               const char* stage) {
    for (size_t w = 0; w < part.windows.size(); ++w) {
      std::vector<Thresholds> open;
      for (const Thresholds& t : wanted) {
        const bool listed = std::find(open.begin(), open.end(), t) != open.end();
        if (!listed && state_.at(name, t).windows == w) open.push_back(t);
      }
      std::vector<Measurement> sums;
      for (const Thresholds& t : open) sums.push_back(state_.at(name, t));
      if (!open.empty()) evaluator_.compare(part, w, open, sums);
      for (size_t i = 0; i < open.size(); ++i) state_.at(name, open[i]) = sums[i];
      step(wanted.size(), stage);
    }
  }
  Measurement fitted(const Thresholds& t, const char* stage) {
    measure("fit", fit_, {t}, stage);
    return state_.at("fit", t);
  }
  // Fills in both parts of several settings.
  void compare_both(const std::vector<CurveSetting*>& settings) {
    std::vector<Thresholds> all;
    for (const CurveSetting* s : settings) all.push_back(s->thresholds);
    measure("fit", fit_, all, "on the text to tune on");
    measure("validation", validation_, all, "on the other text");
    for (CurveSetting* s : settings) {
      s->fit = state_.at("fit", s->thresholds);
      s->validation = state_.at("validation", s->thresholds);
    }
  }

  // --- what thresholds there are ---
  // Counted thresholds of layer l: 0, then those of its own levels and the global ones, ascending.
  void calibrate() {
    std::vector<MagnitudeHistogram> histograms(n_layer_);
    evaluator_.device().observe(&histograms);
    run_dense("calibrating");
    evaluator_.device().observe(static_cast<std::vector<MagnitudeHistogram>*>(nullptr));
    MagnitudeHistogram all;
    for (const MagnitudeHistogram& h : histograms) all += h;
    for (const double level : kLevels) {
      const float t = rounded(all.threshold_for(level * all.density(0)));
      if (t > 0 && (global_.empty() || t > global_.back())) global_.push_back(t);
    }
    if (global_.empty()) fail("no neuron is ever active on this text: there is nothing to tune");
    for (size_t l = 0; l < n_layer_; ++l) {
      const MagnitudeHistogram& h = histograms[l];
      std::vector<float> own = {0.0f}, thresholds = global_;
      for (const double level : kLevels) own.push_back(rounded(h.threshold_for(level * h.density(0))));
      if (const auto density = request_.goal.density) own.push_back(rounded(h.threshold_for(*density)));
      thresholds.insert(thresholds.end(), own.begin(), own.end());
      std::sort(thresholds.begin(), thresholds.end());
      thresholds.erase(std::unique(thresholds.begin(), thresholds.end()), thresholds.end());
      const int64_t n_expert = weights_.layers[l].router.routing.n_expert;  // of a dense layer none
      counts_.emplace_back(std::move(thresholds), evaluator_.device().n_neurons(l), n_expert);
      own_.push_back(std::move(own));
    }
    evaluator_.device().observe(&counts_);
    run_dense("counting");
    evaluator_.device().observe(static_cast<std::vector<ThresholdCounts>*>(nullptr));
  }

  size_t index_of(size_t layer, float threshold) const {
    const std::vector<float>& all = counts_[layer].thresholds();
    return static_cast<size_t>(std::lower_bound(all.begin(), all.end(), threshold) - all.begin());
  }
  Choice levels_for(double density) const {
    Choice choice;
    for (size_t l = 0; l < n_layer_; ++l) choice.push_back(index_of(l, own_[l].back()));
    HEARTH_CHECK(density > 0);
    return choice;
  }
  CurveSetting setting(const Choice& choice) const {
    CurveSetting s;
    for (size_t l = 0; l < n_layer_; ++l) s.thresholds.push_back(counts_[l].thresholds()[choice[l]]);
    const PlannedSpeed speed = speed_->speed(choice);
    s.planned_tps = speed.tokens_per_second(), s.hit_rate = speed.hit_rate;
    return s;
  }

  // --- 3: what they cost ---
  void sweep_global(TuneResult& result) {
    std::vector<float> thresholds = {0.0f};
    thresholds.insert(thresholds.end(), global_.begin(), global_.end());
    for (const float t : thresholds) {
      Choice choice;
      for (size_t l = 0; l < n_layer_; ++l) choice.push_back(index_of(l, t));
      result.global.push_back(setting(choice));
      result.global.back().global = t;
    }
    compare_all(result.global);
    result.global_knee = knee_of(result.global);
  }

  void compare_all(std::vector<CurveSetting>& settings) {
    std::vector<CurveSetting*> all;
    for (CurveSetting& s : settings) all.push_back(&s);
    compare_both(all);
  }

  static size_t knee_of(const std::vector<CurveSetting>& settings) {
    std::vector<CurvePoint> curve;
    for (const CurveSetting& s : settings) curve.push_back({s.planned_tps, s.validation.comparison.kl.mean()});
    return find_knee(curve);
  }

  // --- 4: the greedy path ---
  void find_path() {
    std::vector<Thresholds> probes;
    for (size_t l = 0; l < n_layer_; ++l) {
      Thresholds t(n_layer_, 0.0f);
      t[l] = own_[l][1 + kProbeLevel];
      probes.push_back(std::move(t));
    }
    measure("fit", fit_, probes, "each layer alone");
    std::vector<std::vector<double>> loss(n_layer_), saved(n_layer_);
    for (size_t l = 0; l < n_layer_; ++l) {
      const double kl = state_.at("fit", probes[l]).comparison.kl.mean();
      const double energy = counts_[l].dropped_energy(index_of(l, own_[l][1 + kProbeLevel]));
      for (const float t : own_[l]) {
        const size_t k = index_of(l, t);
        loss[l].push_back(t > 0 && energy > 0 ? kl * counts_[l].dropped_energy(k) / energy : 0.0);
        saved[l].push_back(k > 0 ? speed_->saved(l, k) : 0.0);
      }
    }
    path_ = greedy_path(loss, saved);
  }

  // The first n steps of the path taken.
  CurveSetting on_path(size_t n) const {
    Choice choice(n_layer_, 0);
    for (size_t i = 0; i < n; ++i)
      choice[path_[i].layer] = index_of(path_[i].layer, own_[path_[i].layer][path_[i].level]);
    return setting(choice);
  }

  void sweep_path(TuneResult& result) {
    positions_ = {0};
    for (size_t i = 1; i <= kPathPoints; ++i) {
      const size_t n = i * path_.size() / kPathPoints;
      if (n > positions_.back()) positions_.push_back(n);
    }
    for (const size_t n : positions_) result.layered.push_back(on_path(n));
    compare_all(result.layered);
    result.layered_knee = knee_of(result.layered);
  }

  // --- 5: which one ---
  std::optional<double> excess(const Measurement& m) const {  // of the loss over its bound; nullopt: no bound
    const TuneGoal& g = request_.goal;
    if (g.max_kl) return upper_kl(m) - *g.max_kl;
    if (g.max_ppl_increase) return upper_ppl_increase(m) - *g.max_ppl_increase;
    return std::nullopt;
  }

  void choose(TuneResult& result) {
    if (request_.goal.target_tps) return choose_for_speed(result);
    if (!request_.goal.max_kl && !request_.goal.max_ppl_increase) {
      result.chosen = result.layered[result.layered_knee];
      result.chosen_by = "the knee of KL against the plan's tokens/s, thresholds by layer";
      return;
    }
    choose_within_bound(result);
  }

  void choose_within_bound(TuneResult& result) {
    // The farthest position on the path within the bound, between the sampled ones.
    size_t low = 0, high = path_.size() + 1;
    for (size_t i = 0; i < positions_.size(); ++i) {
      if (*excess(result.layered[i].fit) <= 0) {
        low = positions_[i];
      } else {
        high = positions_[i];
        break;
      }
    }
    while (high - low > 1) {
      const size_t middle = (low + high) / 2;
      (*excess(fitted(on_path(middle).thresholds, "searching")) <= 0 ? low : high) = middle;
    }
    result.chosen = on_path(low);
    result.chosen_by = "the fastest within the bound, thresholds by layer";
    compare_both({&result.chosen});
    step_back(result, low);
    for (const CurveSetting& s : result.global) {  // one global threshold may do as well
      const bool within = *excess(s.fit) <= 0 && *excess(s.validation) <= 0;
      if (within && s.planned_tps > result.chosen.planned_tps) {
        result.chosen = s;
        result.chosen_by = "the fastest within the bound, one threshold for all layers";
      }
    }
  }

  // The bound must hold on the text that was not tuned on. Each step takes back a tenth of the path and more.
  void step_back(TuneResult& result, size_t position) {
    while (*excess(result.chosen.validation) > 0 && position > 0) {
      if (++result.steps_back > kMostStepsBack) position = 0;
      position -= std::min(position, std::max<size_t>(1, position / 10));
      result.chosen = on_path(position);
      compare_both({&result.chosen});
    }
    if (position == 0) result.chosen_by = "no threshold above 0 keeps within the bound";
  }

  void choose_for_speed(TuneResult& result) {
    const double wanted = *request_.goal.target_tps;
    std::vector<CurveSetting> reached;
    for (const CurveSetting& s : result.global) {
      if (s.planned_tps >= wanted) {
        reached.push_back(s);
        break;
      }
    }
    for (size_t n = 0; n <= path_.size(); ++n) {
      CurveSetting s = on_path(n);
      if (s.planned_tps < wanted) continue;
      compare_both({&s});
      reached.push_back(std::move(s));
      break;
    }
    if (reached.empty()) {
      const double most = std::max(result.global.back().planned_tps, result.layered.back().planned_tps);
      fail(
          "--target-tps {} is out of reach: with the highest thresholds tried (a fifth of the active neurons) the plan "
          "has {:.1f} tokens/s; ask for less, or give a larger --vram-budget",
          wanted, most);
    }
    result.chosen = *std::min_element(reached.begin(), reached.end(), [](const auto& a, const auto& b) {
      return a.fit.comparison.kl.mean() < b.fit.comparison.kl.mean();
    });
    result.chosen_by = result.chosen.global ? "the least loss at that speed, one threshold for all layers"
                                            : "the least loss at that speed, thresholds by layer";
  }

  void count_chosen(TuneResult& result) const {
    result.counted_tokens = counts_.front().tokens();
    for (size_t l = 0; l < n_layer_; ++l) {
      const size_t k = index_of(l, result.chosen.thresholds[l]);
      result.chosen_active.push_back(counts_[l].active(k));
      if (!weights_.layers[l].router) continue;
      result.chosen_inside.resize(n_layer_);
      const uint64_t tokens = counts_[l].tokens();
      result.chosen_inside[l] = {counts_[l].density(k) * static_cast<double>(tokens), tokens};
    }
  }

  Evaluator evaluator_;
  const TextPart& fit_;
  const TextPart& validation_;
  const TuneRequest& request_;
  ModelShape shape_;
  const std::function<bool(const TuneProgress&)>& keep_going_;
  TuneState state_;
  const model::Weights& weights_;
  size_t n_layer_;
  TuneProgress progress_;
  Clock::time_point saved_ = Clock::now();
  std::vector<float> global_;            // thresholds for all layers, ascending, without 0
  std::vector<std::vector<float>> own_;  // by layer: 0, then one per level
  std::vector<ThresholdCounts> counts_;  // by layer
  std::optional<SpeedModel> speed_;
  std::vector<PathStep> path_;
  std::vector<size_t> positions_;  // of result.layered on the path
};

void check_goal(const TuneGoal& g) {
  const int given = (g.max_kl ? 1 : 0) + (g.max_ppl_increase ? 1 : 0) + (g.target_tps ? 1 : 0) + (g.density ? 1 : 0);
  if (given > 1) fail("give one of --max-kl, --max-ppl-increase, --target-tps and --density");
  for (const auto& v : {g.max_kl, g.max_ppl_increase, g.target_tps, g.density}) {
    if (v && !(*v > 0 && std::isfinite(*v))) fail("the goal is {}, expected a number above 0", *v);
  }
  if (g.density && *g.density > 1) fail("--density is {}, expected at most 1", *g.density);
}

}  // namespace

std::optional<TuneResult> tune(model::Model& model, Device& device, ThreadTeam& team, const TextPart& fit,
                               const TextPart& validation, const TuneRequest& request, ModelShape shape,
                               const std::function<bool(const TuneProgress&)>& keep_going) {
  check_goal(request.goal);
  Tuner tuner(model, device, team, fit, validation, request, std::move(shape), keep_going);
  try {
    return tuner.run();
  } catch (const Interrupted&) {
    tuner.save();
    return std::nullopt;
  }
}

}  // namespace hearth::offline
