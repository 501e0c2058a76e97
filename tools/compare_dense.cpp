#include "tools/compare_dense.h"

#include <algorithm>
#include <vector>

namespace hearth::tools {

offline::Comparison compare_with_dense(engine::Engine& engine, engine::Sequence& text, std::span<const int32_t> prompt,
                                       std::span<const int32_t> generated, int64_t most) {
  const auto n_generated = static_cast<int64_t>(generated.size());
  const auto n = static_cast<size_t>(std::clamp<int64_t>(most, 0, std::max<int64_t>(n_generated - 1, 0)));
  offline::Comparison comparison;
  if (n == 0) return comparison;
  std::vector<int32_t> ids(prompt.begin(), prompt.end());
  ids.insert(ids.end(), generated.begin(), generated.begin() + static_cast<ptrdiff_t>(n));
  std::vector<offline::DensePosition> dense;
  const auto n_prompt = static_cast<int64_t>(prompt.size());
  const auto visit = [&](int64_t i, std::span<const float> logits) {
    if (i >= n_prompt) dense.emplace_back(logits, generated[static_cast<size_t>(i - n_prompt + 1)]);
  };
  text.truncate(0);
  engine.eval_all(text, ids, visit, true);
  text.truncate(0);
  engine.eval(text, prompt);
  for (size_t i = 0; i < n; ++i) comparison.add(dense[i], engine.eval(text, generated.subspan(i, 1)));
  return comparison;
}

}  // namespace hearth::tools
