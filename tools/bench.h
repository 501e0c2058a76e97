#pragma once
// `hearth bench`: what is measured, as data, and what is printed of it. bench_run.cpp measures, bench_output.cpp prints
// and bench.cpp has the flags and the sweeps.
#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/profiling_device.h"
#include "engine/traffic.h"
#include "model/model.h"
#include "tools/common.h"

namespace hearth::tools {

struct MeanSd {
  double mean = 0, sd = 0;  // sd of the sample (n - 1); 0 for one value
};
MeanSd mean_sd(std::span<const double> values);

// Floating-point operations of a prompt of T tokens on top of n_past: two per weight of every layer and token, the
// attention's two products over the positions each token sees, and the head once.
double prompt_flops(const model::Model& model, int64_t T, int64_t n_past);

// Where the time of a token (or a prompt) goes, from one run beside the timed ones, operation by operation: no graph,
// and waits and merges in kernels of their own. Seconds by engine::Part.
struct BenchProfile {
  using Rows = std::vector<engine::ProfilingDevice::Row>;
  std::array<double, engine::kParts> main{}, host{};  // host: the CPU's, beside a main device
  Rows main_rows, host_rows;
  // Beyond the longer of the two FFNs, a layer: (ffn + wait - max(ffn, the CPU's)) / layers that hand over, where ffn
  // is the main device's in those layers. 0 where nothing is handed over.
  double hand_off = 0;
};

// Figures that only a divided model has.
struct BenchDivision {
  uint64_t vram_budget = 0, gpu_bytes_planned = 0, gpu_bytes_used = 0;
  double expected_rate = 0;     // tokens/s, the plan's; 0 = unknown
  double hit_share = 0;         // of the active neurons, on the GPU; NaN when none was counted
  engine::SideBytes bandwidth;  // measured, bytes/s; 0 when it was not
};

// One row of results.
struct BenchRow {
  std::string backend, device;
  int threads = 0;
  int64_t n_prompt = 0, n_gen = 0, n_depth = 0, n_ctx = 0;
  int64_t n_parallel = 1;         // generation: sequences that get a token each in every step
  std::vector<double> seconds;    // one per repetition
  double memory_bandwidth = 0;    // of the main device, measured, bytes/s; 0 when it was not
  engine::SideBytes token_bytes;  // generation: read for a token
  double floor_seconds = 0;       // generation: of a token; 0 when bandwidths were not measured
  double flops_per_second = 0;    // prompt
  double density = 0;             // generation in a sparse mode: share of neurons computed; NaN otherwise
  std::optional<BenchDivision> division;
  std::optional<BenchProfile> profile;
  std::string test() const;           // "pp512", "tg128 @ d4096", "tg128 × 4"
  std::vector<double> rates() const;  // tokens per second, one per repetition
};

struct BenchModel {
  std::string file, type, arch;  // type: "llama 35.7M q8_0"
  size_t bytes = 0, parameters = 0;
  int64_t n_layer = 0;
  std::string sparsity, threshold;   // threshold: as it was asked for; empty: none
  std::optional<double> link_share;  // as it was asked for
  double load_seconds = 0;
  std::vector<Way> measured_ways = {};  // what --sparsity auto compared; or empty
};

// Runs the tests on one session.
class Bench {
 public:
  // With `profile`, the session must have been made for it.
  Bench(Session& session, int repetitions, bool measure_bandwidth);

  BenchRow prompt(int64_t n, int64_t depth);
  // n tokens for each of n_parallel sequences, one of each in a step.
  BenchRow generation(int64_t n, int64_t depth, int64_t n_parallel = 1);

 private:
  BenchRow new_row(int64_t depth);
  std::vector<int32_t> random_ids(int64_t n);
  void truncate(int64_t depth);  // all sequences
  void measure_bandwidths();
  template <typename Work>
  void repeat(BenchRow& row, int64_t depth, Work&& work);
  template <typename Work>
  BenchProfile profiled(int64_t depth, int64_t passes, Work&& work);
  int64_t hand_offs() const;  // layers in which the CPU has a part

  Session& session_;
  engine::Engine& engine_;
  engine::Sequence& text_;
  std::vector<engine::Sequence> others_;  // beside it, of the running test
  int repetitions_;
  int64_t n_parallel_ = 1;  // of the running test
  bool measure_bandwidth_;
  engine::SideBytes bandwidths_;  // measured beside the repetitions of the running test, bytes/s
};

// Rows as JSON objects, under llama-bench's names where it has them; what does not apply is null.
nlohmann::ordered_json bench_json(const BenchModel& model, const BenchRow& row);

// Tables of such objects; a column stands in all rows or in none. The columns of Markdown tables are those that a
// table needs: for a divided model, those of both sides.
class BenchTable {
 public:
  enum class Format { md, csv, json };
  // `swept`: names of keys that differ between rows and are no column anyway ("n_ctx", "sparse_threshold",
  // "model_filename").
  BenchTable(Format format, std::vector<std::string> swept) : format_(format), swept_(std::move(swept)) {}

  std::string begin();
  std::string row(const nlohmann::ordered_json& row);
  std::string end();

 private:
  Format format_;
  std::vector<std::string> swept_;
  std::string shape_;  // of the Markdown table that was begun
  bool first_ = true;
};

// The parts of a token and the operations, as text, from a row's "profile".
std::string profile_table(const nlohmann::ordered_json& row);

// The rows that `hearth bench -o json` wrote. Throws Error when it is something else.
nlohmann::ordered_json read_bench_json(const std::string& path);

}  // namespace hearth::tools
