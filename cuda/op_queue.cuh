#pragma once
// The GPU's stream with one operation held back: the norm or the rotary embedding of a single token costs a kernel that
// does next to nothing, and the kernel that reads its result can do it on the way. It is held until the next operation,
// which either takes it over or finds it enqueued first: whoever asks for the Gpu gets everything before enqueued.
#include <optional>

#include "cuda/kernels.cuh"
#include "cuda/staged_input.cuh"

namespace hearth::cuda {

class OpQueue {
 public:
  OpQueue() = default;
  explicit OpQueue(const Gpu& gpu) : gpu_(gpu) {}

  // To enqueue on.
  operator const Gpu&() {
    flush();
    return gpu_;
  }
  // For its properties.
  const Gpu* operator->() const { return &gpu_; }

  // Enqueues what is held back.
  void flush();
  // A norm or rotary embedding of T tokens: held back if another operation could take it over, else enqueued.
  void norm(const NormArgs& args, const float* x, int64_t T, Act out);
  void rope_kv(const RopeKvArgs& args, int64_t T);

  // The held norm, if its result is `in` of n elements and the kernel that reads it may do it: one that writes nothing
  // (`outputs`) where the norm's own input is.
  struct Output {
    const float* data;
    int64_t n;
  };
  std::optional<InputNorm> take_norm(Act in, int64_t n, std::span<const Output> outputs);
  // The held rotary embedding, if `args` and `out` are the attention that it belongs to.
  std::optional<RopeKvArgs> take_rope(const AttentionArgs& args, int64_t T, Act out);

 private:
  struct Norm {
    NormArgs args;
    const float* x;
    Act out;
  };
  Gpu gpu_;
  std::optional<Norm> norm_;
  std::optional<RopeKvArgs> rope_;
};

}  // namespace hearth::cuda
