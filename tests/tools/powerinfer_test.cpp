// PowerInfer's files and flags through the program: the score from which on a predictor names a neuron, and an index of
// hot neurons.
#include <cmath>
#include <nlohmann/json.hpp>

#include "gguf/gguf.h"
#include "program.h"
#include "support/tiny_model.h"

namespace hearth::test {
namespace {

using nlohmann::json;

class PowerInferProgram : public testing::Test {
 protected:
  void SetUp() override {
    write_tiny_model(model_, {.transposed_down = true, .predictor_rank = 32});
    std::fstream file(model_, std::ios::binary | std::ios::in | std::ios::out);
    file.write("PWRI", 4);
  }
  static Outcome run(std::vector<std::string> args) {
    args.insert(args.end(), {"-q", "--device", "cpu"});
    return hearth(args);
  }
  static std::string output(std::vector<std::string> args) {
    const Outcome o = run(std::move(args));
    EXPECT_EQ(o.status, 0) << o.err;
    return o.out;
  }
  // By id.
  static std::vector<double> logits(const std::string& model, const std::vector<std::string>& more) {
    std::vector<std::string> args = {"logits", "-m", model, "--ids", "257,104,3,77", "--all", "--json", "--no-measure"};
    args.insert(args.end(), more.begin(), more.end());
    std::vector<double> by_id(kTinyVocab);
    const json top = json::parse(output(args))["top"];
    EXPECT_EQ(top.size(), by_id.size());
    for (const json& t : top) by_id[t["id"].get<size_t>()] = t["logit"];
    return by_id;
  }
  std::vector<double> logits(const std::vector<std::string>& more) const { return logits(model_, more); }
  static double distance(const std::vector<double>& a, const std::vector<double>& b) {
    double largest = 0;
    for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::fabs(a[i] - b[i]));
    return largest;
  }
  TempDir dir_;
  std::string model_ = (dir_ / "m.powerinfer.gguf").string();
};

// A score of minus a million names all neurons, of a million none; in between it matters.
TEST_F(PowerInferProgram, TheScoreDecidesWhatIsLeftOut) {
  const std::vector<double> dense = logits({"--sparsity", "off"}), exact = logits({"--predictor", "none"});
  const std::vector<double> by_key = logits({}), all = logits({"--sparse-threshold", "-1e6"}),
                            none = logits({"--sparse-threshold", "1e6"});
  // f32 weights: another order of the same 96 terms of size one.
  EXPECT_LT(distance(dense, exact), 1e-3);
  EXPECT_LT(distance(dense, all), 1e-3);
  for (const auto* approximate : {&by_key, &none}) EXPECT_GT(distance(dense, *approximate), 0.05);
  EXPECT_GT(distance(by_key, none), 0.05);
  EXPECT_EQ(logits({"--sparse-threshold", "powerinfer-key"}), by_key);
  EXPECT_EQ(logits({"--sparse-threshold", "0"}), by_key) << "the file has no key: 0";
  EXPECT_GT(distance(logits({"--sparse-threshold", "0.5"}), by_key), 0.01);
}

TEST_F(PowerInferProgram, AConvertedFileObeysTheSameFlag) {
  const std::string converted = (dir_ / "converted.gguf").string();
  const Outcome o = hearth({"convert", model_, "-o", converted, "-q"});
  ASSERT_EQ(o.status, 0) << o.err;
  for (const std::vector<std::string>& flags : std::vector<std::vector<std::string>>{
           {}, {"--sparse-threshold", "0.5"}, {"--sparse-threshold", "powerinfer-key"}}) {
    EXPECT_LT(distance(logits(converted, flags), logits(flags)), 1e-3);
  }
}

TEST_F(PowerInferProgram, EveryMeasurementObeysIt) {
  const auto density = [&](const std::string& score) {
    const json j = json::parse(output({"run", "--no-measure", "-m", model_, "-p", "the", "-n", "8", "--temp", "0",
                                       "--ignore-eos", "--json", "--sparse-threshold", score}));
    return j["density"].get<double>();
  };
  EXPECT_EQ(density("1e6"), 0.0);
  EXPECT_GT(density("-1e6"), 0.3);  // the gates' own: half, for random weights

  std::ofstream(dir_ / "text") << "the other the things in there, then";
  const auto perplexity = [&](const std::vector<std::string>& more) {
    std::vector<std::string> args = {"perplexity", "-m",          model_, "-f", (dir_ / "text").string(),
                                     "--json",     "--no-measure"};
    args.insert(args.end(), more.begin(), more.end());
    return json::parse(output(args))["perplexity"].get<double>();
  };
  const double dense = perplexity({"--sparsity", "off"});
  EXPECT_NEAR(perplexity({"--sparse-threshold", "-1e6"}), dense, 1e-3 * dense);
  EXPECT_GT(std::fabs(perplexity({}) / dense - 1), 0.01) << "predictors act on single tokens: not measured in batches";

  const auto bench = [&](const std::string& score) {
    const json rows = json::parse(output({"bench", "--no-measure", "-m", model_, "-p", "0", "-n", "4", "-r", "1", "-o",
                                          "json", "--no-bandwidth", "--sparse-threshold", score}));
    return rows[0]["density"].get<double>();
  };
  const auto predicted = [&](const std::string& score) {
    const Outcome o = hearth({"predictor", "eval", "-m", model_, "-f", (dir_ / "text").string(), "-c", "16", "--json",
                              "-q", "--sparse-threshold", score});
    EXPECT_EQ(o.status, 0) << o.err;
    return json::parse(o.out)["all"]["predicted_density"].get<double>();
  };
  EXPECT_EQ(predicted("1e6"), 0.0);
  EXPECT_EQ(predicted("-1e6"), 1.0);
  EXPECT_EQ(predicted("powerinfer-key"), predicted("0"));
  EXPECT_GT(bench("-1e6"), 1.2 * bench("powerinfer-key"));
}

TEST_F(PowerInferProgram, WrongThresholdsAreOneLine) {
  const std::string plain = write_tiny_model(dir_ / "plain.gguf").string();
  const auto refused = [&](const std::string& model, const std::string& threshold, const char* part) {
    EXPECT_TRUE(fails_with(run({"logits", "-m", model, "--ids", "3", "--sparse-threshold", threshold}), part));
  };
  refused(plain, "powerinfer-key", "no predictors of PowerInfer's");
  refused(plain, "-0.5", "expected 0 or more");
  refused(plain, "sidecar", "no tuned thresholds");
  refused(model_, "powerinfer", "expected a number");
  refused(model_, "nan", "expected a number");
  EXPECT_TRUE(fails_with(
      run({"logits", "-m", model_, "--ids", "3", "--sparse-threshold", "powerinfer-key", "--predictor", "none"}),
      "no predictors of PowerInfer's"));
}

// An index that makes every third neuron hot, as PowerInfer writes it: type 18 for i32, its own magic.
class GpuIndexProgram : public PowerInferProgram {
 protected:
  void SetUp() override {
    PowerInferProgram::SetUp();
    write_index(index_, 96);
  }
  static void write_index(const std::string& path, int64_t n_ff) {
    gguf::Writer out(path);
    out.set("general.architecture", std::string("generic.gpu_index"));
    std::vector<int32_t> flags(static_cast<size_t>(n_ff));
    for (size_t i = 0; i < flags.size(); i += 3) flags[i] = 1;
    std::vector<size_t> tensors;
    for (int l = 0; l < 2; ++l) {
      tensors.push_back(out.add_tensor("blk." + std::to_string(l) + ".gpu_idx", DType::i32, {n_ff}));
    }
    out.begin();
    for (const size_t t : tensors) out.write(t, 0, std::as_bytes(std::span(flags)));
    out.finish();
  }
  Outcome plan(const std::vector<std::string>& more) const {
    std::vector<std::string> args = {"plan",     "-m", model_,      "--gpu-bw", "1000",
                                     "--cpu-bw", "70", "--pcie-bw", "25",       "-q"};
    args.insert(args.end(), more.begin(), more.end());
    return hearth(args);
  }
  std::string index_ = (dir_ / "m.generated.gpuidx").string();
};

TEST_F(GpuIndexProgram, PlansObeyIt) {
  const std::string saved = (dir_ / "plan.json").string();
  const Outcome o = plan({"--vram-budget", "2", "--gpu-index", index_, "--json", "--save", saved});
  ASSERT_EQ(o.status, 0) << o.err;
  const json layers = json::parse(slurp(saved))["layers"];
  ASSERT_EQ(layers.size(), 2u);
  for (size_t l = 0; l < 2; ++l) {
    const auto bucket = layers[l]["gpu_bucket"].get<std::vector<int32_t>>();
    ASSERT_EQ(bucket.size(), 32u);
    for (size_t i = 0; i < bucket.size(); ++i) EXPECT_EQ(bucket[i], static_cast<int32_t>(3 * i));
    EXPECT_EQ(json::parse(o.out)["layers"][l]["hot"], 32);
  }
  EXPECT_NE(plan({"--vram-budget", "2", "--gpu-index", index_}).out.find("those of the GPU index"), std::string::npos);
}

// The oracle stands in for the GPU. The same neurons are computed as in the undivided model: nothing may change.
TEST_F(GpuIndexProgram, RunsObeyIt) {
  const std::vector<std::string> divided = {"--gpu-index", index_, "--vram-budget", "1", "--isa", "reference"};
  const auto with = [&](std::vector<std::string> args) {
    args.insert(args.end(), divided.begin(), divided.end());
    const Outcome o = hearth(args);
    EXPECT_EQ(o.status, 0) << o.err;
    return json::parse(o.out);
  };
  for (const char* sparsity : {"exact", "predict"}) {
    const json top =
        with({"logits", "-m", model_, "--ids", "257,104,3,77", "--all", "--json", "-q", "--sparsity", sparsity})["top"];
    const std::vector<double> whole = logits({"--sparsity", sparsity});
    for (const json& t : top) EXPECT_NEAR(t["logit"].get<double>(), whole[t["id"].get<size_t>()], 2e-3) << sparsity;
  }
  const json row = with({"bench", "--no-measure", "-m", model_, "-p", "0", "-n", "16", "-r", "1", "--no-bandwidth",
                         "-o", "json", "-q"})[0];
  EXPECT_NEAR(row["hit_share"].get<double>(), 1.0 / 3, 0.15) << "random weights: a third of the neurons, of the hits";
}

TEST_F(GpuIndexProgram, WhatIsWrongIsOneLine) {
  EXPECT_TRUE(fails_with(plan({"--vram-budget", "0", "--gpu-index", index_}), "the budget is 0"));
  EXPECT_TRUE(fails_with(plan({"--vram-budget", "2", "--gpu-index", (dir_ / "none").string()}), "none"));
  EXPECT_TRUE(fails_with(plan({"--vram-budget", "2", "--gpu-index", model_}), "generated.gpuidx"));
  const std::string other = (dir_ / "other.gpuidx").string();
  write_index(other, 99);
  EXPECT_TRUE(fails_with(plan({"--vram-budget", "2", "--gpu-index", other}), "made for another model"));
  EXPECT_TRUE(fails_with(run({"run", "-m", model_, "-p", "the", "--gpu-index", index_}), "--gpu-index"));
}

// The one that PowerInfer itself made for a 7B model: every neuron hot.
TEST_F(GpuIndexProgram, ARealOne) {
  HEARTH_NEEDS_SHARED("profiles/llama-7b-relu.powerinfer.gguf.generated.gpuidx");
  const std::string real = (shared_dir() / "profiles/llama-7b-relu.powerinfer.gguf.generated.gpuidx").string();
  EXPECT_TRUE(fails_with(plan({"--vram-budget", "2", "--gpu-index", real}), "made for another model"));
}

}  // namespace
}  // namespace hearth::test
