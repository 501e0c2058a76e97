#pragma once
// The forward pass, written once over Device. It reads like the papers; sizes and kernels are the device's business.
#include <cstdint>

#include "core/device.h"
#include "engine/activations.h"
#include "engine/kv_cache.h"
#include "model/model.h"

namespace hearth::engine {

struct ForwardArgs {
  const model::Config& config;
  const model::Weights& weights;  // in the device's address space
  Device& device;
  Activations& act;
  KvCache& kv;
  int64_t n_ctx;   // of the cache
  int64_t max_kv;  // upper bound of the positions in use after this pass
  bool sparse;     // single tokens skip inactive neurons
  float sparse_threshold;
};

// act.ids/act.pos [T] -> act.x [T][n_embd], and the KV cache: embedding and all layers.
void forward_layers(const ForwardArgs& f, int64_t T);

// act.x rows [first, first + count) -> act.logits [count][n_vocab]: the last norm and the output head.
void forward_head(const ForwardArgs& f, int64_t first, int64_t count);

}  // namespace hearth::engine
