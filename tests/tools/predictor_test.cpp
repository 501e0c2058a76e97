// `hearth predictor`: fit writes a sidecar that eval finds, compare prints a table; wrong flags are one line.
#include <nlohmann/json.hpp>

#include "program.h"
#include "support/tiny_model.h"

namespace hearth::test {
namespace {

class PredictorProgram : public testing::Test {
 protected:
  void SetUp() override {
    write_tiny_model(model_, {.transposed_down = true});
    std::ofstream text(text_);
    for (int i = 0; i < 24; ++i) text << "the " << i << " and the other " << i * 7919 << " things<|endoftext|>";
  }
  TempDir dir_;
  std::string model_ = (dir_ / "m.gguf").string(), text_ = (dir_ / "t.txt").string();
};

TEST_F(PredictorProgram, FitThenEval) {
  const Outcome none = hearth({"predictor", "eval", "-m", model_, "-f", text_, "-c", "32"});
  EXPECT_EQ(none.status, 1);
  EXPECT_NE(none.err.find("hearth predictor fit"), std::string::npos) << none.err;

  const Outcome fit = hearth({"predictor", "fit", "-m", model_, "-f", text_, "--method", "svd", "--rank", "32",
                              "--type", "q8_0", "--recall", "0.95"});
  ASSERT_EQ(fit.status, 0) << fit.err;
  EXPECT_EQ(fit.out, "");
  EXPECT_TRUE(std::filesystem::exists(dir_ / "m.sparse.gguf"));
  const Outcome eval = hearth({"predictor", "eval", "-m", model_, "-f", text_, "-c", "32", "--json"});
  ASSERT_EQ(eval.status, 0) << eval.err;
  const auto j = nlohmann::json::parse(eval.out);
  ASSERT_EQ(j["layers"].size(), 2u);
  EXPECT_EQ(j["layers"][0]["method"], "svd");
  EXPECT_EQ(j["layers"][0]["rank"], 32);
  EXPECT_EQ(j["layers"][0]["type"], "q8_0");
  EXPECT_GT(j["all"]["loss_recall"].get<double>(), 0.85);
  EXPECT_LT(j["all"]["bytes"].get<double>(), 0.5 * j["all"]["ffn_bytes"].get<double>());
  const Outcome table = hearth({"predictor", "eval", "-m", model_, "-f", text_, "-c", "32"});
  EXPECT_NE(table.out.find("svd 32 q8_0"), std::string::npos) << table.out;
}

// One layer after the other, in runs of their own, is all of them; what is not asked for stays.
TEST_F(PredictorProgram, FitsLayersInTurn) {
  const auto fit = [&](std::vector<std::string> more) {
    std::vector<std::string> args = {"predictor", "fit",      "-m",  model_,   "-f",
                                     text_,       "--method", "svd", "--type", "q8_0"};
    args.insert(args.end(), more.begin(), more.end());
    const Outcome o = hearth(args);
    EXPECT_EQ(o.status, 0) << o.err;
    EXPECT_FALSE(std::filesystem::exists(dir_ / "m.sparse.gguf.fit"));
  };
  const auto layers = [&] {
    const Outcome o = hearth({"predictor", "eval", "-m", model_, "-f", text_, "-c", "32", "--json"});
    EXPECT_EQ(o.status, 0) << o.err;
    return nlohmann::json::parse(o.out)["layers"];
  };
  fit({"--rank", "32", "--layers", "1"});
  EXPECT_EQ(layers()[0]["bytes"], 0);
  EXPECT_EQ(layers()[1]["rank"], 32);
  fit({"--rank", "64", "--layers", "0-0", "--sample-memory", "0.001"});
  EXPECT_EQ(layers()[0]["rank"], 64);
  EXPECT_EQ(layers()[1]["rank"], 32);
}

TEST_F(PredictorProgram, Compare) {
  const Outcome c = hearth({"predictor", "compare", "-m", model_, "-f", text_, "--test", text_, "-o",
                            dir_.path().string(), "--candidate", "svd:32:f16", "gate-bits:q4_0"});
  ASSERT_EQ(c.status, 0) << c.err;
  for (const char* name : {"| svd 32 f16 |", "| gate-bits q4_0 |"}) {
    EXPECT_NE(c.out.find(name), std::string::npos) << c.out;
  }
  EXPECT_TRUE(std::filesystem::exists(dir_ / "predictors-t.svg"));
  EXPECT_TRUE(std::filesystem::exists(dir_ / "predictors-t.md"));
}

TEST_F(PredictorProgram, WrongFlagsAreOneLine) {
  const auto message = [&](std::vector<std::string> more) {
    std::vector<std::string> args = {"predictor", "fit", "-m", model_, "-f", text_};
    args.insert(args.end(), more.begin(), more.end());
    const Outcome o = hearth(args);
    EXPECT_EQ(o.status, 1) << o.err;
    return o.err;
  };
  EXPECT_NE(message({"--method", "svd", "--rank", "many"}).find("--rank is 'many'"), std::string::npos);
  EXPECT_NE(message({"--method", "svd", "--rank", "32", "--type", "q9_9"}).find("unknown type 'q9_9'"),
            std::string::npos);
  EXPECT_NE(message({"--method", "svd", "--rank", "4096"}).find("up to 64"), std::string::npos);
  for (const char* layers : {"2", "0-2", "1-0", "a", "0-", "-1"}) {
    EXPECT_NE(message({"--method", "gate-bits", "--layers", layers}).find("--layers is '"), std::string::npos)
        << layers;
  }
  EXPECT_NE(message({"--method", "gate-bits", "--sample-memory", "0.000001"}).find("give fewer --tokens"),
            std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(dir_ / "m.sparse.gguf"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "m.sparse.gguf.fit"));
}

}  // namespace
}  // namespace hearth::test
