#pragma once
// The CPU's part of a divided pass: serves the main device's hand-offs, layer by layer.
#include <cstdint>
#include <span>
#include <vector>

#include "core/device.h"
#include "core/mailbox.h"
#include "engine/activations.h"
#include "engine/forward.h"
#include "engine/kv_cache.h"
#include "model/model.h"

namespace hearth::engine {

class HostHalf {
 public:
  // `weights`, `split`, `mailbox`, `stream` and `layer_thresholds` must outlive it. The cache holds every layer's room;
  // layers whose attention is on the main device never touch theirs, so their pages are never had.
  HostHalf(const model::Config& config, const model::Weights& weights, const std::vector<LayerSplit>& split,
           Device& host, Mailbox& mailbox, ColdStream* stream, int64_t n_ctx, int64_t n_batch, bool with_q8,
           float sparse_threshold, std::span<const float> layer_thresholds);

  // The tokens of the coming pass; host memory.
  void set_tokens(std::span<const int32_t> ids, int64_t first_position);
  // Embeds them: [T][n_embd], valid until the next call.
  const float* embed();
  // Answers every hand-off of one pass over T tokens, in the order in which the main device asks. On an error the
  // mailbox is abandoned, so that the device does not wait for ever, and the error goes on.
  void serve(int64_t T, bool sparse);
  // x [n_embd] -> logits [n_vocab].
  std::span<const float> head(std::span<const float> x);

  // Active cold neurons of the last single-token pass, [n_layer]; 0 where the layer has none on the CPU.
  std::span<const int32_t> n_active() const { return {act_.n_active, split_.size()}; }

 private:
  void attention_part(int64_t layer, int64_t T, const float* x, float* y);
  // x: the residual stream before the FFN, or its normed input where that is what hand-offs bring. Where the main
  // device finds the neurons, waits for them when all that x alone allows is done.
  void ffn_part(int64_t layer, int64_t T, const float* x, float* y);
  void ffn_lone_gates(int64_t layer, Act in, Vector down_bias, float* y);
  // The mailbox, where the answer to a layer's sparse FFN is to be published in it.
  Mailbox* published(int64_t layer) const;
  // The FFN's input of one token, from what a hand-off brought.
  Act ffn_input(int64_t layer, const float* x);
  // Before the layer's hand-off of one token comes: fetches rows of neurons that the main device expects it to bring.
  void fetch_hinted(int64_t layer);
  void serve_layer(int64_t layer, int64_t T);

  const model::Config& config_;
  const std::vector<LayerSplit>& split_;
  Device& host_;
  Mailbox& mailbox_;
  Activations act_;
  KvCache kv_;
  ForwardArgs f_;
};

}  // namespace hearth::engine
