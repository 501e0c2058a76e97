#pragma once
// Bytes that each side reads for a token, layer by layer, and the time below which no implementation of the same division
// can get: these bytes over the bandwidths of their memories.
#include <cstdint>
#include <vector>

#include "engine/schedule.h"
#include "model/model.h"

namespace hearth::engine {

// Counted over single-token steps in a sparse mode.
struct DensityStats {
  int64_t steps = 0;
  std::vector<double> active;          // per layer: neurons active, summed over steps
  std::vector<double> active_on_host;  // of those, computed by the CPU beside a main device
  std::vector<double> active_linked;   // computed by the main device, read from host memory
  // For divided mixtures: experts that were named in each layer, and those of them that the host has, of cut ones the
  // part that it has.
  std::vector<double> experts, experts_on_host;
  // Neurons among which the active ones were counted: all of a dense layer; of a mixture those of the chosen experts
  // that are computed where neurons are skipped, and, of them, the host's.
  std::vector<double> neurons, neurons_on_host;
  double density() const;     // mean share of active neurons; NaN before the first step
  double host_share() const;  // share of the active neurons, or experts, that the host has; or NaN
  DensityStats since(const DensityStats& before) const;  // what was counted after `before`
};

// Bytes read by the main device from its own memory, by the CPU beside it, and by the main device from host memory.
struct SideBytes {
  double main = 0, host = 0, link = 0;
  double total() const { return main + host + link; }
  SideBytes& operator+=(const SideBytes& b) {
    main += b.main, host += b.host, link += b.link;
    return *this;
  }
};

struct LayerTraffic {
  SideBytes attention;  // wq, wk, wv, wo and the layer's cache
  SideBytes selection;  // read before it is known who computes what: predictors
  SideBytes ffn;        // read at the same time: gate, up and down rows
  SideBytes hint;       // the same, to look ahead at the next layer
  bool hinted = false;  // the CPU may have begun with its rows before the layer did
};

struct TokenTraffic {
  std::vector<LayerTraffic> layers;
  SideBytes head;
  bool parallel_block = false;  // attention and FFN of a layer have the same input
  SideBytes total() const;
};

// Bytes of one decode step at a context of n_kv positions: all matrices, less the rows that a sparse mode skips, with
// as many active neurons on each side as were counted (with nothing counted: all rows), routers and as many experts as a
// token uses (with nothing counted: each as often as any other), predictors, and the KV cache.
// Predictors that also look ahead are counted twice. Gate rows that a predictor names in vain are not counted, nor are
// norms, biases and one row of the embedding.
struct TrafficArgs {
  const model::Model& model;
  const std::vector<LayerFacts>& facts;
  const std::vector<MainRows>& rows;
  bool sparse = false;
  bool output_on_host = false;
};
TokenTraffic token_traffic(const TrafficArgs& args, const DensityStats& counted, int64_t n_kv);

// The floor, in seconds; bandwidths in bytes/s:
//   head + sum over layers of (attention + selection + max(main device's FFN, CPU's FFN, linked rows)),
// each its bytes over the bandwidth of its side. Of a layer that was looked ahead at, the CPU's FFN may be hidden
// behind attention and selection, too; what looking ahead reads is not in it. Where a layer's attention and FFN have
// the same input, the maximum is of each side's attention and FFN. Nothing is added for arithmetic, kernels, hand-offs
// or sampling.
double floor_seconds(const TokenTraffic& traffic, const SideBytes& bandwidths);

}  // namespace hearth::engine
