#include "core/mailbox.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <new>
#include <thread>

#include "core/error.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hearth {
namespace {

// Whether a flag, or the lower half of one, has come to a hand-off's number.
bool has_come(uint64_t flag, uint32_t number) {
  return static_cast<int32_t>(static_cast<uint32_t>(flag) - number) >= 0;
}

// The ids of the bits of a word of marks.
int32_t* append_ids(uint32_t bits, int32_t first, int32_t* to) {
  for (; bits != 0; bits &= bits - 1) *to++ = first + std::countr_zero(bits);
  return to;
}

// Polls until `reached`. False when the other side failed or the patience is over.
template <typename Reached>
bool wait_until(Reached reached, const std::atomic<uint32_t>& failed, std::chrono::milliseconds patience) {
  if (reached()) return true;  // most words of marks are there: not even the time is asked for
  const auto give_up = std::chrono::steady_clock::now() + patience;
  for (int64_t spins = 1;; ++spins) {
    if (reached()) return true;
#if defined(__x86_64__)
    _mm_pause();
#endif
    if (spins % 1024 != 0) continue;
    if (failed.load(std::memory_order_acquire) != 0) return reached();
    if (std::chrono::steady_clock::now() > give_up) return false;
    if (spins > 1 << 16) std::this_thread::yield();  // long silence: somebody may need this core to end it
  }
}

}  // namespace

MailboxLayout::MailboxLayout(int64_t capacity, int64_t max_ids) {
  size_t at = sizeof(MailboxMemory);
  const auto add = [&at](int64_t n) {
    const size_t begin = at;
    at += (static_cast<size_t>(n) * 4 + 255) / 256 * 256;
    return begin;
  };
  x = add(capacity), answer = add(capacity);
  marks = add(2 * kFewTokens * mark_words(max_ids)), hints = add(2 * mark_words(max_ids));
  words = add(2 * n_words(capacity));
  total = at;
}

Mailbox::Mailbox(std::shared_ptr<std::byte> memory, int64_t capacity, int64_t max_ids)
    : flags_(new (memory.get()) MailboxMemory), capacity_(capacity), max_ids_(max_ids), memory_(std::move(memory)) {
  const MailboxLayout l(capacity, max_ids);
  std::byte* base = memory_.get();
  request_ = reinterpret_cast<float*>(base + l.x), answer_ = reinterpret_cast<float*>(base + l.answer);
  static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint64_t>) == sizeof(uint64_t));
  marks_ = reinterpret_cast<std::atomic<uint64_t>*>(base + l.marks);
  hints_ = reinterpret_cast<std::atomic<uint64_t>*>(base + l.hints);
  words_ = reinterpret_cast<std::atomic<uint64_t>*>(base + l.words);
  const auto zero = [](std::atomic<uint64_t>* words, int64_t n) {
    for (int64_t j = 0; j < n; ++j) new (words + j) std::atomic<uint64_t>{0};
  };
  zero(marks_, kFewTokens * MailboxLayout::mark_words(max_ids)), zero(hints_, MailboxLayout::mark_words(max_ids));
  ids_.resize(static_cast<size_t>(kFewTokens * (max_ids + 1)));
  zero(words_, MailboxLayout::n_words(capacity));
}

uint64_t Mailbox::wait(const std::atomic<uint64_t>& flag) {
  uint64_t value = 0;
  const auto reached = [&] {
    value = flag.load(std::memory_order_acquire);
    return has_come(value, served_);
  };
  if (!wait_until(reached, flags_->failed.value, patience_)) {
    give_up(MailboxFailure::device_silent);
    check();
  }
  return value;
}

void Mailbox::check_marks(const MailboxMarks& marks) const {
  HEARTH_CHECK(marks.n_words <= MailboxLayout::mark_words(max_ids_), "{} words of marks in a mailbox of {} neurons",
               marks.n_words, max_ids_);
}

int32_t Mailbox::read_marks(const MailboxMarks& marks, const std::atomic<uint64_t>* words, int32_t* ids) {
  check_marks(marks);
  // The lines come from the device, each a hundred nanoseconds away. A branch that depends on what is in one keeps the
  // processor from asking for those behind it, so words are read many at a time without any.
  constexpr int32_t kAtATime = 128;
  struct Named {
    uint32_t bits;
    int32_t first;
  };
  std::array<Named, kAtATime> named;
  int32_t n = 0;
  for (int32_t begin = 0; begin < marks.n_words; begin += kAtATime) {
    const int32_t end = std::min(begin + kAtATime, marks.n_words);
    size_t n_named = 0;
    const auto all_came = [&] {
      uint32_t difference = 0;
      n_named = 0;
      for (int32_t j = begin; j < end; ++j) {
        const uint64_t word = words[j].load(std::memory_order_relaxed);
        difference |= static_cast<uint32_t>(word) ^ served_;
        named[n_named] = {static_cast<uint32_t>(word >> 32), marks.first + 32 * j};
        n_named += named[n_named].bits != 0 ? 1 : 0;
      }
      return difference == 0;
    };
    if (!all_came()) {
      for (int32_t j = begin; j < end; ++j) wait(words[j]);
      HEARTH_CHECK(all_came(), "marks of a hand-off beyond number {}", served_);
    }
    for (size_t k = 0; k < n_named; ++k) {
      n = static_cast<int32_t>(append_ids(named[k].bits, named[k].first, ids + n) - ids);
    }
  }
  return n;
}

bool Mailbox::has_next() const {
  return has_come(flags_->posted.value.load(std::memory_order_acquire), served_ + 1);
}

bool Mailbox::has_neurons() const {
  const uint64_t flag = flags_->posted.value.load(std::memory_order_acquire);
  if (!has_come(flag, served_)) return false;
  const MailboxMarks marks = MailboxMarks::unpack(static_cast<uint32_t>(flag >> 32));
  return marks.n_words == 0 || has_come(marks_[0].load(std::memory_order_relaxed), served_);
}

std::span<const int32_t> Mailbox::wait_hints(const MailboxMarks& marks) {
  check_marks(marks);
  hinted_.resize(static_cast<size_t>(marks.n_words) * 32);
  int32_t* end = hinted_.data();
  int32_t j = 0;
  const auto take_all = [&] {
    for (; j < marks.n_words; ++j) {
      const uint64_t word = hints_[j].load(std::memory_order_relaxed);
      if (static_cast<uint32_t>(word) != served_ + 1) return false;
      end = append_ids(static_cast<uint32_t>(word >> 32), marks.first + 32 * j, end);
    }
    return true;
  };
  if (!wait_until([&] { return take_all() || has_next(); }, flags_->failed.value, patience_)) {
    give_up(MailboxFailure::device_silent);
    check();
  }
  if (!take_all()) return {};  // once more: what was told before the next hand-off is there when that is
  return {hinted_.data(), end};
}

const float* Mailbox::wait_input() {
  ++served_;
  wait(flags_->posted.value);
  return request_;
}

NeuronLists Mailbox::wait_neurons(int64_t T) {
  HEARTH_CHECK(flags_->answered.value.load(std::memory_order_relaxed) != served_, "no hand-off has begun");
  HEARTH_CHECK(T <= kFewTokens, "the neurons of {} tokens", T);
  const auto packed = static_cast<uint32_t>(wait(flags_->posted.value) >> 32);
  HEARTH_CHECK((packed & MailboxMarks::kIsMarks) != 0, "hand-off {} brings no neurons", served_);
  const MailboxMarks marks = MailboxMarks::unpack(packed);
  const NeuronLists lists{ids_.data(), ids_.data() + kFewTokens * max_ids_, max_ids_};
  for (int64_t t = 0; t < T; ++t) {
    const std::atomic<uint64_t>* words = marks_ + t * MailboxLayout::mark_words(max_ids_);
    lists.count[t] = read_marks(marks, words, lists.ids + t * max_ids_);
  }
  return lists;
}

void Mailbox::give_up(MailboxFailure why) {
  uint32_t none = 0;
  flags_->failed.value.compare_exchange_strong(none, static_cast<uint32_t>(why), std::memory_order_acq_rel);
}

void Mailbox::check() const {
  const MailboxFailure why = failure();
  if (why == MailboxFailure::none) return;
  if (why == MailboxFailure::abandoned) throw MailboxAbandoned(describe(why, patience_));
  fail("{}", describe(why, patience_));
}

void Mailbox::publish(int64_t begin, int64_t end) {
  HEARTH_CHECK(can_publish(end), "element {} of an answer in words", end);
  for (int64_t i = begin; i < end; ++i) {
    const uint64_t word = uint64_t{std::bit_cast<uint32_t>(answer_[i])} << 32 | served_;
    words_[i].store(word, std::memory_order_release);  // and what the hand-off brought is not read any more
  }
}

void Mailbox::answer() {
  flags_->answered.value.store(served_, std::memory_order_release);
}

namespace {

std::shared_ptr<std::byte> host_memory(size_t bytes) {
  const auto buffer = std::make_shared<HostBuffer>(bytes);
  return {buffer, buffer->data()};
}

}  // namespace

HostMailbox::HostMailbox(int64_t capacity, int64_t max_ids)
    : Mailbox(host_memory(MailboxLayout(capacity, max_ids).total), capacity, max_ids) {}

void HostMailbox::begin(const float* x, int64_t n) {
  HEARTH_CHECK(n <= capacity(), "{} floats in a mailbox of {}", n, capacity());
  ++posted_;
  std::memcpy(request_, x, static_cast<size_t>(n) * sizeof(float));
}

void HostMailbox::post(const float* x, int64_t n) {
  begin(x, n);
  flags_->posted.value.store(posted_, std::memory_order_release);
}

void HostMailbox::post_input(const float* x, int64_t n, const MailboxMarks& marks) {
  begin(x, n);
  flags_->posted.value.store(uint64_t{marks.packed()} << 32 | posted_, std::memory_order_release);
}

void HostMailbox::store(std::atomic<uint64_t>* to, uint32_t number, const MailboxMarks& marks,
                        std::span<const int32_t> ids) {
  HEARTH_CHECK(marks.n_words <= MailboxLayout::mark_words(max_ids()), "{} words of marks in a mailbox of {} neurons",
               marks.n_words, max_ids());
  std::vector<uint32_t> words(static_cast<size_t>(marks.n_words));
  for (const int32_t id : ids) words.at(static_cast<size_t>((id - marks.first) / 32)) |= 1u << (id - marks.first) % 32;
  for (size_t j = 0; j < words.size(); ++j) {
    to[j].store(uint64_t{words[j]} << 32 | number, std::memory_order_relaxed);
  }
}

void HostMailbox::post_neurons(int64_t token, const MailboxMarks& marks, std::span<const int32_t> ids) {
  HEARTH_CHECK(token < kFewTokens && std::ssize(ids) <= max_ids(), "{} neurons of token {} in a mailbox of {}",
               ids.size(), token, max_ids());
  store(marks_ + token * MailboxLayout::mark_words(max_ids()), posted_, marks, ids);
}

void HostMailbox::post_hints(const MailboxMarks& marks, std::span<const int32_t> ids) {
  store(hints_, posted_ + 1, marks, ids);
}

template <typename Reached>
void HostMailbox::wait_for(Reached reached) {
  if (wait_until(reached, flags_->failed.value, patience())) return;
  give_up(MailboxFailure::cpu_silent);
  check();
}

void HostMailbox::collect(float* x, int64_t n) {
  wait_for([&] { return has_come(flags_->answered.value.load(std::memory_order_acquire), posted_); });
  for (int64_t i = 0; i < n; ++i) x[i] += answer_[i];
}

void HostMailbox::collect_published(float* x, int64_t n) {
  HEARTH_CHECK(can_publish(n), "{} elements of an answer in words", n);
  for (int64_t i = 0; i < n; ++i) {
    uint64_t word = 0;
    wait_for([&] { return static_cast<uint32_t>(word = words_[i].load(std::memory_order_acquire)) == posted_; });
    x[i] += std::bit_cast<float>(static_cast<uint32_t>(word >> 32));
  }
}

std::string describe(MailboxFailure failure, std::chrono::milliseconds patience) {
  const double seconds = std::chrono::duration<double>(patience).count();
  switch (failure) {
    case MailboxFailure::none:
      return "nothing has failed";
    case MailboxFailure::cpu_silent:
      return fmt::format("the CPU has not answered a layer in {:g} s; it may have stopped", seconds);
    case MailboxFailure::device_silent:
      return fmt::format("the device has not asked for its next layer in {:g} s; it may have stopped", seconds);
    case MailboxFailure::abandoned:
      return "the other side of a hand-off stopped because of an error";
  }
  return fmt::format("a hand-off failed with code {}", static_cast<uint32_t>(failure));
}

}  // namespace hearth
