#pragma once
// The heart of decoding: dot products of many weight rows with one input row, at the speed of memory.
//
// One block a multiprocessor. A row is shared by `warps_per_row` warps (a team): each lane keeps its slice of the input
// in registers for the whole kernel, so that only weights move. They come through a ring in shared memory that every
// lane has for itself (no barriers), kStages rows ahead. Partial sums of a row meet in shared memory, in fixed order.
// For quantised weights the block turns the input into 8 bits itself: that form of it never exists in global memory.
//
// Blocks use half of a multiprocessor, so that those of the next kernel fit beside them. These fill their rings, and
// ask for more weights to be brought into the second-level cache, before grid_wait(): while this kernel ends, and while
// the small kernels between two products run, memory keeps working.
#include "cuda/async_copy.cuh"
#include "cuda/format.cuh"
#include "cuda/kernels.cuh"
#include "cuda/launch.cuh"

namespace hearth::cuda {

constexpr int kStreamMaxThreads = 512;
constexpr int kSegment = 256;  // outputs whose partial sums are in shared memory at once
// Rows in a lane's ring: about 160 bytes of weights (less with scales beside them), so that the rings of two kernels
// fit.
template <DType D, int kChunks>
constexpr int kStages = Format<D>::kQuantized ? (kChunks == 3 ? 3 : 8 / kChunks)
                                              : (kChunks >= 3 ? 12 / kChunks : 10 / kChunks);

struct RowAt {
  const uint4* data;
  const unsigned* scales;  // quantised types: f16, two in a word, which is the least that can be copied
};
template <DType D>
__device__ __forceinline__ RowAt row_at(const void* data, const void* scales, int64_t row, int cols) {
  RowAt at{static_cast<const uint4*>(data) + row * (cols / Format<D>::kWeights), nullptr};
  if constexpr (Format<D>::kQuantized)
    at.scales = static_cast<const unsigned*>(scales) + row * (scale_stride(cols) / 2);
  return at;
}

// A lane's input for one chunk: the values, or their 8-bit form.
template <DType D, bool kQuantized = Format<D>::kQuantized>
struct ChunkInput {
  using F = Format<D>;
  float x[F::kWeights];
  template <bool kShared>
  __device__ __forceinline__ void load(const float* from) {
#pragma unroll
    for (int i = 0; i < F::kWeights; i += 4) {
      float4 v = make_float4(0, 0, 0, 0);
      const auto* p = reinterpret_cast<const float4*>(from + i);
      if (from != nullptr) v = kShared ? *p : __ldcg(p);
      x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
    }
  }
  __device__ __forceinline__ float dot(const Chunk& w, float sum) const {
    float values[F::kWeights];
    F::decode(w, values);
#pragma unroll
    for (int i = 0; i < F::kWeights; ++i) sum = fmaf(values[i], x[i], sum);
    return sum;
  }
};
template <DType D>
struct ChunkInput<D, true> {
  using F = Format<D>;
  int q[F::kWeights / 4];
  Q8Scale scale;
  __device__ __forceinline__ float dot(const Chunk& w, float sum) const { return sum + F::dot(w, q, scale); }
};

// The input of a pass in shared memory: f32 values, or 8-bit quants and their scales.
template <DType D>
struct StagedInput {
  using F = Format<D>;
  uint4* data;
  int cols;  // there is room for

  static __host__ __device__ constexpr size_t bytes(int cols) {
    return F::kQuantized ? static_cast<size_t>(cols + cols / 32 * static_cast<int>(sizeof(Q8Scale)))
                         : static_cast<size_t>(cols) * sizeof(float);
  }
  __device__ __forceinline__ Q8Scale* scales() const {
    return reinterpret_cast<Q8Scale*>(reinterpret_cast<std::byte*>(data) + cols);
  }
  // Called by the whole block, between barriers; n values, n <= cols.
  __device__ __forceinline__ void fill(const float* x, int n) const {
    const int lane = threadIdx.x % kWarp;
    for (int base = static_cast<int>(threadIdx.x) - lane; base < n / 4; base += static_cast<int>(blockDim.x)) {
      const int i = base + lane;
      const float4 v = i < n / 4 ? __ldcg(reinterpret_cast<const float4*>(x) + i) : make_float4(0, 0, 0, 0);
      if constexpr (F::kQuantized) {
        store_quantized(v, i, i < n / 4);
      } else if (i < n / 4) {
        reinterpret_cast<float4*>(data)[i] = v;
      }
    }
  }
  // Values 4i .. 4i + 3. Eight lanes have a block of 32: d = max |x| / 127, round to nearest.
  __device__ __forceinline__ void store_quantized(float4 v, int i, bool real) const {
    float amax = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
    for (int o = 1; o < 8; o *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, o));
    const float inverse = amax > 0.0f ? 127.0f / amax : 0.0f;
    const auto byte = [&](float f) {
      return static_cast<unsigned>(max(-127, min(127, __float2int_rn(f * inverse)))) & 0xFFu;
    };
    const unsigned word = byte(v.x) | byte(v.y) << 8 | byte(v.z) << 16 | byte(v.w) << 24;
    int sum = __dp4a(static_cast<int>(word), 0x01010101, 0);
#pragma unroll
    for (int o = 1; o < 8; o *= 2) sum += __shfl_xor_sync(kAllLanes, sum, o);
    if (!real) return;
    reinterpret_cast<unsigned*>(data)[i] = word;
    const float d = amax / 127.0f;
    if (i % 8 == 0) scales()[i / 8] = {d, d * static_cast<float>(sum)};
  }
  // The input of chunk c of the pass.
  __device__ __forceinline__ void read(int c, bool real, ChunkInput<D>& to) const {
    if constexpr (F::kQuantized) {
#pragma unroll
      for (int i = 0; i < F::kWeights / 16; ++i) {
        const uint4 v = real ? data[c * (F::kWeights / 16) + i] : make_uint4(0, 0, 0, 0);
        to.q[4 * i] = static_cast<int>(v.x), to.q[4 * i + 1] = static_cast<int>(v.y);
        to.q[4 * i + 2] = static_cast<int>(v.z), to.q[4 * i + 3] = static_cast<int>(v.w);
      }
      to.scale = real ? scales()[c * F::kWeights / 32] : Q8Scale{0, 0};
    } else {
      to.template load<true>(real ? reinterpret_cast<const float*>(data) + c * F::kWeights : nullptr);
    }
  }
};
// Rows shared by all warps of the block need no staging: every value is read once.
template <DType D>
__host__ __device__ constexpr size_t staged_bytes(const RowPlan& plan, int cols, int block_warps) {
  if (!Format<D>::kQuantized && plan.warps_per_row == block_warps) return 0;
  const int tile = plan.tile * Format<D>::kWeights;
  return StagedInput<D>::bytes(tile < cols ? tile : round_up(cols, 32));
}

// Sums kRows values over the warp with as few exchanges as there can be: lanes halve the rows they keep at each step.
// Lane l gets the sum of row l / (32 / kRows).
template <int kRows>
__device__ __forceinline__ float reduce_rows(float (&v)[kRows]) {
  const int lane = threadIdx.x % kWarp;
  int offset = kWarp / 2;
#pragma unroll
  for (int keep = kRows / 2; keep > 0; keep /= 2, offset /= 2) {
    const bool upper = (lane & offset) != 0;
#pragma unroll
    for (int r = 0; r < keep; ++r) {
      const float mine = upper ? v[r + keep] : v[r], other = upper ? v[r] : v[r + keep];
      v[r] = mine + __shfl_xor_sync(kAllLanes, other, offset);
    }
  }
#pragma unroll
  for (int o = kWarp / kRows / 2; o > 0; o /= 2) v[0] += __shfl_xor_sync(kAllLanes, v[0], o);
  return v[0];
}

// How a row is shared (plan.h), and what a launch knows besides the job.
struct StreamArgs {
  const float* x;  // [T][cols]
  int cols;
  RowPlan plan;
  int prefetch_bytes;  // of weights that a block brings into the second-level cache before grid_wait()
};

// One pass over rows [begin, end) of a job, this lane's slice of the columns.
template <DType D, int kChunks, typename Job>
struct RowStream {
  using F = Format<D>;
  static constexpr int kDepth = kStages<D, kChunks>;  // rows in the ring
  static constexpr int kRows = kChunks <= 2 ? 4 : 2;  // rows that are reduced together
  const Job& job;
  uint4* ring;       // [kDepth][kChunks][threads]
  unsigned* scales;  // the same: the word of memory that has the chunk's scale
  const int n_chunks, threads, warps_per_row, team, n_teams, part;  // part: which of the team's warps this is
  int first_chunk = 0, limit = 0, stage = 0;                        // of this pass
  ChunkInput<D> input[kChunks];

  __device__ __forceinline__ RowStream(const Job& j, const StreamArgs& a, uint4* shared)
      : job(j),
        ring(shared + threadIdx.x),
        scales(reinterpret_cast<unsigned*>(shared + kDepth * kChunks * blockDim.x) + threadIdx.x),
        n_chunks(a.cols / F::kWeights),
        threads(static_cast<int>(blockDim.x)),
        warps_per_row(a.plan.warps_per_row),
        team(static_cast<int>(threadIdx.x) / kWarp / warps_per_row),
        n_teams(threads / kWarp / warps_per_row),
        part(static_cast<int>(threadIdx.x) / kWarp % warps_per_row) {}

  __device__ __forceinline__ int chunk(int k) const { return first_chunk + k * kWarp * warps_per_row; }
  __device__ __forceinline__ int slot(int s, int k) const { return (s * kChunks + k) * threads; }

  // Requests a row into a stage of the ring.
  __device__ __forceinline__ void request(int row, int end, int s) {
    if (row < end) {
      const RowAt at = job.row(row);
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int c = chunk(k);
        if (c >= limit) continue;
        async_copy16(ring + slot(s, k), at.data + c);
        if constexpr (F::kQuantized) {
          async_copy4(scales + slot(s, k), at.scales + c * F::kWeights / 64);
        }
      }
    }
    async_commit();
  }
  // Requests the first rows of a pass.
  __device__ __forceinline__ void start(const StreamArgs& a, int pass, int begin, int end) {
    first_chunk = pass * a.plan.tile + part * kWarp + static_cast<int>(threadIdx.x) % kWarp;
    limit = min(n_chunks, (pass + 1) * a.plan.tile);
    stage = 0;
#pragma unroll 1
    for (int s = 0; s < kDepth; ++s) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {  // lanes beyond the row multiply zeros
        if (chunk(k) < limit) continue;
        ring[slot(s, k)] = make_uint4(0, 0, 0, 0);
        if constexpr (F::kQuantized) scales[slot(s, k)] = 0;
      }
      request(begin + team + s * n_teams, end, s);
    }
  }
  // Brings the weights that follow those of start() into the second-level cache.
  __device__ __forceinline__ void prefetch(int begin, int end, int bytes) const {
    const int row_bytes = n_chunks * static_cast<int>(sizeof(uint4));
    for (int at = static_cast<int>(threadIdx.x) * 128; at < bytes; at += threads * 128) {
      const int row = begin + n_teams * kDepth + at / row_bytes;
      if (row >= end) return;
      const char* p = reinterpret_cast<const char*>(job.row(row).data) + at % row_bytes;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
    }
  }
  // Called by the whole block; `staged` is free to be overwritten.
  __device__ __forceinline__ void load_input(const float* x, int tile_begin, const StagedInput<D>& staged) {
    if constexpr (!F::kQuantized) {
      if (n_teams == 1) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          input[k].template load<false>(chunk(k) < limit ? x + static_cast<int64_t>(chunk(k)) * F::kWeights : nullptr);
        }
        return;
      }
    }
    staged.fill(x + static_cast<int64_t>(tile_begin) * F::kWeights, (limit - tile_begin) * F::kWeights);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kChunks; ++k) staged.read(chunk(k) - tile_begin, chunk(k) < limit, input[k]);
  }
  __device__ __forceinline__ Chunk received(int s, int k) const {
    Chunk w{ring[slot(s, k)], 0};
    if constexpr (F::kQuantized) {
      const unsigned word = scales[slot(s, k)];
      w.d = static_cast<unsigned short>(chunk(k) * F::kWeights / 32 % 2 != 0 ? word >> 16 : word);
    }
    return w;
  }
  // sums[row - begin][part] = or += this warp's share. Lets the next kernel start when `trigger_rows` are left.
  __device__ __forceinline__ void run(int begin, int end, bool add, int trigger_rows, float* sums) {
    const int lane = threadIdx.x % kWarp;
    for (int row = begin + team; row < end; row += n_teams * kRows) {
      if (row + trigger_rows >= end) grid_trigger();
      float sum[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        async_wait<kDepth - 1>();
        sum[r] = 0.0f;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) sum[r] = input[k].dot(received(stage, k), sum[r]);
        request(row + (kDepth + r) * n_teams, end, stage);
        stage = stage + 1 == kDepth ? 0 : stage + 1;
      }
      const float total = reduce_rows<kRows>(sum);
      const int mine = row + lane / (kWarp / kRows) * n_teams;
      if (lane % (kWarp / kRows) == 0 && mine < end) {
        float& to = sums[(mine - begin) * warps_per_row + part];
        to = add ? to + total : total;
      }
    }
  }
};

template <DType D, int kChunks>
__host__ __device__ constexpr size_t ring_bytes(int threads) {
  return static_cast<size_t>(kStages<D, kChunks> * kChunks * threads) *
         (sizeof(uint4) + (Format<D>::kQuantized ? sizeof(unsigned) : 0));
}

// Runs a job: outputs are shared out evenly over the blocks; each is made of Job::kRowsPerOutput rows. A job has
//   static constexpr bool kRowsKnown      rows do not depend on earlier operations, and may be read before grid_wait()
//   int n_outputs()                       called after grid_wait() unless kRowsKnown
//   RowAt row(int row)
//   float start(int output)               what finish() wants from memory, requested before the products
//   void finish(int output, float start, const float* sums, int stride)   sums of its rows, `stride` apart
template <DType D, int kChunks, typename Job>
__device__ __forceinline__ void stream_rows(const Job& job, const StreamArgs& a, const float* x) {
  constexpr int kPer = Job::kRowsPerOutput;
  constexpr int kTriggerBytes = 96 << 10;  // what a multiprocessor reads in about the time that a launch takes
  const int row_bytes = a.cols / Format<D>::kWeights * static_cast<int>(sizeof(uint4));
  const int trigger_rows = kTriggerBytes / row_bytes + 1;
  extern __shared__ uint4 shared[];
  RowStream<D, kChunks, Job> stream(job, a, shared);
  const int threads = static_cast<int>(blockDim.x);
  std::byte* after_ring = reinterpret_cast<std::byte*>(shared) + ring_bytes<D, kChunks>(threads);
  const size_t staged = staged_bytes<D>(a.plan, a.cols, threads / kWarp);
  const StagedInput<D> input{reinterpret_cast<uint4*>(after_ring),
                             min(a.plan.tile * Format<D>::kWeights, static_cast<int>(round_up(a.cols, 32)))};
  float* sums = reinterpret_cast<float*>(after_ring + staged);
  const auto range = [&] {
    const int64_t n = job.n_outputs();
    return make_int2(static_cast<int>(n * blockIdx.x / gridDim.x), static_cast<int>(n * (blockIdx.x + 1) / gridDim.x));
  };
  int2 outputs{};
  if constexpr (Job::kRowsKnown) {
    outputs = range();
    const int first_end = min(outputs.y, outputs.x + kSegment) * kPer;
    stream.start(a, 0, outputs.x * kPer, first_end);
    stream.prefetch(outputs.x * kPer, first_end, a.prefetch_bytes);
  }
  grid_wait();
  if constexpr (!Job::kRowsKnown) outputs = range();
  bool started = Job::kRowsKnown;
  for (int first = outputs.x; first < outputs.y; first += kSegment) {
    const int last = min(outputs.y, first + kSegment), output = first + static_cast<int>(threadIdx.x);
    const float begun = output < last ? job.start(output) : 0.0f;
    for (int pass = 0; pass < a.plan.passes; ++pass) {
      if (!started) stream.start(a, pass, first * kPer, last * kPer);
      started = false;
      if (first == outputs.x || a.plan.passes > 1) {
        if (first != outputs.x || pass > 0) __syncthreads();  // everyone has read the last one
        stream.load_input(x, pass * a.plan.tile, input);
      }
      const bool ends = last == outputs.y && pass + 1 == a.plan.passes;
      stream.run(first * kPer, last * kPer, pass > 0, ends ? trigger_rows : -kSegment * kPer, sums);
    }
    __syncthreads();
    if (output < last)
      job.finish(output, begun, sums + (output - first) * kPer * a.plan.warps_per_row, a.plan.warps_per_row);
    if (last < outputs.y) __syncthreads();
  }
}

// The sum of one row's partial sums.
__device__ __forceinline__ float sum_parts(const float* sums, int n) {
  float total = 0.0f;
  for (int i = 0; i < n; ++i) total += sums[i];
  return total;
}

template <DType D>
StreamArgs stream_args(const Gpu& gpu, const float* x, int64_t cols) {
  return {x, static_cast<int>(cols), row_plan(cols / Format<D>::kWeights, gpu.stream_warps, Format<D>::kWeights),
          gpu.prefetch_bytes};
}
// Launches a kernel that calls stream_rows<D, kChunks>() for n outputs of each of T inputs.
template <DType D, int kChunks, typename Kernel, typename... Args>
void launch_stream(const Gpu& gpu, Kernel kernel, int64_t n, int rows_per_output, int64_t T, const StreamArgs& s,
                   const Args&... args) {
  const int64_t blocks = std::min<int64_t>(gpu.multiprocessors, n);
  const int64_t segment = std::min<int64_t>(kSegment, ceil_div(n, blocks));
  const int threads = gpu.stream_warps * kWarp;
  const size_t shared = ring_bytes<D, kChunks>(threads) + staged_bytes<D>(s.plan, s.cols, gpu.stream_warps) +
                        static_cast<size_t>(segment * rows_per_output * s.plan.warps_per_row) * sizeof(float);
  launch(gpu, kernel, dim3(grid_size(blocks), grid_size(T)), threads, shared, args..., s);
}
// Calls f.template operator()<kChunks>().
template <typename F>
void with_chunks(const RowPlan& plan, F&& f) {
  switch (plan.chunks) {
    case 1:
      return f.template operator()<1>();
    case 2:
      return f.template operator()<2>();
    case 3:
      return f.template operator()<3>();
    default:
      return f.template operator()<4>();
  }
}

}  // namespace hearth::cuda
