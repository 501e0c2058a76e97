#include "engine/host_half.h"

#include <algorithm>
#include <cstring>

namespace hearth::engine {

HostHalf::HostHalf(const model::Config& config, const model::Weights& weights, const std::vector<LayerSplit>& split,
                   Device& host, Mailbox& mailbox, int64_t n_ctx, int64_t n_batch, bool with_q8, float sparse_threshold,
                   std::span<const float> layer_thresholds)
    : config_(config),
      split_(split),
      host_(host),
      mailbox_(mailbox),
      act_(host, config, n_batch, with_q8),
      kv_(host, config, n_ctx, attention_layers(split, true)),
      f_{config, weights, host, act_, kv_, n_ctx, n_ctx, false, sparse_threshold, nullptr, nullptr, layer_thresholds} {}

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

void HostHalf::ffn_part(int64_t layer, int64_t T, const float* x, float* y) {
  ffn_norm(f_, layer, x, T);
  ffn_block(f_, layer, T, f_.weights.layers[static_cast<size_t>(layer)].ffn_down_bias, y);
}

void HostHalf::serve_layer(int64_t layer, int64_t T) {
  const LayerSplit& split = split_[static_cast<size_t>(layer)];
  const size_t bytes = static_cast<size_t>(T * config_.n_embd) * sizeof(float);
  float* const answer = mailbox_.answer_buffer();
  if (config_.parallel_block) {
    if (!split.attention_on_host && !split.has_cold) return;
    const float* x = mailbox_.wait_request().x;
    std::memset(answer, 0, bytes);
    if (split.has_cold) ffn_part(layer, T, x, answer);
    if (split.attention_on_host) attention_part(layer, T, x, answer);
    return mailbox_.answer();
  }
  if (split.attention_on_host) {
    const float* x = mailbox_.wait_request().x;
    std::memset(answer, 0, bytes);
    attention_part(layer, T, x, answer);
    if (split.whole_on_host()) {  // the FFN's input is x plus what the attention added
      for (int64_t i = 0; i < T * config_.n_embd; ++i) act_.x[i] = x[i] + answer[i];
      ffn_part(layer, T, act_.x, answer);
      return mailbox_.answer();
    }
    mailbox_.answer();
  }
  if (!split.has_cold) return;
  const float* x = mailbox_.wait_request().x;
  std::memset(answer, 0, bytes);
  ffn_part(layer, T, x, answer);
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
