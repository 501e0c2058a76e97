#include "engine/activations.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace hearth::engine {
namespace {

// Lays out pieces one after the other in a single allocation, each aligned for the widest loads.
class Layout {
 public:
  template <typename T>
  void add(T** target, size_t bytes) {
    pieces_.push_back({reinterpret_cast<void**>(target), total_});
    total_ += (bytes + 255) / 256 * 256;
  }
  DeviceBuffer place(Device& device) {
    DeviceBuffer storage = device.allocate(total_, Purpose::activations);
    for (const auto& [target, offset] : pieces_) *target = storage.as<std::byte>() + offset;
    return storage;
  }

 private:
  std::vector<std::pair<void**, size_t>> pieces_;
  size_t total_ = 0;
};

constexpr int64_t kLogitBytes = int64_t{16} << 20;  // bounds the logits of a batch whose every position is wanted

}  // namespace

Activations::Activations(Device& device, const model::Config& c, int64_t batch, bool with_q8)
    : n_batch(batch), n_embd_(c.n_embd), q8_bytes_(device.q8_bytes(c.n_embd)) {
  const auto f32 = [](int64_t n) { return static_cast<size_t>(n) * sizeof(float); };
  logit_rows = std::clamp<int64_t>(kLogitBytes / (4 * c.n_vocab), 1, batch);
  Layout layout;
  layout.add(&ids, f32(2 * batch));
  layout.add(&x, f32(batch * c.n_embd));
  layout.add(&normed.x, f32(batch * c.n_embd));
  layout.add(&ffn_normed.x, f32(std::max<int64_t>(batch, 2) * c.n_embd));
  layout.add(&q, f32(batch * c.n_head * c.head_dim));
  layout.add(&k, f32(batch * c.n_head_kv * c.head_dim));
  layout.add(&v, f32(batch * c.n_head_kv * c.head_dim));
  layout.add(&attn.x, f32(batch * c.n_head * c.head_dim));
  layout.add(&logits, f32(logit_rows * c.n_vocab));
  layout.add(&predicted.ids, f32(c.n_ff));
  layout.add(&predicted.count, sizeof(int32_t));
  layout.add(&linked.ids, f32(c.n_ff));
  layout.add(&linked.count, sizeof(int32_t));
  layout.add(&n_active, f32(2 * c.n_layer + 1));
  if (with_q8) {
    layout.add(&normed.q8, static_cast<size_t>(batch) * q8_bytes_);
    layout.add(&ffn_normed.q8, static_cast<size_t>(std::max<int64_t>(batch, 2)) * q8_bytes_);
    layout.add(&x_q8, q8_bytes_);
    layout.add(&attn.q8, static_cast<size_t>(batch) * device.q8_bytes(c.n_head * c.head_dim));
  }
  storage_ = layout.place(device);
  pos = ids + batch;
  n_linked_active = n_active + c.n_layer;
  best = n_linked_active + c.n_layer;
}

}  // namespace hearth::engine
