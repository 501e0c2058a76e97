#pragma once
// --sparse-threshold: from what is typed to what a model's layers use.
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "model/model.h"
#include "model/sidecar.h"

namespace hearth::tools {

struct SparseThreshold {
  enum class Kind { none, number, sidecar, powerinfer_key };
  Kind kind = Kind::none;
  float number = 0;
};
SparseThreshold parse_threshold(const std::string& text);  // throws Error when it is none
void add_threshold_option(CLI::App& sub, SparseThreshold& value);

struct ChosenThresholds {
  std::vector<float> by_layer;  // of |act(gate)|; empty: none, only exact zeros are left out
  std::string words;            // what is left out by them; empty with by_layer
  std::string score_words;      // what PowerInfer's predictors leave out, where the flag said it
};

// For a model that has its predictors (choose_predictors()); `predicts`: they will be used. With PowerInfer's
// predictors in use a number is the score from which on they name a neuron, in place of the file's
// powerinfer.sparse_threshold; otherwise it is the largest |act(gate)| that is left out. Throws Error when what is
// asked for is not there.
ChosenThresholds choose_thresholds(model::Model& model, const model::Sidecar* sidecar, const SparseThreshold& asked,
                                   bool predicts);

}  // namespace hearth::tools
