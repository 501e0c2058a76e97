#pragma once
// Turns the gates and ups of a batch of tokens into a layer's statistics, on the host.
#include <array>
#include <cstdint>
#include <vector>

#include "core/device.h"
#include "core/thread_team.h"
#include "model/sidecar.h"

namespace hearth::offline {

// How a neuron's value follows from its pre-activations (FfnShard's fields).
struct NeuronRule {
  Activation act = Activation::relu;
  float act_threshold = 0.0f;
  bool up_relu = false;
  float threshold = 0.0f;  // active: |act(gate)| > threshold
  float activate(float z) const;
  float up_factor(float u) const;  // what act(gate) is multiplied with
};

class ActivationCounter {
 public:
  // down_norms [n_ff]: length of each neuron's down row, which weighs its impact. `team` must outlive the counter.
  ActivationCounter(ThreadTeam& team, const NeuronRule& rule, std::vector<float> down_norms);

  // A new text begins: its tokens have no predecessors.
  void begin_sequence();
  // T more tokens of the text. gate and up [T][n_ff], pre-activations with biases; up null for ungated families.
  // Held-out tokens are counted in stats.active_heldout alone. The result has the same bits for any number of threads.
  void add(const float* gate, const float* up, int64_t T, bool heldout, model::LayerStatistics& stats);

 private:
  // Neurons of one piece and token.
  struct Overlap {
    uint32_t active = 0, previous = 0, recent = 0;              // active; of them, with the previous token; recently
    std::array<uint32_t, model::kUnionTokens.size()> unions{};  // active in one of the last tokens, this one included
  };
  void add_piece(const float* gate, const float* up, int64_t T, int64_t begin, int64_t end, Overlap* overlap,
                 model::LayerStatistics& stats);
  void add_heldout(const float* gate, int64_t T, int64_t begin, int64_t end, model::LayerStatistics& stats) const;
  void add_shares(int64_t T, model::LayerStatistics& stats) const;

  ThreadTeam& team_;
  NeuronRule rule_;
  std::vector<float> down_norms_;
  std::vector<int64_t> last_active_;  // [n_ff] position in the text, far negative at first
  int64_t position_ = 0;              // of the next token
  std::vector<Overlap> overlaps_;     // [pieces][T]
};

}  // namespace hearth::offline
