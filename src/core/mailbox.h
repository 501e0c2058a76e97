#pragma once
// How a device hands work to the CPU in the middle of a pass: it posts a vector into host memory that it can write, the
// CPU answers with another, and the device adds the answer in. Two flags, no call to any API per hand-off. Which of the
// CPU's neurons fire the device may say later than the vector, so that the CPU prepares the one while it waits for the
// other.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/buffer.h"
#include "core/error.h"
#include "core/ops.h"

namespace hearth {

// Why a mailbox is of no more use. The first reason stays.
enum class MailboxFailure : uint32_t {
  none = 0,
  cpu_silent = 1,     // the device gave up waiting for an answer
  device_silent = 2,  // the CPU gave up waiting for a hand-off
  abandoned = 3,      // a side stopped because of an error of its own
};

// Thrown by a side that stops because the other one had an error, which is the one to report.
class MailboxAbandoned : public Error {
 public:
  using Error::Error;
};

// The shared memory of one mailbox. Hand-offs are numbered 1, 2, 3, …; both sides count by themselves, in the same
// order.
struct MailboxMemory {
  // Each flag on a cache line of its own: one is written by the device and polled by the CPU, the other the reverse.
  template <typename T>
  struct alignas(64) FlagOf {
    std::atomic<T> value{0};
    static_assert(std::atomic<T>::is_always_lock_free);
  };
  using Flag = FlagOf<uint32_t>;
  // Number of the last hand-off whose vector is complete, and from bit 32 on MailboxMarks::packed(); 0 there: it brings
  // no neurons.
  FlagOf<uint64_t> posted;
  Flag answered;  // number of the last one whose answer is complete
  Flag failed;    // a MailboxFailure, set by a side that gave up waiting, or that stopped: the other must not wait
  MailboxFailure failure() const { return static_cast<MailboxFailure>(failed.value.load(std::memory_order_acquire)); }
};

// The neurons of a hand-off, as marks: word j of a token has the hand-off's number in the low half, in the high half
// which of the ids first + 32 j, ... are meant. Words come in any order, after or before the flag that announces them.
struct MailboxMarks {
  int32_t first = 0;    // -31 to 2^18
  int32_t n_words = 0;  // at most 4095
  static constexpr uint32_t kIsMarks = 1u << 31;
  // For the upper half of `posted`.
  constexpr uint32_t packed() const {
    return kIsMarks | static_cast<uint32_t>(n_words) << 19 | static_cast<uint32_t>(first + 31);
  }
  static constexpr MailboxMarks unpack(uint32_t packed) {
    return {static_cast<int32_t>(packed & 0x7FFFFu) - 31, static_cast<int32_t>(packed >> 19 & 0xFFFu)};
  }
  // As a predictor of n neurons makes them, a word for 32 of its rows, when its first `skipped` are not the CPU's to
  // compute. Ids count from row n_first on.
  static constexpr MailboxMarks of(int32_t n, int32_t n_first, int32_t skipped) {
    const int32_t word = skipped / 32, end = (n + 31) / 32;
    return {word * 32 - n_first, end > word ? end - word : 0};
  }
};

// How a mailbox lies in one piece of memory, in bytes from its start.
struct MailboxLayout {
  MailboxLayout(int64_t capacity, int64_t max_ids);
  // So many elements of an answer at most may come as words, too (Mailbox::publish()): those of a few tokens.
  static constexpr int64_t kMostWords = kFewTokens << 15;
  static constexpr int64_t n_words(int64_t capacity) { return std::min(capacity, kMostWords); }
  // Words of one token's marks, and of a hint.
  static constexpr int64_t mark_words(int64_t max_ids) { return max_ids / 32 + 2; }
  size_t x, answer, marks, hints, words, total;
};

class Mailbox {
 public:
  // How long a side waits for the other before it gives up, unless told otherwise. Generous: a prompt's batch may take
  // the CPU seconds a layer.
  static constexpr std::chrono::seconds kPatience{60};

  // `memory`: MailboxLayout::total bytes, aligned to 64, mapped into the device's address space by the caller.
  Mailbox(std::shared_ptr<std::byte> memory, int64_t capacity, int64_t max_ids);
  virtual ~Mailbox() = default;
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  int64_t capacity() const { return capacity_; }
  int64_t max_ids() const { return max_ids_; }
  std::chrono::milliseconds patience() const { return patience_; }
  // To be called before the first hand-off, and before a device records operations with this mailbox.
  void set_patience(std::chrono::milliseconds patience) { patience_ = patience; }

  // --- the CPU's side ---
  // Waits for the vector of the next hand-off. What one brings stays valid until it is answered. Every wait throws
  // Error when the device gave up or stays silent, MailboxAbandoned when it stopped.
  const float* wait_input();
  // Waits for the neurons of T tokens that the hand-off which has begun brings: lists in host memory, valid until the
  // next call.
  NeuronLists wait_neurons(int64_t T);
  // Between two hand-offs: the neurons that the next one will probably bring, ascending, when the device tells; empty
  // when that hand-off has come instead.
  std::span<const int32_t> wait_hints(const MailboxMarks& marks);
  // Whether the vector of the next hand-off is there.
  bool has_next() const;
  // Whether the neurons of the hand-off that has begun begin to be there.
  bool has_neurons() const;
  float* answer_buffer() { return answer_; }  // to be filled between wait_input() and answer()
  // Before answer(), where the device asks for it (Device::ffn_sparse() with SparseArgs::collect): elements [begin,
  // end) are complete, and the device may use them before the others are. Each travels with the hand-off's number in
  // one 8-byte word: no flag has to be seen first. From any thread, of any part; all n elements of the answer in all.
  void publish(int64_t begin, int64_t end);
  bool can_publish(int64_t n) const { return n <= MailboxLayout::n_words(capacity_); }
  void answer();
  // This side stops because of an error: a waiting partner stops waiting.
  void abandon() { give_up(MailboxFailure::abandoned); }
  bool failed() const { return failure() != MailboxFailure::none; }
  MailboxFailure failure() const { return flags_->failure(); }
  // Throws what failure() says, if anything: "the CPU has not answered a layer in 60 s; ..."
  void check() const;
  // The flags, which stay readable after the mailbox is gone.
  std::shared_ptr<const MailboxMemory> flags() const { return {memory_, flags_}; }

 protected:
  void give_up(MailboxFailure why);

  MailboxMemory* flags_;
  float* request_;
  float* answer_;
  std::atomic<uint64_t>* marks_;  // [kFewTokens][mark_words(max_ids)]
  std::atomic<uint64_t>* hints_;  // [mark_words(max_ids)], with the number of a hand-off to come
  std::atomic<uint64_t>* words_;  // [n_words(capacity)] published: number, and from bit 32 on an f32

 private:
  void check_marks(const MailboxMarks& marks) const;
  // Waits for every word of a token, and turns them into ids; returns how many.
  int32_t read_marks(const MailboxMarks& marks, const std::atomic<uint64_t>* words, int32_t* ids);
  // Waits until the flag's lower half is the number of the hand-off being served; returns the flag.
  uint64_t wait(const std::atomic<uint64_t>& flag);

  int64_t capacity_, max_ids_;
  std::chrono::milliseconds patience_ = kPatience;
  std::shared_ptr<std::byte> memory_;
  uint32_t served_ = 0;
  std::vector<int32_t> ids_;  // [kFewTokens][max_ids] of the hand-off being served, then [kFewTokens] how many
  std::vector<int32_t> hinted_;
};

// For devices whose address space is the host's: the device's side is ordinary code, run by another thread than the
// CPU's side.
class HostMailbox : public Mailbox {
 public:
  HostMailbox(int64_t capacity, int64_t max_ids);
  // Posts x [n], and no neurons.
  void post(const float* x, int64_t n);
  // Posts x [n]; post_neurons() brings the neurons of each token.
  void post_input(const float* x, int64_t n, const MailboxMarks& marks);
  void post_neurons(int64_t token, const MailboxMarks& marks, std::span<const int32_t> ids);
  // Before the next post(): neurons that it will probably bring.
  void post_hints(const MailboxMarks& marks, std::span<const int32_t> ids);
  // x += answer; both throw as the CPU's waits do.
  void collect(float* x, int64_t n);
  void collect_published(float* x, int64_t n);

 private:
  // Writes the vector of the next hand-off.
  void begin(const float* x, int64_t n);
  void store(std::atomic<uint64_t>* words, uint32_t number, const MailboxMarks& marks, std::span<const int32_t> ids);
  // Waits for the CPU.
  template <typename Reached>
  void wait_for(Reached reached);
  uint32_t posted_ = 0;
};

// A failure in words.
std::string describe(MailboxFailure failure, std::chrono::milliseconds patience);

}  // namespace hearth
