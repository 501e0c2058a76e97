#pragma once
// The input of a product in shared memory, copied there or normed on the way.
//
// The RMS norm of a few tokens costs a kernel that does next to nothing: every block of the product after it reads
// the whole input anyway. So the product can do the norm itself: blocks stage x * weight while they sum x^2, and the
// factor 1 / rms is applied to the finished dot products. With quantised weights every block would have to quantise
// x * weight again, which takes longer than a norm of its own; there the product that makes x leaves the norm's result
// but for that factor.
#include "cuda/copy_async.cuh"
#include "cuda/format.cuh"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"

namespace hearth::cuda {

// Columns of the input that are staged in shared memory at once.
template <DType D>
constexpr int kTileColumns = Format<D>::kQuantized ? 12288 : 8192;
constexpr int kMaxNormColumns = 8192;  // of an input that is normed on the way: one tile in every format

// Bytes of shared memory that stages the input of rows of `cols` columns.
template <DType D>
constexpr size_t stage_bytes(int64_t cols) {
  const int64_t columns = cols < kTileColumns<D> ? cols : kTileColumns<D>;
  return static_cast<size_t>(Format<D>::kQuantized ? q8_row_bytes(columns)
                                                   : columns * static_cast<int64_t>(sizeof(float)));
}

// One input row as the format reads it.
struct InputRow {
  const uint4* units;     // f32 values, or 8-bit quants
  const Q8Scale* scales;  // quantised formats
};
template <DType D>
__device__ __forceinline__ InputRow input_row(Act in, int64_t t, int64_t cols) {
  if constexpr (Format<D>::kQuantized) {
    const std::byte* row = static_cast<const std::byte*>(in.q8) + t * q8_row_bytes(cols);
    return {reinterpret_cast<const uint4*>(row), reinterpret_cast<const Q8Scale*>(row + q8_quants_bytes(cols))};
  } else {
    return {reinterpret_cast<const uint4*>(in.x + t * cols), nullptr};
  }
}

// Row t of activations of n columns.
inline Act act_row(Act a, int64_t t, int64_t n) {
  return {a.x + t * n, a.q8 != nullptr ? static_cast<std::byte*>(a.q8) + t * q8_row_bytes(n) : nullptr};
}

// The part of an input row that is in shared memory: chunks [0, n) of the tile, planes `plane` units apart.
template <DType D>
struct StagedInput {
  using F = Format<D>;
  uint4* units;
  Q8Scale* scales;
  int plane;

  __device__ StagedInput(uint4* shared, int n_chunks) {
    constexpr int kTileChunks = kTileColumns<D> / F::kWeights;
    plane = min(n_chunks, kTileChunks);
    units = shared;
    scales = reinterpret_cast<Q8Scale*>(shared + plane * F::kUnits);
  }
  __device__ __forceinline__ uint4& unit(int i) const { return units[i % F::kUnits * plane + i / F::kUnits]; }
  // Called by the whole block, between barriers. Everything is requested before anything is waited for, also what the
  // thread asked for by copy_async() before.
  __device__ __forceinline__ void fill(const InputRow& in, int first_chunk, int n_chunks) {
    const uint4* from = in.units + static_cast<int64_t>(first_chunk) * F::kUnits;
    if constexpr (D != DType::q8_0) {  // 5 % slower for whole models in other formats through copies
#pragma unroll 4
      for (int i = threadIdx.x; i < n_chunks * F::kUnits; i += blockDim.x) unit(i) = __ldcg(from + i);
    } else {
#pragma unroll 1
      for (int i = threadIdx.x; i < n_chunks * F::kUnits; i += blockDim.x) copy_async<16>(&unit(i), from + i);
    }
    if constexpr (F::kQuantized) {
      constexpr int kBytes = F::kWeights / 4;  // of scales, by chunk
      const auto* from_scales = reinterpret_cast<const uint4*>(in.scales) + first_chunk * kBytes / 16;
      const int n = (n_chunks * kBytes + 15) / 16;  // rows end with a whole unit
#pragma unroll 1
      for (int i = threadIdx.x; i < n; i += blockDim.x) {
        copy_async<16>(reinterpret_cast<uint4*>(scales) + i, from_scales + i);
      }
    }
    if constexpr (F::kQuantized) {
      end_copy_group();
      wait_copy_groups<0>();
    }
  }
};

// The result of an RMS norm of rows x [T][n] but for the factor 1 / rms. Rows have room for the longest.
struct UnscaledNorm {
  static constexpr int64_t kRowBytes = q8_row_bytes(kMaxNormColumns), kRowSquares = kMaxNormColumns / 32;
  std::byte* q8 = nullptr;   // rows of x * weight in the 8-bit form
  float* squares = nullptr;  // [T][n / 32] sums of x^2 over blocks of 32
  constexpr UnscaledNorm row(int64_t t) const {
    return {q8 != nullptr ? q8 + t * kRowBytes : nullptr, squares + t * kRowSquares};
  }
};
constexpr int64_t kUnscaledNormBytes = UnscaledNorm::kRowBytes + UnscaledNorm::kRowSquares * 4;  // of a row

// The kernel that makes x leaves this for the norm of x.
struct OutputNorm {
  const float* weight = nullptr;  // null: there is no norm to come
  UnscaledNorm unscaled;

  // Lane l of a warp has element l of a block of 32 of row t of x [T][n], and its weight.
  __device__ __forceinline__ void store(int64_t t, int64_t n, int block, float v, float own_weight) const {
    store_q8_block(v * own_weight, unscaled.q8 + t * UnscaledNorm::kRowBytes, n, block);
    const float sum = group_sum(v * v);
    if (threadIdx.x % kWarp == 0) unscaled.squares[t * UnscaledNorm::kRowSquares + block] = sum;
  }
};

// An RMS norm of rows of n elements, n a multiple of 32 and at most kMaxNormColumns.
struct InputNorm {
  const float* x = nullptr;  // [T][n]; null: there is no norm to do
  const float* weight = nullptr;
  float eps = 0.0f;
  int n = 0;
  Act out;                // gets the result too, for operations to come
  UnscaledNorm unscaled;  // half of it, where the maker of x has left that

  // The norm of row t alone.
  InputNorm row(int64_t t) const {
    return {x + t * n, weight, eps, n, act_row(out, t, n), unscaled.q8 != nullptr ? unscaled.row(t) : UnscaledNorm{}};
  }

  // 1 / rms.
  __device__ __forceinline__ float scale(float sum_of_squares) const {
    return 1.0f / sqrtf(sum_of_squares / static_cast<float>(n) + eps);
  }
  // Lane l has element l of a block of 32 of row t of the result.
  __device__ __forceinline__ void store(int64_t t, int block, float v) const {
    out.x[t * n + block * 32 + static_cast<int>(threadIdx.x % kWarp)] = v;
    if (out.q8 != nullptr) store_q8_block(v, static_cast<std::byte*>(out.q8) + t * q8_row_bytes(n), n, block);
  }
};

// Writes one of n_workers' share of the norm's result, of one row. Called by a warp.
__device__ __forceinline__ void store_norm(const InputNorm& norm, float scale, int worker, int n_workers) {
  for (int block = worker; block < norm.n / 32; block += n_workers) {
    const int i = block * 32 + static_cast<int>(threadIdx.x % kWarp);
    norm.store(0, block, __ldcg(norm.x + i) * norm.weight[i] * scale);
  }
}

// The whole result of one row, by one block. In a launch with a hand-off the messenger does it before it hands the
// result over, instead of the blocks that have products to do; the CPU waits for it, so all loads are in flight at
// once.
template <int kThreads>
struct NormWriter {
  static constexpr int kWarps = kThreads / kWarp, kHeld = 16;
  const InputNorm& norm;
  float x[kHeld], weight[kHeld];  // lane l has element l of blocks warp, warp + kWarps, ...

  __device__ __forceinline__ explicit NormWriter(const InputNorm& n) : norm(n) {}
  static __device__ __forceinline__ int block(int k) { return static_cast<int>(threadIdx.x) / kWarp + k * kWarps; }
  static __device__ __forceinline__ int element(int k) { return static_cast<int>(threadIdx.x) + k * kThreads; }
  // Requests the weights. May be called before grid_wait().
  __device__ __forceinline__ void start() {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) weight[k] = element(k) < norm.n ? norm.weight[element(k)] : 0.0f;
  }
  // Writes the result, and to `copy` too unless that is null. Called by the whole block, ends with a barrier.
  __device__ __forceinline__ void run(float* copy) {
    __shared__ float shared[kWarp];
    const float* squares = norm.unscaled.squares;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) x[k] = element(k) < norm.n ? __ldcg(norm.x + element(k)) : 0.0f;
    float sum = 0.0f;
    if (squares != nullptr) {
      for (int i = threadIdx.x; i < norm.n / 32; i += kThreads) sum += __ldcg(squares + i);
    } else {
#pragma unroll
      for (int k = 0; k < kHeld; ++k) sum += x[k] * x[k];
      for (int k = kHeld; element(k) < norm.n; ++k) {
        const float v = __ldcg(norm.x + element(k));
        sum += v * v;
      }
    }
    const float scale = norm.scale(block_sum(sum, shared));
    const auto store = [&](int k, float value) {
      if (copy != nullptr) copy[element(k)] = value;
      norm.store(0, block(k), value);
    };
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (element(k) < norm.n) store(k, x[k] * weight[k] * scale);
    }
    for (int k = kHeld; element(k) < norm.n; ++k) {
      store(k, __ldcg(norm.x + element(k)) * norm.weight[element(k)] * scale);
    }
    __syncthreads();
  }
};

__device__ __forceinline__ float sum_of_squares(const float4& v, float sum) {
  return fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum))));
}
__device__ __forceinline__ float4 multiply(const float4& a, const float4& b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

// Groups of four of a row's elements, spread over the threads of a block: the next kQuads of this thread.
template <int kQuads>
struct RowQuads {
  float4 v[kQuads];
  // Those of row [n_quads * 4]; whole warps take part, so that the blocks of 32 can be quantised.
  __device__ __forceinline__ void load(const float* row, int base, int n_quads) {
#pragma unroll
    for (int u = 0; u < kQuads; ++u) {
      const int i = base + u * static_cast<int>(blockDim.x);
      v[u] = i < n_quads ? __ldcg(reinterpret_cast<const float4*>(row) + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
};

// The 8-bit form of a vector [n], n a multiple of 32, as quantize_rows() makes it: load(quad) gives its elements 4 quad
// to 4 quad + 3, and store(quad, q) gets them; the scale is worth storing when quad % 8 is 0. Called by the whole
// block.
template <int kQuads, typename Load, typename Store>
__device__ __forceinline__ void quantize_by_block(int n, Load load, Store store) {
  const int n_quads = n / 4;
#pragma unroll 1
  for (int first = 0; first < n_quads; first += kQuads * static_cast<int>(blockDim.x)) {
    const int base = first + static_cast<int>(threadIdx.x);
    float values[kQuads][4];
#pragma unroll
    for (int u = 0; u < kQuads; ++u) {
      const int quad = base + u * static_cast<int>(blockDim.x);
      const float4 v = quad < n_quads ? load(quad) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      values[u][0] = v.x, values[u][1] = v.y, values[u][2] = v.z, values[u][3] = v.w;
    }
    Q8Quad q[kQuads];
    quantize_quads<kQuads, true>(values, q);
#pragma unroll
    for (int u = 0; u < kQuads; ++u) {
      const int quad = base + u * static_cast<int>(blockDim.x);
      if (quad < n_quads) store(quad, q[u]);
    }
  }
}

// A norm's result as the input of a product with a token dimension (token_grid()). The whole block calls its functions,
// in the order in which they are declared.
template <DType D>
struct NormedInput {
  static constexpr int kInFlight = 4;  // loads a thread
  const InputNorm& norm;
  StagedInput<D> staged;
  int n_quads;  // groups of four elements

  __device__ NormedInput(const InputNorm& a, uint4* shared)
      : norm(a), staged(shared, a.n / Format<D>::kWeights), n_quads(a.n / 4) {}

  // Brings the norm's weights to where their products with x will be. May be called before grid_wait().
  __device__ __forceinline__ void start() const {
    const auto* from = reinterpret_cast<const uint4*>(norm.weight);
    for (int i = threadIdx.x; i < n_quads; i += blockDim.x) staged.unit(i) = load_weights(from + i);
  }
  // Stages x * weight; ends with a barrier of the block.
  __device__ __forceinline__ void fill() const {
    const float squares = group_sum(stage());
    if (threadIdx.x % kWarp == 0) warp_squares()[threadIdx.x / kWarp] = squares;
    __syncthreads();
  }
  // 1 / rms, by which the dot products are to be multiplied.
  __device__ __forceinline__ float scale() const {
    const int lane = threadIdx.x % kWarp;
    return norm.scale(group_sum(lane < static_cast<int>(blockDim.x) / kWarp ? warp_squares()[lane] : 0.0f));
  }
  // Writes the block's share of the norm's result. Called by one warp.
  __device__ __forceinline__ void store_result(float scale) const {
#pragma unroll 1
    for (int block = static_cast<int>(blockIdx.y); block < norm.n / 32; block += static_cast<int>(gridDim.y)) {
      const int i = block * 32 + static_cast<int>(threadIdx.x % kWarp);
      norm.store(blockIdx.x, block, reinterpret_cast<const float*>(&staged.unit(i / 4))[i % 4] * scale);
    }
  }

 private:
  static __device__ __forceinline__ float* warp_squares() {
    __shared__ float squares[kWarp];
    return squares;
  }
  // Returns the sum of the thread's x^2.
  __device__ __forceinline__ float stage() const {
    float squares = 0.0f;
    for (int base = threadIdx.x; base < n_quads; base += kInFlight * blockDim.x) {
      RowQuads<kInFlight> x;
      x.load(norm.x + int64_t{blockIdx.x} * norm.n, base, n_quads);
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int i = base + u * static_cast<int>(blockDim.x);
        squares = sum_of_squares(x.v[u], squares);
        if (i >= n_quads) continue;
        const uint4 w = staged.unit(i);  // this thread's own
        const float4 v = multiply(x.v[u], make_float4(__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z),
                                                      __uint_as_float(w.w)));
        staged.unit(i) =
            make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
      }
    }
    return squares;
  }
};

// The same with quantised weights, from norm.unscaled. A token's block b stores block b of the result, so that it needs
// to have as many.
template <DType D>
requires(Format<D>::kQuantized) struct NormedInput<D> {
  const InputNorm& norm;
  StagedInput<D> staged;

  __device__ NormedInput(const InputNorm& a, uint4* shared) : norm(a), staged(shared, a.n / Format<D>::kWeights) {}

  __device__ __forceinline__ void start() const {
    if (stores()) copy_units(copies().weight, norm.weight + blockIdx.y * 32, 32);
  }
  __device__ __forceinline__ void fill() {
    const UnscaledNorm unscaled = norm.unscaled.row(blockIdx.x);
    copy_units(copies().squares, unscaled.squares, norm.n / 32);
    if (stores()) copy_units(copies().x, norm.x + int64_t{blockIdx.x} * norm.n + blockIdx.y * 32, 32);
    staged.fill(input_row<D>({nullptr, unscaled.q8}, 0, norm.n), 0, norm.n / Format<D>::kWeights);
    __syncthreads();
  }
  __device__ __forceinline__ float scale() const {
    float sum = 0.0f;
#pragma unroll
    for (int first = 0; first < kMaxNormColumns / 32; first += kWarp) {
      const int i = first + static_cast<int>(threadIdx.x % kWarp);
      if (i < norm.n / 32) sum += copies().squares[i];
    }
    return norm.scale(group_sum(sum));
  }
  __device__ __forceinline__ void store_result(float scale) const {
    if (!stores()) return;
    const int lane = threadIdx.x % kWarp;
    norm.store(blockIdx.x, static_cast<int>(blockIdx.y), copies().x[lane] * copies().weight[lane] * scale);
  }

 private:
  struct Copies {
    float squares[kMaxNormColumns / 32];
    float x[32], weight[32];  // of the block that this one stores
  };
  static __device__ __forceinline__ Copies& copies() {
    __shared__ alignas(16) Copies c;
    return c;
  }
  __device__ __forceinline__ bool stores() const {
    return static_cast<int>(blockIdx.y) < norm.n / 32;
  }
  // n floats, and up to 3 more; n is at most four a thread.
  static __device__ __forceinline__ void copy_units(float* to, const float* from, int n) {
    const int i = static_cast<int>(threadIdx.x) * 4;
    if (i < n) copy_async<16>(to + i, from + i);
  }
};

}  // namespace hearth::cuda
