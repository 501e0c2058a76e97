#include "offline/tune/knee.h"

#include <algorithm>

#include "core/error.h"

namespace hearth::offline {
namespace {

struct Segment {
  PathStep step;
  double slope;  // loss per saving
};

// The lower convex hull of one layer's choices, from choice 0 on, by rising savings.
std::vector<Segment> hull(size_t layer, const std::vector<double>& loss, const std::vector<double>& saved) {
  std::vector<size_t> order(loss.size());
  for (size_t k = 0; k < order.size(); ++k) order[k] = k;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return saved[a] < saved[b]; });
  const auto slope = [&](size_t from, size_t to) { return (loss[to] - loss[from]) / (saved[to] - saved[from]); };
  std::vector<size_t> points = {0};
  for (const size_t k : order) {
    if (!(saved[k] > saved[points.front()])) continue;
    if (points.size() > 1 && saved[k] == saved[points.back()]) {
      if (loss[k] >= loss[points.back()]) continue;
      points.pop_back();
    }
    while (points.size() > 1 && slope(points[points.size() - 2], points.back()) >= slope(points.back(), k)) {
      points.pop_back();
    }
    points.push_back(k);
  }
  std::vector<Segment> segments;
  for (size_t i = 1; i < points.size(); ++i) segments.push_back({{layer, points[i]}, slope(points[i - 1], points[i])});
  return segments;
}

}  // namespace

size_t find_knee(std::span<const CurvePoint> curve) {
  HEARTH_CHECK(!curve.empty());
  const CurvePoint &first = curve.front(), &last = curve.back();
  const double gain = last.gain - first.gain, loss = last.loss - first.loss;
  if (!(gain > 0) || !(loss > 0)) return curve.size() - 1;
  size_t best = 0;
  double farthest = -1;
  for (size_t i = 0; i < curve.size(); ++i) {
    const double below = (curve[i].gain - first.gain) / gain - (curve[i].loss - first.loss) / loss;
    if (below >= farthest) farthest = below, best = i;
  }
  return best;
}

std::vector<PathStep> greedy_path(std::span<const std::vector<double>> loss,
                                  std::span<const std::vector<double>> saved) {
  HEARTH_CHECK(loss.size() == saved.size());
  std::vector<Segment> all;
  for (size_t l = 0; l < loss.size(); ++l) {
    HEARTH_CHECK(loss[l].size() == saved[l].size() && !loss[l].empty());
    const std::vector<Segment> segments = hull(l, loss[l], saved[l]);
    all.insert(all.end(), segments.begin(), segments.end());
  }
  std::stable_sort(all.begin(), all.end(), [](const Segment& a, const Segment& b) { return a.slope < b.slope; });
  std::vector<PathStep> path;
  for (const Segment& s : all) path.push_back(s.step);
  return path;
}

}  // namespace hearth::offline
