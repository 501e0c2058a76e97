#pragma once
// Mixtures of experts as GGUF files describe them: llama.cpp's keys, and, where those are silent, what is known of the
// architecture and the tensors that are there.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/experts.h"
#include "gguf/gguf.h"

namespace hearth::model {

// The experts of a model; all layers that have some are alike.
struct ExpertsDescription {
  Routing routing;             // n_expert 0: the model is dense
  int64_t n_ff = 0;            // neurons of an expert
  int64_t n_ff_shared = 0;     // neurons of the shared expert; 0: there is none
  int64_t n_dense_layers = 0;  // the first layers are dense
  explicit operator bool() const { return routing.n_expert > 0; }
  bool in_layer(int64_t layer) const { return routing.n_expert > 0 && layer >= n_dense_layers; }
  // The neurons of expert `id`; the shared one is behind the others.
  int64_t neurons_of(int64_t id) const { return id < routing.n_expert ? n_ff : n_ff_shared; }
  // Experts named for each token, the shared one among them.
  int64_t n_named() const { return routing.n_used + (n_ff_shared > 0 ? 1 : 0); }
};

// Throws Error naming the key or tensor when one is missing or out of range, or contradicts another.
ExpertsDescription read_experts(const gguf::File& file, std::string_view arch);

// Whether a file's experts, in the first layer that has some, are gated: there are gate tensors, or merged ones.
bool has_gated_experts(const gguf::File& file);

}  // namespace hearth::model
