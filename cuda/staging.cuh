#pragma once
// Weights that live in host memory and visit the GPU for one batch: slots that a copy stream fills while the operations
// before them run (core/cold_rows.h).
#include <span>
#include <vector>

#include "core/experts.h"
#include "cuda/launch.cuh"

namespace hearth::cuda {

class Staging {
 public:
  // Bytes of a slot that a shard takes: as it lies on the host and, of quantised matrices, as kernels read it.
  static size_t bytes(const FfnShard& host);
  // The same of some experts, with their table.
  static size_t bytes(const ExpertSet& host, std::span<const int32_t> ids);

  // `memory`: n_slots * slot_bytes of device memory, kept by the caller.
  Staging(const Gpu& gpu, void* memory, int n_slots, size_t slot_bytes);
  ~Staging();

  FfnShard stage(int slot, const FfnShard& host);
  ExpertSet stage(int slot, const ExpertSet& host, std::span<const int32_t> ids);
  void acquire(int slot);
  void release(int slot);

 private:
  // A quantised matrix as it came, and where its kernels' layout goes.
  struct Pending {
    Matrix to, from;
  };
  struct Slot {
    std::byte* memory = nullptr;
    Event filled, done;
    size_t used = 0;  // bytes
    std::vector<Pending> pending;
    std::vector<Expert> experts;  // by id
    PinnedMemory table;           // on its way: entries by id, then biases
    size_t table_bytes = 0;
  };
  Slot& begin(int slot);
  std::byte* copy(Slot& slot, const void* host, size_t bytes);
  Matrix copy(Slot& slot, const Matrix& host);

  Gpu gpu_;
  Stream stream_;
  size_t slot_bytes_ = 0;
  std::vector<Slot> slots_;
};

}  // namespace hearth::cuda
