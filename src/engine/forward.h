#pragma once
// The forward pass, written once over Device. It reads like the papers; sizes and kernels are the device's business.
#include <cstdint>
#include <span>
#include <vector>

#include "core/device.h"
#include "engine/activations.h"
#include "engine/cold_stream.h"
#include "engine/kv_cache.h"
#include "engine/placement.h"
#include "model/model.h"

namespace hearth::engine {

// How one layer is run: which part the main device leaves to the CPU (it posts the residual stream x and adds what
// comes back), and how the neurons that one token needs are found.
struct LayerSplit {
  bool attention_on_host = false;
  bool has_hot = true;    // the main device owns some of the layer's neurons
  bool has_cold = false;  // the CPU does
  Selection selection = Selection::all;
  bool predictor_on_main = true;  // with Selection::predictor: the main device predicts, for the CPU's neurons too
  // Neurons of the CPU whose gate rows are on the main device too, behind those of its own neurons: the first rows of
  // the CPU's shard. For one token their gates come with the hand-off.
  int64_t n_lone_gates = 0;
  // The first rows of the CPU's shard, as the main device sees them, that it reads in place, instead of the CPU, for
  // one token; or none.
  FfnShard linked;
  int64_t n_first = 0;  // neurons of the main device; all others are the CPU's, or linked
  bool rests = false;   // all others are linked: for one token, the CPU has no part in the FFN
  // While the layer before is computed, the main device tells the CPU which neurons this one's hand-off of one token
  // will probably bring: its predictor evaluated on that layer's input.
  bool hinted = false;
  // The main device has rows of some neurons.
  bool has_rows() const { return has_hot || n_lone_gates > 0; }
  // The main device takes no part in the layer but the hand-off.
  bool whole_on_host() const {
    return attention_on_host && !has_rows() && !(selection == Selection::predictor && predictor_on_main);
  }
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
  bool sparse;     // single tokens skip inactive neurons, as each layer's selection says
  float sparse_threshold;
  const std::vector<LayerSplit>& split;
  Mailbox* mailbox = nullptr;                    // where some layer has a part of the CPU's
  ColdStream* stream = nullptr;                  // with `mailbox`: what prompts do with the CPU's neurons
  std::span<const float> layer_thresholds = {};  // [n_layer], instead of sparse_threshold; or empty
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
void attention_block(const ForwardArgs& f, int64_t layer, int64_t T, float* y);  // act.normed -> y
// act.ffn_input(layer, T) -> y: the neurons of this device's shard, as `sparse` says.
void ffn_dense_block(const ForwardArgs& f, int64_t layer, int64_t T, Vector down_bias, float* y);
void ffn_sparse_block(const ForwardArgs& f, int64_t layer, const SparseArgs& sparse, Act in, Vector down_bias,
                      float* y);  // `in` instead of act.ffn_input()
// x [T][n_embd] -> act.normed, act.ffn_input(layer, T).
void attention_norm(const ForwardArgs& f, int64_t layer, const float* x, int64_t T);
void ffn_norm(const ForwardArgs& f, int64_t layer, const float* x, int64_t T);

// Whether the hand-off of one token brings the FFN's normed input instead of x: the main device has made it, and the
// CPU need not do so again while the device waits.
bool hands_over_input(const ForwardArgs& f, int64_t layer);
// Whether the next layer's predictor, on the main device or on the CPU, reads this layer's FFN input.
bool next_looks_back(const ForwardArgs& f, int64_t layer, bool on_main);
// Whether, while this layer's neurons of one token are computed, hints of the next one's are made.
bool hints_next(const ForwardArgs& f, int64_t layer);
// Whether the CPU's neurons of a layer visit the main device for this batch, so that the CPU has no part in its FFN.
bool streams_cold(const ForwardArgs& f, int64_t layer, int64_t T);
// Whether the CPU has a part in a layer's FFN, of this batch.
bool asks_cpu(const ForwardArgs& f, int64_t layer, int64_t T);
// Whether a layer's FFN of this batch computes only the neurons that are found to be needed.
bool skips_neurons(const ForwardArgs& f, int64_t layer, int64_t T);
// Whether the main device adds the CPU's answer to a layer's FFN in the pass that adds its own neurons.
bool adds_answer(const ForwardArgs& f, int64_t layer, int64_t T);
// One token, whole layer: the neurons that this device's predictor names, of its own shard in act.predicted; of the
// others, in the hand-off. x: the residual stream before the FFN's norm.
void predict_neurons(const ForwardArgs& f, int64_t layer, const float* x, const HandOff& hand_off);
// The arguments of ffn_sparse() on the neurons that the layer's selection finds on this device alone.
SparseArgs sparse_args(const ForwardArgs& f, int64_t layer);

}  // namespace hearth::engine
