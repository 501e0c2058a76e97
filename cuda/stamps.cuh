#pragma once
// Time stamps between operations (core/device_clock.h): events of a stream, kept and used again.
#include <cstddef>
#include <vector>

#include "cuda/handles.cuh"

namespace hearth::cuda {

class Stamps {
 public:
  // After everything that the stream has been given. Not while a graph is recorded.
  void stamp(cudaStream_t stream) {
    if (used_ == events_.size()) events_.push_back(make_event(cudaEventDefault));
    CUDA_CHECK(cudaEventRecord(events_[used_++], stream));
  }
  // Waits for the last one. Seconds between consecutive stamps, to about half a microsecond; then forgets them.
  std::vector<double> read() {
    std::vector<double> seconds;
    if (used_ > 0) CUDA_CHECK(cudaEventSynchronize(events_[used_ - 1]));
    for (size_t i = 1; i < used_; ++i) {
      float ms = 0;
      CUDA_CHECK(cudaEventElapsedTime(&ms, events_[i - 1], events_[i]));
      seconds.push_back(ms * 1e-3);
    }
    used_ = 0;
    return seconds;
  }

 private:
  std::vector<Event> events_;
  size_t used_ = 0;
};

}  // namespace hearth::cuda
