// `hearth logits`, `perplexity`, `bench` and `doctor`.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "cuda/cuda.h"
#include "offline/tune/metrics.h"
#include "program.h"
#include "support/tiny_model.h"
#include "tools/bench.h"
#include "tools/doctor_gpus.h"

namespace hearth::test {
namespace {

using nlohmann::json;

class Measure : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    files_ = new TempDir;
    write_tiny_model(model(), {});
    write_tiny_model(no_vocabulary(), {.vocabulary = false});
  }
  static void TearDownTestSuite() { delete files_; }
  static std::string file(const std::string& name) { return (*files_ / name).string(); }
  static std::string model() { return file("tiny.gguf"); }
  static std::string no_vocabulary() { return file("no-vocabulary.gguf"); }
  static std::string output(std::vector<std::string> args, int status = 0) {
    args.insert(args.end(), {"--device", "cpu"});
    const Outcome o = hearth(args);
    EXPECT_EQ(o.status, status) << o.err;
    return o.out;
  }

 private:
  static inline TempDir* files_ = nullptr;
};

TEST_F(Measure, LogitsOfTheLastPosition) {
  const json j = json::parse(output({"logits", "-m", model(), "--ids", "257,104,3", "--top", "5", "--json"}));
  EXPECT_EQ(j["ids"], json::array({257, 104, 3}));
  ASSERT_EQ(j["top"].size(), 5u);
  for (size_t i = 1; i < 5; ++i) EXPECT_GE(j["top"][i - 1]["logit"], j["top"][i]["logit"]);
  EXPECT_TRUE(j["top"][0]["text"].is_string());
  const json all = json::parse(output({"logits", "-m", model(), "--ids", "257,104,3", "--all", "--json"}));
  ASSERT_EQ(all["top"].size(), static_cast<size_t>(kTinyVocab));
  for (size_t i = 0; i < 5; ++i) EXPECT_EQ(all["top"][i], j["top"][i]);
}

TEST_F(Measure, LogitsOfEveryPositionAgreeWithPrefixes) {
  const json j =
      json::parse(output({"logits", "-m", model(), "--ids", "257,104,3", "--top", "3", "--json", "--all-positions"}));
  ASSERT_EQ(j["positions"].size(), 3u);
  EXPECT_EQ(j["positions"][1]["position"], 1);
  EXPECT_EQ(j["positions"][1]["id"], 104);
  const json prefix = json::parse(output({"logits", "-m", model(), "--ids", "257,104", "--top", "3", "--json"}));
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(j["positions"][1]["top"][i]["id"], prefix["top"][i]["id"]);
    // The same sums in another order: 64 terms of size one, so some 64 ulp.
    EXPECT_NEAR(j["positions"][1]["top"][i]["logit"].get<double>(), prefix["top"][i]["logit"].get<double>(), 1e-4);
  }
}

TEST_F(Measure, LogitsFromTextAndWithoutVocabulary) {
  const json text = json::parse(output({"logits", "-m", model(), "-p", "the", "--json", "--top", "1"}));
  EXPECT_EQ(text["ids"], json::array({kTinyThe}));
  const json ids = json::parse(output({"logits", "-m", no_vocabulary(), "--ids", "257", "--json", "--top", "1"}));
  EXPECT_EQ(ids["top"][0]["id"], text["top"][0]["id"]);
  EXPECT_EQ(ids["top"][0]["text"], "");
}

TEST_F(Measure, PerplexityEqualsTheSumOverLogits) {
  const std::vector<int32_t> ids = {257, 104, 3, 77, 257, 12, 200};
  std::ofstream u16(file("ids.u16"), std::ios::binary), u32(file("ids.u32"), std::ios::binary);
  std::string list;
  for (const int32_t id : ids) {
    const auto narrow = static_cast<uint16_t>(id);
    u16.write(reinterpret_cast<const char*>(&narrow), 2), u32.write(reinterpret_cast<const char*>(&id), 4);
    if (&id != &ids.back()) list += (list.empty() ? "" : ",") + std::to_string(id);
  }
  u16.close(), u32.close();
  const json logits =
      json::parse(output({"logits", "-m", model(), "--ids", list, "--all", "--all-positions", "--json"}));
  double nll = 0;
  for (size_t i = 0; i + 1 < ids.size(); ++i) {
    double sum = 0, own = 0;
    for (const json& t : logits["positions"][i]["top"]) {
      sum += std::exp(t["logit"].get<double>());
      if (t["id"] == ids[i + 1]) own = t["logit"].get<double>();
    }
    nll += std::log(sum) - own;
  }
  const json result = json::parse(output({"perplexity", "-m", model(), "--ids-file", file("ids.u16"), "--json"}));
  EXPECT_EQ(result["tokens"], 6);
  EXPECT_NEAR(result["nll"].get<double>(), nll / 6, 1e-5);
  EXPECT_NEAR(result["perplexity"].get<double>(), std::exp(nll / 6), 1e-3);
  EXPECT_GT(result["nll_standard_error"].get<double>(), 0);
  EXPECT_EQ(json::parse(output({"perplexity", "-m", model(), "--ids-file", file("ids.u32"), "--json"})), result);
}

TEST(Perplexity, WindowsScoreEveryIdOnce) {
  for (const bool bos : {false, true}) {
    for (const int64_t n : {2, 7, 16, 17, 33}) {
      for (const int64_t window : {2, 5, 16}) {
        for (const int64_t stride : {int64_t{1}, window / 2, window}) {
          SCOPED_TRACE(fmt::format("bos {} n {} window {} stride {}", bos, n, window, stride));
          int64_t next = bos ? 0 : 1;
          for (const offline::Window& w : offline::make_windows(n, window, stride, bos)) {
            EXPECT_EQ(w.first_target, next);
            EXPECT_GE(w.n_targets, 1);
            EXPECT_LE(w.n_inputs + (bos ? 1 : 0), window);
            EXPECT_GE(w.n_inputs + (bos ? 1 : 0), w.n_targets);
            EXPECT_EQ(w.begin + w.n_inputs + 1, w.first_target + w.n_targets)
                << "the last input predicts the last target";
            next = w.first_target + w.n_targets;
          }
          EXPECT_EQ(next, n);
        }
      }
    }
  }
  EXPECT_EQ(offline::make_windows(65537, 512, 512, false).size(), 128u);
  EXPECT_THROW(offline::make_windows(1, 8, 8, false), Error);
  EXPECT_THROW(offline::make_windows(0, 8, 8, true), Error);
  EXPECT_THROW(offline::make_windows(9, 8, 9, false), Error);
  EXPECT_THROW(offline::make_windows(9, 8, 0, false), Error);
  EXPECT_THROW(offline::make_windows(9, 1, 1, true), Error);
}

TEST(Perplexity, MeanAndError) {
  offline::NllMean mean;
  for (const double x : {1.0, 2.0, 4.0}) mean.add(x);
  EXPECT_DOUBLE_EQ(mean.mean(), 7.0 / 3);
  EXPECT_NEAR(mean.standard_error(), std::sqrt(7.0 / 3 / 3), 1e-12);  // variance 7/3 of the three
  EXPECT_NEAR(mean.perplexity(), std::exp(7.0 / 3), 1e-12);
  const std::vector<float> logits = {1000.0f, 999.0f, -1000.0f};  // no overflow
  EXPECT_NEAR(offline::negative_log_likelihood(logits, 1), 1 + std::log1p(std::exp(-1.0)), 1e-6);
}

// All 65,537 ids in windows of 512 gave transformers' float32 a perplexity of 22.980.
TEST(Perplexity, OfTheDemoModelIsTheRecordedOne) {
  HEARTH_NEEDS_SHARED("models/demo-hf/val_ids.u16");
  const auto demo = shared_dir() / "models" / "demo-hf";
  TempDir dir;
  const std::string gguf = (dir / "demo.gguf").string();
  ASSERT_EQ(hearth({"convert", demo.string(), "-o", gguf, "--type", "f16"}).status, 0);
  const Outcome o = hearth({"perplexity", "-m", gguf, "--ids-file", (demo / "val_ids.u16").string(), "--json"});
  ASSERT_EQ(o.status, 0) << o.err;
  const json j = json::parse(o.out);
  EXPECT_EQ(j["tokens"], 65536);
  EXPECT_NEAR(j["perplexity"].get<double>(), 22.980, 0.02);
}

// Commas that separate cells: those outside quotes.
int64_t csv_commas(const std::string& line) {
  bool quoted = false;
  return std::count_if(line.begin(), line.end(), [&](char c) {
    quoted ^= c == '"';
    return c == ',' && !quoted;
  });
}

TEST_F(Measure, BenchTables) {
  const std::vector<std::string> flags = {"bench", "-m", no_vocabulary(), "-p", "4,8", "-n",
                                          "2",     "-d", "0,16",          "-r", "2"};
  std::vector<std::string> as_json = flags, as_csv = flags;
  as_json.insert(as_json.end(), {"-o", "json", "--no-bandwidth"});
  as_csv.insert(as_csv.end(), {"-o", "csv", "--no-bandwidth"});
  const json rows = json::parse(output(as_json));
  ASSERT_EQ(rows.size(), 6u);
  EXPECT_EQ(rows[0]["n_prompt"], 4);
  EXPECT_EQ(rows[5]["n_gen"], 2);
  EXPECT_EQ(rows[5]["n_depth"], 16);
  for (const json& row : rows) {
    EXPECT_GT(row["avg_ts"].get<double>(), 0);
    EXPECT_EQ(row["samples_ns"].size(), 2u);
  }
  EXPECT_GT(rows[2]["bytes_per_second"].get<double>(), 0);
  EXPECT_GT(rows[2]["density"].get<double>(), 0);
  EXPECT_LT(rows[2]["density"].get<double>(), 1);
  EXPECT_GT(rows[0]["flops_per_second"].get<double>(), 0);

  const std::string csv = output(as_csv);
  std::istringstream lines(csv);
  std::string header, line;
  std::getline(lines, header);
  int n_lines = 0;
  for (; std::getline(lines, line); ++n_lines) {
    EXPECT_EQ(csv_commas(line), csv_commas(header)) << line;
  }
  EXPECT_EQ(n_lines, 6);

  const std::string table = output({"bench", "-m", model(), "-p", "4", "-n", "2", "-r", "1"});
  for (const char* text : {"| model", "t/s |", "pp4 |", "tg2 |", "| CPU", "GB/s |", "% of bw |"}) {
    EXPECT_NE(table.find(text), std::string::npos) << text << " is missing in\n" << table;
  }
}

TEST_F(Measure, BenchProfile) {
  const std::string table =
      output({"bench", "-m", model(), "-p", "12", "-n", "2", "-r", "1", "--profile", "--no-bandwidth"});
  for (const char* text : {"ffn_dense 96x64 f32", "ffn_sparse 96x64 f32", "matmul 128x64 f32", "attention", "sum"}) {
    EXPECT_NE(table.find(text), std::string::npos) << text << " is missing in\n" << table;
  }
  EXPECT_EQ(table.find("cold"), std::string::npos) << "nothing is divided";
}

TEST(Bench, MeanAndFlops) {
  const std::vector<double> values = {1, 2, 4};
  EXPECT_DOUBLE_EQ(tools::mean_sd(values).mean, 7.0 / 3);
  EXPECT_NEAR(tools::mean_sd(values).sd, std::sqrt(7.0 / 3), 1e-12);
  EXPECT_EQ(tools::mean_sd(std::span(values).first(1)).sd, 0);
  TempDir dir;
  const model::Model m = model::Model::load(write_tiny_model(dir / "m.gguf"));
  // A layer: q and o 64x64, k and v 32x64, gate, up and down 96x64. Attention: 4 · heads·dim · positions seen (6 + 7).
  const double layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64;
  EXPECT_DOUBLE_EQ(tools::prompt_flops(m, 2, 5), 2 * (2 * layer) * 2 + 2 * 4 * 64 * (6 + 7) + 2 * kTinyVocab * 64);
}

TEST(Doctor, TellsWhatThereIs) {
  const Outcome text = hearth({"doctor", "-t", "1"});
  EXPECT_EQ(text.status, 0) << text.err;
  for (const char* word : {"CPU", "kernels", "physical cores", "memory reads", "batches", "huge pages", "GPU"}) {
    EXPECT_NE(text.out.find(word), std::string::npos) << word;
  }
  const Outcome o = hearth({"doctor", "--json", "-t", "1"});
  EXPECT_EQ(o.status, 0) << o.err;
  const json j = json::parse(o.out);
  EXPECT_GT(j["memory"]["read_bytes_per_second"].get<double>(), 1e8);
  EXPECT_EQ(j["memory"]["read_threads"], 1);
  EXPECT_GE(j["cpu"]["physical_cores"].get<int>(), 1);
  for (const char* type : {"f16", "q8_0", "q4_0"})
    EXPECT_GT(j["cpu"]["batch_operations_per_second"][type].get<double>(), 1e8) << type;
  EXPECT_TRUE(!j["gpus"].empty() || j["no_gpu"].is_string());
}

TEST(Doctor, AGpuThatCannotBeUsedIsAFinding) {
  std::vector<cuda::GpuInfo> gpus(2);
  gpus[0] = {.index = 0, .name = "first"}, gpus[1] = {.index = 1, .name = "second"};
  const auto found = tools::examine_gpus(gpus, [](int gpu) {
    if (gpu == 0) fail("a GPU needs NVIDIA's libcublas.so.12");
    return cuda::Bandwidth{.memory_read = 4e12, .host_to_device = 5e10, .device_to_host = 6e10};
  });
  ASSERT_EQ(found.size(), 2u);
  EXPECT_FALSE(found[0].bandwidth);
  const std::vector<std::string> lines = tools::describe(found[0]);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0].find("first, compute"), 0u) << lines[0];
  EXPECT_EQ(lines[1], "cannot be used: a GPU needs NVIDIA's libcublas.so.12");
  EXPECT_EQ(found[1].unusable, "");
  EXPECT_EQ(tools::describe(found[1])[1], "memory reads 4000.0 GB/s, to the GPU 50.0 GB/s, from it 60.0 GB/s");
}

// As where NVIDIA's libraries are absent, and where there is no GPU at all: the line that says why.
TEST(Doctor, TellsWhatTheCudaBackendThrows) {
  std::string why;
  if (!cuda::list_gpus(&why).empty()) GTEST_SKIP() << "there is a GPU";
  const std::vector<cuda::GpuInfo> gpus(1);
  const auto found = tools::examine_gpus(gpus, cuda::measure_bandwidth);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_FALSE(found[0].bandwidth);
  EXPECT_NE(found[0].unusable, "");
  EXPECT_EQ(found[0].unusable.find('\n'), std::string::npos) << found[0].unusable;
}

}  // namespace
}  // namespace hearth::test
