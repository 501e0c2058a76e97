#pragma once
// The main device's part of a pass: executes its lists of steps.
#include <span>

#include "core/hand_off.h"
#include "engine/cold_stream.h"
#include "engine/forward.h"
#include "engine/schedule.h"

namespace hearth::engine {

class MainSide {
 public:
  // `mailbox` and `stream`: of a divided model, or null. `rows`: of every layer. `head_here`: the main device has the
  // output head. The references must outlive it.
  MainSide(const ForwardContext& context, const Schedule& schedule, std::span<const MainRows> rows, Mailbox* mailbox,
           ColdStream* stream, bool head_here);

  // act.x -> act.x, and the cache: all layers.
  void run(const PassShape& shape, BatchKind kind);

 private:
  class Layer;
  ForwardContext c_;
  const Schedule& schedule_;
  std::span<const MainRows> rows_;
  Mailbox* mailbox_;
  ColdStream* stream_;
  bool head_here_;
};

}  // namespace hearth::engine
