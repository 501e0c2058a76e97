// Experts of a few tokens: every weight of a chosen expert is read once for the tokens that chose it.
//
// The values of a token's experts lie behind each other, so that their down projections are one product: a row of it
// is the rows of these experts one behind the other, each times the expert's weight.
#include "cuda/activation.cuh"
#include "cuda/experts.cuh"
#include "cuda/row_dots.cuh"

namespace hearth::cuda {
namespace {

constexpr int kPerBlock = 32;  // neurons: one block of the 8-bit form
constexpr int kGateUpWarps = 16, kPerWarp = kPerBlock / kGateUpWarps;

struct GateUpArgs {
  ExpertRun run;
  NeuronArgs neuron;  // biases are the experts' own
  Act in, hidden;
  int T, n, cols;
};

struct Slot {
  int t, i;  // token, and which of the run's slots
  int id;
};

// Slot p of all tokens in the order of (expert, token), so that blocks which start together read the same rows. Called
// by the whole block.
__device__ __forceinline__ Slot slot_at(const ExpertRun& run, int T, int p) {
  const auto id_of = [&](int k) {
    return __ldcg(run.ids + k / run.n_slots * run.n_named + run.first_slot + k % run.n_slots);
  };
  if (T == 1) return {0, p, id_of(p)};
  constexpr int kMost = static_cast<int>(kFewTokens) * 64;
  __shared__ int key[kMost];  // of the pairs: id, token
  __shared__ int found;
  const int n = T * run.n_slots;
  if (n > kMost) return {p / run.n_slots, p % run.n_slots, id_of(p)};
  for (int k = threadIdx.x; k < n; k += blockDim.x) key[k] = id_of(k) * static_cast<int>(kFewTokens) + k / run.n_slots;
  __syncthreads();
  for (int k = threadIdx.x; k < n; k += blockDim.x) {
    int rank = 0;
    for (int other = 0; other < n; ++other) rank += key[other] < key[k] ? 1 : 0;
    if (rank == p) found = k;
  }
  __syncthreads();
  return {found / run.n_slots, found % run.n_slots, key[found] / static_cast<int>(kFewTokens)};
}

// Grid: (T * n_slots, n / 32).
template <DType D, bool kGated>
__global__ void __launch_bounds__(kGateUpWarps* kWarp, 2) gate_up_kernel(const __grid_constant__ GateUpArgs a) {
  extern __shared__ uint4 shared[];
  __shared__ float values[kPerBlock];
  grid_wait();
  grid_trigger();  // not before: experts_down() begins with the choice
  const Slot slot = slot_at(a.run, a.T, static_cast<int>(blockIdx.x));
  const ExpertEntry e = a.run.table[slot.id];
  if (e.gate == nullptr) return;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int block_first = static_cast<int>(blockIdx.y) * kPerBlock, first = block_first + warp * kPerWarp;
  constexpr int kBases = kGated ? 2 : 1;
  RowDots<D, kPerWarp * kBases, 2 / kBases, kBases> dots(a.cols);
  dots.live = true;
  dots.set_rows(0, e.gate, first);
  if constexpr (kGated) dots.set_rows(1, e.up, first);
  dots.start();
  dots.run(input_row<D>(a.in, slot.t, a.cols), shared);
  NeuronArgs neuron = a.neuron;
  neuron.gate_bias = e.gate_bias, neuron.up_bias = e.up_bias;
#pragma unroll
  for (int r = 0; r < kPerWarp; ++r) {
    if (lane != r) continue;
    const float gate = neuron.gate(dots.sum[0][r], first + r);
    float up = 1.0f;
    if constexpr (kGated) up = neuron.up(dots.sum[1][r], first + r);
    values[warp * kPerWarp + r] = value_above(a.run.threshold, gate, up);
  }
  __syncthreads();
  if (warp != 0) return;
  const int64_t width = int64_t{a.run.n_slots} * a.n;
  const int at = slot.i * a.n + block_first;
  a.hidden.x[slot.t * width + at + lane] = values[lane];
  if (a.hidden.q8 == nullptr) return;
  store_q8_block(values[lane], static_cast<std::byte*>(a.hidden.q8) + slot.t * q8_row_bytes(width), width, at / 32);
}

struct DownArgs {
  ExpertRun run;
  Act hidden;
  float* y;
  int n, n_embd;
};

// Grid: (T, groups of kRows * kWarps rows).
template <DType D, int kRows, int kUnroll, int kWarps, int kBlocks>
__global__ void __launch_bounds__(kWarps* kWarp, kBlocks) down_kernel(const __grid_constant__ DownArgs a) {
  using F = Format<D>;
  constexpr int kTileChunks = kTileColumns<D> / F::kWeights;
  static_assert(kTileChunks % (kWarp * kUnroll) == 0, "a batch of chunks must not straddle tiles");
  extern __shared__ uint4 shared[];
  struct Part {
    const std::byte* down;  // null: absent
    const float* bias;
    float weight;
  };
  grid_trigger();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, n_slots = a.run.n_slots;
  const int64_t t = blockIdx.x, width = int64_t{n_slots} * a.n;
  const int n_chunks = static_cast<int>(width) / F::kWeights, per_expert = a.n / F::kWeights;
  const int first = (static_cast<int>(blockIdx.y) * kWarps + warp) * kRows, base = min(first, a.n_embd - kRows);
  const bool live = first < a.n_embd;
  Part* const parts = reinterpret_cast<Part*>(reinterpret_cast<std::byte*>(shared) + stage_bytes<D>(width));
  const unsigned reciprocal = 0xFFFFFFFFu / static_cast<unsigned>(per_expert) + 1;  // exact below 65536 chunks
  // All blocks of gate_up_kernel had the choice before this one could start.
  for (int i = threadIdx.x; i < n_slots; i += blockDim.x) {
    const int64_t at = t * a.run.n_named + a.run.first_slot + i;
    const ExpertEntry& e = a.run.table[__ldcg(a.run.ids + at)];
    parts[i] = {e.down, e.down_bias, __ldcg(a.run.weights + at)};
  }
  __syncthreads();
  const RowFields<D> fields(a.n);
  Chunk w[kRows][kUnroll];
  float sum[kRows] = {};
  const auto part_of = [&](int c) {
    return per_expert > 1 ? static_cast<int>(__umulhi(static_cast<unsigned>(c), reciprocal)) : c;
  };
  const auto load = [&](int u, int c) {
    if (!live || c >= n_chunks) return;
    const int i = part_of(c);
    const std::byte* const down = parts[i].down;
    if (down == nullptr) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      w[r][u] =
          fields.load(down, static_cast<unsigned>(base + r) * fields.stride, static_cast<unsigned>(c - i * per_expert));
    }
  };
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) load(u, lane + u * kWarp);
  grid_wait();
  const int row = base + lane;
  const bool writes = live && lane < kRows && row >= first;
  float y = writes ? __ldcg(a.y + t * a.n_embd + row) : 0.0f;
  StagedInput<D> staged(shared, n_chunks);
  for (int tile = 0; tile < n_chunks; tile += kTileChunks) {
    const int end = min(tile + kTileChunks, n_chunks);
    if (tile > 0) __syncthreads();
    staged.fill(input_row<D>(a.hidden, t, width), tile, end - tile);
    __syncthreads();
    for (int batch = tile; live && batch < end; batch += kWarp * kUnroll) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int c = batch + lane + u * kWarp;
        if (c >= n_chunks) continue;
        const Part& part = parts[part_of(c)];
        if (part.down != nullptr) {
          const ChunkInput<D> x(staged, c - tile);
#pragma unroll
          for (int r = 0; r < kRows; ++r) sum[r] = fmaf(part.weight, x.dot(w[r][u], 0.0f), sum[r]);
        }
        load(u, c + kWarp * kUnroll);
      }
    }
  }
  float own = 0.0f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float total = group_sum(sum[r]);
    if (lane == r) own = total;
  }
  if (!writes) return;
  for (int i = 0; i < n_slots; ++i) {
    if (parts[i].down != nullptr && parts[i].bias != nullptr) own = fmaf(parts[i].weight, parts[i].bias[row], own);
  }
  a.y[t * a.n_embd + row] = y + own;
}

}  // namespace

void experts_gate_up(const Gpu& gpu, const ExpertRun& run, Act in, int64_t T, Act hidden) {
  const FfnShard& s = run.shape;
  const GateUpArgs args{
      run, neuron_args(s), in, hidden, static_cast<int>(T), static_cast<int>(s.n()), static_cast<int>(s.gate.cols)};
  with_format(s.gate.type, [&]<DType D>() {
    launch(gpu, s.up ? gate_up_kernel<D, true> : gate_up_kernel<D, false>,
           token_grid(T * run.n_slots, s.n() / kPerBlock), kGateUpWarps * kWarp, stage_bytes<D>(s.gate.cols), args);
  });
}

void experts_down(const Gpu& gpu, const ExpertRun& run, Act hidden, int64_t T, float* y) {
  const Matrix& w = run.shape.down;
  const DownArgs args{run, hidden, y, static_cast<int>(w.cols), static_cast<int>(w.rows)};
  with_format(w.type, [&]<DType D>() {
    const auto start = [&]<int kRows, int kUnroll, int kWarps, int kBlocks>() {
      launch(gpu, down_kernel<D, kRows, kUnroll, kWarps, kBlocks>, token_grid(T, ceil_div(w.rows, kRows * kWarps)),
             kWarps * kWarp, stage_bytes<D>(run.n_slots * w.cols) + static_cast<size_t>(run.n_slots) * 24, args);
    };
    constexpr int kTogether = Format<D>::kWeights == 32 ? 2 : 4;
    constexpr int kInFlight = Format<D>::kQuantized ? 6 : 4;  // chunks: of eight experts of 768 neurons, all of a row
    switch (matvec_shape(w.rows, w.rows, gpu.multiprocessors)) {
      case MatvecShape::few_rows:
        return start.template operator()<1, kInFlight, 8, 3>();
      case MatvecShape::two_rows_a_warp:
      case MatvecShape::two_blocks:
        return start.template operator()<2, kTogether, 8, 3>();
      case MatvecShape::four_rows_a_warp:
        return start.template operator() < 4, kManyRegisters<D> ? 1 : 2, 8, 3 > ();
    }
  });
}

}  // namespace hearth::cuda
