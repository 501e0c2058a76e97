#pragma once
// The lines that a run begins with, besides the one on the model: where it runs and how fast that should be, and what would
// make it faster.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/common.h"

namespace hearth::tools {

struct StartFacts {
  std::string model;  // as it was typed
  int threads = 0;
  enum class Place { cpu, gpu, divided } place = Place::cpu;
  uint64_t vram_budget = 0;                 // of a divided model
  double on_gpu = 0;                        // of a divided model: share of the neurons, or experts
  std::optional<double> tokens_per_second;  // expected
  bool measured = false;                    // that is what was measured, not what a plan says
  bool mixture = false;                     // of experts
  bool sparse_family = false;               // many gates are exactly zero
  bool by_neuron = true;                    // neurons can be told apart: no quantised, untransposed ffn_down
  bool profiled = false, predictors = false;
  bool wide = false;  // most weights have 16 bits or more
  uint64_t weight_bytes = 0, q8_0_bytes = 0, q4_k_bytes = 0;
};

std::string plan_line(const StartFacts& facts);
// Ways to make it faster, each with what to type; only those that apply.
std::vector<std::string> hints(const StartFacts& facts);

// Says both on stderr; measures this machine for it, if it was not before. Nothing with --quiet.
void print_start(Session& session, const ModelOptions& options);

}  // namespace hearth::tools
