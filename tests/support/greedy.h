#pragma once
// Recorded continuations, on an engine.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "engine/engine.h"
#include "support/goldens.h"

namespace hearth::test {

// Fed the recorded continuation, the most likely token must be the recorded one wherever the choice is not within the
// tolerance; where the recorded margin exceeds it throughout, free-running generation must reproduce the text.
inline void expect_greedy(engine::Engine& e, const Golden& g, double tolerance) {
  engine::Sequence text = e.sequence();
  auto logits = e.eval(text, g.ids);
  for (const int32_t expected : g.greedy_ids) {
    const auto best = std::max_element(logits.begin(), logits.end());
    if (best - logits.begin() != expected) {
      EXPECT_LE(*best - logits[static_cast<size_t>(expected)], tolerance) << g.prompt;
    }
    logits = e.eval(text, {&expected, 1});
  }
  if (g.min_greedy_margin <= tolerance) return;
  text.truncate(0);
  logits = e.eval(text, g.ids);
  auto id = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  std::vector<int32_t> free_running;
  while (free_running.size() < g.greedy_ids.size()) {
    free_running.push_back(id);
    id = e.eval_greedy(text, id);
  }
  EXPECT_EQ(free_running, g.greedy_ids) << g.prompt;
}

}  // namespace hearth::test
