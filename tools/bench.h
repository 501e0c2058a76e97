#pragma once
// The arithmetic of `hearth bench`, apart from the engine.
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "model/model.h"

namespace hearth::tools {

struct MeanSd {
  double mean = 0, sd = 0;  // sd of the sample (n - 1); 0 for one value
};
MeanSd mean_sd(std::span<const double> values);

// Floating-point operations of a prompt of T tokens on top of n_past: two per weight of every layer and token, the
// attention's two products over the positions each token sees, and the head once.
double prompt_flops(const model::Model& model, int64_t T, int64_t n_past);

// One row of results, under llama-bench's names.
struct BenchRow {
  std::string backend, device;
  int threads = 0;
  int64_t n_prompt = 0, n_gen = 0, n_depth = 0;
  std::vector<double> seconds;        // one per repetition
  double bytes_per_second = 0;        // generation: weights and KV cache read
  double memory_bandwidth = 0;        // measured, bytes/s; 0 when it was not
  double flops_per_second = 0;        // prompt
  double density = 0;                 // generation in a sparse mode: share of neurons computed; NaN otherwise
  std::string test() const;           // "pp512", "tg128 @ d4096"
  std::vector<double> rates() const;  // tokens per second, one per repetition
};

// The table's header and one row, as Markdown, CSV or (without header) JSON.
struct BenchModel {
  std::string file, type, arch;  // type: "llama 35.7M q8_0"
  size_t bytes = 0, parameters = 0;
  std::string sparsity;
};
std::string markdown_header();
std::string markdown_row(const BenchModel& model, const BenchRow& row);
std::string csv_header();
std::string csv_row(const BenchModel& model, const BenchRow& row);
std::string json_row(const BenchModel& model, const BenchRow& row);

}  // namespace hearth::tools
