#include "cuda/op_queue.cuh"

#include <array>
#include <utility>

namespace hearth::cuda {
namespace {

bool overlap(const float* a, int64_t n_a, const float* b, int64_t n_b) {
  const auto first_a = reinterpret_cast<uintptr_t>(a), first_b = reinterpret_cast<uintptr_t>(b);
  const auto bytes = [](int64_t n) { return static_cast<uintptr_t>(n) * sizeof(float); };
  return first_a < first_b + bytes(n_b) && first_b < first_a + bytes(n_a);
}

}  // namespace

void OpQueue::flush_made(const OutputNorm* half) {
  if (!made_) return;
  const Made m = *std::exchange(made_, std::nullopt);
  m.enqueue(gpu_, half);
}

void OpQueue::flush() {
  flush_made();
  if (norm_) {
    const Norm n = *std::exchange(norm_, std::nullopt);
    cuda::norm(gpu_, n.args, n.x, 1, n.out);
  }
  if (rope_) cuda::rope_kv(gpu_, *std::exchange(rope_, std::nullopt), 1);
  if (lists_) make_lists(gpu_, *std::exchange(lists_, std::nullopt));
}

void OpQueue::make(const float* y, int64_t n, Maker enqueue) {
  flush();
  made_ = {y, n, std::move(enqueue)};
  if (n % 32 != 0 || n > kMaxNormColumns) flush_made();  // no norm that it could leave
}

void OpQueue::matvec(std::span<const MatmulPart> parts, Act in, int64_t T) {
  std::array<Output, kMaxParts> outputs{};
  HEARTH_CHECK(!parts.empty() && parts.size() <= outputs.size());
  for (size_t i = 0; i < parts.size(); ++i) outputs[i] = {parts[i].y, parts[i].w.rows};
  const auto norm = T == 1 ? take_norm(in, parts[0].w, {outputs.data(), parts.size()}) : std::nullopt;
  flush();
  const bool can_wait = T == 1 && !norm && parts.size() == 1 && can_leave_norm(gpu_, parts[0].w);
  if (!can_wait) return cuda::matvec(gpu_, parts, in, T, norm ? &*norm : nullptr);
  make(parts[0].y, parts[0].w.rows, [part = parts[0], in](const Gpu& gpu, const OutputNorm* half) {
    cuda::matvec(gpu, {&part, 1}, in, 1, nullptr, half);
  });
}

void OpQueue::norm(const NormArgs& a, const float* x, int64_t T, Act out) {
  const bool can_wait = T == 1 && a.kind == NormKind::rms && !a.bias && a.n % 32 == 0 && a.n <= kMaxNormColumns &&
                        !overlap(x, a.n, out.x, a.n);
  const bool of_made = can_wait && made_ && !norm_ && made_->y == x && made_->n == a.n;
  if (!of_made) flush();
  if (!can_wait) return cuda::norm(gpu_, a, x, T, out);
  norm_ = {a, x, out};
}

void OpQueue::rope_kv(const RopeKvArgs& a, int64_t T) {
  flush();
  if (T != 1) return cuda::rope_kv(gpu_, a, T);
  rope_ = a;
}

bool OpQueue::may_take_norm(Act in, int64_t n, std::span<const Output> outputs) const {
  if (!norm_ || norm_->out.x != in.x || norm_->out.q8 != in.q8 || norm_->args.n != n) return false;
  for (const Output& o : outputs) {
    if (overlap(norm_->x, norm_->args.n, o.data, o.n)) return false;
  }
  return true;
}

std::optional<InputNorm> OpQueue::take_norm(Act in, int64_t n, std::span<const Output> outputs) {
  if (!may_take_norm(in, n, outputs)) return std::nullopt;
  flush_made();
  const Norm held = *std::exchange(norm_, std::nullopt);
  return InputNorm{held.x, held.args.weight.data, held.args.eps, static_cast<int>(n), held.out, {}};
}

std::optional<InputNorm> OpQueue::take_norm(Act in, const Matrix& w, std::span<const Output> outputs, Reader reader) {
  if (!can_norm(w)) return std::nullopt;
  if (!is_quantized(w.type) || (reader == Reader::any && !made_)) return take_norm(in, w.cols, outputs);
  int64_t rows = 0;
  for (const Output& o : outputs) rows += o.n;
  if (reader == Reader::product && (in.q8 == nullptr || rows < w.cols)) return std::nullopt;
  if (!made_ || !may_take_norm(in, w.cols, outputs)) return std::nullopt;
  const OutputNorm half{norm_->args.weight.data, unscaled_};
  flush_made(&half);
  auto norm = take_norm(in, w.cols, outputs);
  norm->unscaled = unscaled_;
  return norm;
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
