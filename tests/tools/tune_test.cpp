// `hearth tune`, `hearth report`, and running with what they found.
#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <random>
#include <regex>

#include "program.h"
#include "support/random.h"
#include "support/tiny_model.h"

namespace hearth::test {
namespace {

using nlohmann::json;

class TuneProgram : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    files_ = new TempDir;
    for (const char* activation : {"relu", "silu"}) write_tiny_model(file(activation), {.activation = activation});
    std::ofstream fit(file("fit.txt")), validation(file("validation.txt"));
    std::mt19937 rng(1);
    for (int i = 0; i < 300; ++i) fit << static_cast<char>(random_int(rng, 'a', 'z'));
    for (int i = 0; i < 200; ++i) validation << static_cast<char>(random_int(rng, 'a', 'z'));
  }
  static void TearDownTestSuite() { delete files_; }
  static std::string file(const std::string& name) { return (*files_ / name).string(); }
  static Outcome run(std::vector<std::string> args) {
    args.insert(args.end(), {"--device", "cpu"});
    return hearth(args);
  }
  static json tune(const std::string& model, std::vector<std::string> more) {
    std::vector<std::string> args = {"tune",
                                     "-m",
                                     file(model),
                                     "-f",
                                     file("fit.txt"),
                                     "--validation",
                                     file("validation.txt"),
                                     "--tokens",
                                     "0",
                                     "--validation-tokens",
                                     "0",
                                     "--window",
                                     "32",
                                     "--no-measure",
                                     "--json",
                                     "--sidecar",
                                     file(model + ".sidecar")};
    args.insert(args.end(), more.begin(), more.end());
    const Outcome o = run(args);
    EXPECT_EQ(o.status, 0) << o.err;
    return json::parse(o.out);
  }
  // Perplexity of the validation text, as `hearth perplexity` finds it.
  static double perplexity(const std::string& model, const std::string& threshold) {
    const Outcome o =
        run({"perplexity", "-m", file(model), "-f", file("validation.txt"), "--window", "32", "--json",
             "--sparse-threshold", threshold, "--sparsity", "exact", "--sidecar", file(model + ".sidecar")});
    EXPECT_EQ(o.status, 0) << o.err;
    return json::parse(o.out)["perplexity"];
  }

  static std::string report(const std::string& model) {
    const Outcome o = hearth({"report", "-m", file(model), "--sidecar", file(model + ".sidecar"), "-o", file("r.html"),
                              "--vram-budget", "1", "--gpu-bw", "1000", "--cpu-bw", "70", "--pcie-bw", "25", "-q"});
    EXPECT_EQ(o.status, 0) << o.err;
    return slurp(file("r.html"));
  }
  // The table's rows are threshold, density, KL, perplexity ± its error, …
  static double perplexity_in(const std::string& page, const std::string& threshold) {
    const std::regex row("<tr><td>" + threshold + "</td><td>[^<]*</td><td>[^<]*</td><td>([0-9.]+) ");
    std::smatch match;
    if (!std::regex_search(page, match, row)) return NAN;
    return std::stod(match[1]);
  }

 private:
  static inline TempDir* files_ = nullptr;
};

TEST_F(TuneProgram, CurvesAgreeWithPerplexityMeasuredSeparately) {
  for (const char* model : {"relu", "silu"}) {
    const json j = tune(model, {"--max-kl", "0.01"});
    // f32 weights: only the rounding of the f16 cache differs, and neurons that it moves across a threshold.
    const auto expect_same = [](double got, const json& point) {
      EXPECT_NEAR(got, point["validation"]["perplexity"].get<double>(), 2e-3 * got);
    };
    const std::string page = report(model);
    for (const size_t i : {1, 4, 7}) {
      const json& point = j["global"][i];
      const std::string threshold = fmt::format("{:.3g}", point["threshold"].get<float>());
      const double measured = perplexity(model, threshold);
      expect_same(measured, point);
      EXPECT_NEAR(perplexity_in(page, threshold), measured, 2e-3 * measured) << "the report's own table";
    }
    EXPECT_LE(j["chosen"]["validation"]["kl"].get<double>(), 0.01);
    EXPECT_GT(j["chosen"]["thresholds"][0].get<double>() + j["chosen"]["thresholds"][1].get<double>(), 0);
    expect_same(perplexity(model, "sidecar"), j["chosen"]);
  }
}

// A file that another program quantised: its down projections are quantised again, by tune as by run.
TEST_F(TuneProgram, TransposesDownProjectionsWhereThatIsAsked) {
  write_tiny_model(file("foreign"), {.type = DType::q8_0});
  const std::vector<std::string> args = {"tune",
                                         "-m",
                                         file("foreign"),
                                         "-f",
                                         file("fit.txt"),
                                         "--validation",
                                         file("validation.txt"),
                                         "--window",
                                         "32",
                                         "--no-measure",
                                         "--density",
                                         "0.2"};
  std::vector<std::string> with = args, without = args;
  without.push_back("-q");
  EXPECT_TRUE(fails_with(run(without), "--transpose-down"));
  with.push_back("--transpose-down");
  const Outcome tuned = run(with);
  ASSERT_EQ(tuned.status, 0) << tuned.err;
  EXPECT_NE(tuned.out.find("hearth run -m " + file("foreign") + " --transpose-down "), std::string::npos) << tuned.out;
  const Outcome used = run({"run", "-m", file("foreign"), "-p", "the", "-n", "4", "--transpose-down", "--sparsity",
                            "exact", "--sparse-threshold", "sidecar"});
  EXPECT_EQ(used.status, 0) << used.err;
}

TEST_F(TuneProgram, RunUsesTheThresholdsOnlyWhenAskedAndSaysWhatTheyDo) {
  tune("relu", {"--density", "0.2"});
  const auto generate = [](std::vector<std::string> more) {
    std::vector<std::string> args = {
        "run",    "-m", file("relu"),   "--sidecar", file("relu.sidecar"), "-p", "the", "-n", "20",
        "--temp", "0",  "--ignore-eos", "--json",    "--compare-dense",    "100"};
    args.insert(args.end(), more.begin(), more.end());
    const Outcome o = run(args);
    EXPECT_EQ(o.status, 0) << o.err;
    return std::pair(json::parse(o.out), o.err);
  };
  const auto [exact, exact_err] = generate({});
  EXPECT_EQ(exact["against_dense"]["tokens"], 19);
  EXPECT_LT(exact["against_dense"]["kl"].get<double>(), 1e-5);
  EXPECT_EQ(exact_err.find("skipped"), std::string::npos);
  const auto [approximate, err] = generate({"--sparse-threshold", "sidecar"});
  EXPECT_GT(approximate["against_dense"]["kl"].get<double>(), 1e-4);
  EXPECT_LT(approximate["density"].get<double>(), exact["density"].get<double>());
  EXPECT_NE(err.find("skipped"), std::string::npos);
}

TEST_F(TuneProgram, WhatIsMissingIsSaid) {
  EXPECT_TRUE(fails_with(
      run({"run", "-m", file("silu"), "--sidecar", file("none"), "-p", "the", "--sparse-threshold", "sidecar", "-q"}),
      "none"));
  EXPECT_TRUE(fails_with(hearth({"report", "-m", file("silu"), "-o", file("r.html"), "-q"}), "hearth profile"));
  EXPECT_TRUE(fails_with(run({"tune", "-m", file("silu"), "-f", file("fit.txt"), "--max-ppl-increase", "much", "-q"}),
                         "--max-ppl-increase"));
  EXPECT_TRUE(fails_with(run({"run", "-m", file("relu"), "-p", "the", "--sparse-threshold", "lots", "-q"}),
                         "--sparse-threshold"));
}

// The bundled model on texts of its domain. The last one it neither tunes nor judges on.
TEST(TuneDemo, KeepsItsBoundOnATextItNeverSaw) {
  HEARTH_NEEDS_SHARED("text/stories-heldout.txt");
  const TempDir dir;
  const auto part = [&](const char* name, const char* of, size_t begin, size_t n) {
    std::ofstream(dir / name) << slurp(shared_dir() / "text" / of).substr(begin, n);
    return (dir / name).string();
  };
  const std::string fit = part("fit.txt", "stories-calibration.txt", 0, 400'000),
                    validation = part("validation.txt", "stories-heldout.txt", 0, 4'000),
                    unseen = part("unseen.txt", "stories-heldout.txt", 500'000, 10'000);
  const std::string model = (source_dir() / "models/hearth-demo.gguf").string(), sidecar = (dir / "sidecar").string();
  const auto run = [&](std::vector<std::string> args) {
    args.insert(args.end(), {"-m", model, "--device", "cpu", "--sidecar", sidecar, "--window", "256", "--json", "-q"});
    const Outcome o = hearth(args);
    EXPECT_EQ(o.status, 0) << o.err;
    return json::parse(o.out);
  };
  const json tuned = run({"tune", "-f", fit, "--validation", validation, "--max-ppl-increase", "1%", "--tokens", "1024",
                          "--validation-tokens", "0", "--no-measure"});
  EXPECT_LE(tuned["chosen"]["validation"]["perplexity_increase"].get<double>(), 0.01);
  EXPECT_LT(tuned["chosen"]["validation"]["density"].get<double>(),
            0.97 * tuned["global"][0]["validation"]["density"].get<double>())
      << "a percent was allowed, and nothing was left out";

  const auto perplexity = [&](const std::string& text, const std::string& threshold) {
    return run({"perplexity", "-f", text, "--sparsity", threshold == "0" ? "off" : "exact", "--sparse-threshold",
                threshold})["perplexity"]
        .get<double>();
  };
  // The curve, by another route: a few tokens at a time, sparse kernels. Rounding moves neurons across a threshold, so
  // that correct arithmetics (the oracle, each instruction set) are up to 0.7 % from each other.
  for (const size_t i : {0, 3, 5}) {
    const json& point = tuned["global"][i];
    const double expected = point["validation"]["perplexity"];
    EXPECT_NEAR(perplexity(validation, fmt::format("{:.3g}", point["threshold"].get<float>())), expected,
                1e-2 * expected);
  }
  EXPECT_LE(perplexity(unseen, "sidecar"), 1.01 * perplexity(unseen, "0"));
}

}  // namespace
}  // namespace hearth::test
