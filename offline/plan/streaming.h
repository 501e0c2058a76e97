#pragma once
// Prompts: from which batch on what the CPU has visits the GPU instead of being computed where it is, and what comes over
// the link then.
#include <cstdint>
#include <vector>

#include "engine/placement.h"
#include "offline/plan/cost_model.h"
#include "offline/plan/frequencies.h"
#include "offline/plan/shape.h"

namespace hearth::offline {

class Streaming {
 public:
  // References are kept until the constructor returns.
  Streaming(const ModelShape& shape, const Frequencies& frequencies, const engine::Placement& placement,
            const CostModel& cost);

  // Batches of at least this many tokens stream; 0: there is nothing that can. Of dense models by the weights of a layer
  // (CostModel::stream_tokens()). Of mixtures the first T, 9 at least, at which
  //   sum over layers of fetch_seconds + chosen(T) / pcie
  //     <= sum over layers of max(chosen(T) / (cpu * dense), 2 T p weights / cpu_flops)
  // where chosen(T) are the bytes of those of the CPU's experts that T tokens may be expected to choose, each token by
  // itself: an expert of frequency p with the probability 1 - (1 - p)^T.
  int64_t tokens() const { return tokens_; }
  // Bytes that a batch of T tokens streams.
  double bytes(int64_t T) const;

 private:
  struct Layer {  // of which some experts are the CPU's
    double expert_bytes = 0, expert_weights = 0;
    std::vector<double> p;  // of those
    double chosen(int64_t T) const;
  };
  bool pays(int64_t T, const CostModel& cost) const;

  std::vector<Layer> mixtures_;
  double dense_bytes_ = 0;
  int64_t tokens_ = 0;
};

}  // namespace hearth::offline
