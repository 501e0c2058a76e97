#include "offline/plan/knapsack.h"

#include <algorithm>

#include "core/error.h"

namespace hearth::offline {
namespace {

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
  size_t klass, from, to;
  uint64_t bytes;
  double seconds_per_byte;  // saved
};

// All of them, the most seconds per byte first; of one class, in order.
std::vector<Step> steps_of(std::span<const ChoiceClass> classes) {
  std::vector<Step> steps;
  for (size_t k = 0; k < classes.size(); ++k) {
    const std::vector<size_t> hull = lower_hull(classes[k]);
    for (size_t i = 1; i < hull.size(); ++i) {
      const Choice &a = classes[k][hull[i - 1]], &b = classes[k][hull[i]];
      const uint64_t bytes = b.bytes - a.bytes;
      steps.push_back({k, hull[i - 1], hull[i], bytes, (a.seconds - b.seconds) / static_cast<double>(bytes)});
    }
  }
  std::stable_sort(steps.begin(), steps.end(),
                   [](const Step& a, const Step& b) { return a.seconds_per_byte > b.seconds_per_byte; });
  return steps;
}

// Index of the fastest choice of at most `bytes` bytes.
size_t last_within(const ChoiceClass& c, uint64_t bytes) {
  const auto after =
      std::upper_bound(c.begin(), c.end(), bytes, [](uint64_t b, const Choice& x) { return b < x.bytes; });
  return static_cast<size_t>(after - c.begin()) - 1;
}

struct Problem {
  std::span<const ChoiceClass> classes;
  uint64_t budget;
  std::vector<Step> steps;
};

// A choice of every class, by index, with their bytes and seconds in all.
struct Pick {
  std::vector<size_t> at;
  uint64_t bytes = 0;
  double seconds = 0;
  explicit Pick(std::span<const ChoiceClass> classes) : at(classes.size(), 0) {  // the smallest ones
    for (const ChoiceClass& c : classes) bytes += c.front().bytes, seconds += c.front().seconds;
  }
  void set(const ChoiceClass& c, size_t klass, size_t to) {
    bytes = bytes - c[at[klass]].bytes + c[to].bytes;
    seconds += c[to].seconds - c[at[klass]].seconds;
    at[klass] = to;
  }
};

// The steps in order, as far as they fit; none of the class that is `fixed`. Then each time the class that gains most
// takes its fastest choice that still fits.
void grow(const Problem& p, size_t fixed, Pick& pick) {
  for (const Step& s : p.steps) {
    const bool next = pick.at[s.klass] == s.from && s.klass != fixed;
    if (next && s.bytes <= p.budget - pick.bytes) pick.set(p.classes[s.klass], s.klass, s.to);
  }
  for (;;) {
    double gain = 0;
    size_t klass = 0, to = 0;
    for (size_t k = 0; k < p.classes.size(); ++k) {
      const ChoiceClass& c = p.classes[k];
      const size_t j = last_within(c, c[pick.at[k]].bytes + (p.budget - pick.bytes));
      const double g = c[pick.at[k]].seconds - c[j].seconds;
      if (g > gain) gain = g, klass = k, to = j;
    }
    if (gain <= 0) return;
    pick.set(p.classes[klass], klass, to);
  }
}

// A large step that just does not fit, or that another class would have used better: each class in turn goes one step
// on or back, and the others are chosen anew around it.
void improve(const Problem& p, Pick& best) {
  constexpr double kWorthwhile = 1e-6;  // of the time
  for (bool better = true; better;) {
    better = false;
    for (const Step& s : p.steps) {
      const size_t at = best.at[s.klass];
      const bool forth = s.from <= at && at < s.to, back = s.from < at && at <= s.to;
      if (!forth && !back) continue;
      Pick pick(p.classes);
      pick.set(p.classes[s.klass], s.klass, forth ? s.to : s.from);
      if (pick.bytes > p.budget) continue;
      grow(p, s.klass, pick);
      if (pick.seconds < best.seconds * (1 - kWorthwhile)) best = std::move(pick), better = true;
    }
  }
}

// The linear relaxation: the steps in order, and of the first one that does not fit a part.
double relaxed_seconds(const Problem& p) {
  const Pick least(p.classes);
  uint64_t free = p.budget - least.bytes;
  double seconds = least.seconds;
  for (const Step& s : p.steps) {
    seconds -= s.seconds_per_byte * static_cast<double>(std::min(s.bytes, free));
    if (s.bytes > free) break;
    free -= s.bytes;
  }
  return seconds;
}

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

std::optional<KnapsackResult> solve_knapsack(std::span<const ChoiceClass> classes, uint64_t budget) {
  for (const ChoiceClass& c : classes) HEARTH_CHECK(!c.empty());
  Pick pick(classes);
  if (pick.bytes > budget) return std::nullopt;
  const Problem problem{classes, budget, steps_of(classes)};
  grow(problem, classes.size(), pick);
  improve(problem, pick);
  KnapsackResult r{.ids = {}, .bytes = pick.bytes, .seconds = 0, .bound = relaxed_seconds(problem)};
  for (size_t k = 0; k < classes.size(); ++k) {
    r.ids.push_back(classes[k][pick.at[k]].id);
    r.seconds += classes[k][pick.at[k]].seconds;
  }
  r.bound = std::min(r.bound, r.seconds);
  return r;
}

}  // namespace hearth::offline
