#pragma once
// The CPU's part of a divided pass: executes its lists of steps, layer by layer, as the main device's hand-offs come.
#include <cstdint>
#include <span>
#include <vector>

#include "core/hand_off.h"
#include "core/mailbox.h"
#include "engine/forward.h"
#include "engine/schedule.h"
#include "engine/share_out.h"

namespace hearth::engine {

class HostSide {
 public:
  // `context`: the CPU's; `rows`: of the main device, of every layer; `rates`: as ColdStream's. The references must
  // outlive it.
  HostSide(const ForwardContext& context, const Schedule& schedule, std::span<const MainRows> rows, Mailbox& mailbox,
           const ShareRates& rates);

  // Answers every hand-off of one pass. On an error the mailbox is abandoned, so that the main device does not wait for
  // ever, and the error goes on.
  void serve(const PassShape& shape, BatchKind kind);
  // The experts of a layer that the tokens of the last pass over few tokens named, and that the CPU has.
  struct Computed {
    double experts = 0;   // of a cut one the part that is the CPU's
    int64_t neurons = 0;  // of all of them
  };
  Computed computed(int64_t layer) const { return computed_[static_cast<size_t>(layer)]; }

 private:
  class Layer;
  // The contents of a hand-off, and their results.
  struct Letters {
    const float* x = nullptr;  // [T][n_embd] the residual stream, where that is what hand-offs bring
    Act input;                 // the FFN's input
    NeuronLists neurons;
    ExpertChoice choice;
  };
  ForwardContext c_;
  const Schedule& schedule_;
  std::span<const MainRows> rows_;
  Mailbox& mailbox_;
  const ShareRates rates_;
  Letters brought_;
  std::vector<Expert> staying_;     // of one layer, by id; the others are empty
  std::vector<Computed> computed_;  // of each layer
  std::vector<float> last_input_;   // [n_embd] of one token: what the last hand-off brought with experts
};

}  // namespace hearth::engine
