#include "cuda/op_queue.cuh"

#include <utility>

namespace hearth::cuda {
namespace {

bool overlap(const float* a, int64_t n_a, const float* b, int64_t n_b) {
  const auto first_a = reinterpret_cast<uintptr_t>(a), first_b = reinterpret_cast<uintptr_t>(b);
  const auto bytes = [](int64_t n) { return static_cast<uintptr_t>(n) * sizeof(float); };
  return first_a < first_b + bytes(n_b) && first_b < first_a + bytes(n_a);
}

}  // namespace

void OpQueue::flush() {
  if (!norm_) return;
  const Norm n = *std::exchange(norm_, std::nullopt);
  cuda::norm(gpu_, n.args, n.x, 1, n.out);
}

void OpQueue::norm(const NormArgs& a, const float* x, int64_t T, Act out) {
  flush();
  const bool can_wait = T == 1 && a.kind == NormKind::rms && !a.bias && a.n % 32 == 0 && a.n <= kTileColumns &&
                        !overlap(x, a.n, out.x, a.n);
  if (!can_wait) return cuda::norm(gpu_, a, x, T, out);
  norm_ = {a, x, out};
}

std::optional<InputNorm> OpQueue::take_norm(Act in, int64_t n, std::span<const Output> outputs) {
  if (!norm_ || norm_->out.x != in.x || norm_->out.q8 != in.q8 || norm_->args.n != n) return std::nullopt;
  for (const Output& o : outputs) {
    if (overlap(norm_->x, norm_->args.n, o.data, o.n)) return std::nullopt;
  }
  const Norm held = *std::exchange(norm_, std::nullopt);
  return InputNorm{held.x, held.args.weight.data, held.args.eps, static_cast<int>(n), held.out};
}

}  // namespace hearth::cuda
