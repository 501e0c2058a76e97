#pragma once
// Hand-offs to the CPU through mapped host memory: kernels write, raise a flag, and spin on another (core/mailbox.h).
#include <memory>

#include "core/mailbox.h"
#include "cuda/launch.cuh"

namespace hearth::cuda {

class CudaMailbox final : public Mailbox {
 public:
  static std::unique_ptr<CudaMailbox> open(const Gpu& gpu, int64_t capacity);

  void post(const Gpu& gpu, const float* x, int64_t n);
  void collect(const Gpu& gpu, float* x, int64_t n);

 private:
  struct Memory;
  CudaMailbox(std::shared_ptr<Memory> memory, int64_t capacity);
  std::shared_ptr<Memory> memory_;
};

}  // namespace hearth::cuda
