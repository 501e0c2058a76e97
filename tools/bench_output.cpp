#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "tools/bench.h"
#include "tools/report.h"

namespace hearth::tools {
namespace {

std::string markdown_cells(const std::vector<std::string>& cells) {
  // Numbers to the right; the widths fit the usual contents, a longer cell only moves its row.
  static constexpr std::array kWidths = {24, 11, 8, 8, 7, 16, 18, 8, 8, 8, 8};
  std::string line = "|";
  for (size_t i = 0; i < cells.size(); ++i) {
    const bool left = i == 0 || i == 3;
    line += left ? fmt::format(" {:<{}} |", cells[i], kWidths[i]) : fmt::format(" {:>{}} |", cells[i], kWidths[i]);
  }
  return line + "\n";
}

std::string number_or_blank(double value, const char* format) {
  return value > 0 && std::isfinite(value) ? fmt::format(fmt::runtime(format), value) : std::string();
}

double share_of_bandwidth(const BenchRow& row) {
  return row.memory_bandwidth > 0 ? row.bytes_per_second / row.memory_bandwidth : 0.0;
}

}  // namespace

MeanSd mean_sd(std::span<const double> values) {
  MeanSd r;
  if (values.empty()) return r;
  for (const double v : values) r.mean += v / static_cast<double>(values.size());
  double squares = 0;
  for (const double v : values) squares += (v - r.mean) * (v - r.mean);
  if (values.size() > 1) r.sd = std::sqrt(squares / static_cast<double>(values.size() - 1));
  return r;
}

std::string BenchRow::test() const {
  const std::string name = n_prompt > 0 ? fmt::format("pp{}", n_prompt) : fmt::format("tg{}", n_gen);
  return n_depth > 0 ? fmt::format("{} @ d{}", name, n_depth) : name;
}

std::vector<double> BenchRow::rates() const {
  std::vector<double> r;
  for (const double s : seconds) r.push_back(static_cast<double>(n_prompt + n_gen) / s);
  return r;
}

std::string markdown_header() {
  const std::vector<std::string> names = {"model", "size", "params",  "backend", "threads", "test",
                                          "t/s",   "GB/s", "% of bw", "GFLOP/s", "density"};
  std::string rule = markdown_cells(std::vector<std::string>(names.size()));
  for (size_t i = 0; i + 1 < rule.size(); ++i) {
    const bool edge = rule[i] == '|' || rule[i + 1] == '|' || rule[i - 1] == '|';
    if (!edge) rule[i] = '-';
  }
  return markdown_cells(names) + rule;
}

std::string markdown_row(const BenchModel& model, const BenchRow& row) {
  const MeanSd rate = mean_sd(row.rates());
  return markdown_cells(
      {model.type, human_bytes(model.bytes), human_count(model.parameters), row.backend, fmt::format("{}", row.threads),
       row.test(), fmt::format("{:.2f} ± {:.2f}", rate.mean, rate.sd),
       number_or_blank(row.bytes_per_second / 1e9, "{:.2f}"), number_or_blank(share_of_bandwidth(row) * 100, "{:.1f}"),
       number_or_blank(row.flops_per_second / 1e9, "{:.1f}"), number_or_blank(row.density * 100, "{:.1f} %")});
}

std::string csv_header() {
  return "model_filename,model_type,model_size,model_n_params,backend,device,n_threads,sparsity,n_prompt,n_gen,n_depth,"
         "avg_ns,stddev_ns,avg_ts,stddev_ts,bytes_per_second,memory_bandwidth,flops_per_second,density\n";
}

std::string csv_row(const BenchModel& model, const BenchRow& row) {
  const auto quoted = [](const std::string& s) {
    std::string q = "\"";
    for (const char c : s) q += c == '"' ? std::string("\"\"") : std::string(1, c);
    return q + "\"";
  };
  const MeanSd time = mean_sd(row.seconds), rate = mean_sd(row.rates());
  return fmt::format("{},{},{},{},{},{},{},{},{},{},{},{:.0f},{:.0f},{:.6f},{:.6f},{:.0f},{:.0f},{:.0f},{}\n",
                     quoted(model.file), quoted(model.type), model.bytes, model.parameters, quoted(row.backend),
                     quoted(row.device), row.threads, model.sparsity, row.n_prompt, row.n_gen, row.n_depth,
                     time.mean * 1e9, time.sd * 1e9, rate.mean, rate.sd, row.bytes_per_second, row.memory_bandwidth,
                     row.flops_per_second, number_or_blank(row.density, "{:.6f}"));
}

std::string json_row(const BenchModel& model, const BenchRow& row) {
  const MeanSd time = mean_sd(row.seconds), rate = mean_sd(row.rates());
  std::vector<int64_t> samples_ns;
  for (const double s : row.seconds) samples_ns.push_back(std::llround(s * 1e9));
  nlohmann::ordered_json j;
  j["model_filename"] = model.file;
  j["model_type"] = model.type;
  j["model_size"] = model.bytes;
  j["model_n_params"] = model.parameters;
  j["backend"] = row.backend;
  j["device"] = row.device;
  j["n_threads"] = row.threads;
  j["sparsity"] = model.sparsity;
  j["n_prompt"] = row.n_prompt;
  j["n_gen"] = row.n_gen;
  j["n_depth"] = row.n_depth;
  j["avg_ns"] = std::llround(time.mean * 1e9);
  j["stddev_ns"] = std::llround(time.sd * 1e9);
  j["avg_ts"] = rate.mean;
  j["stddev_ts"] = rate.sd;
  j["samples_ns"] = samples_ns;
  j["samples_ts"] = row.rates();
  const auto number_or_null = [](double value) {
    return value > 0 && std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json();
  };
  j["bytes_per_second"] = number_or_null(row.bytes_per_second);
  j["memory_bandwidth"] = number_or_null(row.memory_bandwidth);
  j["flops_per_second"] = number_or_null(row.flops_per_second);
  j["density"] = number_or_null(row.density);
  return j.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

double prompt_flops(const model::Model& model, int64_t T, int64_t n_past) {
  const model::Config& c = model.config();
  const auto size = [](const Matrix& m) { return m ? static_cast<double>(m.rows) * static_cast<double>(m.cols) : 0.0; };
  double weights = 0;
  for (const model::LayerWeights& l : model.weights().layers) {
    for (const Matrix* m : {&l.wq, &l.wk, &l.wv, &l.wo, &l.ffn.gate, &l.ffn.up, &l.ffn.down, &l.ffn.down_t}) {
      weights += size(*m);
    }
  }
  double seen = 0;  // positions seen, summed over tokens
  for (int64_t t = 0; t < T; ++t) {
    const int64_t kv = n_past + t + 1;
    seen += static_cast<double>(c.sliding_window > 0 ? std::min(kv, c.sliding_window) : kv);
  }
  const double attention = 4.0 * static_cast<double>(c.n_layer * c.n_head * c.head_dim) * seen;
  return 2.0 * weights * static_cast<double>(T) + attention + 2.0 * size(model.weights().output);
}

}  // namespace hearth::tools
