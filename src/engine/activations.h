#pragma once
// Every activation of a forward pass, allocated once. T = tokens in the batch, at most n_batch.
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
  Act ffn_normed;               // [T][n_embd] input of the FFN
  float* q = nullptr;           // [T][n_head * head_dim]
  float* k = nullptr;           // [T][n_head_kv * head_dim]
  float* v = nullptr;           // [T][n_head_kv * head_dim]
  Act attn;                     // [T][n_head * head_dim] output of the attention
  float* logits = nullptr;      // [logit_rows][n_vocab]
  int64_t logit_rows = 1;       // positions whose logits are computed at once
  int32_t* n_active = nullptr;  // [n_layer] active neurons of the last sparse step
  int32_t* best = nullptr;      // [1] argmax of the logits
  int64_t n_batch = 1;

 private:
  DeviceBuffer storage_;
};

}  // namespace hearth::engine
