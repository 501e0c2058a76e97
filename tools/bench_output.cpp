// The output of `hearth bench`. Every row is a JSON object first; tables are made of those, so that a file of them can be
// printed again.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/file.h"
#include "tools/bench.h"
#include "tools/figures.h"

namespace hearth::tools {
namespace {

using engine::Part;
using nlohmann::ordered_json;

ordered_json number_or_null(double value) {
  return value > 0 && std::isfinite(value) ? ordered_json(value) : ordered_json();
}

double number(const ordered_json& row, const char* key) {
  const auto it = row.find(key);
  return it != row.end() && it->is_number() ? it->get<double>() : 0.0;
}
std::string text(const ordered_json& row, const char* key) {
  const auto it = row.find(key);
  return it != row.end() && it->is_string() ? it->get<std::string>() : std::string();
}

// A cell of `scale` times the number; empty where there is none.
std::string cell(const ordered_json& row, const char* key, double scale, const char* format) {
  const auto it = row.find(key);
  if (it == row.end() || !it->is_number()) return {};
  return fmt::format(fmt::runtime(format), it->get<double>() * scale);
}

std::string test_of(const ordered_json& row) {
  BenchRow r;
  r.n_prompt = static_cast<int64_t>(number(row, "n_prompt")), r.n_gen = static_cast<int64_t>(number(row, "n_gen"));
  r.n_depth = static_cast<int64_t>(number(row, "n_depth"));
  r.n_parallel = std::max<int64_t>(1, static_cast<int64_t>(number(row, "n_parallel")));
  return r.test();
}

bool divided(const ordered_json& row) {
  return number(row, "vram_budget") > 0 || number(row, "gpu_bytes_planned") > 0;
}

struct Column {
  const char* name;
  int width;
  bool left;
  std::function<std::string(const ordered_json&)> value;
};

Column scaled(const char* name, int width, const char* key, double scale, const char* format) {
  return {name, width, false, [=](const ordered_json& r) { return cell(r, key, scale, format); }};
}

std::vector<Column> columns_of(const ordered_json& row, const std::vector<std::string>& swept) {
  constexpr double kGiB = 1.0 / (1 << 30);
  std::vector<Column> c = {{"model", 24, true, [](const ordered_json& r) { return text(r, "model_type"); }},
                           {"size", 11, false, [](const ordered_json& r) {
                              return human_bytes(static_cast<size_t>(number(r, "model_size")));
                            }}};
  const auto is_swept = [&](const char* key) { return std::find(swept.begin(), swept.end(), key) != swept.end(); };
  if (is_swept("model_filename"))
    c.push_back({"file", 20, true, [](const ordered_json& r) {
                   return std::filesystem::path(text(r, "model_filename")).filename().string();
                 }});
  if (divided(row)) {
    c.push_back(scaled("budget GiB", 10, "vram_budget", kGiB, "{:.2f}"));
  } else {
    c.push_back({"params", 8, false,
                 [](const ordered_json& r) { return human_count(static_cast<size_t>(number(r, "model_n_params"))); }});
  }
  c.push_back({"backend", 8, true, [](const ordered_json& r) { return text(r, "backend"); }});
  c.push_back(scaled("threads", 7, "n_threads", 1, "{:.0f}"));
  if (is_swept("n_ctx")) c.push_back(scaled("context", 7, "n_ctx", 1, "{:.0f}"));
  if (is_swept("sparse_threshold"))
    c.push_back({"threshold", 9, false, [](const ordered_json& r) { return text(r, "sparse_threshold"); }});
  if (is_swept("link_share")) c.push_back(scaled("link share", 10, "link_share", 1, "{:g}"));
  c.push_back({"test", 16, false, test_of});
  c.push_back({"t/s", 18, false, [](const ordered_json& r) {
                 return fmt::format("{:.2f} ± {:.2f}", number(r, "avg_ts"), number(r, "stddev_ts"));
               }});
  if (divided(row)) {
    for (Column& more : std::vector<Column>{
             scaled("plan t/s", 8, "expected_ts", 1, "{:.1f}"), scaled("floor t/s", 9, "floor_ts", 1, "{:.1f}"),
             scaled("of floor", 8, "of_floor", 100, "{:.1f} %"), scaled("GPU hits", 8, "hit_share", 100, "{:.1f} %"),
             scaled("GPU MB", 8, "gpu_bytes_per_token", 1e-6, "{:.1f}"),
             scaled("GPU GB/s", 8, "gpu_bytes_per_second", 1e-9, "{:.1f}"),
             scaled("CPU MB", 8, "cpu_bytes_per_token", 1e-6, "{:.1f}"),
             scaled("CPU GB/s", 8, "cpu_bytes_per_second", 1e-9, "{:.1f}"),
             scaled("link MB", 8, "link_bytes_per_token", 1e-6, "{:.1f}"),
             scaled("link GB/s", 9, "link_bytes_per_second", 1e-9, "{:.1f}")})
      c.push_back(std::move(more));
  } else {
    c.push_back(scaled("GB/s", 8, "bytes_per_second", 1e-9, "{:.2f}"));
    c.push_back(scaled("% of bw", 8, "of_floor", 100, "{:.1f}"));
  }
  c.push_back(scaled("GFLOP/s", 8, "flops_per_second", 1e-9, "{:.1f}"));
  c.push_back(scaled("density", 8, "density", 100, "{:.1f} %"));
  return c;
}

// fmt counts code points and not bytes, so that ± takes one place.
std::string markdown_cell(const Column& c, const std::string& value) {
  return c.left ? fmt::format(" {:<{}} |", value, c.width) : fmt::format(" {:>{}} |", value, c.width);
}

std::string markdown_header(const std::vector<Column>& columns) {
  std::string names = "|", rule = "|";
  for (const Column& c : columns) {
    names += markdown_cell(c, c.name);
    rule += fmt::format(" {:-<{}} |", "", c.width);
  }
  return names + "\n" + rule + "\n";
}

constexpr const char* kProfileKeys[] = {"attention_us", "predictor_us", "hand_over_us", "hot_us",  "cold_us",
                                        "wait_us",      "merge_us",     "head_us",      "other_us"};

// Flat keys of a CSV table.
std::vector<const char*> csv_keys() {
  return {"model_filename",
          "model_type",
          "model_size",
          "model_n_params",
          "backend",
          "device",
          "n_threads",
          "sparsity",
          "sparse_threshold",
          "link_share",
          "n_ctx",
          "n_prompt",
          "n_gen",
          "n_depth",
          "n_parallel",
          "avg_ns",
          "stddev_ns",
          "avg_ts",
          "stddev_ts",
          "bytes_per_second",
          "memory_bandwidth",
          "flops_per_second",
          "density",
          "floor_ts",
          "of_floor",
          "vram_budget",
          "gpu_bytes_planned",
          "gpu_bytes_used",
          "expected_ts",
          "hit_share",
          "gpu_bytes_per_token",
          "cpu_bytes_per_token",
          "link_bytes_per_token",
          "gpu_bytes_per_second",
          "cpu_bytes_per_second",
          "link_bytes_per_second",
          "gpu_bandwidth",
          "cpu_bandwidth",
          "link_bandwidth",
          "load_seconds",
          "load_bytes_per_second"};
}

std::string csv_cell(const ordered_json& value) {
  if (value.is_null()) return {};
  if (!value.is_string()) return value.dump();
  std::string q = "\"";
  for (const char c : value.get<std::string>()) q += c == '"' ? std::string("\"\"") : std::string(1, c);
  return q + "\"";
}

void add_division(ordered_json& j, const BenchRow& row, double rate) {
  const auto put = [&](const char* key, double value) { j[key] = number_or_null(value); };
  const BenchDivision d = row.division.value_or(BenchDivision{});
  const bool reads = row.division && row.n_gen > 0;
  put("vram_budget", static_cast<double>(d.vram_budget));
  put("gpu_bytes_planned", static_cast<double>(d.gpu_bytes_planned));
  put("gpu_bytes_used", static_cast<double>(d.gpu_bytes_used));
  put("expected_ts", row.n_gen > 0 ? d.expected_rate : 0);
  j["hit_share"] = reads && std::isfinite(d.hit_share) ? ordered_json(d.hit_share) : ordered_json();
  put("gpu_bytes_per_token", reads ? row.token_bytes.main : 0);
  put("cpu_bytes_per_token", reads ? row.token_bytes.host : 0);
  put("link_bytes_per_token", reads ? row.token_bytes.link : 0);
  put("gpu_bytes_per_second", reads ? row.token_bytes.main * rate : 0);
  put("cpu_bytes_per_second", reads ? row.token_bytes.host * rate : 0);
  put("link_bytes_per_second", reads ? row.token_bytes.link * rate : 0);
  put("gpu_bandwidth", d.bandwidth.main), put("cpu_bandwidth", d.bandwidth.host);
  put("link_bandwidth", d.bandwidth.link);
}

ordered_json operations_json(const char* side, const BenchProfile::Rows& rows) {
  ordered_json out = ordered_json::array();
  for (const auto& r : rows) {
    out.push_back({{"side", side}, {"operation", r.operation}, {"calls", r.calls}, {"us", r.seconds * 1e6}});
    out.back()["bytes_per_second"] = number_or_null(static_cast<double>(r.weight_bytes) / r.seconds);
  }
  return out;
}

ordered_json profile_json(const BenchProfile& p, bool is_divided) {
  const auto us = [](const std::array<double, engine::kParts>& parts, Part part) {
    return parts[static_cast<size_t>(part)] * 1e6;
  };
  double cpu_rest = 0;
  for (const Part part : {Part::attention, Part::predictor, Part::head, Part::other}) cpu_rest += us(p.host, part);
  ordered_json j = {{"attention_us", us(p.main, Part::attention)},
                    {"predictor_us", us(p.main, Part::predictor)},
                    {"hand_over_us", us(p.main, Part::hand_over)},
                    {"hot_us", us(p.main, Part::ffn)},
                    {"cold_us", is_divided ? ordered_json(us(p.host, Part::ffn)) : ordered_json()},
                    {"wait_us", us(p.main, Part::wait)},
                    {"merge_us", us(p.main, Part::merge)},
                    {"head_us", us(p.main, Part::head)},
                    {"other_us", us(p.main, Part::other)},
                    {"cpu_rest_us", is_divided ? ordered_json(cpu_rest) : ordered_json()},
                    {"hand_off_us", is_divided ? ordered_json(p.hand_off * 1e6) : ordered_json()}};
  j["operations"] = operations_json("main", p.main_rows);
  for (const ordered_json& o : operations_json("cpu", p.host_rows)) j["operations"].push_back(o);
  return j;
}

}  // namespace

ordered_json bench_json(const BenchModel& model, const BenchRow& row) {
  const MeanSd time = mean_sd(row.seconds), rate = mean_sd(row.rates());
  std::vector<int64_t> samples_ns;
  for (const double s : row.seconds) samples_ns.push_back(std::llround(s * 1e9));
  ordered_json j;
  j["model_filename"] = model.file;
  j["model_type"] = model.type;
  j["model_size"] = model.bytes;
  j["model_n_params"] = model.parameters;
  j["n_layer"] = model.n_layer;
  j["backend"] = row.backend;
  j["device"] = row.device;
  j["n_threads"] = row.threads;
  j["sparsity"] = model.sparsity;
  j["sparsity_measured_ts"] = to_json(model.measured_ways);
  j["sparse_threshold"] = model.threshold.empty() ? ordered_json() : ordered_json(model.threshold);
  j["link_share"] = model.link_share ? ordered_json(*model.link_share) : ordered_json();
  j["n_ctx"] = row.n_ctx;
  j["n_prompt"] = row.n_prompt;
  j["n_gen"] = row.n_gen;
  j["n_depth"] = row.n_depth;
  j["n_parallel"] = row.n_parallel;
  j["avg_ns"] = std::llround(time.mean * 1e9);
  j["stddev_ns"] = std::llround(time.sd * 1e9);
  j["avg_ts"] = rate.mean;
  j["stddev_ts"] = rate.sd;
  j["samples_ns"] = samples_ns;
  j["samples_ts"] = row.rates();
  j["bytes_per_second"] = number_or_null(row.token_bytes.total() * rate.mean);
  j["memory_bandwidth"] = number_or_null(row.memory_bandwidth);
  j["flops_per_second"] = number_or_null(row.flops_per_second);
  j["density"] = number_or_null(row.density);
  j["floor_ts"] = number_or_null(row.floor_seconds > 0 ? 1 / row.floor_seconds : 0);
  j["of_floor"] = number_or_null(row.floor_seconds * rate.mean);
  add_division(j, row, rate.mean);
  j["load_seconds"] = number_or_null(model.load_seconds);
  j["load_bytes_per_second"] =
      number_or_null(model.load_seconds > 0 ? static_cast<double>(model.bytes) / model.load_seconds : 0);
  j["profile"] = row.profile ? profile_json(*row.profile, row.division.has_value()) : ordered_json();
  return j;
}

std::string BenchTable::begin() {
  if (format_ == Format::json) return "[";
  if (format_ == Format::md) return {};
  std::string header;
  for (const char* key : csv_keys()) header += (header.empty() ? "" : ",") + std::string(key);
  for (const char* key : kProfileKeys) header += "," + std::string(key);
  return header + "\n";
}

std::string BenchTable::row(const ordered_json& row) {
  const bool first = std::exchange(first_, false);
  if (format_ == Format::json) {
    return (first ? "\n  " : ",\n  ") + row.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }
  if (format_ == Format::csv) {
    std::string line;
    for (const char* key : csv_keys()) line += csv_cell(row.value(key, ordered_json())) + ",";
    const ordered_json profile = row.value("profile", ordered_json());
    for (const char* key : kProfileKeys)
      line += (profile.is_object() ? csv_cell(profile.value(key, ordered_json())) : "") + ",";
    line.back() = '\n';
    return line;
  }
  const std::vector<Column> columns = columns_of(row, swept_);
  std::string out, line = "|";
  if (const std::string header = markdown_header(columns); header != shape_) {
    out = (shape_.empty() ? "" : "\n") + header;
    shape_ = header;
  }
  for (const Column& c : columns) line += markdown_cell(c, c.value(row));
  return out + line + "\n";
}

std::string BenchTable::end() {
  return format_ == Format::json ? "\n]\n" : "";
}

std::string profile_table(const ordered_json& row) {
  const ordered_json& p = row.at("profile");
  const double layers = std::max(1.0, number(row, "n_layer"));
  std::string out = fmt::format("\n{}: where the time of one {} goes; one more run, operation by operation\n",
                                test_of(row), number(row, "n_gen") > 0 ? "token" : "prompt");
  out += fmt::format("{:<32} {:>11} {:>11}\n", "part", "us", "us a layer");
  double sum = 0;
  const auto line = [&](const char* name, const char* key, bool counts, bool by_layer) {
    const double us = number(p, key);
    if (us == 0) return;
    if (counts) sum += us;
    out += fmt::format("{:<32} {:>11.1f} {:>11}\n", name, us, by_layer ? fmt::format("{:.2f}", us / layers) : "");
  };
  const bool two = divided(row);
  line("attention", "attention_us", true, true);
  line(two ? "predictor and hand-over" : "predictor", "predictor_us", true, true);
  line("hand-over", "hand_over_us", true, true);
  line(two ? "hot neurons" : "neurons", "hot_us", true, true);
  line("wait", "wait_us", true, true);
  line("merge", "merge_us", true, true);
  line("head", "head_us", true, false);
  line("other", "other_us", true, false);
  out += fmt::format("{:<32} {:>11.1f}\n", "sum", sum);
  if (two) {
    out += "at the same time, on the CPU\n";
    line("cold neurons", "cold_us", false, true);
    line("the rest of its work", "cpu_rest_us", false, true);
    out += fmt::format("hand-off beyond the longer of hot and cold: {:.2f} us a layer\n", number(p, "hand_off_us"));
  }
  out += fmt::format("{:<6} {:<36} {:>8} {:>11} {:>9}\n", "side", "operation", "calls", "us", "GB/s");
  for (const ordered_json& o : p.at("operations")) {
    out += fmt::format("{:<6} {:<36} {:>8} {:>11.1f} {:>9}\n", text(o, "side"), text(o, "operation"),
                       o.at("calls").get<int64_t>(), number(o, "us"), cell(o, "bytes_per_second", 1e-9, "{:.2f}"));
  }
  return out + "\n";
}

ordered_json read_bench_json(const std::string& path) {
  ordered_json rows = ordered_json::parse(read_text_file(path), nullptr, false);
  if (!rows.is_array() || rows.empty()) fail("'{}' is no array of results; `hearth bench -o json` writes one", path);
  for (const ordered_json& r : rows) {
    const bool known = r.is_object() && (r.contains("error") || (r.contains("avg_ts") && r.contains("n_gen")));
    if (!known) fail("'{}' holds something else than results of `hearth bench -o json`", path);
  }
  return rows;
}

}  // namespace hearth::tools
