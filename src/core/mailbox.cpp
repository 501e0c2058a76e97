#include "core/mailbox.h"

#include <cstring>
#include <new>
#include <thread>

#include "core/error.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hearth {
namespace {

size_t request_offset() {
  return sizeof(MailboxMemory);
}
size_t answer_offset(int64_t capacity) {
  return (request_offset() + static_cast<size_t>(capacity) * sizeof(float) + 63) / 64 * 64;
}

// Polls until `flag` has reached `number`. False when the other side failed or the patience is over.
bool wait_for(const std::atomic<uint32_t>& flag, uint32_t number, const std::atomic<uint32_t>& failed) {
  const auto reached = [&] { return static_cast<int32_t>(flag.load(std::memory_order_acquire) - number) >= 0; };
  const auto give_up = std::chrono::steady_clock::now() + Mailbox::kPatience;
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

const float* Mailbox::wait_request() {
  ++served_;
  if (!wait_for(flags_->posted.value, served_, flags_->failed.value)) {
    abandon();
    fail("the device has not asked for its next layer in {} s; it may have stopped", kPatience.count());
  }
  return request_;
}

void Mailbox::answer() {
  flags_->answered.value.store(served_, std::memory_order_release);
}

HostMailbox::HostMailbox(int64_t capacity)
    : HostMailbox(std::make_shared<HostBuffer>(answer_offset(capacity) + static_cast<size_t>(capacity) * sizeof(float)),
                  capacity) {}

HostMailbox::HostMailbox(std::shared_ptr<HostBuffer> memory, int64_t capacity)
    : Mailbox(new (memory->data()) MailboxMemory, reinterpret_cast<float*>(memory->data() + request_offset()),
              reinterpret_cast<float*>(memory->data() + answer_offset(capacity)), capacity, memory) {}

void HostMailbox::post(const float* x, int64_t n) {
  HEARTH_CHECK(n <= capacity(), "{} floats in a mailbox of {}", n, capacity());
  std::memcpy(request_, x, static_cast<size_t>(n) * sizeof(float));
  flags_->posted.value.store(++posted_, std::memory_order_release);
}

void HostMailbox::collect(float* x, int64_t n) {
  if (!wait_for(flags_->answered.value, posted_, flags_->failed.value)) {
    abandon();
    fail("the CPU has not answered a layer in {} s; it may have stopped", kPatience.count());
  }
  for (int64_t i = 0; i < n; ++i) x[i] += answer_[i];
}

}  // namespace hearth
