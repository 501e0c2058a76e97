// Attention over the f16 cache. One token: the context is cut into pieces that all threads share. Many tokens: blocks
// of queries against blocks of keys with a running softmax (Milakov & Gimelshein 2018; Dao et al. 2022), scores never
// leave the caches.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "cpu/cpu_device.h"
#include "cpu/tiling.h"

namespace hearth::cpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

int64_t first_position(const AttentionArgs& a, int64_t pos) {
  return a.window > 0 ? std::max<int64_t>(0, pos - a.window + 1) : 0;
}
const f16_t* head_of(const f16_t* cache, const AttentionArgs& a, int64_t kv_head) {
  return cache + kv_head * a.n_ctx * a.head_dim;
}
int64_t q_stride(const AttentionArgs& a) {
  return a.q_stride != 0 ? a.q_stride : a.n_head * a.head_dim;
}
int64_t round_up(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

}  // namespace

void CpuDevice::attend_one(const AttentionArgs& a, float* out) {
  const int64_t d = a.head_dim, group = a.n_head / a.n_head_kv, width = d + 2;
  const int64_t first = first_position(a, a.pos[0]), n_positions = a.pos[0] - first + 1;
  const int64_t n_pieces = (n_positions + kContextPiece - 1) / kContextPiece;
  float* partial = scratch(partial_, n_pieces * a.n_head * width);  // [piece][head]: maximum, sum, weighted sum of v
  team_.for_chunks(n_pieces * a.n_head_kv, 1, [&](int64_t item, int64_t, int thread) {
    const int64_t piece = item / a.n_head_kv, kv = item % a.n_head_kv, h0 = kv * group;
    const int64_t begin = first + piece * kContextPiece, n = std::min(kContextPiece, first + n_positions - begin);
    float* scores = thread_scratch(thread);  // [group][kContextPiece]
    const RowsView keys{head_of(a.k_cache, a, kv) + begin * d, static_cast<size_t>(d) * sizeof(f16_t), nullptr, n};
    k_.dot_rows[index(DType::f16)](keys, nullptr, d, a.q + h0 * d, static_cast<size_t>(d) * sizeof(float), group,
                                   scores, kContextPiece);
    float* p = partial + (piece * a.n_head + h0) * width;
    for (int64_t h = 0; h < group; ++h) {
      float* s = scores + h * kContextPiece;
      k_.scale(a.scale, n, s);
      p[h * width] = k_.max(s, n);
      p[h * width + 1] = k_.exp_sum(s, n, p[h * width]);
    }
    k_.weighted_sum(head_of(a.v_cache, a, kv) + begin * d, d, n, scores, kContextPiece, static_cast<int>(group), p + 2,
                    width);
  });
  team_.for_chunks(a.n_head, n_pieces > 4 ? 4 : a.n_head, [&](int64_t begin, int64_t end, int) {
    for (int64_t h = begin; h < end; ++h) {
      const auto at = [&](int64_t piece) { return partial + (piece * a.n_head + h) * width; };
      float max = at(0)[0], total = 0;
      for (int64_t i = 1; i < n_pieces; ++i) max = std::max(max, at(i)[0]);
      float* o = out + h * d;
      std::memset(o, 0, static_cast<size_t>(d) * sizeof(float));
      for (int64_t i = 0; i < n_pieces; ++i) {
        const float factor = std::exp(at(i)[0] - max);
        total += factor * at(i)[1];
        k_.axpy(factor, at(i) + 2, d, o);
      }
      k_.scale(1.0f / total, d, o);
    }
  });
}

// Floats of scratch for one piece of a prefill.
struct CpuDevice::AttendBlock {
  int64_t rows, d, d_padded;
  size_t q, keys, scores, weights, values, sums, maxima, totals, end;
  AttendBlock(int64_t n_rows, int64_t head_dim, const Kernels& k)
      : rows(round_up(n_rows, k.mr)), d(head_dim), d_padded(round_up(head_dim, k.nr)) {
    size_t at = 0;
    const auto take = [&](int64_t floats) { return std::exchange(at, at + static_cast<size_t>(round_up(floats, 16))); };
    q = take(rows * d);                   // packed queries [tile][d][mr]
    keys = take(kKeyBlock * d);           // packed keys [kKeyBlock / nr][d][nr]
    scores = take(rows * kKeyBlock);      // [rows][kKeyBlock]
    weights = take(rows * kKeyBlock);     // packed softmax weights [tile][kKeyBlock][mr]
    values = take(kKeyBlock * d_padded);  // packed values [d_padded / nr][kKeyBlock][nr]
    sums = take(rows * d_padded);         // [rows][d_padded]
    maxima = take(rows);
    totals = take(rows);
    end = at;
  }
};

size_t CpuDevice::attend_block_floats(int64_t head_dim, int64_t group, const Kernels& k) {
  return AttendBlock(std::max(group, kQueryTiles * k.mr), head_dim, k).end;
}

// One row of scores becomes softmax weights relative to the running maximum; the sums so far are rescaled to it.
void CpuDevice::soften(float* scores, int64_t begin, int64_t end, float* max, float* total, float* sums,
                       int64_t d) const {
  if (begin >= end) {
    std::memset(scores, 0, kKeyBlock * sizeof(float));
    return;
  }
  const float new_max = std::max(*max, k_.max(scores + begin, end - begin));
  const float factor = std::exp(*max - new_max);  // 0 at first
  *total = *total * factor + k_.exp_sum(scores + begin, end - begin, new_max);
  if (factor != 1.0f) k_.scale(factor, d, sums);
  *max = new_max;
  std::fill(scores, scores + begin, 0.0f);
  std::fill(scores + end, scores + kKeyBlock, 0.0f);
}

// Row r of the block is token t0 + r / group, head r % group of those that share kv_head.
void CpuDevice::attend_block(const AttentionArgs& a, int64_t kv_head, int64_t t0, int64_t n_tokens, float* out,
                             float* memory) const {
  const int64_t d = a.head_dim, group = a.n_head / a.n_head_kv, rows = n_tokens * group, mr = k_.mr, nr = k_.nr;
  const AttendBlock at(rows, d, k_);
  const int64_t d_padded = at.d_padded;
  float *q = memory + at.q, *keys = memory + at.keys, *scores = memory + at.scores, *weights = memory + at.weights;
  float *values = memory + at.values, *sums = memory + at.sums, *maxima = memory + at.maxima,
        *totals = memory + at.totals;
  std::memset(q, 0, static_cast<size_t>(at.rows * d) * sizeof(float));
  std::memset(weights, 0, static_cast<size_t>(at.rows * kKeyBlock) * sizeof(float));
  std::memset(sums, 0, static_cast<size_t>(at.rows * d_padded) * sizeof(float));
  std::fill(maxima, maxima + rows, kMinusInfinity);
  std::fill(totals, totals + rows, 0.0f);
  for (int64_t r = 0; r < rows; ++r) {
    const float* x = a.q + (t0 + r / group) * q_stride(a) + (kv_head * group + r % group) * d;
    for (int64_t i = 0; i < d; ++i) q[(r / mr * d + i) * mr + r % mr] = x[i] * a.scale;
  }

  const int64_t end = a.pos[t0] + n_tokens;
  for (int64_t j = first_position(a, a.pos[t0]); j < end; j += kKeyBlock) {
    const int64_t n = std::min(kKeyBlock, end - j);
    const f16_t* k_head = head_of(a.k_cache, a, kv_head);
    const size_t row_bytes = static_cast<size_t>(d) * sizeof(f16_t);
    for (int64_t p = 0; p < n; p += nr) {
      k_.pack_rows[index(DType::f16)](k_head, row_bytes, j + p, static_cast<int>(std::min(nr, n - p)), 0, d,
                                      keys + p * d);
    }
    k_.pack_cols[index(DType::f16)](head_of(a.v_cache, a, kv_head), row_bytes, j, n, 0, d, values);
    for (int64_t r = 0; r < rows; r += mr) {
      const int m = static_cast<int>(std::min(mr, rows - r));
      for (int64_t p = 0; p < n; p += nr) {
        k_.gemm_tile(d, q + r * d, keys + p * d, scores + r * kKeyBlock + p, kKeyBlock, m, static_cast<int>(nr), false);
      }
      for (int64_t i = r; i < r + m; ++i) {
        const int64_t pos = a.pos[t0 + i / group];
        float* s = scores + i * kKeyBlock;
        soften(s, std::clamp<int64_t>(first_position(a, pos) - j, 0, n), std::clamp<int64_t>(pos + 1 - j, 0, n),
               maxima + i, totals + i, sums + i * d_padded, d);
        for (int64_t p = 0; p < n; ++p) weights[r * kKeyBlock + p * mr + (i - r)] = s[p];
      }
      for (int64_t c = 0; c < d_padded; c += nr) {
        k_.gemm_tile(n, weights + r * kKeyBlock, values + c * n, sums + r * d_padded + c, d_padded, m,
                     static_cast<int>(nr), true);
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* o = out + (t0 + r / group) * a.n_head * d + (kv_head * group + r % group) * d;
    std::memset(o, 0, static_cast<size_t>(d) * sizeof(float));
    k_.axpy(1.0f / totals[r], sums + r * d_padded, d, o);
  }
}

void CpuDevice::attention(const AttentionArgs& a, int64_t T, Act out) {
  if (T == 0) return;
  HEARTH_CHECK(a.pos[T - 1] < a.n_ctx && a.pos[T - 1] < a.max_kv, "position {}, max_kv {}, n_ctx {}", a.pos[T - 1],
               a.max_kv, a.n_ctx);
  if (T == 1) {
    attend_one(a, out.x);
  } else {
    const int64_t group = a.n_head / a.n_head_kv, tokens = std::max<int64_t>(1, kQueryTiles * k_.mr / group);
    const int64_t blocks = (T + tokens - 1) / tokens;
    HEARTH_CHECK(AttendBlock(std::min(tokens, T) * group, a.head_dim, k_).end <= thread_floats_,
                 "reserve() was told less");
    team_.for_chunks(blocks * a.n_head_kv, 1, [&](int64_t item, int64_t, int thread) {
      // The last blocks see the longest context: they go first.
      const int64_t block = blocks - 1 - item / a.n_head_kv, t0 = block * tokens;
      attend_block(a, item % a.n_head_kv, t0, std::min(tokens, T - t0), out.x, thread_scratch(thread));
    });
  }
  quantize_rows(out, T, a.n_head * a.head_dim);
}

}  // namespace hearth::cpu
