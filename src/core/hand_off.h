#pragma once
// Devices that hand work to the CPU in the middle of a pass (core/mailbox.h), and the CPU's side of it.
#include <cstdint>
#include <memory>
#include <span>

#include "core/experts.h"
#include "core/mailbox.h"
#include "core/ops.h"
#include "core/sparse_ffn.h"

namespace hearth {

// The neurons that a hint tells of: those of rows [n_own + n_linked, n) of the predictor, numbered from n_own on.
struct HintArgs {
  Mailbox* mailbox = nullptr;
  int64_t n_own = 0, n_linked = 0;
};

// A main device's side.
class HandOffs {
 public:
  // Room for `capacity` floats each way, and for lists of at most `max_ids` neurons for each of kFewTokens tokens.
  virtual std::unique_ptr<Mailbox> open_mailbox(int64_t capacity, int64_t max_ids) = 0;
  // Posts n floats and no neurons; the CPU may read them from then on.
  virtual void post(Mailbox& mailbox, const float* x, int64_t n) = 0;
  // Waits for the answer to the last post, then x += answer.
  virtual void collect(Mailbox& mailbox, float* x, int64_t n) = 0;
  // One token: tells the CPU which of its neurons the predictor of the next layer names for the input at hand, which is
  // much like that layer's own. Between a hand-off and the next one, which is that layer's. Nothing depends on it: the
  // CPU prefetches rows while it waits, and a device that is not good at it does nothing. May run beside the operations
  // that follow: names of an input that they have overwritten by then are wrong, no more than that.
  virtual void hint(const Predictor& predictor, Act in, const HintArgs& args) = 0;

 protected:
  ~HandOffs() = default;
};

// The CPU's side: what it does while it waits, for one token.
class RowPrefetch {
 public:
  // Brings the rows of these neurons (ascending) near the cores that read them if about the same are listed in the next
  // ffn_sparse() of this shard. Ends when the mailbox's next hand-off is there.
  virtual void fetch(const FfnShard& shard, std::span<const int32_t> ids, const Mailbox& until) = 0;
  // The same for the input of the next ffn_sparse(), in about 3 us: when a hand-off has begun and its neurons are not
  // there yet. Until they come, goes on with what fetch() began for this shard.
  virtual void fetch_input(const FfnShard& shard, Act in, const Mailbox& hand_off) = 0;
  // Brings the rows of the experts that this choice of one token names, those that are here, near the cores that read
  // them if about the same are chosen in the next ffn_experts(). Ends when the mailbox's next hand-off is there.
  virtual void fetch_experts(const ExpertSet& set, const ExpertChoice& choice, const Mailbox& until) = 0;

 protected:
  ~RowPrefetch() = default;
};

}  // namespace hearth
