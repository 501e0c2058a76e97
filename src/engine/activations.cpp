#include "engine/activations.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "engine/page_pool.h"

namespace hearth::engine {

// Pieces one after the other in a single allocation, each aligned for the widest loads.
class Activations::Layout {
 public:
  template <typename T>
  void add(T** target, size_t bytes) {
    pieces_.push_back({reinterpret_cast<void**>(target), total_});
    total_ += (bytes + 255) / 256 * 256;
  }
  size_t total() const { return total_; }
  DeviceBuffer place(Device& device) {
    DeviceBuffer storage = device.allocate(total_, Purpose::activations);
    for (const auto& [target, offset] : pieces_) *target = storage.as<std::byte>() + offset;
    return storage;
  }

 private:
  std::vector<std::pair<void**, size_t>> pieces_;
  size_t total_ = 0;
};

namespace {

constexpr int64_t kLogitBytes = int64_t{16} << 20;  // bounds the logits of a batch whose every position is wanted

}  // namespace

Limits limits_of(const model::Config& c, int64_t n_ctx, int64_t n_batch, bool quantized) {
  Limits l;
  l.max_tokens = n_batch;
  l.max_context = n_ctx;
  l.max_cols = std::max({c.n_embd, c.n_ff, c.n_attended(), c.latent.n_q_latent, c.latent.n_latent, c.latent.n_plain});
  l.max_rows = std::max({c.n_embd, c.n_ff, c.n_queries(), c.latent.n_q_latent, c.latent.n_latent});
  l.n_vocab = c.n_vocab;
  l.n_ff = c.n_ff;
  l.n_embd = c.n_embd;
  l.n_head = c.n_head, l.n_head_kv = c.n_head_kv, l.head_dim = c.head_dim;
  if (c.experts) {
    l.n_experts = c.experts.routing.n_expert + (c.experts.n_ff_shared > 0 ? 1 : 0);
    l.n_named = c.experts.n_named();
    l.n_ff_expert = std::max(c.experts.n_ff, c.experts.n_ff_shared);
    l.max_cols = std::max(l.max_cols, l.n_ff_expert);
    l.max_rows = std::max({l.max_rows, l.n_ff_expert, c.experts.routing.n_expert});
  }
  l.quantized_weights = quantized;
  return l;
}

ActivationShape ActivationShape::of(int64_t n_ctx, int64_t n_sequences, int64_t n_batch, bool quantized) {
  return {std::min(n_batch, n_ctx * n_sequences), std::max(n_sequences, kFewTokens), pages_of(n_ctx), quantized};
}

void Activations::lay_out(Layout& layout, const model::Config& c, const ActivationShape& shape,
                          FunctionRef<size_t(int64_t)> q8_bytes) {
  const int64_t batch = shape.n_batch, few = kFewTokens, n_kv = c.n_head_kv * c.head_dim;
  const auto words = [](int64_t n) { return static_cast<size_t>(n) * sizeof(float); };
  n_batch = batch, pages_stride = shape.pages_stride;
  logit_rows = std::min(batch, std::max<int64_t>(kLogitBytes / (4 * c.n_vocab), few));
  predicted.stride = linked.stride = c.n_ff;
  layout.add(&ids, words(3 * batch + shape.n_slots * shape.pages_stride));
  layout.add(&x, words(batch * c.n_embd));
  layout.add(&normed.x, words(batch * c.n_embd));
  n_named_ = c.experts.n_named(), n_embd_ = c.n_embd;
  layout.add(&ffn_normed_.x, words(batch * (c.n_embd + 2 * n_named_)));
  layout.add(&odd_ffn_normed_.x, words(few * (c.n_embd + 2 * n_named_)));
  layout.add(&q, words(batch * c.n_head * c.head_dim));
  layout.add(&k, words(batch * n_kv));
  layout.add(&v, words(batch * (c.latent ? 0 : n_kv)));
  layout.add(&attn.x, words(batch * c.n_attended()));
  if (c.latent) {
    layout.add(&q_heads, words(batch * c.n_queries()));
    layout.add(&q_latent, words(batch * c.latent.n_q_latent));
    layout.add(&q_latent_normed.x, words(batch * c.latent.n_q_latent));
    layout.add(&latents, words(batch * c.n_head * c.latent.n_latent));
  }
  if (c.post_norms) layout.add(&branch, words(batch * c.n_embd));
  layout.add(&logits, words(logit_rows * c.n_vocab));
  for (NeuronLists* lists : {&predicted, &linked}) {
    layout.add(&lists->ids, words(few * c.n_ff));
    layout.add(&lists->count, words(few));
  }
  layout.add(&n_active, words((2 * c.n_layer + 1) * few));
  if (!shape.with_q8) return;
  const size_t row = q8_bytes(c.n_embd);
  layout.add(&normed.q8, static_cast<size_t>(batch) * row);
  layout.add(&ffn_normed_.q8, static_cast<size_t>(batch) * row);
  layout.add(&odd_ffn_normed_.q8, static_cast<size_t>(few) * row);
  layout.add(&x_q8, static_cast<size_t>(few) * row);
  layout.add(&attn.q8, static_cast<size_t>(batch) * q8_bytes(c.n_attended()));
  if (c.latent) layout.add(&q_latent_normed.q8, static_cast<size_t>(batch) * q8_bytes(c.latent.n_q_latent));
}

Activations::Activations(Device& device, const model::Config& c, const ActivationShape& shape) {
  Layout layout;
  lay_out(layout, c, shape, [&](int64_t n) { return device.q8_bytes(n); });
  storage_ = layout.place(device);
  pos = ids + n_batch, slot = pos + n_batch, pages = slot + n_batch;
  n_linked_active = n_active + c.n_layer * kFewTokens;
  best = n_linked_active + c.n_layer * kFewTokens;
}

size_t Activations::bytes(const model::Config& c, const ActivationShape& shape, FunctionRef<size_t(int64_t)> q8_bytes) {
  Activations unplaced;
  Layout layout;
  unplaced.lay_out(layout, c, shape, q8_bytes);
  return layout.total();
}

}  // namespace hearth::engine
