// A predictor of one token in one kernel (otherwise two, predict.cu): every block has a few rows of fc1, in registers,
// and a few words of the mask with their rows of fc2, on their way into shared memory. Between the two products blocks
// hand each other the hidden vector (exchange.cuh).
#include "cuda/exchange.cuh"
#include "cuda/owned_columns.cuh"
#include "cuda/reduce.cuh"
#include "cuda/sparse.cuh"
#include "cuda/staged_input.cuh"

namespace hearth::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarp;
constexpr int kMaxRows = 8;                         // of fc1 in a block
constexpr int kMaxWords = 4;                        // of the mask in a block
static_assert(32 / kWarps == 2 && kMaxWords == 4);  // a warp has two rows of fc2 of each word

struct FusedArgs {
  Matrix fc1, fc2;
  Act in;
  InputNorm norm;  // whose result the input is, to be done on the way; norm.x null: none
  const float* bias;
  bool relu;
  const float* threshold;
  Exchange exchange;
  int rows_per_block, words_per_block;
  NameTarget target;
};

// The block's rows of fc1; thread t has chunks t, t + kThreads, ... of each.
template <DType D, int kChunks>
struct FirstProduct {
  static constexpr int kRows = kMaxRows;
  const FusedArgs& a;
  const int first_row, n_rows;
  Chunk w[kRows][kChunks];
  OwnedInput<D, kChunks> in;

  __device__ FirstProduct(const FusedArgs& args, int block)
      : a(args),
        first_row(block * args.rows_per_block),
        n_rows(max(0, min(args.rows_per_block, static_cast<int>(args.fc1.rows) - first_row))) {}

  // Requests the weights. May be called before grid_wait().
  __device__ __forceinline__ void start() {
    const int n_chunks = static_cast<int>(a.fc1.cols) / Format<D>::kWeights;
    const RowFields<D> fields(a.fc1.cols);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        w[r][k] = {};
        // Asked for the block, not for the row, which would cost more than a row in vain.
        if (r >= a.rows_per_block || n_rows == 0) continue;
        const int c = min(static_cast<int>(threadIdx.x) + k * kThreads, n_chunks - 1);
        const int64_t row = min(first_row + r, static_cast<int>(a.fc1.rows) - 1);
        w[r][k] = fields.load(row_of(a.fc1, fields, row), 0, static_cast<unsigned>(c));
      }
    }
    if constexpr (!Format<D>::kQuantized) {
      if (a.norm.x != nullptr) in.load_weight(a.norm.weight, a.fc1.cols, threadIdx.x, kThreads);
    }
  }
  // The thread's columns of the input, after grid_wait(); returns its share of the sum of squares where there is a
  // norm.
  __device__ __forceinline__ float load_input() {
    float squares = 0.0f;
    if constexpr (Format<D>::kQuantized) {
      in.load(a.norm.x != nullptr ? Act{nullptr, a.norm.unscaled.q8} : a.in, a.fc1.cols, threadIdx.x, kThreads);
      if (a.norm.x != nullptr && static_cast<int>(threadIdx.x) < a.norm.n / 32) {
        squares = __ldcg(a.norm.unscaled.squares + threadIdx.x);
      }
    } else if (a.norm.x != nullptr) {
      squares = in.load_scaled(a.norm.x, a.fc1.cols, threadIdx.x, kThreads);
    } else {
      in.load(a.in, a.fc1.cols, threadIdx.x, kThreads);
    }
    return squares;
  }
  // Row r's sum in thread r; 1 / rms of the norm, by which it is multiplied already, in `scale`. Called by the block.
  __device__ __forceinline__ float run(float squares, float& scale) const {
    __shared__ float sums[kWarps][kRows + 1];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    float dots[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      dots[r] = 0.0f;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) dots[r] = in.dot(k, w[r][k], dots[r]);
    }
    const float sum = warp_sums(dots);
    squares = group_sum(squares);
    if (lane % (kWarp / kRows) == 0) sums[warp][lane / (kWarp / kRows)] = sum;
    if (lane == 0) sums[warp][kRows] = squares;
    __syncthreads();
    scale = 1.0f;
    if (a.norm.x != nullptr) scale = a.norm.scale(group_sum(lane < kWarps ? sums[lane][kRows] : 0.0f));
    if (threadIdx.x >= kRows) return 0.0f;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) total += sums[i][threadIdx.x];
    return total * scale;
  }
};

// The hidden vector [rank] as a warp's threads read it, in shared memory: f32, and its 8-bit form.
struct Hidden {
  alignas(16) float x[kMaxFusedRank];
  uint4 quants[kMaxFusedRank / 16];
  Q8Scale scales[kMaxFusedRank / 32];
};

// Waits for it. Called by the whole block, ends with a barrier.
template <bool kQuantized>
__device__ __forceinline__ void collect_hidden(const Exchange& e, int rank, uint32_t number, Hidden& hidden) {
  for (int pair = threadIdx.x; pair < rank / 2; pair += kThreads) {
    const uint2 v = wait_words(e, 2 * pair, number);
    reinterpret_cast<float2*>(hidden.x)[pair] = {__uint_as_float(v.x), __uint_as_float(v.y)};
  }
  __syncthreads();
  if constexpr (kQuantized) {
    quantize_by_block<1>(
        rank, [&](int quad) { return reinterpret_cast<const float4*>(hidden.x)[quad]; },
        [&](int quad, const Q8Quad& q) {
          reinterpret_cast<unsigned*>(hidden.quants)[quad] = q.word;
          if (quad % 8 == 0) hidden.scales[quad / 8] = q.scale;
        });
    __syncthreads();
  }
}

// A lane's columns of it; zero beyond.
template <DType D, int kChunks>
__device__ __forceinline__ void take_hidden(const Hidden& hidden, int cols, OwnedInput<D, kChunks>& in) {
  using F = Format<D>;
  const int lane = threadIdx.x % kWarp, n_chunks = cols / F::kWeights;
  if constexpr (F::kQuantized) {
    in.take(hidden.quants, hidden.scales, cols, lane, kWarp);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (lane + k * kWarp >= n_chunks) in.scale[k] = {};
    }
  } else {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int c = lane + k * kWarp;
#pragma unroll
      for (int u = 0; u < F::kUnits; ++u) {
        in.units[k][u] = make_uint4(0, 0, 0, 0);
        if (c < n_chunks) in.units[k][u] = reinterpret_cast<const uint4*>(hidden.x)[c * F::kUnits + u];
      }
    }
  }
}

// kFirst: chunks of fc1's rows that a thread has; kSecond: of fc2's that a lane has.
template <DType D, int kFirst, int kSecond>
__global__ void __launch_bounds__(kThreads, 1) fused_kernel(const __grid_constant__ FusedArgs a) {
  extern __shared__ uint4 shared[];
  __shared__ Hidden hidden;
  __shared__ float scores[kMaxWords * 32];
  __shared__ uint32_t number, mark;
  grid_trigger();
  const int block = worker(a.target), warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int workers = static_cast<int>(gridDim.x) - (a.target.posts() ? 1 : 0);
  const bool counts = a.target.posts() && a.target.is_last;
  if (is_messenger(a.target)) {
    Messenger<kThreads> messenger(a.target, a.norm);
    messenger.start();
    grid_wait();
    const uint32_t own_number = threadIdx.x == 0 ? launch_number(a.exchange) : 0;
    messenger.run();
    if (threadIdx.x != 0) return;
    if (counts) {
      const PostTarget& post = a.target.post;
      const uint32_t posted = next_number(post);
      // They have read the number that is raised here.
      wait_arrivals(post.arrived, static_cast<unsigned>(workers), a.exchange.patience);
      *post.number = posted;
    }
    count_launch(a.exchange, own_number);
  } else {
    FirstProduct<D, kFirst> first(a, block);
    first.start();
    // Row i of the warp is row i * kWarps + warp of the block's, so that words are 32 / kWarps rows of every warp.
    const int first_word = block * a.words_per_block, first_row = first_word * 32;
    const int n_slots = a.words_per_block * 32 / kWarps;
    const RowSlots<D, kSecond, true> slots(shared, n_slots, lane, kWarp, a.fc2.cols);
    const bool has_rows = first_row < a.fc2.rows;
    // Rows that fc2 does not have are its last.
    const auto row = [&](int i) { return min(first_row + i * kWarps + warp, static_cast<int>(a.fc2.rows) - 1); };
    float threshold = 0.0f;
    const int neuron = first_row + warp * 32 + lane;  // of word `warp`
    const bool has_word = warp < a.words_per_block && neuron < a.target.n;
    if (has_word) threshold = a.threshold[neuron];
    grid_wait();
    const uint32_t own_number = threadIdx.x == 0 ? launch_number(a.exchange) : 0;
    const uint32_t own_mark = threadIdx.x == 0 ? mark_number(a.target) : 0;
    const float squares = first.load_input();
    // Asked for behind the input, which would otherwise stand in line behind them; and first only as much as keeps the
    // memory busy, because a warp that asks for more is held up until there is room for it.
    const auto request_word = [&](int word) {
      if (has_rows && word < a.words_per_block) {
        slots.request(2 * word, a.fc2, row(2 * word)), slots.request(2 * word + 1, a.fc2, row(2 * word + 1));
      }
      end_copy_group();
    };
    request_word(0);
    float scale;
    if (threadIdx.x == 0) number = own_number, mark = own_mark, count_launch(a.exchange, own_number);
    float sum = first.run(squares, scale);  // its barrier: everybody knows the numbers
    if (counts && threadIdx.x == 0) add_arrival(a.target.post.arrived);
    if (static_cast<int>(threadIdx.x) < first.n_rows) {
      const int k = first.first_row + static_cast<int>(threadIdx.x);
      if (a.bias != nullptr) sum += a.bias[k];
      put_word(a.exchange.words + k, __float_as_uint(a.relu ? fmaxf(sum, 0.0f) : sum), number);
    }
#pragma unroll 1
    for (int word = 1; word < kMaxWords; ++word) request_word(word);
    if (a.norm.x != nullptr && !a.target.posts() && warp == kWarps - 1) store_norm(a.norm, scale, block, workers);
    if (has_rows) {
      collect_hidden<Format<D>::kQuantized>(a.exchange, static_cast<int>(a.fc1.rows), number, hidden);
      OwnedInput<D, kSecond> in;
      take_hidden<D, kSecond>(hidden, static_cast<int>(a.fc2.cols), in);
#pragma unroll 1
      for (int word = 0; word < a.words_per_block; ++word) {  // as they arrive
        if (word == 0) wait_copy_groups<kMaxWords - 1>();
        if (word == 1) wait_copy_groups<kMaxWords - 2>();
        if (word == 2) wait_copy_groups<kMaxWords - 3>();
        if (word == 3) wait_copy_groups<kMaxWords - 4>();
        float dots[2] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int slot = 2 * word + i;
#pragma unroll
          for (int k = 0; k < kSecond; ++k) dots[i] = in.dot(k, slots.get(slot, k), dots[i]);
        }
        const float score = warp_sums(dots);
        if (lane % (kWarp / 2) == 0) scores[(2 * word + lane / (kWarp / 2)) * kWarps + warp] = score;
      }
      __syncthreads();
      if (warp < a.words_per_block) {
        const unsigned word = __ballot_sync(kAllLanes, has_word && scores[warp * 32 + lane] > threshold);
        if (lane == 0 && first_row + warp * 32 < a.target.n) put_names(a.target, first_word + warp, word, mark);
      }
    }
  }
}

// Calls f.template operator()<D, kFirst, kSecond>() with the fewest chunks that cover the rows; false when none does.
template <typename F>
bool with_chunks(const Predictor& p, F&& f) {
  bool done = false;
  with_predictor_format(p.fc1.type, [&]<DType D>() {
    if constexpr (D != DType::f32) {
      constexpr int kWeights = Format<D>::kWeights, kNarrow = Format<D>::kQuantized ? 1 : 2;
      if (p.fc1.cols % kWeights != 0 || p.fc2.cols % kWeights != 0) return;
      const int64_t first = ceil_div(p.fc1.cols / kWeights, kThreads), second = ceil_div(p.fc2.cols / kWeights, kWarp);
      const auto attempt = [&]<int kFirst, int kSecond>() {
        if (done || first > kFirst || second > kSecond) return;
        f.template operator()<D, kFirst, kSecond>();
        done = true;
      };
      attempt.template operator()<1, kNarrow>();
      attempt.template operator()<1, 2 * kNarrow>();
      attempt.template operator()<2, kNarrow>();
      attempt.template operator()<2, 2 * kNarrow>();
    }
  });
  return done;
}

struct FusedPlan {
  int workers = 0, rows = 0, words = 0;
  size_t shared_bytes = 0;
};

// Nothing (no workers) where the predictor is of another kind, or not all of its blocks would be resident together.
FusedPlan plan_fused(const Gpu& gpu, const Predictor& p, const NameTarget& target) {
  constexpr size_t kStatic = (16 << 10) + sizeof(Hidden);
  FusedPlan plan;
  if (!p.fc1 || p.fc1.type != p.fc2.type || p.fc1.rows > kMaxFusedRank || p.fc1.rows % 4 != 0) return plan;
  const int messengers = target.posts() ? 1 : 0;
  const int64_t workers = gpu.multiprocessors - messengers;
  if (workers < 1) return plan;
  const int64_t rows = ceil_div(p.fc1.rows, workers), words = ceil_div(target.n_words(), workers);
  if (rows > kMaxRows || words > kMaxWords) return plan;
  with_chunks(p, [&]<DType D, int kFirst, int kSecond>() {
    const size_t bytes = slot_bytes<kSlotWords<D>>(static_cast<int>(words) * 32 / kWarps, kSecond, kThreads);
    if (bytes + kStatic > gpu.shared_per_block) return;
    const auto* kernel = reinterpret_cast<const void*>(fused_kernel<D, kFirst, kSecond>);
    if (!fits_at_once(gpu, kernel, workers + messengers, kThreads, bytes)) return;
    plan = {static_cast<int>(workers), static_cast<int>(rows), static_cast<int>(words), bytes};
  });
  return plan;
}

}  // namespace

bool predict_fused(const Gpu& gpu, const Predictor& p, Act in, const InputNorm* norm, const NameTarget& target,
                   const Exchange& exchange) {
  if (norm != nullptr && p.fc1 && is_quantized(p.fc1.type) && norm->unscaled.q8 == nullptr) return false;
  const FusedPlan plan = plan_fused(gpu, p, target);
  if (plan.workers == 0) return false;
  FusedArgs a{};
  a.fc1 = p.fc1, a.fc2 = p.fc2, a.in = in, a.bias = p.fc1_bias.data, a.relu = p.relu, a.threshold = p.threshold.data;
  if (norm != nullptr) a.norm = *norm;
  a.exchange = exchange, a.rows_per_block = plan.rows, a.words_per_block = plan.words, a.target = target;
  with_chunks(p, [&]<DType D, int kFirst, int kSecond>() {
    launch(gpu, fused_kernel<D, kFirst, kSecond>, grid_size(plan.workers + (target.posts() ? 1 : 0)), kThreads,
           plan.shared_bytes, a);
  });
  return true;
}

}  // namespace hearth::cuda
