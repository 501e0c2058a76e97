#include "tools/compare_dense.h"

#include <algorithm>
#include <vector>

#include "core/error.h"

namespace hearth::tools {
namespace {

// Calls visit(i, logits) for every id, in pieces of at most n_batch and at least two: a single one would be sparse.
void eval_dense(engine::Engine& engine, std::span<const int32_t> ids, int64_t n_batch,
                FunctionRef<void(int64_t, std::span<const float>)> visit) {
  const auto n = static_cast<int64_t>(ids.size()), pieces = (n + n_batch - 1) / n_batch;
  for (int64_t p = 0; p < pieces; ++p) {
    const int64_t begin = p * n / pieces, end = (p + 1) * n / pieces;
    HEARTH_CHECK(end - begin >= 2);
    engine.eval_all(ids.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)),
                    [&](int64_t i, std::span<const float> logits) { visit(begin + i, logits); });
  }
}

}  // namespace

offline::Comparison compare_with_dense(engine::Engine& engine, std::span<const int32_t> prompt,
                                       std::span<const int32_t> generated, int64_t most, int64_t n_batch) {
  if (n_batch < 3) fail("--compare-dense evaluates batches of tokens; use -b 3 or more");
  const auto n_generated = static_cast<int64_t>(generated.size());
  const auto n = static_cast<size_t>(std::clamp<int64_t>(most, 0, std::max<int64_t>(n_generated - 1, 0)));
  offline::Comparison comparison;
  if (n == 0) return comparison;
  std::vector<int32_t> ids(prompt.begin(), prompt.end());
  ids.insert(ids.end(), generated.begin(), generated.begin() + static_cast<ptrdiff_t>(n));
  std::vector<offline::DensePosition> dense;
  const auto n_prompt = static_cast<int64_t>(prompt.size());
  engine.truncate(0);
  eval_dense(engine, ids, n_batch, [&](int64_t i, std::span<const float> logits) {
    if (i >= n_prompt) dense.emplace_back(logits, generated[static_cast<size_t>(i - n_prompt + 1)]);
  });
  engine.truncate(0);
  engine.eval(prompt);
  for (size_t i = 0; i < n; ++i) comparison.add(dense[i], engine.eval(generated.subspan(i, 1)));
  return comparison;
}

}  // namespace hearth::tools
