// Predictors: which neurons of a layer a token needs (core/sparse_ffn.h, Predictor). Two kernels: fc1 with bias and
// ReLU, where the norm before it can be done on the way, then fc2 with the thresholds, whose blocks write the mask and
// tell the CPU of its neurons. Hints run beside the sparse FFN (side_stream.cuh), in blocks that fit beside its own.
#include "cuda/owned_columns.cuh"
#include "cuda/sparse.cuh"
#include "cuda/staged_input.cuh"

namespace hearth::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeldChunks = 16;  // of a thread, in flight together
constexpr int kMaxRows = 32;     // of a block; with fc2 a word of the mask
// Of a hint's block, in shared memory: the sparse FFN's block of f16 rows leaves 24 KiB.
constexpr size_t kMostBesideBytes = 16 << 10;

// A multiprocessor's, by registers: with four, one has room beside the sparse FFN's.
template <int kChunks>
constexpr int kBlocks = kChunks > 4 ? 3 : 4;

struct RowsArgs {
  Matrix w;
  Act in;
  const float* unquantized;  // instead of in.q8: f32 input of quantised weights
  int threads;               // that share a row
  int rows_per_block;
  int rows_per_pass;  // of a group of threads
  InputNorm norm;     // whose result the input is, to be done on the way (hidden_kernel); norm.x null: none
  // The rows' sums become the hidden vector, or the mask.
  const float* bias;
  bool relu;
  float* hidden;
  const float* threshold;
  NameTarget target;
};

template <DType D, int kChunks>
struct RowsBlock {
  static constexpr int kTogether = kChunks == 8 ? 2 : 4;  // rows
  const RowsArgs& a;
  const int first_row, group, groups, t;
  RowSlots<D, kChunks> slots;

  __device__ RowsBlock(const RowsArgs& args, int block, uint4* shared)
      : a(args),
        first_row(block * args.rows_per_block),
        group(threadIdx.x / args.threads),
        groups(kThreads / args.threads),
        t(threadIdx.x % args.threads),
        slots(shared, args.rows_per_pass, t, args.threads, args.w.cols) {}

  __device__ __forceinline__ int row_in_block(int pass, int r) const {
    return (pass * groups + group) * a.rows_per_pass + r;
  }
  // Rows of the group's in a pass.
  __device__ __forceinline__ int n_rows(int pass) const {
    if (group >= groups) return 0;
    const int left = min(a.rows_per_block, static_cast<int>(a.w.rows) - first_row) - row_in_block(pass, 0);
    return min(a.rows_per_pass, left);
  }
  __device__ __forceinline__ void request(int pass) {
    const int n = n_rows(pass);
#pragma unroll 2
    for (int r = 0; r < n; ++r) slots.request(r, a.w, first_row + row_in_block(pass, r));
    end_copy_group();
  }
  // Requests the first rows. May be called before grid_wait().
  __device__ __forceinline__ void start() {
    request(0);
  }
  // Quantised weights: the 8-bit form of x, or of x * weight, whose squares x^2 it adds up.
  __device__ __forceinline__ float load_quantized(OwnedInput<D, kChunks>& in, const float* x,
                                                  const float* weight) const {
    constexpr int kMost = kThreads * kChunks * Format<D>::kWeights;  // columns
    __shared__ uint4 quants[kMost / 16];
    __shared__ Q8Scale scales[kMost / 32];
    float squares = 0.0f;
    quantize_by_block<4>(
        static_cast<int>(a.w.cols),
        [&](int quad) {
          const float4 v = __ldcg(reinterpret_cast<const float4*>(x) + quad);
          squares = sum_of_squares(v, squares);
          return weight != nullptr ? multiply(v, __ldcg(reinterpret_cast<const float4*>(weight) + quad)) : v;
        },
        [&](int quad, const Q8Quad& q) {
          reinterpret_cast<unsigned*>(quants)[quad] = q.word;
          if (quad % 8 == 0) scales[quad / 8] = q.scale;
        });
    __syncthreads();
    in.take(quants, scales, a.w.cols, t, a.threads);
    return squares;
  }
  // Quantised weights: what the maker of the norm's input has left. Returns a share of the sum of x^2.
  __device__ __forceinline__ float load_unscaled(OwnedInput<D, kChunks>& in) const {
    in.load({nullptr, a.norm.unscaled.q8}, a.w.cols, t, a.threads);
    float squares = 0.0f;
    for (int i = threadIdx.x; i < a.norm.n / 32; i += kThreads) squares += __ldcg(a.norm.unscaled.squares + i);
    return squares;
  }
  __device__ __forceinline__ void load_input(OwnedInput<D, kChunks>& in) const {
    if constexpr (Format<D>::kQuantized) {
      if (a.unquantized != nullptr) {
        load_quantized(in, a.unquantized, nullptr);
        return;
      }
    }
    in.load(a.in, a.w.cols, t, a.threads);
  }
  // x * weight of the norm; returns 1 / rms, by which the sums are to be multiplied. Called by the whole block.
  __device__ __forceinline__ float load_normed(OwnedInput<D, kChunks>& in) const {
    __shared__ float warp_squares[kThreads / kWarp];
    float squares;
    int warps = kThreads / kWarp;  // that saw the row once
    if constexpr (Format<D>::kQuantized) {
      squares = a.norm.unscaled.q8 != nullptr ? load_unscaled(in) : load_quantized(in, a.norm.x, a.norm.weight);
    } else {
      squares = in.load_scaled(a.norm.x, a.w.cols, t, a.threads);
      warps = a.threads / kWarp;
    }
    squares = group_sum(squares);
    if (threadIdx.x % kWarp == 0) warp_squares[threadIdx.x / kWarp] = squares;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kThreads / kWarp; ++w) sum += w < warps ? warp_squares[w] : 0.0f;
    return 1.0f / sqrtf(sum / static_cast<float>(a.norm.n) + a.norm.eps);
  }
  // The sums of the block's rows, in lane r of warp 0 that of row r.
  __device__ __forceinline__ float run(const OwnedInput<D, kChunks>& in) {
    __shared__ float sums[kMaxRows][kThreads / kWarp + 1];
    const int lane = threadIdx.x % kWarp;
    const int passes = (a.rows_per_block + groups * a.rows_per_pass - 1) / (groups * a.rows_per_pass);
    for (int pass = 0; pass < passes; ++pass) {
      wait_copy_groups<0>();
      const int n = n_rows(pass);
#pragma unroll 1
      for (int first = 0; first < n; first += kTogether) {  // rolled: code that runs once is slow to fetch
        float dots[kTogether];
#pragma unroll
        for (int r = 0; r < kTogether; ++r) {
          dots[r] = 0.0f;
#pragma unroll
          for (int k = 0; k < kChunks; ++k) {
            if (first + r >= n || !slots.has(k)) continue;
            dots[r] = in.dot(k, slots.get(first + r, k), dots[r]);
          }
        }
        const float sum = warp_sums(dots);
        const int r = first + lane / (kWarp / kTogether);
        if (lane % (kWarp / kTogether) == 0 && r < n) sums[row_in_block(pass, r)][t / kWarp] = sum;
      }
      if (pass + 1 < passes) request(pass + 1);
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) >= min(kWarp, a.rows_per_block)) return 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kThreads / kWarp; ++i) sum += i < a.threads / kWarp ? sums[threadIdx.x][i] : 0.0f;
    return sum;
  }
};

template <DType D, int kChunks>
__global__ void __launch_bounds__(kThreads, kBlocks<kChunks>) hidden_kernel(const __grid_constant__ RowsArgs a) {
  extern __shared__ uint4 shared[];
  grid_trigger();
  RowsBlock<D, kChunks> rows(a, static_cast<int>(blockIdx.x), shared);
  rows.start();
  const int k = rows.first_row + static_cast<int>(threadIdx.x);
  OwnedInput<D, kChunks> in;
  if constexpr (!Format<D>::kQuantized) {
    if (a.norm.x != nullptr) in.load_weight(a.norm.weight, a.w.cols, rows.t, a.threads);
  }
  grid_wait();
  float scale = 1.0f;
  if (a.norm.x != nullptr) {
    scale = rows.load_normed(in);
  } else {
    rows.load_input(in);
  }
  float sum = rows.run(in) * scale;
  if (a.norm.x != nullptr && threadIdx.x / kWarp == kThreads / kWarp - 1) {
    store_norm(a.norm, scale, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  }
  if (static_cast<int>(threadIdx.x) >= a.rows_per_block || k >= a.w.rows) return;
  if (a.bias != nullptr) sum += a.bias[k];
  a.hidden[k] = a.relu ? fmaxf(sum, 0.0f) : sum;
}

template <DType D, int kChunks>
__global__ void __launch_bounds__(kThreads, kBlocks<kChunks>) mask_kernel(const __grid_constant__ RowsArgs a) {
  extern __shared__ uint4 shared[];
  grid_trigger();
  if (is_messenger(a.target)) {
    grid_wait();
    post_input(a.target);
  } else {
    const int word = a.target.first_word() + worker(a.target);
    RowsBlock<D, kChunks> rows(a, word, shared);
    rows.start();
    const int k = rows.first_row + static_cast<int>(threadIdx.x);
    const float threshold = threadIdx.x < kWarp && k < a.w.rows ? a.threshold[k] : 0.0f;
    grid_wait();
    const uint32_t number = threadIdx.x == 0 ? mark_number(a.target) : 0;
    OwnedInput<D, kChunks> in;
    rows.load_input(in);
    const float sum = rows.run(in);
    if (threadIdx.x < kWarp) {
      const unsigned named = __ballot_sync(kAllLanes, k < a.w.rows && sum > threshold);
      if (threadIdx.x == 0) put_names(a.target, word, named, number);
    }
  }
  count_hand_off(a.target);
}

// The mask from scores: a word a warp.
__global__ void __launch_bounds__(kThreads)
    score_kernel(const float* score, const float* threshold, const __grid_constant__ NameTarget target) {
  grid_trigger();
  grid_wait();
  if (is_messenger(target)) {
    post_input(target);
  } else {
    const int k = worker(target) * kThreads + static_cast<int>(threadIdx.x);
    const unsigned named = __ballot_sync(kAllLanes, k < target.n && __ldcg(score + k) > threshold[k]);
    if (k % kWarp == 0 && k < target.n) put_names(target, k / kWarp, named, mark_number(target));
  }
  count_hand_off(target);
}

__global__ void relu_kernel(float* x, int64_t n) {
  grid_trigger();
  grid_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) x[i] = fmaxf(__ldcg(x + i), 0.0f);
}

// Calls f.template operator()<D, kChunks>() with the fewest chunks a thread that cover a row; false when none does.
template <typename F>
bool with_rows(const Matrix& w, F&& f) {
  bool done = false;
  with_predictor_format(w.type, [&]<DType D>() {
    const auto attempt = [&]<int kChunks>() {
      const int threads = threads_per_row(w.cols / Format<D>::kWeights, kChunks, kThreads);
      if (done || threads == 0) return;
      f.template operator()<D, kChunks>(threads);
      done = true;
    };
    if (w.cols % Format<D>::kWeights != 0) return;
    attempt.template operator()<1>();
    attempt.template operator()<2>();
    if constexpr (!Format<D>::kQuantized) {
      attempt.template operator()<4>();
      attempt.template operator()<8>();
    }
  });
  return done;
}

// Returns the bytes of shared memory.
template <DType D, int kChunks>
size_t set_rows(const Gpu& gpu, RowsArgs& a, int threads, int64_t rows_per_block, bool is_hint) {
  constexpr size_t kStatic = 22 << 10;  // of the kernels
  const size_t most = is_hint ? kMostBesideBytes : gpu.shared_per_block - kStatic;
  const int64_t groups = kThreads / threads;
  a.threads = threads;
  a.rows_per_block = static_cast<int>(rows_per_block);
  a.rows_per_pass = static_cast<int>(std::min<int64_t>(kHeldChunks / kChunks, ceil_div(rows_per_block, groups)));
  while (a.rows_per_pass > 1 && slot_bytes<kSlotWords<D>>(a.rows_per_pass, kChunks, kThreads) > most) --a.rows_per_pass;
  return slot_bytes<kSlotWords<D>>(a.rows_per_pass, kChunks, kThreads);
}

unsigned grid_of(const NameTarget& target, int64_t workers) {
  return grid_size(workers + (target.posts() ? 1 : 0));
}

void hidden_vector(const Gpu& gpu, const Predictor& p, Act in, const InputNorm* norm, bool is_hint, float* hidden) {
  RowsArgs a{};
  a.w = p.fc1, a.in = in, a.bias = p.fc1_bias.data, a.relu = p.relu, a.hidden = hidden;
  if (norm != nullptr) a.norm = *norm;
  const int64_t blocks = gpu.multiprocessors * (is_hint ? 4 : 2);
  const int64_t rows = std::clamp<int64_t>(ceil_div(p.fc1.rows, blocks), 1, kMaxRows);
  with_rows(p.fc1, [&]<DType D, int kChunks>(int threads) {
    const size_t shared_bytes = set_rows<D, kChunks>(gpu, a, threads, rows, is_hint);
    launch(gpu, hidden_kernel<D, kChunks>, grid_size(ceil_div(p.fc1.rows, rows)), kThreads, shared_bytes, a);
  });
}

}  // namespace

bool predict_fits(const Predictor& p) {
  const auto fits = [](const Matrix& w) {
    int used = 0;
    return with_rows(w, [&]<DType D, int kChunks>(int threads) { used = threads; });
  };
  return (!p.fc1 || fits(p.fc1)) && fits(p.fc2);
}

void predict(const Gpu& gpu, const Predictor& p, Act in, const InputNorm* norm, const NameTarget& target,
             float* hidden) {
  HEARTH_CHECK(norm == nullptr || p.fc1);
  RowsArgs a{};
  if (p.fc1) {
    hidden_vector(gpu, p, in, norm, target.hints(), hidden);
    in = {hidden, nullptr};
    a.unquantized = hidden;
  }
  a.w = p.fc2, a.in = in, a.threshold = p.threshold.data, a.target = target;
  const bool fits = with_rows(p.fc2, [&]<DType D, int kChunks>(int threads) {
    const size_t shared_bytes = set_rows<D, kChunks>(gpu, a, threads, kMaxRows, target.hints());
    launch(gpu, mask_kernel<D, kChunks>, grid_of(target, target.n_words()), kThreads, shared_bytes, a);
  });
  HEARTH_CHECK(fits);
}

void name_by_scores(const Gpu& gpu, const float* score, const float* threshold, const NameTarget& target) {
  launch(gpu, score_kernel, grid_of(target, ceil_div(target.n, kThreads)), kThreads, 0, score, threshold, target);
}

void relu(const Gpu& gpu, float* x, int64_t n) {
  launch(gpu, relu_kernel, grid_size(ceil_div(n, 256)), 256, 0, x, n);
}

}  // namespace hearth::cuda
