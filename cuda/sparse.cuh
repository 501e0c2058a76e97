#pragma once
// Launchers of predicted and sparse execution (core/sparse_ffn.h).
#include <array>

#include "core/sparse_ffn.h"
#include "cuda/exchange.cuh"
#include "cuda/kernels.cuh"
#include "cuda/mailbox.cuh"
#include "cuda/neuron_mask.cuh"

namespace hearth::cuda {

// --- predict.cu, predict_fused.cu: one token ---
// Whether predict() can: every row of whole 16-byte chunks, and not too long for the registers of a block. Otherwise
// the scores are made by ordinary products, and name_by_scores() names the neurons.
bool predict_fits(const Predictor& predictor);
// norm: the input of fc1 is this norm's result, which its kernel makes on the way (with quantised fc1 faster from
//   norm->unscaled); or null. hidden: [rank] scratch.
void predict(const Gpu& gpu, const Predictor& predictor, Act in, const InputNorm* norm, const NameTarget& target,
             float* hidden);
// The same in one kernel, for fc1 and fc2 of one type that the multiprocessors can share out and hold (the 7B's, with
// ranks up to about 1024 in f16). With quantised fc1, norm needs norm->unscaled. Does nothing and returns false for
// others. Not for hints: its blocks wait for each other, and would keep the sparse FFN's from starting. exchange:
// scratch of its own, with kMaxFusedRank words.
constexpr int64_t kMaxFusedRank = 2048;
bool predict_fused(const Gpu& gpu, const Predictor& predictor, Act in, const InputNorm* norm, const NameTarget& target,
                   const Exchange& exchange);
void name_by_scores(const Gpu& gpu, const float* score, const float* threshold, const NameTarget& target);
void relu(const Gpu& gpu, float* x, int64_t n);

// --- ffn_gates.cu: few tokens ---
// Whether ffn_gates() can: at least four rows, of whole 16-byte chunks.
bool ffn_gates_fit(const Matrix& gate);
// value[t][k] = act(gate row k . in[t]) of all n rows of shard.gate; mask [t][ceil(n / 32)] of those with |value| >
// threshold. norm: as in matvec().
void ffn_gates(const Gpu& gpu, const FfnShard& shard, float threshold, Act in, int64_t T, const InputNorm* norm,
               float* value, uint32_t* mask);

// --- ffn_list.cu, ffn_merge.cu: few tokens ---
// Masked neurons, from the gate (or, with `values`, from its activation) to their part of the FFN's sum.
struct FfnListArgs {
  NeuronLists named;              // masks (neuron_mask.cuh)
  const float* values = nullptr;  // [T][n] act(gate) of every neuron, all masked are active; null: gates are read
  float threshold = 0.0f;         // of |act(gate)|, without `values`
  float* partial = nullptr;       // scratch, ffn_list_bytes()
  int32_t* n_active = nullptr;    // out [T], optional
  const LinkedNeurons* linked = nullptr;  // beside them, or null
  const AnswerSource* answer = nullptr;   // [T][n_embd] to be added in the same pass, or null
  std::array<Matrix, 3> next;             // what is multiplied first when the answer has come, or empty
  bool hinted = false;                    // a hint runs beside
  const OutputNorm* half = nullptr;       // what is left for the norm of y, or null
};
size_t ffn_list_bytes(const Gpu& gpu, int64_t n_embd, int64_t T);
// Whether ffn_list() can: gate (where read), up and down_t of one type, rows of whole 16-byte chunks that fit.
bool ffn_list_fits(const Gpu& gpu, const FfnShard& shard, bool reads_gate);
// y[t] += bias + the sum over token t's neurons (+ the answer).
void ffn_list(const Gpu& gpu, const FfnShard& shard, const FfnListArgs& args, Act in, int64_t T, Vector y_bias,
              float* y);

// The second kernel of it: the sum of the blocks' sums.
struct MergeArgs {
  const float* partial;  // [T][splits][n]
  int splits;
  int n;
  const float* bias;
  float* y;                     // [T][n]
  const int32_t* block_active;  // [T][splits]
  int link_splits;              // the first of them
  int32_t* n_active;            // [T] of the others, or null
  int32_t* n_linked_active;     // [T] of those, or null
  AnswerSource answer;          // words null: none
  OutputNorm next;
};
void merge_sums(const Gpu& gpu, const MergeArgs& args, int64_t T);

// --- ffn_sparse.cu: one token ---
struct SelectScratch {
  float* gate = nullptr;          // [n] activations of the gate, by candidate
  int32_t* candidates = nullptr;  // [n]
  int32_t* n_candidates = nullptr;
  float* value = nullptr;  // [n] of the active neurons
  int32_t* ids = nullptr;  // [n]
  int32_t* count = nullptr;
};
// The active neurons of all (mask null) or of the masked: fills to.ids, value and count, and n_active unless null.
void ffn_select(const Gpu& gpu, const FfnShard& shard, float threshold, const uint32_t* mask, Act in, int32_t* n_active,
                const SelectScratch& to);

}  // namespace hearth::cuda
