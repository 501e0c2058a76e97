#pragma once
// The multiple-choice knapsack problem: from every class take one choice, so that the bytes fit and the time is least.
// Solved by linear relaxation, which also bounds what any solution can reach, and an exact dynamic programme over the
// choices that the bound leaves possible (Kellerer, Pferschy, Pisinger, Knapsack Problems, chapter 11).
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace hearth::offline {

struct Choice {
  uint64_t bytes = 0;
  double seconds = 0;
  uint32_t id = 0;  // the caller's
};
using ChoiceClass = std::vector<Choice>;

// Sorts by bytes and drops every choice that another one beats: afterwards seconds fall strictly as bytes rise.
void keep_pareto(ChoiceClass& choices);

struct KnapsackResult {
  std::vector<uint32_t> ids;  // chosen, by class
  uint64_t bytes = 0;
  double seconds = 0;
  double bound = 0;  // no solution is faster than this
  // seconds is the optimum, up to kKnapsackTolerance.
  bool proven() const;
};
constexpr double kKnapsackTolerance = 1e-7;  // relative

// Every class must have gone through keep_pareto() and be non-empty. nullopt when even the smallest choices do not fit.
std::optional<KnapsackResult> solve_knapsack(std::span<const ChoiceClass> classes, uint64_t budget);

}  // namespace hearth::offline
