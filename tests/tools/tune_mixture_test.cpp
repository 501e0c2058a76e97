// Thresholds inside experts, through the program: tuned, run with, planned with, and refused.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "program.h"

namespace hearth::test {
namespace {

using nlohmann::json;

class TuneMixtureProgram : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    files_ = new TempDir;
    for (const char* down : {"transposed", "standard"}) {
      std::istringstream flags(
          "--arch qwen3moe --layers 2 --n-embd 64 --n-head 4 --n-head-kv 2 --n-ff-exp 64 --experts 8 --experts-used 2 "
          "--n-vocab 600 --n-ctx 64 --type f32 --text-tokens 700");
      std::vector<std::string> args = {"synth", "-o", file(down), "--text", file("words"), "--down", down};
      args.insert(args.end(), std::istream_iterator<std::string>(flags), {});
      const Outcome o = hearth(args);
      ASSERT_EQ(o.status, 0) << o.err;
    }
    const std::string words = slurp(file("words"));
    std::ofstream(file("fit.txt")) << words.substr(0, words.size() / 2);
    std::ofstream(file("validation.txt")) << words.substr(words.size() / 2);
    tuned_ = tune("transposed", {"--density", "0.4"});
  }
  static void TearDownTestSuite() { delete files_; }
  static std::string file(const std::string& name) { return (*files_ / name).string(); }
  static std::vector<std::string> tune_args(const std::string& model, const std::vector<std::string>& more,
                                            const std::string& sidecar = "") {
    std::vector<std::string> args = {"tune",
                                     "-m",
                                     file(model),
                                     "-f",
                                     file("fit.txt"),
                                     "--validation",
                                     file("validation.txt"),
                                     "--window",
                                     "32",
                                     "--no-measure",
                                     "--device",
                                     "cpu",
                                     "--sidecar",
                                     file(sidecar.empty() ? model + ".sidecar" : sidecar)};
    args.insert(args.end(), more.begin(), more.end());
    return args;
  }
  static json tune(const std::string& model, std::vector<std::string> more, const std::string& sidecar = "") {
    more.push_back("--json");
    const Outcome o = hearth(tune_args(model, more, sidecar));
    EXPECT_EQ(o.status, 0) << o.err;
    return json::parse(o.out);
  }
  static Outcome run(const std::string& model, std::vector<std::string> more) {
    std::vector<std::string> args = {"run", "-m",          file(model), "--sidecar", file(model + ".sidecar"),
                                     "-p",  "ac",          "-n",        "12",        "--temp",
                                     "0",   "--ignore-eos"};
    args.insert(args.end(), more.begin(), more.end());
    return hearth(args);
  }
  static inline json tuned_;

 private:
  static inline TempDir* files_ = nullptr;
};

TEST_F(TuneMixtureProgram, CurvesAgreeWithPerplexityMeasuredSeparately) {
  const json j = tune("transposed", {"--max-kl", "0.05"}, "curves.sidecar");
  const auto expect_same = [](const json& point, const std::string& threshold) {
    const Outcome o =
        hearth({"perplexity", "-m", file("transposed"), "-f", file("validation.txt"), "--window", "32", "--json",
                "--device", "cpu", "--sparse-threshold", threshold, "--sidecar", file("curves.sidecar")});
    ASSERT_EQ(o.status, 0) << o.err;
    const double got = json::parse(o.out)["perplexity"];
    // f32 weights: the rounding of the f16 cache differs, and neurons that it moves across a threshold.
    EXPECT_NEAR(got, point["validation"]["perplexity"].get<double>(), 2e-3 * got) << threshold;
  };
  for (const size_t i : {0, 4, 8})
    expect_same(j["global"][i], fmt::format("{:.3g}", j["global"][i]["threshold"].get<float>()));
  EXPECT_LE(j["chosen"]["validation"]["kl"].get<double>(), 0.05);
  EXPECT_LT(j["chosen"]["validation"]["density"].get<double>(), 0.97);
  expect_same(j["chosen"], "sidecar");

  const Outcome page =
      hearth({"report", "-m", file("transposed"), "--sidecar", file("curves.sidecar"), "-o", file("r.html"),
              "--vram-budget", "1", "--gpu-bw", "1000", "--cpu-bw", "70", "--pcie-bw", "25", "-q"});
  EXPECT_EQ(page.status, 0) << page.err;
  EXPECT_NE(slurp(file("r.html")).find("with the tuned thresholds"), std::string::npos);
}

TEST_F(TuneMixtureProgram, RunUsesTheThresholdsOnlyWhenAskedAndSaysWhatTheyDo) {
  EXPECT_NEAR(tuned_["chosen"]["validation"]["density"].get<double>(), 0.4, 0.05);
  const Outcome all = run("transposed", {"--device", "cpu", "--json", "--compare-dense", "100"});
  ASSERT_EQ(all.status, 0) << all.err;
  EXPECT_EQ(json::parse(all.out)["sparsity"], "off");
  EXPECT_NE(all.err.find("every neuron was computed"), std::string::npos) << all.err;

  const std::vector<std::string> thresholds = {"--sparse-threshold", "sidecar"};
  std::vector<std::string> args = {"--device", "cpu", "--json", "--compare-dense", "100"};
  args.insert(args.end(), thresholds.begin(), thresholds.end());
  const Outcome fewer = run("transposed", args);
  ASSERT_EQ(fewer.status, 0) << fewer.err;
  const json j = json::parse(fewer.out);
  EXPECT_EQ(j["sparsity"], "exact");
  EXPECT_NEAR(j["density"].get<double>(), 0.4, 0.1);
  EXPECT_GT(j["against_dense"]["kl"].get<double>(), 1e-5);
  EXPECT_NE(fewer.err.find("skipped = "), std::string::npos) << fewer.err;

  // The same text wherever experts live. A stand-in for a GPU computes whole experts as a GPU does.
  const Outcome divided =
      run("transposed", {"--isa", "reference", "--vram-budget", "0.25", "--json", "--sparse-threshold", "sidecar"});
  ASSERT_EQ(divided.status, 0) << divided.err;
  EXPECT_EQ(json::parse(divided.out)["text"], j["text"]);
}

TEST_F(TuneMixtureProgram, PlansCountWhatIsLeftOut) {
  const auto plan = [&](std::vector<std::string> more) {
    std::vector<std::string> args = {"plan",
                                     "-m",
                                     file("transposed"),
                                     "--sidecar",
                                     file("transposed.sidecar"),
                                     "-q",
                                     "--vram-budget",
                                     "0",
                                     "--gpu-bw",
                                     "1000",
                                     "--cpu-bw",
                                     "70",
                                     "--pcie-bw",
                                     "25"};
    args.insert(args.end(), more.begin(), more.end());
    const Outcome o = hearth(args);
    EXPECT_EQ(o.status, 0) << o.err;
    return o.out;
  };
  const json all = json::parse(plan({"--json"})),
             fewer = json::parse(plan({"--json", "--sparse-threshold", "sidecar"}));
  EXPECT_GT(fewer["tokens_per_second"].get<double>(), all["tokens_per_second"].get<double>());
  EXPECT_NE(plan({"--sparse-threshold", "sidecar"}).find("inside experts: "), std::string::npos);
  EXPECT_EQ(plan({}).find("inside experts"), std::string::npos);
  EXPECT_NE(plan({"--sparse-threshold", "sidecar", "--schedule"}).find("active neurons"), std::string::npos);
}

TEST_F(TuneMixtureProgram, ExpertsMustBeTransposed) {
  const std::string said = "blk.0.ffn_down_exps is stored untransposed; --transpose-down";
  EXPECT_TRUE(fails_with(
      hearth({"run", "-m", file("standard"), "-p", "ac", "--device", "cpu", "--sparse-threshold", "0.1", "-q"}), said));
  EXPECT_TRUE(fails_with(hearth(tune_args("standard", {"-q"})), said));
  EXPECT_TRUE(fails_with(hearth({"plan", "-m", file("standard"), "--sparse-threshold", "0.1", "--vram-budget", "1",
                                 "--gpu-bw", "1000", "--cpu-bw", "70", "--pcie-bw", "25", "-q"}),
                         said));
  const Outcome tuned = hearth(tune_args("standard", {"--density", "0.4", "--transpose-down"}));
  ASSERT_EQ(tuned.status, 0) << tuned.err;
  EXPECT_NE(tuned.out.find(" --transpose-down --sidecar "), std::string::npos) << tuned.out;
  EXPECT_EQ(tuned.out.find("--sparsity"), std::string::npos) << "mixtures have no predictors";
  const Outcome used = run("standard", {"--device", "cpu", "--sparse-threshold", "sidecar", "--transpose-down"});
  EXPECT_EQ(used.status, 0) << used.err;
}

}  // namespace
}  // namespace hearth::test
