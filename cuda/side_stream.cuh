#pragma once
// Work beside the GPU's stream: it begins when what is enqueued so far is done, and nothing waits for it until join().
// Its blocks go first where there is room for both, since what it makes is wanted before the main stream's end.
// Recorded into a graph with the main stream, as a branch.
#include "cuda/launch.cuh"

namespace hearth::cuda {

class SideStream {
 public:
  SideStream();

  // To enqueue such work on.
  Gpu fork(const Gpu& main);
  // Whatever is enqueued on the main stream from now on waits for it, too. A launch that waits for two streams does not
  // begin before the end of either, so this is for where nothing overlaps anyway: the ends of graphs, the host's waits.
  void join(const Gpu& main);

 private:
  Stream stream_;
  Event fork_, join_;
  bool is_open_ = false;
};

}  // namespace hearth::cuda
