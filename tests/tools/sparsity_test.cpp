// --sparsity auto of models with predictors: what is compared, what is chosen, and that it is measured once.
#include <nlohmann/json.hpp>

#include "program.h"
#include "support/tiny_model.h"
#include "tools/choose_sparsity.h"

namespace hearth::test {
namespace {

using engine::Sparsity;
using nlohmann::json;
using tools::Way;

TEST(FastestWay, AnApproximateOneMustBeFasterThanEveryExactOne) {
  const auto chosen = [](double off, double exact, double predict) {
    const std::vector<Way> ways = {
        {Sparsity::off, false, off}, {Sparsity::exact, false, exact}, {Sparsity::predict, true, predict}};
    return tools::fastest(ways).sparsity;
  };
  EXPECT_EQ(chosen(400, 648, 547), Sparsity::exact);
  EXPECT_EQ(chosen(400, 547, 648), Sparsity::predict);
  EXPECT_EQ(chosen(700, 547, 648), Sparsity::off);
  EXPECT_EQ(chosen(100, 500, 500), Sparsity::exact);
  EXPECT_EQ(chosen(100, 500, 500 * tools::kApproximateGain - 1), Sparsity::exact);  // within the measurement's error
  EXPECT_EQ(chosen(100, 500, 500 * tools::kApproximateGain + 1), Sparsity::predict);
  EXPECT_EQ(chosen(0, 0, 10), Sparsity::predict);  // the others cannot be run
  EXPECT_EQ(chosen(0, 1, 0), Sparsity::exact);
}

TEST(FastestWay, ThresholdsAreAnApproximationToo) {
  const std::vector<Way> ways = {
      {Sparsity::off, false, 500}, {Sparsity::exact, true, 505}, {Sparsity::predict, true, 499}};
  EXPECT_EQ(tools::fastest(ways).sparsity, Sparsity::off);
}

TEST(FastestWay, AreDescribedFastestFirst) {
  const std::vector<Way> ways = {
      {Sparsity::off, false, 9.96}, {Sparsity::exact, false, 0}, {Sparsity::predict, true, 547.4}};
  EXPECT_EQ(tools::describe(ways), "predict 547, off 10.0 tokens/s");
  EXPECT_EQ(tools::to_json(ways).dump(), R"({"off":9.96,"exact":0.0,"predict":547.4})");
  EXPECT_TRUE(tools::to_json({}).is_null());
}

TEST(WaysToRun, OnlyWherePredictorsWouldApproximateUnasked) {
  const TempDir dir;
  const auto ways = [&](const TinyModelOptions& o, Sparsity asked, bool thresholded = false) {
    const std::string file = (dir / "m.gguf").string();
    write_tiny_model(file, o);
    return tools::ways_to_run(model::Model::load(file), asked, thresholded);
  };
  const TinyModelOptions relu{.transposed_down = true, .predictor_rank = 32},
      silu{.activation = "silu", .transposed_down = true, .predictor_rank = 32};
  const Way off{Sparsity::off, false}, exact{Sparsity::exact, false}, predict{Sparsity::predict, true};
  EXPECT_EQ(ways(relu, Sparsity::auto_), (std::vector{off, exact, predict}));
  EXPECT_EQ(ways(relu, Sparsity::auto_, true), (std::vector{off, {Sparsity::exact, true}, predict}));
  EXPECT_EQ(ways(silu, Sparsity::auto_), (std::vector{off, predict}));  // no gate is exactly zero
  EXPECT_TRUE(ways(relu, Sparsity::predict).empty());
  EXPECT_TRUE(ways(relu, Sparsity::off).empty());
  EXPECT_TRUE(ways({.transposed_down = true}, Sparsity::auto_).empty());
  EXPECT_TRUE(ways({.type = DType::q8_0, .predictor_rank = 32}, Sparsity::auto_).empty());  // dense whatever is wished
}

// The demo with a fitted predictor, and a cache of its own.
class AutoProgram : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    files_ = new TempDir;
    setenv("XDG_CACHE_HOME", (*files_ / "cache").c_str(), 1);
    std::filesystem::copy(std::filesystem::path(HEARTH_SOURCE_DIR) / "models/hearth-demo.gguf", model());
    std::ofstream text(*files_ / "t.txt");
    for (const char* who : {"dog", "cat", "girl", "boy", "bird", "king"})
      text << "Once upon a time there was a little " << who << " who liked to play in the big garden.<|endoftext|>";
    text.close();
    const Outcome fit =
        hearth({"predictor", "fit", "-m", model(), "-f", (*files_ / "t.txt").string(), "--method", "gate-bits"});
    ASSERT_EQ(fit.status, 0) << fit.err;
  }
  static void TearDownTestSuite() {
    unsetenv("XDG_CACHE_HOME");
    delete files_;
  }
  void SetUp() override { std::filesystem::remove(cache()); }

  static std::string model() { return (*files_ / "demo.gguf").string(); }
  static std::filesystem::path cache() { return *files_ / "cache/hearth/machine.json"; }
  static Outcome run(std::vector<std::string> more) {
    std::vector<std::string> args = {"run", "-m", model(), "-p",     "Once", "-n",
                                     "3",   "-c", "64",    "--temp", "0",    "--json"};
    args.insert(args.end(), more.begin(), more.end());
    Outcome o = hearth(args);
    EXPECT_EQ(o.status, 0) << o.err;
    return o;
  }
  static bool measures(const Outcome& o) { return o.err.find("measuring what predictors") != std::string::npos; }
  // The speeds that are kept, of the one way of starting this model that there was.
  static json& speeds(json& kept) {
    for (json& machine : kept) {
      if (machine.contains("speeds")) return machine["speeds"].front();
    }
    ADD_FAILURE() << kept.dump();
    return kept;
  }
  static json read() { return json::parse(slurp(cache())); }
  static void set(double off, double exact, double predict) {
    json kept = read();
    speeds(kept) = {{"off", off}, {"exact", exact}, {"predict", predict}};
    std::ofstream(cache()) << kept;
  }
  // What was measured decides, then what is put in its place.
  static void obeys(const std::vector<std::string>& flags) {
    const Outcome first = run(flags);
    EXPECT_TRUE(measures(first)) << first.err;
    const json measured = json::parse(first.out);
    json kept = read();
    EXPECT_EQ(measured["sparsity_measured_ts"], speeds(kept));
    const double off = speeds(kept)["off"], exact = speeds(kept)["exact"], predict = speeds(kept)["predict"];
    const std::vector<Way> ways = {
        {Sparsity::off, false, off}, {Sparsity::exact, false, exact}, {Sparsity::predict, true, predict}};
    EXPECT_EQ(measured["sparsity"], engine::to_string(tools::fastest(ways).sparsity)) << first.err;
    EXPECT_NE(first.err.find("measured here: "), std::string::npos) << first.err;
    const auto then = [&](double with_off, double with_exact, double with_predict) {
      set(with_off, with_exact, with_predict);
      const Outcome o = run(flags);
      EXPECT_FALSE(measures(o)) << o.err;
      return json::parse(o.out)["sparsity"].get<std::string>();
    };
    EXPECT_EQ(then(100, 648, 547), "exact");
    EXPECT_EQ(then(100, 547, 648), "predict");
    EXPECT_EQ(then(900, 547, 648), "off");
  }

  static inline TempDir* files_ = nullptr;
};

TEST_F(AutoProgram, TakesWhatIsFastestOnTheCpu) {
  obeys({"--device", "cpu"});
}

// One thread is slow enough that the plan's costs let predictors pay on any machine.
TEST_F(AutoProgram, TakesWhatIsFastestOfADividedModel) {
  obeys({"--isa", "reference", "-t", "1", "--vram-budget", "0.2", "-b", "16"});
}

// A trial leaves nothing behind: neither in the density nor in the text.
TEST_F(AutoProgram, MeasuringChangesNoResult) {
  const json first = json::parse(run({"--device", "cpu"}).out);
  const json asked = json::parse(run({"--device", "cpu", "--sparsity", first["sparsity"]}).out);
  EXPECT_EQ(first["ids"], asked["ids"]);
  EXPECT_EQ(first["density"], asked["density"]);
}

TEST_F(AutoProgram, PredictsUnmeasuredWhereThatIsWished) {
  const Outcome o = run({"--device", "cpu", "--no-measure"});
  EXPECT_EQ(json::parse(o.out)["sparsity"], "predict");
  EXPECT_TRUE(json::parse(o.out)["sparsity_measured_ts"].is_null());
  EXPECT_FALSE(std::filesystem::exists(cache()));
}

TEST_F(AutoProgram, BenchTells) {
  const Outcome o = hearth(
      {"bench", "-m", model(), "--device", "cpu", "-p", "0", "-n", "2", "-r", "1", "--no-bandwidth", "-o", "json"});
  ASSERT_EQ(o.status, 0) << o.err;
  json kept = read();
  EXPECT_EQ(json::parse(o.out)[0]["sparsity_measured_ts"], speeds(kept));
}

}  // namespace
}  // namespace hearth::test
