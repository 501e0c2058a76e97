#pragma once
// Prompts of a divided model: the CPU's neurons visit the main device in pieces, over the host link, while the piece
// before multiplies. For many tokens that beats the CPU, whose arithmetic is the limit then.
#include <cstdint>
#include <vector>

#include "core/device.h"
#include "model/model.h"

namespace hearth::engine {

// Neurons [first, first + count) of a shard in the file's layout.
FfnShard slice_neurons(const FfnShard& shard, int64_t first, int64_t count);

class ColdStream {
 public:
  // Batches of at least `min_tokens` are streamed (never with 0). `host`: the CPU's weights, whose memory must be
  // page-locked for `main`. Takes kSlots slots of kSlotBytes from it, or of one neuron where that is more; nothing when
  // no layer has neurons on the CPU.
  ColdStream(Device& main, const model::Weights& host, int64_t min_tokens);

  // Whether the CPU's neurons of a layer are computed here, and not by the CPU.
  bool streams(int64_t layer, int64_t T) const {
    return min_tokens_ > 0 && T >= min_tokens_ && neurons_[static_cast<size_t>(layer)] > 0;
  }
  // y += bias + FFN(in) over the layer's neurons of the CPU.
  void ffn(int64_t layer, Act in, int64_t T, Vector bias, float* y);

  static constexpr int kSlots = 2;
  static constexpr size_t kSlotBytes = size_t{32} << 20;

 private:
  Device& main_;
  const model::Weights& host_;
  int64_t min_tokens_;
  std::vector<int64_t> neurons_;  // of each layer that fit a slot; 0 = the layer has none to stream
  int slot_ = 0;
};

}  // namespace hearth::engine
