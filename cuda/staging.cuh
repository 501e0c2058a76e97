#pragma once
// Weights that live in host memory and visit the GPU for one batch: slots that a copy stream fills while the operations
// before them run (core/device.h, staging).
#include <array>
#include <vector>

#include "core/device.h"
#include "cuda/launch.cuh"

namespace hearth::cuda {

class Staging {
 public:
  // Bytes of a slot that a shard takes: as it lies on the host and, of quantised matrices, as kernels read it.
  static size_t bytes(const FfnShard& host);

  // `memory`: n_slots * slot_bytes of device memory, kept by the caller.
  Staging(const Gpu& gpu, void* memory, int n_slots, size_t slot_bytes);
  ~Staging();

  FfnShard stage(int slot, const FfnShard& host);
  void acquire(int slot);
  void release(int slot);

 private:
  // A quantised matrix as it came, and where its kernels' layout goes.
  struct Pending {
    Matrix to;
    const void* blocks = nullptr;
  };
  struct Slot {
    std::byte* memory = nullptr;
    Event filled, done;
    bool used = false;
    std::vector<Pending> pending;
  };
  std::byte* copy(Slot& slot, size_t& used, const void* host, size_t bytes);

  Gpu gpu_;
  Stream stream_;
  size_t slot_bytes_ = 0;
  std::vector<Slot> slots_;
};

}  // namespace hearth::cuda
