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
  if (norm_) {
    const Norm n = *std::exchange(norm_, std::nullopt);
    cuda::norm(gpu_, n.args, n.x, 1, n.out);
  }
  if (rope_) cuda::rope_kv(gpu_, *std::exchange(rope_, std::nullopt), 1);
}

void OpQueue::norm(const NormArgs& a, const float* x, int64_t T, Act out) {
  flush();
  const bool can_wait = T == 1 && a.kind == NormKind::rms && !a.bias && a.n % 32 == 0 && a.n <= kMaxNormColumns &&
                        !overlap(x, a.n, out.x, a.n);
  if (!can_wait) return cuda::norm(gpu_, a, x, T, out);
  norm_ = {a, x, out};
}

void OpQueue::rope_kv(const RopeKvArgs& a, int64_t T) {
  flush();
  if (T != 1) return cuda::rope_kv(gpu_, a, T);
  rope_ = a;
}

std::optional<InputNorm> OpQueue::take_norm(Act in, int64_t n, std::span<const Output> outputs) {
  if (!norm_ || norm_->out.x != in.x || norm_->out.q8 != in.q8 || norm_->args.n != n) return std::nullopt;
  for (const Output& o : outputs) {
    if (overlap(norm_->x, norm_->args.n, o.data, o.n)) return std::nullopt;
  }
  const Norm held = *std::exchange(norm_, std::nullopt);
  return InputNorm{held.x, held.args.weight.data, held.args.eps, static_cast<int>(n), held.out};
}

std::optional<RopeKvArgs> OpQueue::take_rope(const AttentionArgs& a, int64_t T, Act out) {
  if (!rope_) return std::nullopt;
  const RopeKvArgs& r = *rope_;
  const bool same = T == 1 && r.q == a.q && r.k_cache == a.k_cache && r.v_cache == a.v_cache && r.n_ctx == a.n_ctx &&
                    r.pos == a.pos && r.n_head == a.n_head && r.n_head_kv == a.n_head_kv && r.head_dim == a.head_dim;
  const int64_t n_q = a.n_head * a.head_dim, n_kv = a.n_head_kv * a.head_dim;
  if (!same || overlap(out.x, n_q, r.q, n_q) || overlap(out.x, n_q, r.k, n_kv) || overlap(out.x, n_q, r.v, n_kv)) {
    return std::nullopt;
  }
  return *std::exchange(rope_, std::nullopt);
}

}  // namespace hearth::cuda
