#pragma once
// Every activation of a forward pass, allocated once. T = tokens in the batch, at most n_batch; a few: kFewTokens.
#include <cstddef>
#include <cstdint>

#include "core/device.h"
#include "core/experts.h"
#include "core/ops.h"
#include "core/thread_team.h"
#include "model/config.h"

namespace hearth::engine {

// The limits that a device reserves memory for to run this model.
Limits limits_of(const model::Config& config, int64_t n_ctx, int64_t n_batch, bool quantized);

// How large the activations are.
struct ActivationShape {
  int64_t n_batch = 1;
  int64_t n_slots = 1;       // sequences in a batch
  int64_t pages_stride = 1;  // pages of a sequence
  bool with_q8 = false;      // some weights are quantised, so inputs of matrices also get their 8-bit companions
  // For batches of at most n_batch tokens of at most n_sequences sequences of n_ctx positions.
  static ActivationShape of(int64_t n_ctx, int64_t n_sequences, int64_t n_batch, bool quantized);
};

struct Activations {
  Activations() = default;
  Activations(Device& device, const model::Config& config, const ActivationShape& shape);
  // Bytes that it allocates. `q8_bytes`: Device::q8_bytes().
  static size_t bytes(const model::Config& config, const ActivationShape& shape, FunctionRef<size_t(int64_t)> q8_bytes);

  // One upload brings what varies from pass to pass: ids, positions, slots, then the table of pages.
  int32_t* ids = nullptr;    // [n_batch] token ids, then
  int32_t* pos = nullptr;    // [n_batch] their positions, then
  int32_t* slot = nullptr;   // [n_batch] the rows of their sequences in
  int32_t* pages = nullptr;  // [n_slots][pages_stride]
  float* x = nullptr;        // [T][n_embd] residual stream
  Act normed;                // [T][n_embd] input of the attention, or of the head
  void* x_q8 = nullptr;      // the 8-bit form of a few tokens' x, for predictors that read the residual stream
  float* q = nullptr;        // [T][n_head * head_dim]
  float* k = nullptr;        // [T][n_head_kv * head_dim]
  float* v = nullptr;        // [T][n_head_kv * head_dim]
  Act attn;                  // [T][Config::n_attended()] output of the attention
  // In multi-head latent attention: queries before anything is absorbed, [T][Config::n_queries()]; the latent that they
  // are made of, [T][n_q_latent], before its norm and after; what is attended to, [T][n_head * n_latent].
  float* q_heads = nullptr;
  float* q_latent = nullptr;
  Act q_latent_normed;
  float* latents = nullptr;
  float* branch = nullptr;  // [T][n_embd] what half a layer adds, where a norm follows it (Config::post_norms)
  float* logits = nullptr;  // [logit_rows][n_vocab]
  int64_t logit_rows = 1;   // positions whose logits are computed at once; at least a few tokens
  NeuronLists predicted;    // [few][n_ff] ids that a predictor named
  NeuronLists linked;       // [few][n_ff] those of them whose rows are read over the link
  // One download brings the results of a pass over few tokens.
  int32_t* n_active = nullptr;         // [n_layer][few] active neurons, without the linked ones, then
  int32_t* n_linked_active = nullptr;  // [n_layer][few] active linked ones, then
  int32_t* best = nullptr;             // [few] argmax of the logits
  int64_t n_batch = 1, pages_stride = 1;

  // The input of a layer's FFN, [T][n_embd]. A few tokens' alternates between two places: a hint, which nothing waits
  // for, may still be reading that of the layer before (HandOffs::hint()).
  Act ffn_input(int64_t layer, int64_t T) const {
    return T > kFewTokens || layer % 2 == 0 ? ffn_normed_ : odd_ffn_normed_;
  }

  // The experts of a layer's T tokens, behind the input of its FFN: one hand-off brings both.
  ExpertChoice choice(int64_t layer, int64_t T) const { return choice_behind(ffn_input(layer, T).x, T); }
  ExpertChoice choice_behind(float* input, int64_t T) const {
    float* const at = input + T * n_embd_;
    return {reinterpret_cast<int32_t*>(at), at + T * n_named_, n_named_};
  }
  // Floats of both.
  int64_t handed_over(int64_t T) const { return T * (n_embd_ + 2 * n_named_); }

 private:
  class Layout;
  void lay_out(Layout& layout, const model::Config& config, const ActivationShape& shape,
               FunctionRef<size_t(int64_t)> q8_bytes);
  Act ffn_normed_;      // [T][n_embd], and of mixtures ids [T][n_named] and weights [T][n_named]
  Act odd_ffn_normed_;  // the same of a few
  int64_t n_embd_ = 0, n_named_ = 0;
  DeviceBuffer storage_;
};

}  // namespace hearth::engine
