#pragma once
// Prompts of a divided model: the CPU's neurons visit the main device in pieces, over the host link, while the piece
// before multiplies. For many tokens that beats the CPU, whose arithmetic is the limit then.
#include <cstdint>
#include <vector>

#include "core/cold_rows.h"
#include "core/device.h"
#include "model/model.h"

namespace hearth::engine {

// Neurons [first, first + count) of a shard in the file's layout.
FfnShard slice_neurons(const FfnShard& shard, int64_t first, int64_t count);

class ColdStream {
 public:
  // `host`: the CPU's weights, whose memory must be page-locked for `main`. Takes kSlots slots of kSlotBytes from it, or
  // of one neuron where that is more; nothing when no layer has neurons on the CPU.
  ColdStream(Device& main, const model::Weights& host);

  // y += bias + FFN(in) over the layer's neurons of the CPU, which are some, with down_t.
  void ffn(int64_t layer, const Input& in, int64_t T, Vector bias, float* y);

  static constexpr int kSlots = 2;
  static constexpr size_t kSlotBytes = size_t{32} << 20;

 private:
  Device& main_;
  ColdRows& slots_;  // main_'s
  const model::Weights& host_;
  std::vector<int64_t> neurons_;  // of each layer that fit a slot; 0 = the layer has none to stream
  int slot_ = 0;
};

}  // namespace hearth::engine
