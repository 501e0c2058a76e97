#pragma once
// Every activation of a forward pass, allocated once. T = tokens in the batch, at most n_batch.
#include <cstddef>
#include <cstdint>

#include "core/device.h"
#include "model/config.h"

namespace hearth::engine {

struct Activations {
  Activations() = default;
  // with_q8: some weights are quantised, so inputs of matrices also get their 8-bit companions.
  Activations(Device& device, const model::Config& config, int64_t n_batch, bool with_q8);

  int32_t* ids = nullptr;       // [n_batch] token ids, then
  int32_t* pos = nullptr;       // [n_batch] their positions
  float* x = nullptr;           // [T][n_embd] residual stream
  Act normed;                   // [T][n_embd] input of the attention, or of the head
  Act ffn_normed;               // [T][n_embd] input of the FFN; for one token use ffn_input()
  void* x_q8 = nullptr;         // the 8-bit form of one token's x, for predictors that read the residual stream
  float* q = nullptr;           // [T][n_head * head_dim]
  float* k = nullptr;           // [T][n_head_kv * head_dim]
  float* v = nullptr;           // [T][n_head_kv * head_dim]
  Act attn;                     // [T][n_head * head_dim] output of the attention
  float* logits = nullptr;      // [logit_rows][n_vocab]
  int64_t logit_rows = 1;       // positions whose logits are computed at once
  NeuronList predicted;         // [n_ff] ids that a predictor named
  NeuronList linked;            // [n_ff] of those, the ones whose rows are read over the link
  int32_t* n_active = nullptr;  // [n_layer] active neurons of the last sparse step, without the linked ones, then
  int32_t* n_linked_active = nullptr;  // [n_layer] active linked ones, then
  int32_t* best = nullptr;             // [1] argmax of the logits: one download brings all
  int64_t n_batch = 1;

  // The input of a layer's FFN. For one token that of the layer before stays valid beside it.
  Act ffn_input(int64_t layer, int64_t T) const {
    if (T > 1 || layer % 2 == 0) return ffn_normed;
    Act second{ffn_normed.x + n_embd_, nullptr};
    if (ffn_normed.q8 != nullptr) second.q8 = static_cast<std::byte*>(ffn_normed.q8) + q8_bytes_;
    return second;
  }

 private:
  int64_t n_embd_ = 0;
  size_t q8_bytes_ = 0;  // of a row of n_embd activations
  DeviceBuffer storage_;
};

}  // namespace hearth::engine
