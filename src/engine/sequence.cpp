#include "engine/sequence.h"

#include <utility>

#include "core/error.h"

namespace hearth::engine {

Sequence::Sequence(std::shared_ptr<PagePool> pool, std::string name)
    : pool_(std::move(pool)), holder_(pool_->add_holder(name)), name_(std::move(name)) {}

Sequence::~Sequence() {
  if (!pool_) return;
  truncate(0);
  pool_->remove_holder(holder_);
}

Sequence::Sequence(Sequence&& other) noexcept {
  *this = std::move(other);
}

Sequence& Sequence::operator=(Sequence&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(holder_, other.holder_);
  std::swap(name_, other.name_);
  std::swap(pages_, other.pages_);
  std::swap(n_past_, other.n_past_);
  return *this;
}

Sequence Sequence::fork(std::string name) const {
  Sequence copy(pool_, std::move(name));
  for (const int32_t page : pages_) pool_->share(copy.holder_, page);
  copy.pages_ = pages_, copy.n_past_ = n_past_;
  return copy;
}

void Sequence::truncate(int64_t n) {
  HEARTH_CHECK(n >= 0 && n <= n_past_, "{} positions of {}", n, n_past_);
  while (std::ssize(pages_) > pages_of(n)) {
    pool_->release(holder_, pages_.back());
    pages_.pop_back();
  }
  n_past_ = n;
}

}  // namespace hearth::engine
