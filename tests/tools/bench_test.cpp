// `hearth bench` on divided models, over lists, and what it makes of former results. The oracle stands in for the GPU.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "program.h"
#include "support/tiny_model.h"

namespace hearth::test {
namespace {

using nlohmann::json;

class BenchProgram : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    files_ = new TempDir;
    setenv("XDG_CACHE_HOME", (*files_ / "cache").c_str(), 1);
    write_tiny_model(file("tiny.gguf"));
    write_tiny_model(file("other.gguf"), {.seed = 2});
  }
  static void TearDownTestSuite() {
    unsetenv("XDG_CACHE_HOME");
    delete files_;
  }
  static std::string file(const std::string& name) { return (*files_ / name).string(); }
  static std::string demo() { return (source_dir() / "models" / "hearth-demo.gguf").string(); }
  static Outcome bench(std::vector<std::string> more) {
    std::vector<std::string> args = {"bench", "-q", "-r", "1"};
    args.insert(args.end(), more.begin(), more.end());
    return hearth(args);
  }
  static json rows(std::vector<std::string> more, int status = 0) {
    more.insert(more.end(), {"-o", "json"});
    const Outcome o = bench(more);
    EXPECT_EQ(o.status, status) << o.err;
    return json::parse(o.out);
  }
  // The demo model within GPU memory of `gib`.
  static std::vector<std::string> divided(const std::string& gib) {
    return {"-m", demo(), "--isa", "reference", "--vram-budget", gib, "-c", "64", "-b", "16", "-p", "0", "-n", "2"};
  }
  // A budget that does not hold all of it: 8 MiB less than what does.
  static std::string not_all() {
    std::vector<std::string> args = divided("0.5");
    args.push_back("--no-bandwidth");
    const double all = rows(args)[0]["gpu_bytes_planned"].get<double>();
    return fmt::format("{:.5f}", (all - (8 << 20)) / (1 << 30));
  }

 private:
  static inline TempDir* files_ = nullptr;
};

double number(const json& row, const char* key) {
  EXPECT_TRUE(row.contains(key) && row[key].is_number()) << key << " in " << row.dump();
  return row.contains(key) && row[key].is_number() ? row[key].get<double>() : NAN;
}

TEST_F(BenchProgram, BudgetsWithFloorAndParts) {
  const std::string middle = not_all();
  std::vector<std::string> args = divided("0.01," + middle + ",0.5");
  args.insert(args.end(), {"--profile", "--plot", file("budgets.svg"), "-o", "json"});
  const Outcome o = bench(args);
  EXPECT_EQ(o.status, 1) << "a budget too small is told";
  EXPECT_NE(o.err.find("--vram-budget 0.01, -c 64: a budget of 0.01 GiB is too small"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("error: 1 of 3 combinations could not be run"), std::string::npos) << o.err;
  const json all = json::parse(o.out);
  ASSERT_EQ(all.size(), 3u) << "and the others are measured";
  EXPECT_TRUE(all[0]["error"].is_string());
  for (const json& row : {all[1], all[2]}) {
    EXPECT_EQ(row["backend"], "CPU+CPU");
    EXPECT_GT(number(row, "floor_ts"), number(row, "avg_ts")) << "the oracle is not faster than memory";
    EXPECT_NEAR(number(row, "of_floor"), number(row, "avg_ts") / number(row, "floor_ts"), 1e-9);
    EXPECT_NEAR(number(row, "gpu_bytes_per_second"), number(row, "gpu_bytes_per_token") * number(row, "avg_ts"), 1);
    EXPECT_LE(number(row, "gpu_bytes_planned"), number(row, "vram_budget"));
    EXPECT_GT(number(row, "gpu_bytes_used"), 0);
    EXPECT_GT(number(row, "expected_ts"), 0);
    EXPECT_GT(number(row, "gpu_bandwidth"), 0);
    EXPECT_GT(number(row, "cpu_bandwidth"), 0);
    EXPECT_GT(number(row, "load_bytes_per_second"), 0);
    for (const char* part : {"attention_us", "hot_us", "head_us"}) EXPECT_GT(number(row["profile"], part), 0) << part;
  }
  const json& part = all[1];
  EXPECT_GT(number(part, "hit_share"), 0);
  EXPECT_LT(number(part, "hit_share"), 1);
  EXPECT_EQ(number(all[2], "hit_share"), 1);
  EXPECT_TRUE(all[2]["cpu_bytes_per_token"].is_null()) << "the CPU has nothing to read";
  for (const char* p : {"cold_us", "wait_us", "merge_us"}) {
    EXPECT_GT(number(part["profile"], p), 0) << p;
    EXPECT_EQ(number(all[2]["profile"], p), 0) << p;
  }
  // The bytes of both sides are those of the same model, so the floor lies between those of either side alone.
  const double main = number(part, "gpu_bytes_per_token") / number(part, "gpu_bandwidth");
  const double host = number(part, "cpu_bytes_per_token") / number(part, "cpu_bandwidth");
  EXPECT_GE(1 / number(part, "floor_ts"), std::max(main, host) * (1 - 1e-9));
  EXPECT_LE(1 / number(part, "floor_ts"), (main + host) * (1 + 1e-9));

  std::ofstream(file("rows.json")) << o.out;
  const Outcome again = bench({"--from", file("rows.json"), "--plot", file("again.svg")});
  EXPECT_EQ(again.status, 0) << again.err;
  for (const char* text :
       {"| budget GiB", "floor t/s |", "GPU hits |", "cold neurons", "hand-off beyond", "wait for the CPU"})
    EXPECT_NE(again.out.find(text), std::string::npos) << text << " is missing in\n" << again.out;
  EXPECT_EQ(slurp(file("again.svg")), slurp(file("budgets.svg")));
  EXPECT_NE(slurp(file("again.svg")).find("GPU memory budget, GiB"), std::string::npos);
  const Outcome csv = bench({"--from", file("rows.json"), "-o", "csv"});
  EXPECT_EQ(std::count(csv.out.begin(), csv.out.end(), '\n'), 3) << csv.out;
}

TEST_F(BenchProgram, EveryListIsCrossed) {
  const json all =
      rows({"-m", file("tiny.gguf"), "-m", file("other.gguf"), "-t", "1,2", "-c", "16,32", "--sparse-threshold",
            "0,0.5", "--device", "cpu", "-p", "0", "-n", "2", "-d", "0,8", "--no-bandwidth"});
  ASSERT_EQ(all.size(), 32u);
  size_t i = 0;
  for (const std::string model : {"tiny.gguf", "other.gguf"}) {
    for (const std::string threshold : {"0", "0.5"}) {
      for (const int n_ctx : {16, 32}) {
        for (const int threads : {1, 2}) {
          for (const int depth : {0, 8}) {
            const json& row = all[i++];
            EXPECT_EQ(row["model_filename"], file(model));
            EXPECT_EQ(row["sparse_threshold"], threshold);
            EXPECT_EQ(row["n_ctx"], n_ctx);
            EXPECT_EQ(row["n_threads"], threads);
            EXPECT_EQ(row["n_depth"], depth);
          }
        }
      }
    }
  }
  EXPECT_LT(number(all[8], "density"), number(all[0], "density")) << "a threshold leaves neurons out";
}

TEST_F(BenchProgram, TablesNameWhatIsSwept) {
  const auto table = [](std::vector<std::string> more) {
    std::vector<std::string> args = {"-m", file("tiny.gguf"), "--device", "cpu", "-p", "0", "-n",
                                     "2",  "--no-bandwidth"};
    args.insert(args.end(), more.begin(), more.end());
    return bench(args).out;
  };
  EXPECT_NE(table({"--sparse-threshold", "0,0.5"}).find("| threshold |"), std::string::npos);
  EXPECT_NE(table({"-c", "8,16"}).find("| context |"), std::string::npos);
  EXPECT_NE(table({"--link-share", "0,0.5"}).find("| link share |"), std::string::npos);
  EXPECT_NE(table({"-m", file("other.gguf")}).find("| other.gguf"), std::string::npos);
  const std::string plain = table({"-t", "1,2"});
  EXPECT_EQ(plain.find("| threshold |"), std::string::npos);
  EXPECT_EQ(std::count(plain.begin(), plain.end(), '\n'), 4) << plain;
}

TEST_F(BenchProgram, UsersMistakes) {
  const auto tiny = [](std::vector<std::string> more) {
    more.insert(more.end(), {"-m", file("tiny.gguf"), "--device", "cpu", "--no-bandwidth"});
    return bench(more);
  };
  EXPECT_TRUE(fails_with(bench({}), "-m FILE, or --from FILE"));
  EXPECT_TRUE(fails_with(bench({"--from", file("absent.json")}), "absent.json"));
  EXPECT_TRUE(fails_with(tiny({"--from", file("absent.json")}), "leave out -m"));
  std::ofstream(file("garbage.json")) << "{\"a\":1}";
  std::ofstream(file("others.json")) << "[{\"a\":1}]";
  EXPECT_TRUE(fails_with(bench({"--from", file("garbage.json")}), "no array of results"));
  EXPECT_TRUE(fails_with(bench({"--from", file("others.json")}), "something else"));
  EXPECT_TRUE(fails_with(tiny({"-t", "0"}), "-t is 0, expected 1 to 1024"));
  EXPECT_TRUE(fails_with(tiny({"--sparse-threshold", "0,x"}), "--sparse-threshold is 'x'"));
  EXPECT_TRUE(fails_with(tiny({"-p", "4", "-n", "0", "--plot", file("p.svg")}), "nothing to plot"));
  EXPECT_FALSE(std::filesystem::exists(file("p.svg")));
}

TEST_F(BenchProgram, RunTellsTheTimeToTheFirstToken) {
  const Outcome o = hearth({"run", "-m", file("tiny.gguf"), "-p", "the", "-n", "2", "--device", "cpu", "--json"});
  ASSERT_EQ(o.status, 0) << o.err;
  const json timings = json::parse(o.out)["timings"];
  EXPECT_GE(number(timings, "first_token_ms") + 10, number(timings, "load_ms")) << "clocks that tick every 10 ms";
  EXPECT_LT(number(timings, "first_token_ms"), 60e3);
  EXPECT_NE(o.err.find("first token time ="), std::string::npos) << o.err;
}

}  // namespace
}  // namespace hearth::test
