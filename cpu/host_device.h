#pragma once
// What the CPU devices share: host memory with accounting, and copies that are plain memcpy.
#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/buffer.h"
#include "core/device.h"
#include "core/error.h"
#include "core/mailbox.h"

namespace hearth::cpu {

class HostDevice : public Device {
 public:
  bool is_host() const override { return true; }

  std::vector<MemoryUse> memory() const override {
    std::vector<MemoryUse> uses;
    for (size_t i = 0; i < used_.size(); ++i) {
      if (used_[i] > 0) uses.push_back({static_cast<Purpose>(i), used_[i]});
    }
    return uses;
  }

  void upload(void* device, const void* host, size_t bytes) override { copy(device, host, bytes); }
  void download(void* host, const void* device, size_t bytes) override { copy(host, device, bytes); }
  void fill_zero(void* device, size_t bytes) override {
    if (bytes > 0) std::memset(device, 0, bytes);
  }
  void synchronize() override {}

  // The matrix as it is. Throws Error for a type without kernels.
  Matrix adopt(const Matrix& host) override {
    const DTypeTraits& t = traits(host.type);
    if (host && !t.computable()) {
      fail(
          "weights of type {} cannot be computed with; expected f32, f16, bf16, q8_0 or q4_0: quantise the model again",
          t.name);
    }
    HEARTH_CHECK(host.scales == nullptr && host.cols % t.block_size == 0, "{} columns of type {}", host.cols, t.name);
    return host;
  }
  Vector adopt(const Vector& host) override { return host; }
  size_t adopted_bytes(const Matrix&) const override { return 0; }

  std::unique_ptr<Mailbox> open_mailbox(int64_t capacity, int64_t max_ids) override {
    return std::make_unique<HostMailbox>(capacity, max_ids);
  }
  void post(Mailbox& mailbox, const float* x, int64_t n) override { host(mailbox).post(x, n); }
  void collect(Mailbox& mailbox, float* x, int64_t n) override { host(mailbox).collect(x, n); }

  // A stand-in for a device: what predict() would hand over.
  void hint(const Predictor& p, Act in, const HintArgs& args) override {
    std::vector<int32_t> ids(static_cast<size_t>(p.n()));
    int32_t counts[3] = {};
    int32_t* const linked = ids.data() + args.n_first;
    int32_t* const rest = linked + args.n_linked;
    predict(p, in,
            {.n_first = args.n_first,
             .first = {ids.data(), counts},
             .rest = {rest, counts + 1},
             .hand_off = {},
             .n_linked = args.n_linked,
             .linked = {linked, counts + 2}});
    const auto n_first = static_cast<int32_t>(args.n_first);
    host(*args.mailbox)
        .post_hints(
            MailboxMarks::of(static_cast<int32_t>(p.n()), n_first, n_first + static_cast<int32_t>(args.n_linked)),
            {rest, static_cast<size_t>(counts[1])});
  }

  bool can_link(const FfnShard&) const override { return true; }
  FfnShard link(const FfnShard& host, std::byte* /*memory*/) override { return host; }

 protected:
  // Hands out the neurons that a predictor of n neurons names, ascending, as `args` asks; changes them.
  static void hand_out(const PredictArgs& args, int64_t n, std::span<int32_t> named) {
    const auto store = [](std::span<const int32_t> ids, const NeuronList& to) {
      std::copy(ids.begin(), ids.end(), to.ids);
      *to.count = static_cast<int32_t>(ids.size());
    };
    // Takes those below `bound` from the front.
    const auto take = [&](int64_t bound) {
      const auto end = std::lower_bound(named.begin(), named.end(), static_cast<int32_t>(bound));
      const auto taken = named.first(static_cast<size_t>(end - named.begin()));
      named = named.subspan(taken.size());
      return taken;
    };
    const auto first = take(args.n_first);
    if (args.n_first > 0) store(first, args.first);
    for (int32_t& id : named) id -= static_cast<int32_t>(args.n_first);
    const auto linked = take(args.n_linked);
    if (args.n_linked > 0) store(linked, args.linked);
    if (args.hand_off.mailbox != nullptr) {
      host(*args.hand_off.mailbox).post(args.hand_off.x, args.hand_off.n, named);
    } else if (args.n_first + args.n_linked < n) {
      store(named, args.rest);
    }
  }

  // The part of ffn_sparse() for neurons that another device would read over its link.
  void add_linked(const SparseArgs& sparse, Act in, float* y) {
    const LinkedNeurons& l = *sparse.linked;
    const SparseArgs named{
        .threshold = sparse.threshold, .predicted = l.named.ids, .n_predicted = l.named.count, .n_active = l.n_active};
    ffn_sparse(l.shard, named, in, {}, y);
  }

  void* allocate_bytes(size_t bytes, Purpose purpose) override {
    HostBuffer buffer(bytes);
    void* data = buffer.data();
    if (data == nullptr) return nullptr;
    buffers_.emplace(data, std::move(buffer));
    used_[static_cast<size_t>(purpose)] += bytes;
    return data;
  }
  void release_bytes(void* data, size_t bytes, Purpose purpose) override {
    if (data == nullptr) return;
    HEARTH_CHECK(buffers_.erase(data) == 1);
    used_[static_cast<size_t>(purpose)] -= bytes;
  }

  // The part of ffn_sparse() for what the CPU answers.
  static void add_answer(Mailbox& mailbox, float* y, int64_t n) {
    HostMailbox& box = host(mailbox);
    box.can_publish(n) ? box.collect_published(y, n) : box.collect(y, n);
  }

  static HostMailbox& host(Mailbox& mailbox) {
    auto* h = dynamic_cast<HostMailbox*>(&mailbox);
    HEARTH_CHECK(h != nullptr, "a mailbox of another device");
    return *h;
  }

 private:
  static void copy(void* to, const void* from, size_t bytes) {
    if (bytes > 0 && to != from) std::memmove(to, from, bytes);
  }

  std::unordered_map<void*, HostBuffer> buffers_;
  std::array<size_t, 6> used_{};  // bytes, by Purpose
};

}  // namespace hearth::cpu
