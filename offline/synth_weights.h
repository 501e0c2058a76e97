#pragma once
// The tensors of a synthetic model and the values of any rows of them.
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/thread_team.h"
#include "offline/synth.h"
#include "offline/synth_random.h"
#include "offline/synth_sparsity.h"

namespace hearth::offline {

// How a tensor's values are made. "Centred" is orthogonal to the constant component.
enum class SynthFill {
  zeros,
  ones,
  embedding,      // constant component + word + topic
  positions,      // centred rows
  head,           // centred rows that prefer the current topic
  inputs,         // centred rows of length 1: blind to the constant component
  outputs,        // centred columns: leave the constant component alone
  gate,           // see synth_sparsity.h
  down,           // centred columns [n_embd][n_ff]
  down_t,         // the same numbers, transposed
  router,         // centred rows, and an offset for each expert
  predictor_in,   // fc1 [r][n_embd]: basis B, -B, and a row that reads the constant component
  predictor_out,  // fc2 [n_ff][r]: A, -A, and the offsets; gate = A B + offsets, through relu(x) - relu(-x) = x
};

struct SynthTensor {
  std::string name;
  DType type = DType::f32;
  int64_t cols = 0, rows = 0;
  bool vector = false;  // one dimension in the file
  SynthFill fill = SynthFill::zeros;
  int64_t layer = -1;
  uint64_t stream = 0;   // of random numbers
  int64_t n_expert = 0;  // three dimensions in the file, with rows / n_expert rows for each expert
  std::vector<int64_t> ne() const {
    if (vector) return {cols};
    return n_expert > 0 ? std::vector{cols, rows / n_expert, n_expert} : std::vector{cols, rows};
  }
};

class SynthWeights {
 public:
  // `options` are checked already. Throws Error when no activation law meets them.
  SynthWeights(const SynthOptions& options, ThreadTeam& team);

  const std::vector<double>& law() const { return law_; }
  std::vector<SynthTensor> tensors() const;  // in the order of the file

  // To be called before fill() when the tensor's layer differs from the last call's.
  void prepare_layer(int64_t layer);
  // out [count][cols] = rows [first, first + count). `first` and `count` are multiples of kSynthBlock for `down` and
  // `outputs`. Any thread.
  void fill(const SynthTensor& tensor, int64_t first, int64_t count, float* out) const;

 private:
  static constexpr int kTerms =
      8;  // basis vectors in a gate row: A is sparse, which makes A B cheap and keeps its rank
  struct Combination {
    int32_t index[kTerms];
    float coefficient[kTerms];
    int count = 0;
  };

  RandomStream stream(uint64_t id) const { return {options_.seed, id}; }
  double offset(int64_t neuron) const;  // s_l b_i
  void gate_row(const SynthTensor& t, int64_t neuron, float* out, Combination* used) const;
  void embedding_row(const SynthTensor& t, int64_t token, float* out) const;
  void head_row(const SynthTensor& t, int64_t token, float* out) const;
  void router_row(const SynthTensor& t, int64_t expert, float* out) const;
  void read_topics(const SynthTensor& t, int64_t expert, float* row) const;
  void predictor_in_row(int64_t row, float* out) const;
  void predictor_out_row(const SynthTensor& t, int64_t neuron, float* out) const;
  void down_row(const SynthTensor& t, int64_t neuron, float* out) const;
  void columns(const SynthTensor& t, int64_t first, int64_t count, float* out) const;
  void column_block(const SynthTensor& t, int64_t column, int64_t block, float* out) const;
  void make_topics();
  void add_layer_tensors(int64_t layer, std::vector<SynthTensor>& list) const;

  const SynthOptions options_;
  ThreadTeam& team_;
  std::vector<double> law_;  // by rank
  Calibration calibration_;
  int64_t basis_rank_ = 0;      // 0: gate rows are random vectors of full rank
  double drift_ = 0;            // of embeddings: routers that persist need topics, too
  std::vector<float> topics_;   // [topic_count][n_embd], variance 1; empty without drift
  int64_t layer_ = -1;          // that the following belong to
  std::vector<int32_t> ranks_;  // [n_ff]
  std::vector<float> basis_;    // [basis_rank][n_embd], rows of length 1
};

}  // namespace hearth::offline
