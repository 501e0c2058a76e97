#pragma once
// Tokens of one or several sequences that are evaluated in one pass.
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/kv_cache.h"
#include "engine/sequence.h"

namespace hearth::engine {

// Whose logits are wanted.
enum class Logits { none, last, all };

class Batch {
 public:
  // Appends tokens to a sequence that is not in the batch yet, and outlives it.
  void add(Sequence& sequence, std::span<const int32_t> ids, Logits wanted = Logits::last);

  // Computes every neuron, also of few tokens.
  void compute_every_neuron() { every_neuron_ = true; }
  bool computes_every_neuron() const { return every_neuron_; }

  int64_t size() const { return static_cast<int64_t>(ids_.size()); }
  bool empty() const { return ids_.empty(); }
  std::span<const int32_t> ids() const { return ids_; }
  // By row, whether its logits are wanted; rows are numbered in the order in which they were added.
  const std::vector<bool>& wanted() const { return wanted_; }

  struct Part {
    Sequence* sequence;
    int64_t first_row, n_rows;
  };
  std::span<const Part> parts() const { return parts_; }

 private:
  std::vector<int32_t> ids_;
  std::vector<bool> wanted_;
  std::vector<Part> parts_;
  bool every_neuron_ = false;
};

// Throws Error when n more positions of a sequence do not fit in n_ctx, or in the pool's free pages.
void require_room(const Sequence& sequence, int64_t n, const PagePool& pool, int64_t n_ctx);

// A batch with pages for all its positions, and what devices are told of them. Sequences have their pages from the
// construction on, and their new positions after commit(); without it they are as before.
class PagedBatch {
 public:
  // Throws Error when a sequence would be longer than n_ctx, or the pool has too few free pages; then nothing has
  // changed. `copy_page(from, to)` copies a page of the cache that several sequences hold.
  PagedBatch(const Batch& batch, PagePool& pool, int64_t n_ctx,
             const std::function<void(int32_t from, int32_t to)>& copy_page);
  ~PagedBatch();
  PagedBatch(const PagedBatch&) = delete;
  PagedBatch& operator=(const PagedBatch&) = delete;
  void commit();

  int64_t size() const { return batch_.size(); }
  // The largest position + 1.
  int64_t max_kv() const { return max_kv_; }
  std::span<const BatchRun> runs() const { return runs_; }
  const Batch& batch() const { return batch_; }

 private:
  const Batch& batch_;
  std::vector<BatchRun> runs_;
  int64_t max_kv_ = 0;
  bool committed_ = false;
};

}  // namespace hearth::engine
