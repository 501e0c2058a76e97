// docs/reference/what-runs.md and the README's table say what the code does: every architecture and every type is run, or
// refused, on the CPU, on a stand-in that offers what the GPU offers, and divided between the two.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <random>

#include "cpu/cpu.h"
#include "engine/engine.h"
#include "model/architectures.h"
#include "offline/convert/hf_config.h"
#include "support/divisions.h"
#include "support/errors.h"
#include "support/gpu_stand_in.h"
#include "support/mixture_divisions.h"
#include "support/tiny_mixture.h"
#include "support/tiny_model.h"

namespace hearth {
namespace {

constexpr const char* kRewrite = "HEARTH_WRITE_DOCS=1 BUILD/tests/test_engine --gtest_filter='WhatRuns.*'";
constexpr const char* kMade = "made by tests/engine/test_what_runs.cpp";

// Why it does not run there; empty where it does.
struct Outcome {
  std::string cpu, gpu, divided;
  std::string cells() const {
    const auto cell = [](const std::string& why) { return why.empty() ? "yes" : "no"; };
    return fmt::format("{} | {} | {}", cell(cpu), cell(gpu), cell(divided));
  }
};

// Loads and evaluates three tokens. Returns the refusal of a device; every other error fails the test.
std::string refusal(const std::filesystem::path& file, bool on_gpu, bool divided) {
  const std::string error = test::message_of([&] {
    auto m = model::Model::load(file);
    ThreadTeam team(1);
    const auto inner = cpu::make_reference_device(), host = cpu::make_device(team);
    test::GpuStandIn gpu(*inner);
    const engine::EngineOptions options{.sparsity = engine::Sparsity::off};
    engine::Placement placement;
    if (divided && m.config().experts) {
      placement = test::placement_of(test::kMixtureDivisions[2], m);
    } else if (divided) {
      if (const auto why = m.prepare_sparse()) fail("{}", *why);
      std::mt19937 rng(1);
      placement = test::placement_of({"half", {0.5}}, m, false, rng);
    }
    auto e = divided  ? engine::Engine(m, gpu, options, {*host, placement, team})
             : on_gpu ? engine::Engine(m, gpu, options)
                      : engine::Engine(m, *host, options);
    engine::Sequence text = e.sequence();
    for (const float logit : e.eval(text, std::vector<int32_t>{5, 9, 1})) EXPECT_TRUE(std::isfinite(logit));
  });
  if (error == "no error") return {};
  const bool refused =
      error.find("cannot compute") != std::string::npos || error.find("no kernels") != std::string::npos;
  EXPECT_TRUE(refused) << file << ": " << error;
  return error;
}
Outcome outcome(const std::filesystem::path& file) {
  return {refusal(file, false, false), refusal(file, true, false), refusal(file, true, true)};
}

// An architecture with dense layers, and with experts where there are such models.
struct Row {
  std::string name, activation;
  Outcome dense;
  std::optional<Outcome> experts;
};

std::vector<Row> architecture_rows() {
  const test::TempDir dir;
  std::vector<Row> rows;
  for (const model::Architecture& a : model::architectures()) {
    test::TinyMixtureOptions o{.arch = std::string(a.name)};
    const auto mixture = test::write_tiny_mixture(dir / (o.arch + "-experts.gguf"), o);
    o.n_dense_layers = o.n_layer, o.without = {"expert_count"};
    const auto dense = test::write_tiny_mixture(dir / (o.arch + ".gguf"), o);
    Row& row = rows.emplace_back(o.arch, std::string(a.activation), outcome(dense), std::nullopt);
    const std::string error = test::message_of([&] { model::Model::load(mixture); });
    if (error == "no error") {
      row.experts = outcome(mixture);
    } else {
      EXPECT_NE(error.find("mixtures of experts of the architecture"), std::string::npos) << error;
    }
  }
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.name < b.name; });
  return rows;
}

struct TypeRow {
  const DTypeTraits* type;
  Outcome outcome;
};
std::vector<TypeRow> type_rows() {
  const test::TempDir dir;
  std::vector<TypeRow> rows;
  for (const DTypeTraits& t : all_traits()) {
    if (!t.computable()) continue;
    const test::TinyModelOptions o{.type = t.type, .transposed_down = true, .n_embd = 256, .n_ff = 256};
    rows.push_back({&t, outcome(test::write_tiny_model(dir / (std::string(t.name) + ".gguf"), o))});
  }
  return rows;
}

std::string page(const std::vector<Row>& architectures, const std::vector<TypeRow>& types) {
  std::string text = fmt::format(
      "# What runs\n\nThis page is {}, from what the code runs and refuses.\n\n"
      "## Architectures\n`general.architecture` of a GGUF file. The activation is that of files that do not say.\n\n"
      "| architecture | layers | activation | CPU | GPU | divided |\n|---|---|---|---|---|---|\n",
      kMade);
  for (const Row& r : architectures) {
    text += fmt::format("| {} | dense | {} | {} |\n", r.name, r.activation, r.dense.cells());
    if (r.experts) text += fmt::format("| | experts | | {} |\n", r.experts->cells());
  }
  text +=
      "\n## Types\nA file may mix them, as Q4_K_M and the like do. A quantised model is divided by neurons where its "
      "down "
      "projections are stored\ntransposed; see [Files of other "
      "programs](../how-to/divide.md#files-of-other-programs).\n\n"
      "| type | bits a weight | CPU | GPU | divided | `quantize` writes it | with an importance |\n"
      "|---|---|---|---|---|---|---|\n";
  for (const TypeRow& r : types) {
    const DTypeTraits& t = *r.type;
    text +=
        fmt::format("| {} | {:.4g} | {} | {} | {} |\n", t.name, 8.0 * t.block_bytes / t.block_size, r.outcome.cells(),
                    t.from_float != nullptr ? "yes" : "no", t.from_float_weighted != nullptr ? "yes" : "");
  }
  text += "\n## What is refused\n";
  for (const Row& r : architectures) {
    if (!r.dense.gpu.empty()) text += fmt::format("- {} on a GPU: \"{}\"\n", r.name, r.dense.gpu);
  }
  for (const TypeRow& r : types) {
    if (!r.outcome.gpu.empty()) text += fmt::format("- {} on a GPU: \"{}\"\n", r.type->name, r.outcome.gpu);
  }
  text += fmt::format("\n## From Hugging Face\n`hearth convert` reads checkpoints of {}.\n",
                      convert::supported_architectures());
  return text;
}

// The README's: one row for all that run alike.
std::string summary(const std::vector<Row>& architectures, const std::vector<TypeRow>& types) {
  std::map<std::pair<bool, std::string>, std::string> alike;  // whether it is refused somewhere, kind and cells: names
  const auto add = [&](const std::string& kind, const Outcome& o, const std::string& name) {
    std::string& names = alike[{!o.gpu.empty() || !o.divided.empty(), kind + " | " + o.cells()}];
    names += (names.empty() ? "" : ", ") + name;
  };
  for (const Row& r : architectures) {
    const bool everywhere = r.dense.cells() == (r.experts ? *r.experts : r.dense).cells();
    EXPECT_TRUE(everywhere) << r.name << ": dense layers and experts differ, which the summary has no words for";
    add(r.experts ? "architectures, mixtures of experts too" : "architectures", r.dense, r.name);
  }
  for (const TypeRow& r : types) add("types of weights", r.outcome, r.type->name);
  std::string text = "| | | CPU | GPU | divided |\n|---|---|---|---|---|\n";
  for (const auto& [key, names] : alike) {
    const size_t bar = key.second.find(" | ");
    text += fmt::format("| {} | {} |{} |\n", key.second.substr(0, bar), names, key.second.substr(bar + 2));
  }
  return text;
}

std::string read(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void expect_file(const std::string& name, const std::string& text) {
  const auto path = test::source_dir() / name;
  if (std::getenv("HEARTH_WRITE_DOCS") != nullptr) std::ofstream(path, std::ios::binary) << text;
  EXPECT_EQ(read(path), text) << name << " is not what the code does; write it again: " << kRewrite;
}

TEST(WhatRuns, TheDocsSayWhatTheCodeDoes) {
  const std::vector<Row> architectures = architecture_rows();
  const std::vector<TypeRow> types = type_rows();
  expect_file("docs/reference/what-runs.md", page(architectures, types));

  std::string readme = read(test::source_dir() / "README.md");
  const std::string begin = fmt::format("<!-- what-runs: {} -->\n", kMade), end = "<!-- /what-runs -->";
  const size_t from = readme.find(begin), to = readme.find(end);
  ASSERT_TRUE(from != std::string::npos && to != std::string::npos) << "README.md has no place for the table";
  readme.replace(from + begin.size(), to - from - begin.size(), summary(architectures, types));
  expect_file("README.md", readme);
}

// The stand-in knows the GPU's interfaces from their declaration: it offers some, and latent attention is not among them
// until the declaration has it.
TEST(WhatRuns, TheStandInOffersWhatTheGpuDeclares) {
  const auto inner = cpu::make_reference_device();
  test::GpuStandIn gpu(*inner);
  const auto declared = test::GpuStandIn::declared();
  EXPECT_TRUE(declared.contains("Device"));
  EXPECT_EQ(gpu.latent_attention() != nullptr, declared.contains("LatentAttention"));
  EXPECT_EQ(gpu.expert_ffn() != nullptr, declared.contains("ExpertFfn"));
  EXPECT_EQ(gpu.sparse_ffn() != nullptr, declared.contains("SparseFfn"));
  EXPECT_EQ(gpu.hand_offs() != nullptr, declared.contains("HandOffs"));
}

}  // namespace
}  // namespace hearth
