#include "offline/plan/knapsack.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace hearth::offline {
namespace {

// Limits of the exact search; beyond them the incumbent stands, with the gap to the bound.
constexpr size_t kMaxStates = 30'000;
constexpr uint64_t kMaxWork = 2'000'000;  // partial solutions looked at
constexpr size_t kCells = 2048;           // of the budget, in the rounded programme

// Indices of the choices on the lower convex hull of (bytes, seconds).
std::vector<size_t> lower_hull(const ChoiceClass& c) {
  std::vector<size_t> hull;
  const auto cross = [&](size_t a, size_t b, size_t p) {
    const double bx = static_cast<double>(c[b].bytes - c[a].bytes), px = static_cast<double>(c[p].bytes - c[a].bytes);
    return bx * (c[p].seconds - c[a].seconds) - px * (c[b].seconds - c[a].seconds);
  };
  for (size_t i = 0; i < c.size(); ++i) {
    while (hull.size() >= 2 && cross(hull[hull.size() - 2], hull.back(), i) <= 0) hull.pop_back();
    hull.push_back(i);
  }
  return hull;
}

// One move along a class's hull.
struct Step {
  double seconds_per_byte;  // saved
  size_t klass, from, to;
};

class Solver {
 public:
  Solver(std::span<const ChoiceClass> classes, uint64_t budget) : classes_(classes), budget_(budget) {}

  std::optional<KnapsackResult> solve() {
    pick_.assign(classes_.size(), 0);
    if (smallest_bytes() > budget_) return std::nullopt;
    relax();
    fill(pick_);
    best_ = pick_;
    if (!close_enough() && choices() > 64 * classes_.size()) improve_rounded();
    if (!close_enough()) search();
    KnapsackResult r;
    for (size_t i = 0; i < classes_.size(); ++i) r.ids.push_back(classes_[i][best_[i]].id);
    r.bytes = bytes_of(best_);
    r.seconds = seconds_of(best_);
    r.bound = std::min(bound_, r.seconds);
    return r;
  }

 private:
  using Pick = std::vector<size_t>;

  uint64_t bytes_of(const Pick& p) const {
    uint64_t sum = 0;
    for (size_t i = 0; i < p.size(); ++i) sum += classes_[i][p[i]].bytes;
    return sum;
  }
  double seconds_of(const Pick& p) const {
    double sum = 0;
    for (size_t i = 0; i < p.size(); ++i) sum += classes_[i][p[i]].seconds;
    return sum;
  }
  bool close_enough() const {
    const double seconds = seconds_of(best_);
    return seconds - bound_ <= kKnapsackTolerance * seconds;
  }

  // The linear relaxation: steps along the hulls, the most seconds per byte first. Leaves pick_ at the last integer
  // point, bound_ at the fractional optimum, and lambda_ at the price of a byte there.
  void relax() {
    std::vector<Step> steps;
    for (size_t k = 0; k < classes_.size(); ++k) {
      const ChoiceClass& c = classes_[k];
      const std::vector<size_t> hull = lower_hull(c);
      for (size_t i = 1; i < hull.size(); ++i) {
        const Choice &a = c[hull[i - 1]], &b = c[hull[i]];
        steps.push_back({(a.seconds - b.seconds) / static_cast<double>(b.bytes - a.bytes), k, hull[i - 1], hull[i]});
      }
    }
    std::stable_sort(steps.begin(), steps.end(),
                     [](const Step& a, const Step& b) { return a.seconds_per_byte > b.seconds_per_byte; });
    uint64_t used = bytes_of(pick_);
    bool broken = false;
    for (const Step& s : steps) {
      const uint64_t bytes = classes_[s.klass][s.to].bytes - classes_[s.klass][s.from].bytes;
      if (!broken && bytes > budget_ - used) {
        broken = true;
        lambda_ = s.seconds_per_byte;
        bound_ = seconds_of(pick_) - lambda_ * static_cast<double>(budget_ - used);
      }
      // After the break smaller steps may still fit: a better integer point, if not the best.
      if (bytes > budget_ - used || pick_[s.klass] != s.from) continue;
      pick_[s.klass] = s.to;
      used += bytes;
    }
    if (!broken) bound_ = seconds_of(pick_);
  }

  // Spends what is left of the budget: each class in turn takes its best choice that fits, the largest gain first.
  void fill(Pick& pick) const {
    uint64_t used = bytes_of(pick);
    for (;;) {
      double gain = 0;
      size_t klass = 0, to = 0;
      for (size_t k = 0; k < classes_.size(); ++k) {
        const ChoiceClass& c = classes_[k];
        const size_t j = last_within(c, c[pick[k]].bytes + (budget_ - used));
        const double g = c[pick[k]].seconds - c[j].seconds;
        if (g > gain) gain = g, klass = k, to = j;
      }
      if (gain <= 0) return;
      used = used - classes_[klass][pick[klass]].bytes + classes_[klass][to].bytes;
      pick[klass] = to;
    }
  }

  // The fastest choice of at most `bytes` bytes.
  static size_t last_within(const ChoiceClass& c, uint64_t bytes) {
    const auto after =
        std::upper_bound(c.begin(), c.end(), bytes, [](uint64_t b, const Choice& x) { return b < x.bytes; });
    return static_cast<size_t>(after - c.begin()) - 1;
  }

  size_t choices() const {
    size_t n = 0;
    for (const ChoiceClass& c : classes_) n += c.size();
    return n;
  }

  // A better incumbent for large problems: the dynamic programme over the budget in kCells cells, every choice rounded
  // up to whole cells, then what rounding left over is spent. Finds the combinations of large items that fill the
  // budget, which steps along the hulls cannot.
  void improve_rounded() {
    const uint64_t floor = smallest_bytes(), cell = (budget_ - floor) / kCells + 1;
    constexpr double infinity = std::numeric_limits<double>::infinity();
    std::vector<double> fastest(kCells + 1, 0.0), next(kCells + 1);
    std::vector<std::vector<uint32_t>> taken;  // [class][cells available] = choice
    for (const ChoiceClass& c : classes_) {
      const std::vector<uint32_t> by_cell = best_by_cell(c, cell);
      taken.emplace_back(kCells + 1, 0);
      std::fill(next.begin(), next.end(), infinity);
      for (size_t cells = 0; cells < by_cell.size(); ++cells) {
        if (cells > 0 && by_cell[cells] == by_cell[cells - 1]) continue;  // the same choice costs less room
        const double seconds = c[by_cell[cells]].seconds;
        for (size_t room = cells; room <= kCells; ++room) {
          const double total = fastest[room - cells] + seconds;
          if (total < next[room]) next[room] = total, taken.back()[room] = by_cell[cells];
        }
      }
      fastest.swap(next);
    }
    Pick pick(classes_.size());
    size_t room = (budget_ - floor) / cell;
    for (size_t k = classes_.size(); k-- > 0;) {
      pick[k] = taken[k][room];
      room -= cells_of(classes_[k], pick[k], cell);
    }
    fill(pick);
    if (seconds_of(pick) < seconds_of(best_)) best_ = pick;
  }

  uint64_t smallest_bytes() const {
    uint64_t sum = 0;
    for (const ChoiceClass& c : classes_) sum += c.front().bytes;
    return sum;
  }
  // Bytes beyond the class's smallest choice, in cells, rounded up.
  static size_t cells_of(const ChoiceClass& c, size_t choice, uint64_t cell) {
    return (c[choice].bytes - c.front().bytes + cell - 1) / cell;
  }
  // [cells] -> the fastest choice of at most so many cells.
  static std::vector<uint32_t> best_by_cell(const ChoiceClass& c, uint64_t cell) {
    std::vector<uint32_t> best(1, 0);
    for (uint32_t j = 1; j < c.size(); ++j) {
      const size_t cells = cells_of(c, j, cell);
      if (cells > kCells) break;
      if (cells >= best.size()) best.resize(cells + 1, best.back());
      best[cells] = j;
    }
    return best;
  }

  // A partial solution over the first classes.
  struct State {
    uint64_t bytes;
    double seconds;
    double excess;  // sum of reduced costs: the bound of every completion is bound_ + excess
    uint32_t parent, choice;
  };

  // Exact: extends all partial solutions class by class, dropping those that the bound or another one beats.
  void search() {
    std::vector<std::vector<State>> levels{{State{0, 0, 0, 0, 0}}};
    std::vector<uint64_t> smallest_rest(classes_.size() + 1, 0);
    for (size_t k = classes_.size(); k-- > 0;) smallest_rest[k] = smallest_rest[k + 1] + classes_[k].front().bytes;
    const double allowed = seconds_of(best_) - bound_;
    for (size_t k = 0; k < classes_.size(); ++k) {
      std::vector<State> next = extend(levels.back(), classes_[k], budget_ - smallest_rest[k + 1], allowed);
      drop_dominated(next);
      if (next.size() > kMaxStates || work_ > kMaxWork) return;
      if (next.empty()) {  // nothing beats the incumbent
        bound_ = seconds_of(best_);
        return;
      }
      levels.push_back(std::move(next));
    }
    take_if_better(levels);
    bound_ = seconds_of(best_);
  }

  std::vector<State> extend(const std::vector<State>& states, const ChoiceClass& c, uint64_t limit, double allowed) {
    double cheapest = std::numeric_limits<double>::infinity();
    for (const Choice& x : c) cheapest = std::min(cheapest, priced(x));
    std::vector<std::pair<uint32_t, double>> possible;  // choice and its reduced cost
    for (uint32_t j = 0; j < c.size(); ++j) {
      const double reduced = priced(c[j]) - cheapest;
      if (reduced < allowed) possible.push_back({j, reduced});
    }
    std::vector<State> next;
    for (uint32_t i = 0; i < states.size() && work_ <= kMaxWork; ++i) {
      const State& s = states[i];
      work_ += possible.size();
      for (const auto& [j, reduced] : possible) {
        if (s.bytes + c[j].bytes > limit) break;  // choices are sorted by bytes
        if (s.excess + reduced >= allowed) continue;
        next.push_back({s.bytes + c[j].bytes, s.seconds + c[j].seconds, s.excess + reduced, i, j});
      }
      if (next.size() > 8 * kMaxStates) drop_dominated(next);
    }
    return next;
  }

  double priced(const Choice& x) const { return x.seconds + lambda_ * static_cast<double>(x.bytes); }

  static void drop_dominated(std::vector<State>& states) {
    std::sort(states.begin(), states.end(), [](const State& a, const State& b) {
      return a.bytes != b.bytes ? a.bytes < b.bytes : a.seconds < b.seconds;
    });
    size_t kept = 0;
    double fastest = std::numeric_limits<double>::infinity();
    for (const State& s : states) {
      if (s.seconds >= fastest) continue;
      fastest = s.seconds;
      states[kept++] = s;
    }
    states.resize(kept);
  }

  void take_if_better(const std::vector<std::vector<State>>& levels) {
    const std::vector<State>& last = levels.back();
    const auto best = std::min_element(last.begin(), last.end(),
                                       [](const State& a, const State& b) { return a.seconds < b.seconds; });
    if (best->seconds >= seconds_of(best_)) return;
    State s = *best;
    for (size_t k = classes_.size(); k-- > 0;) {
      best_[k] = s.choice;
      s = levels[k][s.parent];
    }
  }

  std::span<const ChoiceClass> classes_;
  uint64_t budget_;
  Pick pick_, best_;
  double lambda_ = 0, bound_ = 0;
  uint64_t work_ = 0;
};

}  // namespace

void keep_pareto(ChoiceClass& choices) {
  std::sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) {
    return a.bytes != b.bytes ? a.bytes < b.bytes : a.seconds < b.seconds;
  });
  size_t kept = 0;
  for (const Choice& c : choices) {
    if (kept == 0 || c.seconds < choices[kept - 1].seconds) choices[kept++] = c;
  }
  choices.resize(kept);
}

bool KnapsackResult::proven() const {
  return seconds - bound <= kKnapsackTolerance * seconds;
}

std::optional<KnapsackResult> solve_knapsack(std::span<const ChoiceClass> classes, uint64_t budget) {
  for (const ChoiceClass& c : classes) HEARTH_CHECK(!c.empty());
  return Solver(classes, budget).solve();
}

}  // namespace hearth::offline
