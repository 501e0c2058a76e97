// Rotary embedding, the write to the cache, and attention, as one operation.
#include "cuda/attention.cuh"

namespace hearth::cuda {
namespace {

void check_runs(std::span<const BatchRun> runs, int64_t T) {
  int64_t n = 0;
  for (const BatchRun& r : runs) {
    HEARTH_CHECK(r.first_row == n && r.n_rows > 0, "a run of {} rows begins at row {}, after {} rows", r.n_rows,
                 r.first_row, n);
    n += r.n_rows;
  }
  HEARTH_CHECK(n == T, "runs of {} rows, {} tokens", n, T);
}

}  // namespace

void attention(const Gpu& gpu, const AttentionArgs& args, int64_t T, float* partial, unsigned* counters, Act out) {
  if (args.latent_norm) return attention_latent(gpu, args, T, partial, counters, out);
  if (args.head_dim % 8 != 0 || args.head_dim > 256) {
    fail("heads of {} dimensions are not supported on the GPU, expected a multiple of 8 up to 256; use --device cpu",
         args.head_dim);
  }
  if (T == 1) return attention_decode(gpu, args, T, true, partial, counters, out);
  rope_kv(gpu, args, T);
  if (T <= kFewTokens) return attention_decode(gpu, args, T, false, partial, counters, out);
  check_runs(args.rows.runs, T);
  attention_prefill(gpu, args, out.x);
  if (out.q8 != nullptr) quantize_rows(gpu, out.x, T, args.n_head * args.head_dim, out.q8);
}

}  // namespace hearth::cuda
