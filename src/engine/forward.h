#pragma once
// The forward pass, written once over Device. It reads like the papers; sizes and kernels are the device's business.
#include <cstdint>
#include <span>
#include <vector>

#include "core/device.h"
#include "engine/activations.h"
#include "engine/kv_cache.h"
#include "model/model.h"

namespace hearth::engine {

// Which part of a layer the main device leaves to the CPU. It posts the residual stream x and adds what comes back.
struct LayerSplit {
  bool attention_on_host = false;
  bool has_hot = true;    // the main device owns some of the layer's neurons
  bool has_cold = false;  // the CPU does
  bool whole_on_host() const { return attention_on_host && !has_hot; }
};

// The layers whose attention is on the host, or on the main device.
inline std::vector<bool> attention_layers(const std::vector<LayerSplit>& split, bool on_host) {
  std::vector<bool> layers;
  for (const LayerSplit& s : split) layers.push_back(s.attention_on_host == on_host);
  return layers;
}

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
  const std::vector<LayerSplit>* split = nullptr;  // null: everything is on this device
  Mailbox* mailbox = nullptr;                      // with `split`
  std::span<const float> layer_thresholds = {};    // [n_layer], instead of sparse_threshold; or empty
  float threshold(int64_t layer) const {
    return layer_thresholds.empty() ? sparse_threshold : layer_thresholds[static_cast<size_t>(layer)];
  }
};

// act.ids [T] -> act.x [T][n_embd].
void forward_embedding(const ForwardArgs& f, int64_t T);
// act.x, act.pos -> act.x, and the KV cache: all layers.
void forward_layers(const ForwardArgs& f, int64_t T);
// act.x rows [first, first + count) -> act.logits [count][n_vocab]: the last norm and the output head.
void forward_head(const ForwardArgs& f, int64_t first, int64_t count);

// The two halves of a layer, for whoever runs a part of one. Inputs are normed; outputs are added to y [T][n_embd].
void attention_block(const ForwardArgs& f, int64_t layer, int64_t T, float* y);              // act.normed -> y
void ffn_block(const ForwardArgs& f, int64_t layer, int64_t T, Vector down_bias, float* y);  // act.ffn_normed -> y
// x [T][n_embd] -> act.normed, act.ffn_normed.
void attention_norm(const ForwardArgs& f, int64_t layer, const float* x, int64_t T);
void ffn_norm(const ForwardArgs& f, int64_t layer, const float* x, int64_t T);

}  // namespace hearth::engine
