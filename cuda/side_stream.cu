#include "cuda/side_stream.cuh"

namespace hearth::cuda {

SideStream::SideStream() : fork_(make_event()), join_(make_event()) {
  int lowest = 0, highest = 0;
  CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  stream_ = make_stream(highest);
}

Gpu SideStream::fork(const Gpu& main) {
  CUDA_CHECK(cudaEventRecord(fork_, main.stream));
  CUDA_CHECK(cudaStreamWaitEvent(stream_, fork_, 0));
  is_open_ = true;
  Gpu side = main;
  // Blocks that begin early wait in room that others could have.
  side.stream = stream_, side.overlap = false;
  return side;
}

void SideStream::join(const Gpu& main) {
  if (!is_open_) return;
  CUDA_CHECK(cudaEventRecord(join_, stream_));
  CUDA_CHECK(cudaStreamWaitEvent(main.stream, join_, 0));
  is_open_ = false;
}

}  // namespace hearth::cuda
