#pragma once
// The SIMD device. Each operation is split into pieces, which the team takes in any order. Where their borders follow
// the threads' number or speeds, results do not depend on them; every number is computed by one thread, or as sums over
// pieces that depend on the shapes alone, in a fixed order. Hence one result for any number of threads.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "cpu/cpu.h"
#include "cpu/host_device.h"
#include "cpu/kernels.h"

namespace hearth::cpu {

WeightType weight_type(DType type);
// Rows of this type are cut at multiples of so many columns.
inline int64_t column_unit(DType type) {
  return std::max<int64_t>(kBlock, traits(type).block_size);
}
// Columns of each part of n, for so many threads.
inline int64_t columns_of_part(DType type, int64_t n, int64_t threads) {
  const int64_t unit = column_unit(type), each = (n + threads - 1) / threads;
  return (each + unit - 1) / unit * unit;
}

// Asks for `bytes` from `begin` on to come to a cache of this core.
enum class For {
  later,  // the second-level cache
  soon,   // the first
  writing,
};
template <For use = For::later>
inline void prefetch(const void* begin, size_t bytes) {
  constexpr uintptr_t kLine = 64;
  const auto first = reinterpret_cast<uintptr_t>(begin);
  for (uintptr_t at = first / kLine * kLine; at < first + bytes; at += kLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(at), use == For::writing ? 1 : 0, use == For::later ? 2 : 3);
  }
}

class CpuDevice final : public HostDevice {
 public:
  CpuDevice(ThreadTeam& team, Isa isa);

  std::string name() const override;
  size_t q8_bytes(int64_t n) const override { return q8_row_bytes(n); }
  size_t packed_bytes(const Matrix& host) const override;
  Matrix pack(const Matrix& host, std::byte* memory) override;
  void reserve(const Limits& limits) override;
  void fill_zero(void* device, size_t bytes) override;

  void embed(const Matrix& table, const int32_t* ids, const Matrix& positions, const int32_t* pos,
             int64_t position_offset, int64_t T, float* x) override;
  void quantize(Act a, int64_t T, int64_t n) override { quantize_rows(a, T, n); }
  void norm(const NormArgs& args, const float* x, int64_t T, Act out) override;
  void add_norm(const NormArgs& args, float* x, int64_t T, float* y) override;
  void scale(float factor, int64_t n, float* x) override;
  void soft_cap(float cap, int64_t n, float* x) override;
  using Device::matmul;
  void matmul(std::span<const MatmulPart> parts, const Input& in, int64_t T, const NextNorm* next) override;
  void attention(const AttentionArgs& args, int64_t T, Act out) override;
  void ffn_dense(const FfnShard& shard, const Input& in, int64_t T, Vector y_bias, float* y,
                 const NextNorm* next) override;
  void predict(const Predictor& predictor, const Input& in, int64_t T, const PredictArgs& args) override;
  void ffn_sparse(const FfnShard& shard, const SparseArgs& sparse, const Input& in, int64_t T, Vector y_bias, float* y,
                  const NextNorm* next) override;
  void route(const Router& router, const Input& in, int64_t T, const ExpertChoice& choice) override;
  void ffn_experts(const ExpertSet& set, const ExpertChoice& choice, const Input& in, int64_t T, float* y) override;
  void head_products(const HeadProducts& products, int64_t T) override;
  void fetch(const FfnShard& shard, std::span<const int32_t> ids, const Mailbox& until) override;
  void fetch_input(const FfnShard& shard, Act in, const Mailbox& hand_off) override;
  void fetch_experts(const ExpertSet& set, const ExpertChoice& choice, const Mailbox& until) override;
  void argmax(const float* logits, int64_t n, int64_t T, int32_t* ids) override;

 private:
  // How a product of T tokens is computed.
  enum class Method {
    dot,     // rows times tokens, weights read where they are
    gemm,    // packed panels in f32
    panels,  // panels of quantised weights, in integers: packed at load, or here for a batch
  };
  struct Operand {
    Act act;
    int64_t T = 0;
    const float* packed = nullptr;  // pack_input()'s, for Method::gemm
  };

  Method method(const Matrix& w, int64_t T) const;
  // Rows that one piece of a product covers.
  int64_t rows_per_piece(const Matrix& w, int64_t T) const;
  // [T][K] activations in tiles of `mr` tokens: packed[tile][K][mr].
  const float* pack_input(const float* x, int64_t T, int64_t K);
  // y[t][r] (+)= rows [r0, r0 + n) of w times token t; y points at row r0 of token 0.
  void product(const Matrix& w, int64_t r0, int64_t n, const Operand& in, float* y, int64_t ldy, bool accumulate,
               int thread);
  void product_dot(const Matrix& w, int64_t r0, int64_t n, const Operand& in, float* y, int64_t ldy, bool accumulate,
                   int thread);
  void product_gemm(const Matrix& w, int64_t r0, int64_t n, const Operand& in, float* y, int64_t ldy, bool accumulate,
                    int thread);
  void product_panels(const Matrix& w, int64_t r0, int64_t n, const Operand& in, float* y, int64_t ldy, bool accumulate,
                      int thread);
  // The panel that begins with row r of a packed matrix.
  static const std::byte* panel_of(const Matrix& w, int64_t r) {
    return static_cast<const std::byte*>(w.data) + static_cast<size_t>(r) * w.row_size();
  }
  // Makes `input` fit for products with these weights.
  void prepare(Operand& input, const Matrix& w);
  void quantize_rows(Act a, int64_t T, int64_t n);
  void add_bias(Vector bias, int64_t T, float* y);

  // values[t][k] of all neurons, in values_.
  void ffn_values(const FfnShard& shard, const Operand& in);
  // y[t] += sum_k values_[t][k] * down_t[k]: up to kFewTokens tokens, or any number.
  void ffn_down_few(const FfnShard& shard, int64_t T, float* y);
  void ffn_down_batch(const FfnShard& shard, int64_t T, float* y);
  void sum_lanes(int64_t n_lanes, int64_t n, float* y);

  // The neurons that a sparse operation looks at, by position: those listed, or the first `n`; and where it keeps what
  // it finds. Pieces of positions are independent of each other, so their number may follow the team's.
  struct Candidates {
    int64_t n = 0, n_pieces = 0, unit = 1;  // pieces of equal length begin at multiples of `unit`
    const int32_t* listed = nullptr;
    const int64_t* begins = nullptr;  // [n_pieces + 1], or null: pieces of equal length
    bool near = false;                // fetch() brought most of a piece's rows near the thread that takes it
    // By slots: pieces are written by different threads, who should not fight over lines. A piece's slot in ids has its
    // number of finds, then the finds; in values act(gate) of the finds, then their activations.
    int32_t* ids = nullptr;
    float* values = nullptr;
    static constexpr int64_t kApart = 32;  // 128 bytes: processors fetch lines in pairs
    int64_t begin(int64_t piece) const {
      return begins != nullptr ? begins[piece] : std::min(n, piece * ((n + unit - 1) / unit) / n_pieces * unit);
    }
    int64_t slot(int64_t piece) const { return (begin(piece) + kApart - 1) / kApart * kApart + piece * kApart; }
    static int64_t slots(int64_t n, int64_t n_pieces) { return n + (n_pieces + 1) * kApart; }
    int32_t id(int64_t position) const { return listed != nullptr ? listed[position] : static_cast<int32_t>(position); }
  };
  int64_t most_pieces(int64_t n) const;
  // Where pieces begin that are dealt one to every thread; null: dealt otherwise.
  struct Dealt {
    const int64_t* begins = nullptr;
    bool near = false;  // Candidates::near
  };
  Candidates candidates(const FfnShard& shard, int64_t n, const int32_t* listed, Dealt dealt) const;
  // FFNs of n neurons, `listed` or the first: few, or those whose rows fetch() brought near the threads, unless it
  // brought too different ones.
  Dealt deal(const FfnShard& shard, int64_t n, const int32_t* listed);
  // z[t * z_stride + i]: gate begin + i, i < n, of token t. Panels begin at multiples of kPanelRows.
  void consecutive_gates(const FfnShard& shard, Act in, int64_t T, int64_t begin, int64_t n, float* z,
                         int64_t z_stride) const;
  // Finds the active ones of a piece.
  void select_piece(const FfnShard& shard, const SparseArgs& sparse, Act in, const Candidates& c, int64_t piece) const;
  // Multiplies their gates with up_act(up . h).
  void multiply_up(const FfnShard& shard, Act in, const Candidates& c, int64_t piece, int thread) const;
  // Copies the finds of pieces [first, last) one behind the other to ids and values, which may be c.ids and c.values
  // themselves; not those whose value is zero because up is (dReLU).
  struct Found {
    const int32_t* ids = nullptr;
    const float* values = nullptr;
    int64_t n = 0, n_active = 0;  // copied; all
    bool near = false;            // Candidates::near
  };
  static Found join_pieces(const Candidates& c, int64_t first, int64_t last, int32_t* ids, float* values);
  // How the partial sums of the down projection, lane after lane, are shared out to the threads: by whole blocks.
  struct DownShares {
    int64_t n_embd = 0;
    int64_t unit = kBlock;  // column_unit()
    std::span<const double> ends;
    int64_t begin(int64_t lanes, int64_t share) const {
      const int64_t units = (n_embd + unit - 1) / unit, at = part_begin(ends, lanes * units, share);
      return at / units * n_embd + at % units * unit;
    }
  };
  // Calls visit(column, n_columns, first, n_rows, at) for what elements [begin, end) of n_lanes such sums are made of:
  // columns of the rows at positions [first, first + n_rows) of n.
  template <typename Visit>
  static void each_lane(int64_t n_embd, int64_t n, int64_t n_lanes, int64_t begin, int64_t end, Visit&& visit) {
    while (begin < end) {  // a share of the columns may end in the next lane
      const int64_t lane = begin / n_embd, column = begin % n_embd, n_columns = std::min(end - begin, n_embd - column);
      const int64_t first = lane * n / n_lanes;
      visit(column, n_columns, first, (lane + 1) * n / n_lanes - first, begin);
      begin += n_columns;
    }
  }
  // Adds values[i] down_t[ids[i]] of the finds to `sums` [n_lanes][n_embd], elements [begin, end) of it.
  void add_down(const FfnShard& shard, const Found& found, int64_t n_lanes, int64_t begin, int64_t end,
                float* sums) const;
  // y += the candidates' sum; returns how many are active.
  int64_t ffn_candidates(const FfnShard& shard, const SparseArgs& sparse, Act in, const Candidates& c, Vector y_bias,
                         float* y);

  void sparse_one(const FfnShard& shard, const SparseArgs& sparse, Act in, Vector y_bias, float* y);

  // --- several tokens (cpu_sparse_few.cpp) ---
  struct TokenNeurons;
  void sparse_few(const FfnShard& shard, const SparseArgs& sparse, Act in, int64_t T, Vector y_bias, float* y);
  int64_t find_few(const FfnShard& shard, float threshold, Act in, int64_t begin, std::span<const int32_t> looked,
                   int64_t n, float* z, int32_t* ids, float* values, float* up) const;
  void add_down_few(const FfnShard& shard, std::span<const TokenNeurons> tokens, Vector y_bias, float* y);

  // --- mixtures (cpu_experts.cpp) ---
  // The tokens of one expert that is here.
  struct ExpertGroup {
    const Expert* expert = nullptr;
    int64_t first = 0, count = 0;  // of mixture_.tokens
    Act in;                        // [count][n_embd]
    bool copied = false;           // it is not the operation's own input
    float* values = nullptr;       // [count][n]
    int32_t* ids = nullptr;        // [count][n]: of active neurons, by pieces
    std::byte* values_q8 = nullptr;
  };
  void reserve_experts(const Limits& limits);
  // The tokens by expert, those that are here: lists them in mixture_.tokens.
  std::span<ExpertGroup> group_tokens(std::span<const Expert> experts, const ExpertChoice& choice, int64_t T);
  void gather_input(std::span<ExpertGroup> groups, Act in, int64_t n_embd);
  // How the rows of T tokens' experts are cut.
  struct ExpertCuts {
    int64_t rows = 0, each = 0;  // of a piece of gate and up; pieces of a group, of smaller experts the last are empty
    int64_t columns = 0;         // of the result, of a piece of the down projections
  };
  ExpertCuts cut(std::span<const ExpertGroup> groups, int64_t T) const;
  void expert_product(const Matrix& w, int64_t r0, int64_t n, const Operand& in, float* y, int64_t ldy, int thread);
  // Neurons [r0, r0 + n) of a group's expert; rows [r0, r0 + n) of its down projection, times weights, added to y.
  // Values of neurons at or below the threshold are zero.
  void expert_values(const ExpertGroup& group, float threshold, int64_t r0, int64_t n, int thread);
  void values_above(const FfnShard& shard, float threshold, float* gates, const float* ups, int64_t n) const;
  void expert_down(const ExpertGroup& group, int64_t r0, int64_t n, float* y, int thread);
  void expert_down_rows(const ExpertGroup& group, int64_t c0, int64_t n, float* sums) const;
  // --- active neurons of experts (cpu_experts_sparse.cpp) ---
  // Pieces of `rows` neurons, numbered alike in every group.
  struct ExpertPieces {
    int64_t rows = 0, each = 0;  // each: pieces of a group; of smaller experts the last ones are empty
    int64_t begin(int64_t piece, const ExpertGroup& g) const {
      return std::min(piece % each * rows, g.expert->ffn.n());
    }
  };
  // The neurons of a piece that are active for a token. Their ids and values begin where the piece does in the token's.
  struct ExpertFinds {
    int32_t n = 0, n_active = 0;  // n: less those whose value is zero because up is (dReLU)
  };
  ExpertFinds& expert_finds(const ExpertGroup& g, int64_t t, int64_t piece, const ExpertPieces& pieces) const {
    return mixture_.finds.as<ExpertFinds>()[(g.first + t) * pieces.each + piece % pieces.each];
  }
  void find_in_expert(const ExpertGroup& group, float threshold, const ExpertPieces& pieces, int64_t piece,
                      int thread) const;
  void sum_expert(const ExpertGroup& group, const ExpertPieces& pieces, int64_t begin, int64_t end) const;
  void ffn_experts_sparse(std::span<ExpertGroup> groups, const ExpertSet& set, int64_t T, float* y);
  // [n_listed]: the weights of the listed tokens.
  const float* expert_weights() const {
    return reinterpret_cast<const float*>(mixture_.tokens.as<int32_t>() + mixture_.n_listed);
  }
  float* expert_scratch(int thread, int64_t floats) const {
    HEARTH_CHECK(static_cast<size_t>(floats) <= mixture_.thread_floats, "{} floats of scratch", floats);
    return mixture_.threads.as<float>() + static_cast<size_t>(thread) * mixture_.thread_floats;
  }

  Act predictor_hidden(const Predictor& predictor, Act in) const;
  int32_t predict_piece(const Predictor& predictor, Act hidden, int64_t begin, int64_t end, int32_t* ids,
                        float* score) const;
  void predict_token(const Predictor& predictor, Act in, int64_t t, int64_t T, const PredictArgs& args);

  void write_cache(const AttentionArgs& args, int64_t T);
  void attend_one(const AttentionArgs& args, int64_t t, float* out);
  struct AttendBlock;  // where a piece of a prefill keeps what
  static size_t attend_block_floats(int64_t head_dim, int64_t group, const Kernels& k);
  void attend_block(const AttentionArgs& args, int64_t kv_head, int64_t t0, int64_t n_tokens, float* out,
                    float* memory) const;
  void soften(float* scores, int64_t begin, int64_t end, float* max, float* total, float* sums, int64_t d) const;

  float* thread_scratch(int thread) const { return thread_.as<float>() + static_cast<size_t>(thread) * thread_floats_; }
  float* scratch(const DeviceBuffer& buffer, int64_t floats) const;

  ThreadTeam& team_;
  Isa isa_;
  const Kernels& k_;
  DeviceBuffer packed_;  // pack_input
  DeviceBuffer thread_;  // [threads][thread_floats_]: panels, tiles
  size_t thread_floats_ = 0;
  DeviceBuffer values_;     // [T][n_ff]; Candidates::values
  DeviceBuffer values_q8_;  // the 8-bit form of values_
  DeviceBuffer lanes_;      // [kLanes][up to kFewTokens][n_embd] partial sums of the FFN
  DeviceBuffer ids_;        // [2][n_ff]; Candidates::ids
  DeviceBuffer partial_;    // attention over pieces of the context: [pieces][n_head][head_dim + 2]
  DeviceBuffer angles_;     // [T][head_dim]: cosines and sines
  struct MixtureScratch {
    DeviceBuffer logits;      // [T][n_expert], then [T] of shared gates
    DeviceBuffer tokens;      // [T * n_named] tokens by expert, then their weights
    DeviceBuffer values;      // [T * n_named][n_ff]
    DeviceBuffer values_q8;   // their 8-bit form
    DeviceBuffer in, in_q8;   // [T * n_named][n_embd]: inputs by expert, where they are copied
    DeviceBuffer ids, finds;  // [few * n_named][n_ff] active neurons; [few * n_named][pieces]
    DeviceBuffer sums;        // [few * n_named][n_embd] of each token's experts
    DeviceBuffer threads;     // [threads][thread_floats]
    size_t thread_floats = 0;
    int64_t n_listed = 0;  // T * n_named of the call
  } mixture_;
  std::vector<ExpertGroup> groups_;  // by expert
  // The part of a short list that each thread gets, summed up: cores differ, being different or because somebody
  // else has work for them. How long each took for its part of the last one, of which the parts of the next are learnt.
  std::vector<double> ends_;
  struct alignas(128) Pace {
    std::chrono::nanoseconds busy{0};
    int64_t n_fetched = 0;  // pieces of rows that fetch_part() brought
  };
  std::vector<Pace> paces_;
  bool timed_ = false;  // there is something to learn
  static int64_t part_begin(std::span<const double> ends, int64_t n, int64_t thread) {
    return thread == 0 ? 0 : std::llround(ends[static_cast<size_t>(thread - 1)] * static_cast<double>(n));
  }
  // While a list is awaited, where somebody says that it is (fetch_input()), or else when the next one is dealt.
  void learn_parts();
  // The shard that fetch() was called for last, its neurons, and the id with which each thread's part began.
  const void* fetched_ = nullptr;
  std::vector<int32_t> foreseen_, fetched_ids_;
  // Brings a thread's part of their rows, from where it last stopped, until `stop`.
  void fetch_part(const FfnShard& shard, int64_t thread, FunctionRef<bool()> stop);
  std::vector<int64_t> begins_;
};

}  // namespace hearth::cpu
