// The FFN of masked neurons in two kernels. The first gives each block a share of the list that the mask stands for,
// and goes from gate to down in one pass: rows stream into shared memory, and every thread adds the down rows of its
// columns in registers. Of a short share all rows are asked for at once; of a long one up and down rows only where the
// gate confirms. The second (ffn_merge.cu) adds the blocks' sums, the bias, and the CPU's answer to y. Shares depend on
// positions in the list, sums are added in fixed order: the same result run after run. Neurons whose rows are in host
// memory have a list and blocks of their own: what such rows take over the link passes beside the work on the others,
// and few blocks keep a link busy. Each token has its blocks; what the tokens before it have read they mostly find in
// the second-level cache.
#include <array>

#include "cuda/activation.cuh"
#include "cuda/copy_async.cuh"
#include "cuda/kernels.cuh"
#include "cuda/next_rows.cuh"
#include "cuda/owned_columns.cuh"
#include "cuda/sparse.cuh"
#include "cuda/staged_input.cuh"

namespace hearth::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / kWarp;
constexpr int kMaxBatch = 4;     // neurons that a group of threads takes a step with
constexpr int kStages = 2;       // batches whose rows of one kind are in flight
constexpr int kRowsPerSlot = 3;  // gate, up, down
constexpr int kTile = 512;       // of the block's share of the list, in shared memory
constexpr int kMaxLinkBlocks = 16;

// The list of one shard's neurons, and the blocks that compute it.
struct ListPart {
  FfnShard shard;
  NeuronArgs neuron;
  const uint32_t* mask;  // of token 0, the next `stride` words on; its bits [skip, skip + n)
  int64_t stride;
  int skip, n;
  const float* values;  // [T][n]
  int first_block, blocks;
};

// Grid: (blocks, T).
struct ListKernelArgs {
  ListPart parts[2];  // of host memory; of the device's. Blocks of the first part come first.
  float threshold;
  Act in;
  float* partial;     // [T][gridDim.x][cols]
  int32_t* n_active;  // [T][gridDim.x]
  int threads;        // that share a row
  int batch;          // at most kMaxBatch / kChunks
  NextRows next;      // brought by the last token's blocks of the second part that are done: they wait for the CPU
  bool hinted;        // FfnListArgs
};

// A batch when its gates are known.
struct Gates {
  float value = 0.0f;   // lane r: act(gate) of row r
  unsigned active = 0;  // bit r: row r is
};

// D: the type of gate and up rows; DDown: of down rows, as many weights a chunk.
template <DType D, DType DDown, int kChunks>
struct ListBlock {
  using F = Format<D>;
  static constexpr int kWords = std::max(kSlotWords<D>, kSlotWords<DDown>);
  static constexpr int kBatch = kMaxBatch / kChunks;
  // All rows of a share of up to so many batches are asked for at once: it takes as long as memory takes to answer
  // twice, one after the other, and rows in vain cost less than the second time. Larger rows stand in each other's way.
  static constexpr int kShortBatches = F::kQuantized ? 2 * kStages : 1;
  const ListKernelArgs& a;
  const ListPart& part;
  const int lane, warp, group, groups, t;
  RowSlots<D, kChunks, true, kWords> slots;
  RowSlots<DDown, kChunks, true, kWords> down_slots;  // in the same memory
  OwnedInput<D, kChunks> in;
  ScaledSum<DDown> sums[kChunks];  // of the thread's columns
  const int32_t* ids;          // of the tile, in shared memory
  const float* known;          // act(gate) of the tile's neurons, with part.values
  int n;                       // neurons in the tile
  int n_active = 0;

  __device__ ListBlock(const ListKernelArgs& args, const ListPart& own, uint4* shared)
      : a(args),
        part(own),
        lane(threadIdx.x % kWarp),
        warp(threadIdx.x / kWarp),
        group(threadIdx.x / args.threads),
        groups(blockDim.x / args.threads),
        t(threadIdx.x % args.threads),
        slots(shared, kStages * kRowsPerSlot * args.batch, t, args.threads, own.shard.down_t.cols),
        down_slots(shared, kStages * kRowsPerSlot * args.batch, t, args.threads, own.shard.down_t.cols) {}

  __device__ __forceinline__ int position(int batch, int r) const { return (batch * groups + group) * a.batch + r; }
  __device__ __forceinline__ bool has(int batch, int r) const {
    return batch >= 0 && r < a.batch && position(batch, r) < n;
  }
  __device__ __forceinline__ int slot(int kind, int batch, int r) const {
    return (kind * kStages + batch % kStages) * a.batch + r;
  }
  // Whether to leave a row out. To ask costs more than a row in vain where that is cheap; slots that nothing was
  // requested for hold anything, and what is made of them is not used.
  static __device__ __forceinline__ bool skip(bool wanted) { return F::kQuantized && !wanted; }
  __device__ __forceinline__ int any_slot(int kind, int batch, int r) const {
    return slot(kind, batch, min(r, a.batch - 1));
  }

  __device__ __forceinline__ void request_gates(int batch) const {
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      if (has(batch, r)) slots.request(slot(0, batch, r), part.shard.gate, ids[position(batch, r)]);
    }
  }
  __device__ __forceinline__ void request_up_down(int batch, unsigned active) const {
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      if ((active >> r & 1) == 0) continue;
      const int row = ids[position(batch, r)];
      if (part.shard.up.data != nullptr) slots.request(slot(1, batch, r), part.shard.up, row);
      down_slots.request(slot(2, batch, r), part.shard.down_t, row);
    }
  }
  __device__ __forceinline__ unsigned all(int batch) const {
    unsigned mask = 0;
#pragma unroll
    for (int r = 0; r < kBatch; ++r) mask |= static_cast<unsigned>(has(batch, r)) << r;
    return mask;
  }
  // Asks for all that can be asked for before a batch's gates are known.
  template <bool kAtOnce>
  __device__ __forceinline__ void request(int batch) const {
    if (part.values == nullptr) request_gates(batch);
    if (kAtOnce) request_up_down(batch, all(batch));
  }
  // The thread's part of row . input.
  __device__ __forceinline__ float dot(int s) const {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) sum = in.dot(k, slots.get(s, k), sum);
    return sum;
  }
  // The active ones of a batch's down rows, each times value[r].
  __device__ __forceinline__ void add_rows(int batch, unsigned active, const float (&value)[kBatch]) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      Chunk w[kBatch];
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        w[r] = {};
        if (skip((active >> r & 1) != 0)) continue;
        w[r] = down_slots.get(any_slot(2, batch, r), k);
        if ((active >> r & 1) == 0) w[r] = {};
      }
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        if (!skip((active >> r & 1) != 0)) sums[k].add(w[r], value[r]);
      }
    }
  }

  // One step of the pipeline: the gates of `batch`, and what is left of it; or, unless kAtOnce, of the batch two before
  // it, `old`. dot_sums: [warps][2 * kMaxBatch] in shared memory, another one than in the step before.
  template <bool kAtOnce>
  __device__ __forceinline__ Gates step(int batch, const Gates& old, float (*dot_sums)[2 * kMaxBatch]) {
    const bool reads_gate = part.values == nullptr, has_up = part.shard.up.data != nullptr;
    const int up_batch = kAtOnce ? batch : batch - kStages;
    const unsigned ups = kAtOnce ? all(batch) : old.active;
    wait_copy_groups<kStages - 1>();
    float dots[2 * kMaxBatch] = {};
    if (reads_gate && has(batch, 0)) {
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        if (!skip(has(batch, r))) dots[r] = dot(any_slot(0, batch, r));
      }
    }
    if (has_up && ups != 0) {
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        if (!skip((ups >> r & 1) != 0)) {
          dots[kMaxBatch + r] = dot(any_slot(1, up_batch, r));
        }
      }
    }
    const float mine = warp_sums(dots);
    if (lane % 4 == 0) dot_sums[warp][lane / 4] = mine;
    __syncthreads();
    // Every warp makes the same values of its group: lane r the gate of row r, lane kMaxBatch + r the up of row r.
    const int r = lane % kMaxBatch, per_group = a.threads / kWarp;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMaxWarps / 4; ++i) {  // the lanes of a value share the warps' sums
      const int w = lane / (2 * kMaxBatch) + 4 * i;
      if (w < per_group) sum += dot_sums[group * per_group + w][lane % (2 * kMaxBatch)];
    }
    sum += __shfl_xor_sync(kAllLanes, sum, 2 * kMaxBatch);
    sum += __shfl_xor_sync(kAllLanes, sum, 4 * kMaxBatch);
    Gates now;
    if (lane < kMaxBatch && has(batch, r)) {
      const int at = position(batch, r);
      now.value = reads_gate ? part.neuron.gate(sum, ids[at]) : known[at];
    }
    const bool active = lane < kMaxBatch && has(batch, r) && (!reads_gate || fabsf(now.value) > a.threshold);
    now.active = __ballot_sync(kAllLanes, active);
    n_active += __popc(now.active);
    const Gates& left = kAtOnce ? now : old;
    float value = __shfl_sync(kAllLanes, left.value, r);
    if (has_up && lane >= kMaxBatch && lane < 2 * kMaxBatch && (left.active >> r & 1) != 0) {
      value *= part.neuron.up(sum, ids[position(up_batch, r)]);
    }
    if (left.active == 0) return now;
    float values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float v = __shfl_sync(kAllLanes, value, kMaxBatch + i);
      values[i] = (left.active >> i & 1) != 0 ? v : 0.0f;
    }
    add_rows(up_batch, left.active, values);
    return now;
  }

  // All neurons of a tile of the list.
  template <bool kAtOnce>
  __device__ __forceinline__ void run_tile(float (*dot_sums)[kMaxWarps][2 * kMaxBatch]) {
    const int batches = (n + groups * a.batch - 1) / (groups * a.batch);
#pragma unroll
    for (int b = 0; b < kStages; ++b) request<kAtOnce>(b), end_copy_group();
    Gates before, old;  // of the batches one and two before
    for (int b = 0; b < batches + (kAtOnce ? 0 : kStages); ++b) {
      const Gates now = step<kAtOnce>(b, old, dot_sums[b & 1]);
      old = before, before = now;
      // The slots that these take are free: this thread has read them.
      if (!kAtOnce) request_up_down(b, now.active);
      request<kAtOnce>(b + kStages);
      end_copy_group();
    }
    wait_copy_groups<0>();
  }

  // The block's sum: over its groups of threads, in order.
  __device__ __forceinline__ void store(float* partial, float* shared) {
    const int n_chunks = slots.n_chunks;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) sums[k].finish();
    if (groups == 1) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        if (t + k * a.threads >= n_chunks) continue;
        auto* to = reinterpret_cast<float4*>(partial) + (t + k * a.threads) * F::kWeights / 4;
        const float* acc = sums[k].acc;
#pragma unroll
        for (int i = 0; i < F::kWeights; i += 4) to[i / 4] = make_float4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]);
      }
      return;
    }
    // Planes of one weight of every chunk, apart by 32 / kWeights banks.
    const int plane = kChunks * a.threads + kWarp / F::kWeights;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
#pragma unroll
      for (int i = 0; i < F::kWeights; ++i) {
        shared[(group * F::kWeights + i) * plane + k * a.threads + t] = sums[k].acc[i];
      }
    }
    __syncthreads();
    constexpr int kTogether = 4;
    for (int first = threadIdx.x; first < n_chunks * F::kWeights; first += kTogether * static_cast<int>(blockDim.x)) {
      float sum[kTogether] = {};
      for (int g = 0; g < groups; ++g) {
#pragma unroll
        for (int u = 0; u < kTogether; ++u) {
          const int c = first + u * static_cast<int>(blockDim.x);
          if (c >= n_chunks * F::kWeights) continue;
          sum[u] += shared[(g * F::kWeights + c % F::kWeights) * plane + c / F::kWeights];
        }
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int c = first + u * static_cast<int>(blockDim.x);
        if (c < n_chunks * F::kWeights) partial[c] = sum[u];
      }
    }
  }
};

// The row of a token as OwnedInput reads it.
template <DType D>
__device__ __forceinline__ Act token_input(Act in, int64_t t, int64_t cols) {
  if constexpr (Format<D>::kQuantized) return {nullptr, static_cast<std::byte*>(in.q8) + t * q8_row_bytes(cols)};
  return {in.x + t * cols, nullptr};
}

// Threads to count registers for: with a quarter more, there is room for a hint's block (predict.cu) beside this one.
// Four-bit rows would run short of them.
template <DType D, int kChunks>
constexpr int kThreadsWithRoom = kChunks == 1 && Format<D>::kWeights < 32 ? kMaxThreads * 5 / 4 : kMaxThreads;

template <DType D, DType DDown, int kChunks>
__global__ void __launch_bounds__(kThreadsWithRoom<D, kChunks>, 1)
    list_kernel(const __grid_constant__ ListKernelArgs a) {
  extern __shared__ uint4 shared[];
  __shared__ int32_t ids[kTile];
  __shared__ float known[kTile];
  __shared__ float sums[2][kMaxWarps][2 * kMaxBatch];
  // The next kernel's blocks would wait in the room that a hint's could have.
  if (!a.hinted) grid_trigger();
  grid_wait();
  const ListPart& part = a.parts[static_cast<int>(blockIdx.x) < a.parts[0].blocks ? 0 : 1];
  const int first = static_cast<int>(blockIdx.x) - part.first_block, step = part.blocks;
  const int64_t token = blockIdx.y, cols = part.shard.down_t.cols;
  ListBlock<D, DDown, kChunks> block(a, part, shared);
  block.in.load(token_input<D>(a.in, token, cols), cols, block.t, a.threads);
  block.ids = ids, block.known = known;
  const uint32_t* const mask = part.mask + token * part.stride;
  const float* const values = part.values + token * part.n;
  // The block has positions first, first + step, ... of the list.
#pragma unroll 1
  for (int tile = 0, share = 1; tile < share; tile += kTile) {
    __syncthreads();
    const int count = each_masked(mask, part.skip, part.n, first + tile * step, step, kTile, [&](int i, int32_t id) {
      ids[i] = id;
      if (part.values != nullptr) known[i] = __ldcg(values + id);
    });
    share = count > first ? (count - first + step - 1) / step : 0;
    block.n = min(share - tile, kTile);
    __syncthreads();
    if (part.values != nullptr || share <= block.kShortBatches * block.groups * a.batch) {
      block.template run_tile<true>(sums);
    } else {
      block.template run_tile<false>(sums);
    }
  }
  if (a.hinted) grid_trigger();
  __syncthreads();
  block.store(a.partial + (token * gridDim.x + blockIdx.x) * cols, reinterpret_cast<float*>(shared));
  if (a.next.bytes > 0 && &part == &a.parts[1] && token + 1 == gridDim.y) {
    for (int r = first + static_cast<int>(threadIdx.x) * step; r < a.next.end[2];
         r += static_cast<int>(blockDim.x) * step) {
      prefetch_l2(a.next.at(r), a.next.bytes);
    }
  }
  // Each group has counted its own: the first thread of each, in turn.
  __shared__ int active[kMaxWarps];
  if (block.t == 0) active[block.group] = block.n_active;
  __syncthreads();
  if (threadIdx.x != 0) return;
  int total = 0;
  for (int g = 0; g < block.groups; ++g) total += active[g];
  a.n_active[token * gridDim.x + blockIdx.x] = total;
}

// --- how it is launched ---

struct ListPlan {
  int threads = 0, groups = 0, batch = 0;
  size_t shared_bytes = 0;
};

template <DType D, int kWords, int kChunks>
ListPlan plan_list(const Gpu& gpu, int64_t cols) {
  ListPlan p;
  p.threads = threads_per_row(cols / Format<D>::kWeights, kChunks, kMaxThreads);
  if (p.threads == 0) return p;
  const int slots = kStages * kRowsPerSlot;  // of each neuron of a batch
  constexpr size_t kStatic = 8 << 10;        // ids, values and sums of the kernel
  for (p.groups = kMaxThreads / p.threads; p.groups > 0; p.groups /= 2) {
    const size_t reduction =
        p.groups == 1 ? 0
                      : static_cast<size_t>(p.groups * Format<D>::kWeights) *
                            static_cast<size_t>(p.threads * kChunks + kWarp / Format<D>::kWeights) * sizeof(float);
    for (p.batch = kMaxBatch / kChunks; p.batch > 0; --p.batch) {
      p.shared_bytes = std::max(slot_bytes<kWords>(slots * p.batch, kChunks, p.threads * p.groups), reduction);
      if (p.shared_bytes + kStatic <= gpu.shared_per_block) return p;
    }
  }
  return {};
}

// The types of gate and up rows, and of down rows, that a kernel is made for: the same, or as the usual mixtures of
// quantised types have them (offline/quantize/mix.cpp).
template <typename F>
void with_row_types(DType rows, DType down, F&& f) {
  using enum DType;
  if (rows == down) {
    with_format(rows, [&]<DType D>() { f.template operator()<D, D>(); });
  } else if (rows == q4_k && down == q6_k) {
    f.template operator()<q4_k, q6_k>();
  } else if (rows == q5_k && down == q6_k) {
    f.template operator()<q5_k, q6_k>();
  } else if (rows == q4_k && down == q5_k) {
    f.template operator()<q4_k, q5_k>();
  } else if (rows == q3_k && down == q5_k) {
    f.template operator()<q3_k, q5_k>();
  } else if (rows == q3_k && down == q4_k) {
    f.template operator()<q3_k, q4_k>();
  } else if (rows == q2_k && down == q3_k) {
    f.template operator()<q2_k, q3_k>();
  } else if (rows == iq4_xs && down == q5_k) {
    f.template operator()<iq4_xs, q5_k>();
  }
}

// Calls f.template operator()<D, DDown, kChunks>(plan) with the fewest chunks a thread that cover a row; false when
// none does. `rows`: the type of the gate and up rows that are read.
template <typename F>
bool with_list_plan(const Gpu& gpu, DType rows, const Matrix& down_t, F&& f) {
  bool done = false;
  with_row_types(rows, down_t.type, [&]<DType D, DType DDown>() {
    static_assert(Format<D>::kWeights == Format<DDown>::kWeights);
    const auto attempt = [&]<int kChunks>() {
      if (done) return;
      const ListPlan plan = plan_list<D, std::max(kSlotWords<D>, kSlotWords<DDown>), kChunks>(gpu, down_t.cols);
      if (plan.batch == 0) return;
      f.template operator()<D, DDown, kChunks>(plan);
      done = true;
    };
    if (down_t.cols % Format<D>::kWeights != 0) return;
    attempt.template operator()<1>();
    if constexpr (!Format<D>::kQuantized) {
      attempt.template operator()<2>();
      attempt.template operator()<4>();
    }
  });
  return done;
}

// The type of the rows that are read beside those of down_t.
DType row_type(const FfnShard& s, bool reads_gate) {
  if (s.up) return s.up.type;
  return reads_gate ? s.gate.type : s.down_t.type;
}

// Blocks of the list kernel: one a multiprocessor.
int64_t list_blocks(const Gpu& gpu) {
  return gpu.multiprocessors;
}
// Those blocks that read neurons in host memory.
int link_blocks(const Gpu& gpu) {
  return std::clamp(static_cast<int>(list_blocks(gpu)) / 8, 1, kMaxLinkBlocks);
}

}  // namespace

size_t ffn_list_bytes(const Gpu& gpu, int64_t n_embd, int64_t T) {
  return static_cast<size_t>(T * list_blocks(gpu) * (n_embd + 1)) * sizeof(float);
}

bool ffn_list_fits(const Gpu& gpu, const FfnShard& s, bool reads_gate) {
  if (reads_gate && s.up && s.gate.type != s.up.type) return false;
  return with_list_plan(gpu, row_type(s, reads_gate), s.down_t,
                        [&]<DType D, DType DDown, int kChunks>(const ListPlan& /*plan*/) {});
}

void ffn_list(const Gpu& gpu, const FfnShard& s, const FfnListArgs& list, Act in, int64_t T, Vector y_bias, float* y) {
  const int64_t blocks = list_blocks(gpu), n = s.down_t.cols;
  const int link = list.linked != nullptr ? link_blocks(gpu) : 0;
  auto* block_active = reinterpret_cast<int32_t*>(list.partial + T * blocks * n);
  ListKernelArgs args{};
  if (const LinkedNeurons* l = list.linked; l != nullptr) {
    HEARTH_CHECK(l->shard.gate.type == s.gate.type && l->shard.down_t.type == s.down_t.type &&
                 l->shard.down_t.cols == n);
    args.parts[0] = {.shard = l->shard,
                     .neuron = neuron_args(l->shard),
                     .mask = token_mask(l->named, 0),
                     .stride = l->named.stride,
                     .skip = static_cast<int>(s.n() % 32),
                     .n = static_cast<int>(l->shard.n()),
                     .blocks = link};
  }
  args.parts[1] = {.shard = s,
                   .neuron = neuron_args(s),
                   .mask = token_mask(list.named, 0),
                   .stride = list.named.stride,
                   .n = static_cast<int>(s.n()),
                   .values = list.values,
                   .first_block = link,
                   .blocks = static_cast<int>(blocks) - link};
  if (list.answer != nullptr) args.next = next_rows(gpu, list.next);
  args.hinted = list.hinted;
  args.threshold = list.threshold, args.in = in, args.partial = list.partial, args.n_active = block_active;
  const dim3 grid(grid_size(blocks), grid_size(T));
  const DType rows = row_type(s, list.values == nullptr);
  const bool fits = with_list_plan(gpu, rows, s.down_t, [&]<DType D, DType DDown, int kChunks>(const ListPlan& p) {
    args.threads = p.threads, args.batch = p.batch;
    launch(gpu, list_kernel<D, DDown, kChunks>, grid, p.threads * p.groups, p.shared_bytes, args);
  });
  HEARTH_CHECK(fits);
  merge_sums(gpu,
             {.partial = list.partial,
              .splits = static_cast<int>(blocks),
              .n = static_cast<int>(n),
              .bias = y_bias.data,
              .y = y,
              .block_active = block_active,
              .link_splits = link,
              .n_active = list.n_active,
              .n_linked_active = list.linked != nullptr ? list.linked->n_active : nullptr,
              .answer = list.answer != nullptr ? *list.answer : AnswerSource{},
              .next = list.half != nullptr ? *list.half : OutputNorm{}},
             T);
}

}  // namespace hearth::cuda
