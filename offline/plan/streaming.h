#pragma once
// Prompts: from which batch on what the CPU has visits the GPU instead of being computed where it is, or some of its
// experts do; what comes over the link then, and how long that takes.
#include <cstdint>
#include <vector>

#include "engine/placement.h"
#include "engine/share_out.h"
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
  // (CostModel::stream_tokens()). Of mixtures the first T, 9 at least, at which seconds(T) < cpu_seconds(T).
  int64_t tokens() const { return tokens_; }
  // Bytes that a batch of T tokens streams.
  double bytes(int64_t T) const;
  // Of what a batch of T tokens needs of the CPU's weights, when it streams: bytes over the link's bandwidth. Of
  // mixtures the sum over layers of the longer side's time, as the engine shares experts out (engine/share_out.h). Of
  // an expert of frequency p the work is what T tokens may be expected to ask, each by itself: with the probability 1 -
  // (1 - p)^T its bytes, and T p products with each weight.
  double seconds(int64_t T) const;
  // The same of a mixture when the CPU computes all of it.
  double cpu_seconds(int64_t T) const;

 private:
  struct Layer {  // of which some experts are the CPU's
    double expert_bytes = 0, expert_weights = 0;
    std::vector<double> p;  // of those
    std::vector<engine::ExpertWork> work(int64_t T) const;
  };

  engine::ShareRates rates_, cpu_alone_;
  std::vector<Layer> mixtures_;
  double dense_bytes_ = 0;
  int64_t tokens_ = 0;
};

}  // namespace hearth::offline
