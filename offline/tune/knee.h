#pragma once
// Where a curve turns from cheap to expensive, and which path through layers' choices costs least.
#include <cstddef>
#include <span>
#include <vector>

namespace hearth::offline {

struct CurvePoint {
  double gain = 0;  // what is wanted more of: tokens/s
  double loss = 0;  // what it costs
};

// The point farthest below the straight line from the first point to the last, both axes scaled to [0, 1]: the knee of
// a convex curve (Satopää et al., "Finding a Kneedle in a Haystack", 2011, without its smoothing). Points by rising
// gain. Of less than three points, or of none below the line, the last one below or on it; a curve without any rise in
// loss has its knee at its end.
size_t find_knee(std::span<const CurvePoint> curve);

// One step of a greedy path: `layer` goes to its choice `level`.
struct PathStep {
  size_t layer = 0, level = 0;
};
// loss[l][k] and saved[l][k]: what layer l's choice k costs and saves; choice 0 is the start of every layer, at 0 and
// 0. Steps by rising loss per saving, along the lower convex hull of each layer's choices, so that every prefix loses
// the least for what it saves, as far as layers add up. Choices that save nothing more are never taken.
std::vector<PathStep> greedy_path(std::span<const std::vector<double>> loss,
                                  std::span<const std::vector<double>> saved);

}  // namespace hearth::offline
