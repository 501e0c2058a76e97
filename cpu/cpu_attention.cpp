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
// From the begin of the pages to position j of a token's sequence; what follows in its page is behind it.
int64_t cache_at(const AttentionArgs& a, int64_t t, int64_t kv_head, int64_t j) {
  const int64_t page = a.rows.pages[a.rows.slot[t] * a.rows.pages_stride + j / kPagePositions];
  return page * a.cache.stride + (kv_head * kPagePositions + j % kPagePositions) * a.head_dim;
}
int64_t round_up(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

}  // namespace

// A piece is what the token sees of one page. Heads that share keys are taken a few at a time, because many of them share
// one where latents are attended to.
void CpuDevice::attend_one(const AttentionArgs& a, int64_t t, float* out) {
  const int64_t d = a.head_dim, dv = a.value_dim(), group = a.n_head / a.n_head_kv, width = dv + 2;
  const int64_t together = std::min(group, kFewTokens), parts = (group + together - 1) / together;
  const int64_t last = a.rows.pos[t], first = first_position(a, last), first_page = first / kPagePositions;
  const int64_t n_pieces = last / kPagePositions - first_page + 1;
  const float* q = a.q + t * a.n_head * d;
  float* partial = scratch(partial_, n_pieces * a.n_head * width);  // [piece][head]: maximum, sum, weighted sum of v
  team_.for_chunks(n_pieces * a.n_head_kv * parts, 1, [&](int64_t item, int64_t, int thread) {
    const int64_t piece = item / parts / a.n_head_kv, kv = item / parts % a.n_head_kv;
    const int64_t in_group = item % parts * together, h0 = kv * group + in_group;
    const int64_t n_heads = std::min(together, group - in_group);
    const int64_t page = (first_page + piece) * kPagePositions, begin = std::max(first, page);
    const int64_t n = std::min(page + kPagePositions, last + 1) - begin, at = cache_at(a, t, kv, begin);
    float* scores = thread_scratch(thread);  // [together][kPagePositions]
    const RowsView keys{a.cache.k + at, static_cast<size_t>(d) * sizeof(f16_t), nullptr, n};
    k_.dot_rows[index(DType::f16)](keys, nullptr, d, q + h0 * d, static_cast<size_t>(d) * sizeof(float), n_heads,
                                   scores, kPagePositions);
    float* p = partial + (piece * a.n_head + h0) * width;
    for (int64_t h = 0; h < n_heads; ++h) {
      float* s = scores + h * kPagePositions;
      k_.scale(a.scale, n, s);
      if (a.soft_cap > 0) k_.soft_cap(a.soft_cap, n, s);
      p[h * width] = k_.max(s, n);
      p[h * width + 1] = k_.exp_sum(s, n, p[h * width]);
    }
    k_.weighted_sum(a.values() + at, d, dv, n, scores, kPagePositions, static_cast<int>(n_heads), p + 2, width);
  });
  team_.for_chunks(a.n_head, n_pieces > 4 ? 4 : a.n_head, [&](int64_t begin, int64_t end, int) {
    for (int64_t h = begin; h < end; ++h) {
      const auto part = [&](int64_t piece) { return partial + (piece * a.n_head + h) * width; };
      const float sink = a.sinks ? a.sinks.data[h] : kMinusInfinity;
      float max = sink;
      for (int64_t i = 0; i < n_pieces; ++i) max = std::max(max, part(i)[0]);
      float total = std::exp(sink - max);
      float* o = out + h * dv;
      std::memset(o, 0, static_cast<size_t>(dv) * sizeof(float));
      for (int64_t i = 0; i < n_pieces; ++i) {
        const float factor = std::exp(part(i)[0] - max);
        total += factor * part(i)[1];
        k_.axpy(factor, part(i) + 2, dv, o);
      }
      k_.scale(1.0f / total, dv, o);
    }
  });
}

// Floats of scratch for one piece of a prefill.
struct CpuDevice::AttendBlock {
  int64_t rows, d, d_padded;  // the last one is of values
  size_t q, keys, scores, weights, values, sums, maxima, totals, end;
  AttendBlock(int64_t n_rows, int64_t head_dim, int64_t value_dim, const Kernels& k)
      : rows(round_up(n_rows, k.mr)), d(head_dim), d_padded(round_up(value_dim, k.nr)) {
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
  return AttendBlock(std::max(group, kQueryTiles * k.mr), head_dim, head_dim, k).end;
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
  const AttendBlock at(rows, d, a.value_dim(), k_);
  const int64_t dv = a.value_dim(), d_padded = at.d_padded;
  float *q = memory + at.q, *keys = memory + at.keys, *scores = memory + at.scores, *weights = memory + at.weights;
  float *values = memory + at.values, *sums = memory + at.sums, *maxima = memory + at.maxima,
        *totals = memory + at.totals;
  std::memset(q, 0, static_cast<size_t>(at.rows * d) * sizeof(float));
  std::memset(weights, 0, static_cast<size_t>(at.rows * kKeyBlock) * sizeof(float));
  std::memset(sums, 0, static_cast<size_t>(at.rows * d_padded) * sizeof(float));
  std::fill(maxima, maxima + rows, kMinusInfinity);
  std::fill(totals, totals + rows, 0.0f);
  for (int64_t r = 0; r < rows; ++r) {
    const float* x = a.q + ((t0 + r / group) * a.n_head + kv_head * group + r % group) * d;
    for (int64_t i = 0; i < d; ++i) q[(r / mr * d + i) * mr + r % mr] = x[i] * a.scale;
  }

  static_assert(kPagePositions % kKeyBlock == 0, "a block of keys is in one page");
  const int32_t* pos = a.rows.pos;
  const int64_t end = pos[t0] + n_tokens;
  for (int64_t j = first_position(a, pos[t0]) / kKeyBlock * kKeyBlock; j < end; j += kKeyBlock) {
    const int64_t n = std::min(kKeyBlock, end - j), at_keys = cache_at(a, t0, kv_head, j);
    const size_t row_bytes = static_cast<size_t>(d) * sizeof(f16_t);
    for (int64_t p = 0; p < n; p += nr) {
      k_.pack_rows[index(DType::f16)](a.cache.k + at_keys, row_bytes, p, static_cast<int>(std::min(nr, n - p)), 0, d,
                                      keys + p * d);
    }
    k_.pack_cols[index(DType::f16)](a.values() + at_keys, row_bytes, 0, n, 0, dv, values);
    for (int64_t r = 0; r < rows; r += mr) {
      const int m = static_cast<int>(std::min(mr, rows - r));
      for (int64_t p = 0; p < n; p += nr) {
        k_.gemm_tile(d, q + r * d, keys + p * d, scores + r * kKeyBlock + p, kKeyBlock, m, static_cast<int>(nr), false);
      }
      for (int64_t i = r; i < r + m; ++i) {
        const int64_t seen = pos[t0 + i / group];
        float* s = scores + i * kKeyBlock;
        const int64_t first = std::clamp<int64_t>(first_position(a, seen) - j, 0, n);
        const int64_t last = std::clamp<int64_t>(seen + 1 - j, 0, n);
        if (a.soft_cap > 0 && first < last) k_.soft_cap(a.soft_cap, last - first, s + first);
        soften(s, first, last, maxima + i, totals + i, sums + i * d_padded, dv);
        for (int64_t p = 0; p < n; ++p) weights[r * kKeyBlock + p * mr + (i - r)] = s[p];
      }
      for (int64_t c = 0; c < d_padded; c += nr) {
        k_.gemm_tile(n, weights + r * kKeyBlock, values + c * n, sums + r * d_padded + c, d_padded, m,
                     static_cast<int>(nr), true);
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t head = kv_head * group + r % group;
    float* o = out + ((t0 + r / group) * a.n_head + head) * dv;
    float factor = 1.0f / totals[r];
    if (a.sinks) {
      const float sink = a.sinks.data[head], max = std::max(sink, maxima[r]), scale = std::exp(maxima[r] - max);
      factor = scale / (totals[r] * scale + std::exp(sink - max));
    }
    std::memset(o, 0, static_cast<size_t>(dv) * sizeof(float));
    k_.axpy(factor, sums + r * d_padded, dv, o);
  }
}

// Rotates queries and keys, and writes keys and values to the cache.
void CpuDevice::write_cache(const AttentionArgs& a, int64_t T) {
  const int64_t d = a.head_dim, half = a.rope == RopeKind::none ? 0 : a.n_rot / 2;
  float* angles = scratch(angles_, T * 2 * half);
  team_.for_chunks(T, kRowsPerPiece, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const int32_t pos = a.rows.pos[t];
      HEARTH_CHECK(pos >= 0 && pos < a.max_kv && pos < a.rows.pages_stride * kPagePositions, "position {}, max_kv {}",
                   pos, a.max_kv);
      float* cos = angles + t * 2 * half;
      float* sin = cos + half;
      for (int64_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(pos) * a.inv_freq[i];
        cos[i] = static_cast<float>(std::cos(angle)) * a.attention_factor;
        sin[i] = static_cast<float>(std::sin(angle)) * a.attention_factor;
      }
      const auto prepare_head = [&](float* head, Vector weight) {
        if (weight) k_.rms_norm(head, weight.data, nullptr, a.norm_eps, d, head);
        if (half > 0) k_.rotate(head, cos, sin, half, a.rope == RopeKind::neox);
      };
      for (int64_t h = 0; h < a.n_head; ++h) prepare_head(a.q + (t * a.n_head + h) * d, a.q_norm);
      for (int64_t h = 0; h < a.n_head_kv; ++h) {
        float* k = a.k + (t * a.n_head_kv + h) * d;
        prepare_head(k, a.k_norm);
        if (a.latent_norm) {
          float* const latent = k + d - a.latent_norm.n;
          k_.rms_norm(latent, a.latent_norm.data, nullptr, a.norm_eps, a.latent_norm.n, latent);
        }
        const int64_t at = cache_at(a, t, h, pos);
        k_.to_f16(k, d, a.cache.k + at);
        if (!a.latent_norm) k_.to_f16(a.v + (t * a.n_head_kv + h) * d, d, a.cache.v + at);
      }
    }
  });
}

void CpuDevice::attention(const AttentionArgs& a, int64_t T, Act out) {
  if (T == 0) return;
  write_cache(a, T);
  const int64_t d = a.head_dim, width = a.n_head * a.value_dim(), group = a.n_head / a.n_head_kv;
  if (T <= kFewTokens) {
    for (int64_t t = 0; t < T; ++t) attend_one(a, t, out.x + t * width);
    return quantize_rows(out, T, width);
  }
  const int64_t most = std::max<int64_t>(1, kQueryTiles * k_.mr / group);
  HEARTH_CHECK(AttendBlock(std::min(most, T) * group, d, a.value_dim(), k_).end <= thread_floats_,
               "reserve() was told less");
  std::vector<BatchRun> blocks;
  for (const BatchRun& run : a.rows.runs) {
    for (int64_t i = 0; i < run.n_rows; i += most) {
      blocks.push_back({run.first_row + i, std::min(most, run.n_rows - i), run.first_position + i});
    }
  }
  // The blocks that see the longest context go first.
  std::stable_sort(blocks.begin(), blocks.end(),
                   [](const BatchRun& x, const BatchRun& y) { return x.first_position > y.first_position; });
  team_.for_chunks(std::ssize(blocks) * a.n_head_kv, 1, [&](int64_t item, int64_t, int thread) {
    const BatchRun& block = blocks[static_cast<size_t>(item / a.n_head_kv)];
    attend_block(a, item % a.n_head_kv, block.first_row, block.n_rows, out.x, thread_scratch(thread));
  });
  quantize_rows(out, T, width);
}

}  // namespace hearth::cpu
