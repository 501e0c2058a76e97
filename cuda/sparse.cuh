#pragma once
// Launchers of predicted and sparse execution, one token each (core/device.h: Device::predict, Device::ffn_sparse).
#include "core/device.h"
#include "cuda/exchange.cuh"
#include "cuda/kernels.cuh"
#include "cuda/mailbox.cuh"
#include "cuda/neuron_lists.cuh"

namespace hearth::cuda {

// --- predict.cu, predict_fused.cu ---
// Whether predict() can: every row of whole 16-byte chunks, and not too long for the registers of a block. Otherwise
// the scores are made by ordinary products and listed by list_scores().
bool predict_fits(const Predictor& predictor);
// norm: the input of fc1 is this norm's result, which its kernel makes on the way (with quantised fc1 faster from
//   norm->unscaled); or null. hidden: [rank] scratch.
void predict(const Gpu& gpu, const Predictor& predictor, Act in, const InputNorm* norm, const NeuronLists& lists,
             float* hidden);
// The same in one kernel, for fc1 and fc2 of one type that the multiprocessors can share out and hold (the 7B's, with
// ranks up to about 1024 in f16). With quantised fc1, norm needs norm->unscaled. Does nothing and returns false for
// others. Makes the mask and tells the CPU, but makes no lists. Not for hints: its blocks wait for each other, and
// beside other kernels some might not get room. exchange: scratch of its own, with kMaxFusedRank words.
constexpr int64_t kMaxFusedRank = 2048;
bool predict_fused(const Gpu& gpu, const Predictor& predictor, Act in, const InputNorm* norm, const NeuronLists& lists,
                   const Exchange& exchange);
void list_scores(const Gpu& gpu, const float* score, const float* threshold, const NeuronLists& lists);
void relu(const Gpu& gpu, float* x, int64_t n);

// --- ffn_gates.cu ---
// Whether ffn_gates() can: at least four rows, of whole 16-byte chunks.
bool ffn_gates_fit(const Matrix& gate);
// value[k] = act(gate row k . in) of all rows of shard.gate; lists those with |value| > threshold. norm: as in
// matvec().
void ffn_gates(const Gpu& gpu, const FfnShard& shard, float threshold, Act in, const InputNorm* norm, float* value,
               const NeuronLists& lists);

// --- ffn_list.cu ---
// The neurons of a list, from the gate (or, with `values`, from its activation) to their part of the FFN's sum.
struct FfnListArgs {
  const int32_t* ids = nullptr;
  const int32_t* count = nullptr;
  const float* values = nullptr;  // act(gate) of every neuron of the shard, all listed are active; null: gates are read
  float threshold = 0.0f;         // of |act(gate)|, without `values`
  float* gate_out = nullptr;      // optional: act(gate) by position in the list
  float* partial = nullptr;       // scratch, ffn_list_bytes()
  int32_t* n_active = nullptr;    // out, optional
  const AnswerSource* answer = nullptr;   // to be added in the same pass, or null
  const LinkedNeurons* linked = nullptr;  // beside the list, or null
  const NeuronLists* made_of = nullptr;   // the list, and the linked one, are yet to be made, of this mask; or null
  std::array<Matrix, 3> next;             // what is multiplied first when the answer has come, or empty
  bool hinted = false;                    // a hint runs beside
};
size_t ffn_list_bytes(const Gpu& gpu, int64_t n_embd);
// Whether ffn_list() can: gate (where read), up and down_t of one type, rows of whole 16-byte chunks that fit.
bool ffn_list_fits(const Gpu& gpu, const FfnShard& shard, bool reads_gate);
// y += bias + the sum over the list (+ the answer). Enqueues all but the last kernel, which is returned.
Maker ffn_list(const Gpu& gpu, const FfnShard& shard, const FfnListArgs& args, Act in, Vector y_bias, float* y);

}  // namespace hearth::cuda
