#pragma once
// Turns the experts that a router chose for a batch of tokens into a layer's statistics, on the host.
#include <cstdint>
#include <span>
#include <vector>

#include "model/sidecar.h"

namespace hearth::offline {

class ExpertCounter {
 public:
  // n_used of n_expert experts are chosen for each token; ids from n_expert on (the shared expert) are not counted.
  ExpertCounter(int64_t n_expert, int64_t n_used);

  // A new text begins: its tokens have no predecessors.
  void begin_sequence();
  // T more tokens of the text: ids [T][n_named]. `foreseen` [T][n_named], or empty: what the router names for these
  // tokens on the input of the layer before. Held-out tokens are counted in stats.active_heldout alone. Throws Error
  // when a token does not have n_used distinct experts.
  void add(std::span<const int32_t> ids, std::span<const int32_t> foreseen, int64_t T, bool heldout,
           model::LayerStatistics& stats);

 private:
  // A token's ids below n_expert, checked.
  std::vector<int32_t> routed(std::span<const int32_t> ids, int64_t t, int64_t T) const;
  void add_token(const std::vector<int32_t>& experts, model::LayerStatistics& stats);

  int64_t n_expert_, n_used_;
  std::vector<int64_t> last_used_;  // [n_expert] position in the text, far negative at first
  int64_t position_ = 0;            // of the next token
};

}  // namespace hearth::offline
