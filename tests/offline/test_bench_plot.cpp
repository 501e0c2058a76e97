// The plot of bench's results: what is drawn against what.
#include "offline/report/bench_plot.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "core/error.h"

namespace hearth::offline {
namespace {

using nlohmann::ordered_json;

ordered_json row(double gib, int threads, double rate) {
  return {{"model_filename", "/models/a & b.gguf"},
          {"model_type", "llama 1B f16"},
          {"device", "GPU <1>"},
          {"n_gen", 64},
          {"n_depth", 0},
          {"n_ctx", 128},
          {"n_threads", threads},
          {"density", 0.1 + gib / 1000},
          {"vram_budget", gib > 0 ? ordered_json(gib * (1 << 30)) : ordered_json()},
          {"avg_ts", rate},
          {"floor_ts", 2 * rate},
          {"expected_ts", 1.5 * rate},
          {"sparse_threshold", nullptr}};
}

size_t count(const std::string& text, const std::string& what) {
  size_t n = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
  return n;
}

TEST(BenchPlot, BudgetsWithFloorAndPlan) {
  ordered_json rows = ordered_json::array({row(4, 16, 40), row(2, 16, 20), row(8, 16, 200)});
  rows.push_back({{"error", "too small"}});
  const std::string svg = bench_plot_svg(rows);
  EXPECT_EQ(svg.rfind("<svg xmlns=\"http://www.w3.org/2000/svg\"", 0), 0u);
  EXPECT_NE(svg.find("GPU memory budget, GiB"), std::string::npos);
  EXPECT_NE(svg.find("a &amp; b.gguf: tokens per second (GPU &lt;1&gt;)"), std::string::npos);
  EXPECT_EQ(count(svg, "<polyline"), 3u);
  EXPECT_EQ(count(svg, "<circle"), 9u);
  for (const char* name : {">measured<", ">floor<", ">plan<"}) EXPECT_EQ(count(svg, name), 1u) << name;
  // By rising budget, whatever the order of the rows: every x is right of the one before.
  const size_t first = svg.find("points=\"") + 8;
  double x = -1;
  for (size_t at = first; svg[at] != '"'; at = svg.find(' ', at) + 1) {
    const double next = std::stod(svg.substr(at));
    EXPECT_GT(next, x);
    x = next;
  }
}

TEST(BenchPlot, WhatVariesMostIsTheAxisAndTheRestAreLines) {
  ordered_json rows = ordered_json::array();
  for (const double gib : {2.0, 4.0}) {
    for (const int threads : {1, 2, 4, 8}) rows.push_back(row(gib, threads, gib * threads));
  }
  const std::string svg = bench_plot_svg(rows);
  EXPECT_NE(svg.find("CPU threads"), std::string::npos);
  for (const char* name : {">measured, 2 GiB<", ">floor, 2 GiB<", ">measured, 4 GiB<"})
    EXPECT_EQ(count(svg, name), 1u) << name;
  EXPECT_EQ(count(svg, "plan"), 0u);
}

TEST(BenchPlot, LinkSharesAreAnAxisOrALine) {
  ordered_json rows = ordered_json::array();
  for (const double share : {0.0, 0.2, 0.4}) {
    for (const double gib : {5.0, 7.75}) {
      rows.push_back(row(gib, 14, gib + share));
      rows.back()["link_share"] = share;
    }
  }
  EXPECT_NE(bench_plot_svg(rows).find("share of cold neurons read over the link"), std::string::npos);
  for (const double gib : {2.0, 3.0}) rows.push_back(row(gib, 14, gib));
  EXPECT_NE(bench_plot_svg(rows).find(">measured, 0.4 over the link<"), std::string::npos);
}

TEST(BenchPlot, DensityIsAnAxisOnlyWhereItWasSwept) {
  ordered_json rows = ordered_json::array({row(0, 4, 10), row(0, 4, 20), row(0, 4, 30)});
  for (size_t i = 0; i < 3; ++i) {
    rows[i]["density"] = 0.1 * static_cast<double>(i + 1);
    rows[i]["sparse_threshold"] = std::to_string(i);
  }
  EXPECT_NE(bench_plot_svg(rows).find("active neurons, %"), std::string::npos);
  for (ordered_json& r : rows) r["sparse_threshold"] = nullptr;
  EXPECT_EQ(bench_plot_svg(rows).find("active neurons, %"), std::string::npos);
}

TEST(BenchPlot, NothingToPlotIsAnError) {
  ordered_json prompt = row(2, 4, 100);
  prompt["n_gen"] = 0;
  EXPECT_THROW(bench_plot_svg(ordered_json::array({prompt})), Error);
  EXPECT_THROW(bench_plot_svg(ordered_json::array()), Error);
}

}  // namespace
}  // namespace hearth::offline
