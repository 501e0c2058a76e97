#pragma once
// Dot products of rows by threads that own columns: `threads` neighbouring threads (whole warps) share a row, thread t
// has chunks t, t + threads, ... of every row that its group computes, and keeps the input of those columns in
// registers. Nothing is staged, and every load of a row can be in flight at once.
#include "cuda/copy_async.cuh"
#include "cuda/format.cuh"
#include "cuda/launch.cuh"
#include "cuda/staged_input.cuh"

namespace hearth::cuda {

// The thread's columns of the input.
template <DType D, int kChunks>
struct OwnedInput {
  using F = Format<D>;
  uint4 units[kChunks][F::kUnits];  // f32 values, or 8-bit quants
  Q8Scale scale[kChunks];           // quantised formats

  __device__ __forceinline__ void load(Act in, int64_t cols, int first, int threads) {
    const int n_chunks = static_cast<int>(cols) / F::kWeights;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int c = first + k * threads;
      scale[k] = {};
#pragma unroll
      for (int u = 0; u < F::kUnits; ++u) units[k][u] = make_uint4(0, 0, 0, 0);
      if (c >= n_chunks) continue;
      const void* row = F::kQuantized ? in.q8 : static_cast<const void*>(in.x);
#pragma unroll
      for (int u = 0; u < F::kUnits; ++u) units[k][u] = __ldcg(static_cast<const uint4*>(row) + c * F::kUnits + u);
      if constexpr (F::kQuantized) {
        const auto* scales =
            reinterpret_cast<const float2*>(static_cast<const std::byte*>(row) + q8_quants_bytes(cols));
        const float2 s = __ldcg(scales + c * F::kWeights / 32);
        scale[k] = {s.x, s.y};
      }
    }
  }

  // Other formats: x * weight, in two steps: the weight, which may come before grid_wait(), then x.
  __device__ __forceinline__ void load_weight(const float* weight, int64_t cols, int first, int threads) {
    const int n_chunks = static_cast<int>(cols) / F::kWeights;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int c = first + k * threads;
#pragma unroll
      for (int u = 0; u < F::kUnits; ++u) {
        units[k][u] = make_uint4(0, 0, 0, 0);
        if (c < n_chunks) units[k][u] = load_weights(reinterpret_cast<const uint4*>(weight) + c * F::kUnits + u);
      }
    }
  }
  // Returns the sum of the thread's x^2.
  __device__ __forceinline__ float load_scaled(const float* x, int64_t cols, int first, int threads) {
    const int n_chunks = static_cast<int>(cols) / F::kWeights;
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int c = first + k * threads;
#pragma unroll
      for (int u = 0; u < F::kUnits; ++u) {
        float4 v = make_float4(0, 0, 0, 0);
        if (c < n_chunks) v = __ldcg(reinterpret_cast<const float4*>(x) + c * F::kUnits + u);
        squares = sum_of_squares(v, squares);
        const uint4 w = units[k][u];
        v = multiply(
            v, make_float4(__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w)));
        units[k][u] =
            make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
      }
    }
    return squares;
  }

  // Quantised formats: from the 8-bit form in shared memory.
  __device__ __forceinline__ void take(const uint4* quants, const Q8Scale* scales, int64_t cols, int first,
                                       int threads) {
    const int n_chunks = static_cast<int>(cols) / F::kWeights;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int c = min(first + k * threads, n_chunks - 1);  // beyond the row: of no use, but defined
#pragma unroll
      for (int u = 0; u < F::kUnits; ++u) units[k][u] = quants[c * F::kUnits + u];
      scale[k] = scales[c * F::kWeights / 32];
    }
  }

  // sum + chunk k of a row . input.
  __device__ __forceinline__ float dot(int k, const Chunk& w, float sum) const {
    if constexpr (F::kQuantized) {
      return sum + F::dot(w, units[k], scale[k]);
    } else {
      float values[F::kWeights];
      F::decode(w, values);
      const float* x = reinterpret_cast<const float*>(units[k]);
#pragma unroll
      for (int i = 0; i < F::kWeights; ++i) sum = fmaf(values[i], x[i], sum);
      return sum;
    }
  }
};

// Words of shared memory that a chunk takes beside its 16 bytes: its high bits, and the aligned words that hold its
// scale and super-scale.
template <DType D>
constexpr int kSlotWords = static_cast<int>(RowFields<D>::kHigh / 4) + (RowFields<D>::kScale > 0 ? 1 : 0) +
                           (RowFields<D>::kSuper > 0 ? 1 : 0);

// Rows of weights on their way into shared memory. Each thread has its own columns and slots, so nobody waits for
// anybody. kAlways: threads whose columns would be beyond the row have its last chunk, for inputs that are zero there:
// code that need not ask is faster. kWords: of a slot, where rows of several types share slots.
template <DType D, int kChunks, bool kAlways = false, int kWords = kSlotWords<D>>
struct RowSlots {
  using F = Format<D>;
  using Fields = RowFields<D>;
  const Fields fields;
  uint4* quants;
  unsigned* words;
  int first, threads, n_chunks;

  __device__ RowSlots(uint4* shared, int n_slots, int t, int row_threads, int64_t cols)
      : fields(cols),
        quants(shared + threadIdx.x),
        words(reinterpret_cast<unsigned*>(shared + n_slots * kChunks * blockDim.x) + threadIdx.x),
        first(t),
        threads(row_threads),
        n_chunks(static_cast<int>(cols) / F::kWeights) {}

  __device__ __forceinline__ int chunk(int k) const {
    const int c = first + k * threads;
    return kAlways ? min(c, n_chunks - 1) : c;
  }
  __device__ __forceinline__ unsigned* word(int at, int i) const {
    return words + (at * kWords + i) * static_cast<int>(blockDim.x);
  }
  __device__ __forceinline__ void request(int slot, const Matrix& w, int64_t row) const {
    const std::byte* const from = row_of(w, fields, row);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (chunk(k) >= n_chunks) continue;
      const auto c = static_cast<unsigned>(chunk(k));
      const int at = slot * kChunks + k;
      copy_async<Fields::kLow>(quants + at * static_cast<int>(blockDim.x), from + fields.low_at(c));
      int i = 0;
      if constexpr (Fields::kHigh >= 4) copy_async<4>(word(at, i++), from + fields.high_at(c));
      if constexpr (Fields::kHigh == 8) copy_async<4>(word(at, i++), from + (fields.high_at(c) + 4));
      if constexpr (Fields::kScale > 0) copy_async<4>(word(at, i++), from + fields.scale_at(c) / 4 * 4);
      if constexpr (Fields::kSuper > 0) copy_async<4>(word(at, i++), from + fields.super_at(c) / 4 * 4);
    }
  }
  __device__ __forceinline__ bool has(int k) const { return chunk(k) < n_chunks; }
  __device__ __forceinline__ Chunk get(int slot, int k) const {
    const int at = slot * kChunks + k;
    const auto c = static_cast<unsigned>(chunk(k));
    Chunk w{};
    if constexpr (Fields::kLow == 16) {
      w.q = quants[at * static_cast<int>(blockDim.x)];
    } else {
      const uint2 q = *reinterpret_cast<const uint2*>(quants + at * static_cast<int>(blockDim.x));
      w.q = make_uint4(q.x, q.y, 0, 0);
    }
    int i = 0;
    if constexpr (Fields::kHigh >= 4) w.high.x = *word(at, i++);
    if constexpr (Fields::kHigh == 8) w.high.y = *word(at, i++);
    if constexpr (Fields::kScale > 0) w.scale = *word(at, i++) >> (fields.scale_at(c) % 4 * 8);
    if constexpr (Fields::kSuper > 0) w.super = *word(at, i++) >> (fields.super_at(c) % 4 * 8);
    return w;
  }
};

// kN sums over the lanes of a warp at once: lane l gets that of v[l / (32 / kN)]. kN is a power of two up to 32.
template <int kN, int kHalf = kN / 2, int kOffset = kWarp / 2>
__device__ __forceinline__ float warp_sums(float (&v)[kN]) {
  if constexpr (kHalf > 0) {  // by recursion: a loop of 16 values would keep them in memory
    const bool upper = (threadIdx.x & kOffset) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float keep = upper ? v[i + kHalf] : v[i], give = upper ? v[i] : v[i + kHalf];
      v[i] = keep + __shfl_xor_sync(kAllLanes, give, kOffset);
    }
    return warp_sums<kN, kHalf / 2, kOffset / 2>(v);
  } else {
    float sum = v[0];
#pragma unroll
    for (int o = kOffset; o > 0; o /= 2) sum += __shfl_xor_sync(kAllLanes, sum, o);
    return sum;
  }
}

// Bytes of shared memory for the slots of a block.
template <int kWords>
constexpr size_t slot_bytes(int n_slots, int chunks, int threads) {
  return static_cast<size_t>(n_slots) * static_cast<size_t>(chunks * threads) * (16 + 4 * kWords);
}

// How many threads share a row, when each may have up to kChunks of its chunks; 0 when `limit` threads do not suffice.
inline int threads_per_row(int64_t n_chunks, int chunks, int limit) {
  const int64_t threads = round_up(ceil_div(n_chunks, chunks), 32);
  return threads <= limit ? static_cast<int>(threads) : 0;
}

}  // namespace hearth::cuda
