#pragma once
// The sizes a plan is made of: every tensor's bytes, from headers alone.
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/model.h"
#include "model/sidecar.h"

namespace hearth::offline {

// Bytes of GPU memory that a matrix takes, its alignment included: a GPU may lay out quantised rows anew.
using MatrixBytes = std::function<uint64_t(const Matrix&)>;
inline uint64_t bytes_in_file(const Matrix& m) {
  return m.bytes();
}

// The neurons below are the experts, where it is a mixture: each has up_down_bytes, and n_used of them are active.
struct LayerShape {
  int64_t n_ff = 0;
  bool experts = false;
  bool shared_expert = false;   // the last expert is used by every token
  double n_used = 0;            // experts that a token uses, the shared one among them
  uint64_t expert_bytes = 0;    // of all experts
  uint64_t expert_weights = 0;  // of the largest one, their number
  // Of the largest expert, up and down where down is transposed: the bytes of which a CPU skips inactive neurons'. And
  // the share of them that a token needs; 1: none are skipped.
  uint64_t skippable_bytes = 0;
  double active_inside = 1;
  // Ways to cut a routed expert between GPU and CPU, where its neurons can be told apart: neurons on the GPU, what they
  // take there. And which neurons are active, which says where to cut; empty: not known, experts are whole.
  struct ExpertCut {
    int32_t neurons = 0;
    uint64_t gpu_bytes = 0;
  };
  std::vector<ExpertCut> cuts;
  model::InsideCounts inside;
  bool gpu_experts = false;                // GPUs have kernels for experts of this shape
  bool can_stream = false;                 // they can visit a GPU: their down projections are not transposed
  uint64_t attention_bytes = 0;            // wq, wk, wv, wo
  uint64_t kv_token_bytes = 0;             // keys and values of one position
  uint64_t small_bytes = 0;                // norms and biases, other than the neurons'
  uint64_t gate_bytes = 0;                 // of one neuron: gate row and its bias
  uint64_t up_down_bytes = 0;              // of one neuron: up row, its bias, down row
  uint64_t predictor_bytes = 0;            // fc1 and fc2; 0 = there is no predictor
  std::optional<double> named_per_active;  // neurons that the predictor names, for each active one, if that is known
  bool can_look_ahead = false;             // there is a predictor, and a layer before
  // In GPU memory, where that is not what the file's bytes say.
  std::optional<uint64_t> gpu_attention_bytes, gpu_neuron_bytes, gpu_predictor_bytes;
  // False where `down` is quantised and not transposed: its neurons cannot be told apart, so the FFN is dense and on
  // one side.
  bool by_neuron = true;
  bool copies_linked = false;  // rows that the GPU reads over the link are laid out anew: they are quantised
  uint64_t neuron_bytes() const { return gate_bytes + up_down_bytes; }
  uint64_t attention_on_gpu() const { return gpu_attention_bytes.value_or(attention_bytes); }
  uint64_t neuron_on_gpu() const { return gpu_neuron_bytes.value_or(neuron_bytes()); }
  uint64_t predictor_on_gpu() const { return gpu_predictor_bytes.value_or(predictor_bytes); }
  // What a GPU reads of a whole expert, whose transposed down projection it has in another form.
  uint64_t expert_read_by_gpu() const { return skippable_bytes > 0 ? neuron_on_gpu() : up_down_bytes; }
  uint64_t ffn_bytes() const { return experts ? expert_bytes : neuron_bytes() * static_cast<uint64_t>(n_ff); }
};

struct ModelShape {
  std::string name, fingerprint, type_name;
  model::Config config;
  bool learned_positions = false;  // the context cannot exceed n_ctx_train
  bool sparse_family = true;       // inactive neurons are exactly zero
  bool quantized = false;
  bool tied_head = false;
  uint64_t embedding_bytes = 0;  // token embedding and learned positions
  uint64_t output_bytes = 0;     // the head; with tied_head the same tensor as the embedding
  uint64_t small_bytes = 0;      // output norm and bias, RoPE frequencies
  std::optional<uint64_t> gpu_embedding_bytes, gpu_output_bytes;  // as LayerShape's
  std::vector<LayerShape> layers;

  uint64_t embedding_on_gpu() const { return gpu_embedding_bytes.value_or(embedding_bytes); }
  uint64_t output_on_gpu() const { return gpu_output_bytes.value_or(output_bytes); }
  uint64_t weight_bytes() const;  // all tensors, a tied head counted once, predictors not counted
};

// With the predictors that the model has (model/predictors.h attaches those of a sidecar).
ModelShape shape_of(const model::Model& model, const MatrixBytes& gpu_bytes = bytes_in_file);
// Sets named_per_active: of predictors that the sidecar holds, as measured when they were made; of others, as the
// profile found on a few tokens.
void set_named_per_active(ModelShape& shape, const model::Sidecar& sidecar);
// Sets active_inside of mixtures: under `thresholds`, by layer or none, as tuning counted it; of ReLU families without
// any as the profile did. And `inside` of ReLU families, as the profile counted it.
void set_active_inside(ModelShape& shape, const model::Sidecar& sidecar, std::span<const float> thresholds = {});

}  // namespace hearth::offline
