#include "engine/host_half.h"

#include <algorithm>
#include <cstring>

namespace hearth::engine {

HostHalf::HostHalf(const model::Config& config, const model::Weights& weights, const std::vector<LayerSplit>& split,
                   Device& host, Mailbox& mailbox, ColdStream* stream, int64_t n_ctx, int64_t n_batch, bool with_q8,
                   float sparse_threshold, std::span<const float> layer_thresholds)
    : config_(config),
      split_(split),
      host_(host),
      mailbox_(mailbox),
      act_(host, config, n_batch, with_q8),
      kv_(host, config, n_ctx, attention_layers(split, true)),
      f_{config, weights,          host,  act_,    kv_,    n_ctx,           n_ctx,
         false,  sparse_threshold, split, nullptr, stream, layer_thresholds} {}

void HostHalf::set_tokens(std::span<const int32_t> ids, int64_t first_position) {
  std::copy(ids.begin(), ids.end(), act_.ids);
  for (size_t i = 0; i < ids.size(); ++i) act_.pos[i] = static_cast<int32_t>(first_position + static_cast<int64_t>(i));
  f_.max_kv = first_position + static_cast<int64_t>(ids.size());
}

const float* HostHalf::embed() {
  const int64_t T = f_.max_kv - act_.pos[0];
  forward_embedding(f_, T);
  return act_.x;
}

std::span<const float> HostHalf::head(std::span<const float> x) {
  std::copy(x.begin(), x.end(), act_.x);
  forward_head(f_, 0, 1);
  return {act_.logits, static_cast<size_t>(config_.n_vocab)};
}

void HostHalf::attention_part(int64_t layer, int64_t T, const float* x, float* y) {
  attention_norm(f_, layer, x, T);
  attention_block(f_, layer, T, y);
}

Act HostHalf::ffn_input(int64_t layer, const float* x) {
  Act in = act_.ffn_input(layer, 1);
  if (!hands_over_input(f_, layer)) {
    ffn_norm(f_, layer, x, 1);
    return in;
  }
  const bool kept = next_looks_back(f_, layer, false);  // for the next layer's predictor, whatever its weights are
  if (kept) {
    std::copy_n(x, config_.n_embd, in.x);
  } else {
    in.x = const_cast<float*>(x);  // inputs of operations are only read
  }
  const FfnShard& shard = f_.weights.layers[static_cast<size_t>(layer)].ffn;
  if (kept || is_quantized(shard.gate.type) || (shard.up && is_quantized(shard.up.type))) {
    host_.quantize(in, 1, config_.n_embd);
  }
  return in;
}

Mailbox* HostHalf::published(int64_t layer) const {
  return adds_answer(f_, layer, 1) && mailbox_.can_publish(config_.n_embd) ? &mailbox_ : nullptr;
}

// The neurons whose gates are the CPU's own, while the main device evaluates the others'; then those.
void HostHalf::ffn_lone_gates(int64_t layer, Act in, Vector down_bias, float* y) {
  const FfnShard& whole = f_.weights.layers[static_cast<size_t>(layer)].ffn;
  const int64_t n_lone = split_[static_cast<size_t>(layer)].n_lone_gates;
  int32_t n_own = 0;
  if (n_lone < whole.n()) {
    host_.ffn_sparse(slice_neurons(whole, n_lone, whole.n() - n_lone), sparse_args(f_, layer), in, {}, y);
    n_own = act_.n_active[layer];
  }
  const MailboxRequest request = mailbox_.wait_neurons();
  SparseArgs known = sparse_args(f_, layer);
  known.answer = published(layer);
  known.predicted = request.ids, known.n_predicted = request.n_ids, known.gate_values = request.values;
  ffn_sparse_block(f_, layer, known, in, down_bias, y);
  act_.n_active[layer] += n_own;
}

void HostHalf::ffn_part(int64_t layer, int64_t T, const float* x, float* y) {
  const LayerSplit& split = split_[static_cast<size_t>(layer)];
  const Vector bias = f_.weights.layers[static_cast<size_t>(layer)].ffn_down_bias;
  if (!skips_neurons(f_, layer, T)) {
    ffn_norm(f_, layer, x, T);
    return ffn_dense_block(f_, layer, T, bias, y);
  }
  const Act in = ffn_input(layer, x);
  if (split.n_lone_gates > 0) return ffn_lone_gates(layer, in, bias, y);
  SparseArgs sparse = sparse_args(f_, layer);
  sparse.answer = published(layer);
  if (split.selection == Selection::predictor) {
    if (split.predictor_on_main) {
      host_.fetch_input(f_.weights.layers[static_cast<size_t>(layer)].ffn, in, mailbox_);
      const MailboxRequest request = mailbox_.wait_neurons();
      sparse.predicted = request.ids, sparse.n_predicted = request.n_ids;
    } else {
      predict_neurons(f_, layer, x, {});
    }
  }
  ffn_sparse_block(f_, layer, sparse, in, bias, y);
}

void HostHalf::fetch_hinted(int64_t layer) {
  const LayerSplit& split = split_[static_cast<size_t>(layer)];
  const FfnShard& cold = f_.weights.layers[static_cast<size_t>(layer)].ffn;
  const auto n_first = static_cast<int32_t>(split.n_first), n = n_first + static_cast<int32_t>(cold.n());
  const auto marks = MailboxMarks::of(n, n_first, n_first + static_cast<int32_t>(split.linked.n()));
  const std::span<const int32_t> told = mailbox_.wait_hints(marks);
  // Of a hint that came a hand-off late, what is no row of this layer's.
  const auto begin = std::lower_bound(told.begin(), told.end(), 0);
  const std::span<const int32_t> ids(begin, std::lower_bound(begin, told.end(), cold.n()));
  if (!ids.empty()) host_.fetch(cold, ids, mailbox_);
}

void HostHalf::serve_layer(int64_t layer, int64_t T) {
  const LayerSplit& split = split_[static_cast<size_t>(layer)];
  const bool has_cold = asks_cpu(f_, layer, T);
  const size_t bytes = static_cast<size_t>(T * config_.n_embd) * sizeof(float);
  float* const answer = mailbox_.answer_buffer();
  if (!config_.parallel_block && split.attention_on_host) {
    const float* x = mailbox_.wait_input();
    std::memset(answer, 0, bytes);
    attention_part(layer, T, x, answer);
    if (split.whole_on_host()) {  // the FFN's input is x plus what the attention added
      for (int64_t i = 0; i < T * config_.n_embd; ++i) act_.x[i] = x[i] + answer[i];
      ffn_part(layer, T, act_.x, answer);
      return mailbox_.answer();
    }
    mailbox_.answer();
  }
  const bool attends = config_.parallel_block && split.attention_on_host;
  if (!has_cold && !attends) return;
  if (T == 1 && layer > 0 && hints_next(f_, layer - 1)) fetch_hinted(layer);
  const float* x = mailbox_.wait_input();
  std::memset(answer, 0, bytes);
  if (has_cold) ffn_part(layer, T, x, answer);
  if (attends) attention_part(layer, T, x, answer);
  mailbox_.answer();
}

void HostHalf::serve(int64_t T, bool sparse) {
  f_.sparse = sparse;
  try {
    for (int64_t layer = 0; layer < config_.n_layer; ++layer) serve_layer(layer, T);
  } catch (...) {
    mailbox_.abandon();
    throw;
  }
}

}  // namespace hearth::engine
