#pragma once
// A model's tensors, bound by name and checked against the configuration. Weights are views of the mapped file: nothing
// is copied but the few small vectors that are not stored as f32.
#include <array>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "core/buffer.h"
#include "core/experts.h"
#include "core/ops.h"
#include "gguf/gguf.h"
#include "model/config.h"
#include "model/transpose_down.h"
#include "model/transposed_file.h"

namespace hearth::model {

struct Norm {
  Vector weight, bias;
};

// A predictor's input: the normed input of its layer's FFN, or the residual stream before that norm (PowerInfer).
enum class PredictorInput { ffn_input, residual };
const char* to_string(PredictorInput input);  // "ffn_input", ...

struct LayerPredictor {
  Predictor weights;  // of all n_ff neurons; empty: the layer has none
  PredictorInput input = PredictorInput::ffn_input;
  std::string method;  // "svd", "mlp", "gate-bits"; "powerinfer" for fc1 and fc2 in the model's own file
  // Calls f on every matrix and vector.
  template <typename F>
  void for_each(F&& f) {
    f(weights.fc1), f(weights.fc1_bias), f(weights.fc2), f(weights.threshold);
  }
};

// More of multi-head latent attention (LatentDescription). wq makes n_plain + n_rot elements of each head, of
// the layer's input or of its latent; wk makes the latent of keys and values, and there is no wv.
struct LatentWeights {
  Matrix q_a;        // [n_q_latent][n_embd], or empty
  Vector q_a_norm;   // [n_q_latent]
  Matrix k_rotated;  // [n_rot][n_embd]
  Vector norm;       // [n_latent]
  Matrix k_b, v_b;   // [n_head * n_latent][n_plain], [n_head * n_value][n_latent]
};

struct LayerWeights {
  Norm attn_norm;         // n_a: input of the attention
  Matrix wq, wk, wv, wo;  // [n_head*head_dim][n_embd], [n_head_kv*head_dim][n_embd] twice, [n_embd][n_head*head_dim]
  Vector bq, bk, bv, bo;
  Vector q_norm, k_norm;  // [head_dim]: of every head (Qwen3); or of all heads at once (OLMo 2), as wide as wq, wk
  Vector sinks;           // [n_head]: a score of each head that has no value (gpt-oss)
  LatentWeights latent;
  Norm attn_post_norm;   // of what the attention adds (Gemma, OLMo 2); attn_norm and ffn_norm may be absent then
  Norm ffn_norm;         // n_f: input of the FFN
  Norm ffn_post_norm;    // of what the FFN adds
  FfnShard ffn;          // all n_ff neurons; empty where the layer has experts
  Vector ffn_down_bias;  // [n_embd]
  LayerPredictor predictor;
  Router router;                       // empty: the layer is dense
  std::vector<Expert> experts;         // by id, the shared one last
  const void* expert_table = nullptr;  // ExpertFfn::adopt_experts()
  // The attention's matrices, of which the first to be read comes first.
  std::array<const Matrix*, 8> attention() const {
    return {latent.q_a ? &latent.q_a : &wq, &wk,         &wv,         &latent.k_rotated,
            latent.q_a ? &wq : &latent.q_a, &latent.k_b, &latent.v_b, &wo};
  }
  // The FFN, or the first expert that is there: their types are alike.
  const FfnShard& some_ffn() const {
    for (const Expert& e : experts) {
      if (e) return e.ffn;
    }
    return ffn;
  }
};

// The tensors of a model in one address space: the file's mapping, or a device's memory after engine::place().
struct Weights {
  Matrix tok_embd;  // [n_vocab][n_embd]
  Matrix pos_embd;  // [n_ctx_train + offset][n_embd], learned positions (OPT)
  Norm output_norm;
  Matrix output;  // [n_vocab][n_embd]; the same view as tok_embd when tied
  Vector output_bias;
  Vector inv_freq;  // [ropes of the configuration][n_rot / 2], RoPE frequencies with every scaling applied
  std::vector<LayerWeights> layers;

  // Calls f on every matrix and every vector (empty ones too), so that places and sums are written once.
  template <typename F>
  void for_each(F&& f) {
    f(tok_embd), f(pos_embd), f(output_norm.weight), f(output_norm.bias), f(output), f(output_bias), f(inv_freq);
    for (LayerWeights& l : layers) {
      f(l.attn_norm.weight), f(l.attn_norm.bias), f(l.wq), f(l.wk), f(l.wv), f(l.wo), f(l.bq), f(l.bk), f(l.bv),
          f(l.bo);
      f(l.latent.q_a), f(l.latent.q_a_norm), f(l.latent.k_rotated), f(l.latent.norm), f(l.latent.k_b), f(l.latent.v_b);
      f(l.q_norm), f(l.k_norm), f(l.sinks), f(l.ffn_norm.weight), f(l.ffn_norm.bias);
      f(l.attn_post_norm.weight), f(l.attn_post_norm.bias), f(l.ffn_post_norm.weight), f(l.ffn_post_norm.bias);
      f(l.ffn.gate), f(l.ffn.up), f(l.ffn.down_t), f(l.ffn.down), f(l.ffn.gate_bias), f(l.ffn.up_bias),
          f(l.ffn_down_bias);
      l.predictor.for_each(f);
      f(l.router.w), f(l.router.bias), f(l.router.correction), f(l.router.shared_gate);
      for (Expert& e : l.experts) {
        f(e.ffn.gate), f(e.ffn.up), f(e.ffn.down), f(e.ffn.down_t), f(e.ffn.gate_bias), f(e.ffn.up_bias),
            f(e.down_bias);
      }
    }
  }
  // Calls f on every matrix that there is.
  template <typename F>
  void for_each_matrix(F&& f) {
    for_each([&](auto& tensor) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(tensor)>, Matrix>) {
        if (tensor) f(tensor);
      }
    });
  }
};

struct TransposeDown {
  bool wanted = false;        // quantise them again, transposed
  std::optional<DType> type;  // to this type; default: their own
  bool cached = false;        // take them from the file at transposed_path(), which is made where it is missing
};

struct LoadOptions {
  std::optional<std::string> activation;  // overrides what the file says, a name parse_activation() knows
  TransposeDown transpose_down;           // what prepare_sparse() does with quantised standard down projections
};

class Model {
 public:
  // Throws Error naming the tensor when one is missing, of an unsupported type, or of another shape than the
  // configuration's.
  static Model load(const std::filesystem::path& path, const LoadOptions& options = {});

  const gguf::File& file() const { return *file_; }
  const Config& config() const { return config_; }
  const Weights& weights() const { return weights_; }
  bool tied_head() const { return weights_.output.data == weights_.tok_embd.data; }
  // Bytes of all weights in use, a tied head counted once.
  size_t weight_bytes() const;
  size_t parameters() const;
  bool quantized() const;  // any matrix is
  // Whether a matrix is the model's own memory (prepare_sparse()) and not a view of the file.
  bool owns(const Matrix& matrix) const;
  // The most frequent type among the layers' matrices, by bytes: "f16", "q8_0".
  std::string type_name() const;

  // Why prepare_sparse() cannot give a dense layer a transposed down projection; nothing where it can.
  std::optional<std::string> why_not_by_neuron(int64_t layer) const;
  std::optional<std::string> why_not_by_neuron() const;  // ... the first such layer
  // Gives every dense layer a transposed down projection, which the sparse kernels need: exact for f32, f16 and bf16. A
  // quantised standard `ffn_down` is quantised again, if LoadOptions::transpose_down asks for it; otherwise the reason
  // is returned and nothing changes. The transposed copy replaces the mapped original, whose pages are released.
  // Experts, which may be larger than memory, get theirs where LoadOptions::transpose_down asks for it and their
  // neurons are left out: those of ReLU families that are zero, or, `thresholds`, those below one.
  std::optional<std::string> prepare_sparse(bool thresholds = false);
  // After it: why the experts have no transposed down projections; nothing where they have.
  std::optional<std::string> why_experts_are_whole() const;
  // The file's own down projection [n_embd][n] of an expert, which prepare_sparse() has replaced, or an empty one.
  Matrix stored_down(size_t layer, size_t expert) const;
  // The error that it has made so far.
  const RequantizationError& requantization_error() const { return requantization_error_; }

  // Lets go of the memory behind a layer's attention or FFN once a device has its own copy: pages of the mapping (they
  // come back from the file when read again), and transposed copies (the layer is then as in the file, until
  // prepare_sparse()).
  void release_attention(int64_t layer);
  void release_file() const;  // every page of the mapping
  void release_ffn(int64_t layer);

  void drop_predictors();  // of all layers
  // Layers that have a predictor in `layers` get that one; the others keep theirs. `owner` of the memory that the views
  // refer to is kept as long as the model lives. model/attach_predictors.h does this for a sidecar.
  void set_predictors(const std::vector<LayerPredictor>& layers, std::shared_ptr<const void> owner);

 private:
  void release_tensors(const std::string& prefix) const;
  // Down projections that are transposed together, of a dense layer or of a mixture's experts (prepare_sparse.cpp).
  struct Downs;
  std::vector<Downs> standard_downs(bool thresholds);
  void replace(const Downs& made);
  bool map_transposed(std::span<const Downs> downs);
  void transpose_all(std::span<Downs> downs);
  friend class Binder;
  std::unique_ptr<gguf::File> file_;
  Config config_;
  Weights weights_;
  std::vector<std::vector<float>> owned_vectors_;  // vectors not stored as f32, and inv_freq
  std::vector<HostBuffer> owned_matrices_;         // transposed down projections, and what latents are multiplied by
  TransposeDown transpose_down_;
  std::vector<std::vector<Matrix>> stored_downs_;    // by layer: what prepare_sparse() has replaced, by expert
  std::unique_ptr<TransposedFile> transposed_file_;  // in use
  RequantizationError requantization_error_;
  std::vector<std::shared_ptr<const void>> predictor_owners_;
};

}  // namespace hearth::model
