#pragma once
// Hand-offs to the CPU through mapped host memory: kernels write, raise a flag, and spin on another (core/mailbox.h).
#include <memory>

#include "core/device.h"
#include "core/mailbox.h"
#include "cuda/launch.cuh"

namespace hearth::cuda {

class CudaMailbox final : public Mailbox {
 public:
  static std::unique_ptr<CudaMailbox> open(const Gpu& gpu, int64_t capacity, int64_t max_ids);

  // x [n], and the neurons of a list with their gates' activations (`values` may be null).
  void post(const Gpu& gpu, const float* x, int64_t n, NeuronList list = {}, const float* values = nullptr);
  void collect(const Gpu& gpu, float* x, int64_t n);

 private:
  struct Memory;
  CudaMailbox(std::shared_ptr<Memory> memory, std::byte* host, int64_t capacity, int64_t max_ids);
  std::shared_ptr<Memory> memory_;
};

}  // namespace hearth::cuda
