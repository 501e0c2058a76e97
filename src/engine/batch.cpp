#include "engine/batch.h"

#include <algorithm>
#include <map>

#include "core/error.h"

namespace hearth::engine {

void Batch::add(Sequence& sequence, std::span<const int32_t> ids, Logits wanted) {
  HEARTH_CHECK(!ids.empty(), "no tokens for '{}'", sequence.name());
  for (const Part& p : parts_) HEARTH_CHECK(p.sequence != &sequence, "'{}' is in the batch already", sequence.name());
  parts_.push_back({&sequence, size(), std::ssize(ids)});
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  wanted_.resize(ids_.size(), wanted == Logits::all);
  if (wanted == Logits::last) wanted_.back() = true;
}

namespace {

// Whether new positions of a sequence begin in a page that others hold, too.
bool writes_to_shared(const Sequence& s, const PagePool& pool) {
  return s.n_past() % kPagePositions != 0 && pool.uses(s.pages().back()) > 1;
}

// Pages that n more positions take, without a copy of a shared one.
int64_t new_pages(const Sequence& s, int64_t n, int64_t n_ctx) {
  if (s.n_past() + n > n_ctx) {
    fail("the context is full: {} tokens are in it and {} more do not fit in {}; use a larger -c or a shorter text",
         s.n_past(), n, n_ctx);
  }
  return pages_of(s.n_past() + n) - std::ssize(s.pages());
}

}  // namespace

void require_room(const Sequence& s, int64_t n, const PagePool& pool, int64_t n_ctx) {
  pool.require(new_pages(s, n, n_ctx) + (writes_to_shared(s, pool) ? 1 : 0));
}

PagedBatch::PagedBatch(const Batch& batch, PagePool& pool, int64_t n_ctx,
                       const std::function<void(int32_t from, int32_t to)>& copy_page)
    : batch_(batch) {
  int64_t wanted = 0;
  std::map<int32_t, int32_t> writers;  // of each shared page: the last of its holders needs no copy
  for (const Batch::Part& p : batch.parts()) {
    const Sequence& s = *p.sequence;
    wanted += new_pages(s, p.n_rows, n_ctx);
    if (writes_to_shared(s, pool) && ++writers[s.pages_.back()] < pool.uses(s.pages_.back())) ++wanted;
  }
  pool.require(wanted);
  for (const Batch::Part& p : batch.parts()) {
    Sequence& s = *p.sequence;
    if (writes_to_shared(s, pool)) {
      const int32_t own = pool.take(s.holder_), shared = s.pages_.back();
      copy_page(shared, own);
      pool.release(s.holder_, shared);
      s.pages_.back() = own;
    }
    while (std::ssize(s.pages_) < pages_of(s.n_past_ + p.n_rows)) s.pages_.push_back(pool.take(s.holder_));
    runs_.push_back({p.first_row, p.n_rows, s.n_past_});
    max_kv_ = std::max(max_kv_, s.n_past_ + p.n_rows);
  }
}

PagedBatch::~PagedBatch() {
  if (committed_) return;
  for (const Batch::Part& p : batch_.parts()) p.sequence->truncate(p.sequence->n_past_);
}

void PagedBatch::commit() {
  committed_ = true;
  for (const Batch::Part& p : batch_.parts()) p.sequence->n_past_ += p.n_rows;
}

}  // namespace hearth::engine
