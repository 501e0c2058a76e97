#pragma once
// Prompts of a divided model: the CPU's neurons, or some of its chosen experts (engine/share_out.h), visit the main
// device in pieces, over the host link, while the piece before multiplies. For many tokens that beats the CPU, whose
// arithmetic is the limit then.
#include <cstdint>
#include <span>
#include <vector>

#include "core/cold_rows.h"
#include "core/device.h"
#include "engine/schedule.h"
#include "engine/share_out.h"
#include "model/model.h"

namespace hearth::engine {

// Neurons [first, first + count) of a shard in the file's layout.
FfnShard slice_neurons(const FfnShard& shard, int64_t first, int64_t count);

class ColdStream {
 public:
  // `host`: the CPU's weights. What is streamable must be page-locked for `main`. Takes kSlots slots of kSlotBytes from
  // it, or of one neuron or expert where that is more; nothing when no layer has something to stream. `rates`: which
  // experts visit.
  ColdStream(Device& main, const model::Weights& host, std::span<const LayerFacts> facts, const ShareRates& rates);

  // y += bias + FFN(in) over the layer's neurons of the CPU, which are some, with down_t.
  void ffn(int64_t layer, const Input& in, int64_t T, Vector bias, float* y);

  // Waits for the choice of T tokens, and begins to copy those of the CPU's experts that visit for it: ascending, as
  // many at a time as fit a slot. Operations that come before ffn_experts() run beside the first copies.
  void fetch(int64_t layer, const ExpertChoice& choice, int64_t T);
  // y += the weighted sum of the experts that were fetched, which may be none.
  void ffn_experts(const ExpertChoice& choice, const Input& in, int64_t T, float* y);

  static constexpr int kSlots = 2;
  static constexpr size_t kSlotBytes = size_t{32} << 20;

 private:
  size_t neuron_bytes(size_t layer);
  size_t expert_bytes(size_t layer) const;
  ExpertSet experts(size_t layer) const;
  void stage_next_experts();

  Device& main_;
  ColdRows& slots_;  // main_'s
  const model::Weights& host_;
  const ShareRates rates_;
  std::vector<int64_t> neurons_;  // of each layer that fit a slot; 0 = the layer has none to stream
  size_t slot_bytes_ = 0;
  int slot_ = 0;  // the next to be computed with

  // Between fetch() and ffn_experts().
  size_t layer_ = 0;
  std::vector<std::vector<int32_t>> pieces_;  // ids
  std::vector<ExpertSet> staged_;             // of the first pieces
};

}  // namespace hearth::engine
