// What a run says first: its plan, what would make it faster, and what does not fit.
#include <iterator>
#include <sstream>

#include "program.h"
#include "support/tiny_model.h"
#include "tools/fit_memory.h"
#include "tools/start_lines.h"

namespace hearth::test {
namespace {

using tools::StartFacts;

constexpr uint64_t kGiB = uint64_t{1} << 30;

std::string joined(const StartFacts& f) {
  std::string text;
  for (const std::string& hint : tools::hints(f)) text += hint + "\n";
  return text;
}

StartFacts dense() {
  return {.model = "m.gguf",
          .threads = 8,
          .tokens_per_second = 12.34,
          .wide = true,
          .weight_bytes = 14 * kGiB,
          .q8_0_bytes = 7 * kGiB,
          .q4_k_bytes = 4 * kGiB};
}
StartFacts divided(StartFacts f) {
  f.place = StartFacts::Place::divided, f.vram_budget = 6 * kGiB, f.on_gpu = 0.42;
  return f;
}

TEST(StartLines, ADenseFileOnTheCpu) {
  EXPECT_EQ(tools::plan_line(dense()), "plan: all on the CPU, 8 threads; 12.3 tokens/s expected");
  EXPECT_EQ(joined(dense()), "in q8_0 a token reads 50 % of the bytes, in q4_k 29 % (`hearth quantize`)\n");
}

TEST(StartLines, ReluWithoutAProfile) {
  StartFacts f = divided(dense());
  f.sparse_family = true;
  EXPECT_EQ(
      tools::plan_line(f),
      "plan: 42 % of the neurons in 6.00 GiB of GPU memory, the others on the CPU at the same time; 12.3 tokens/s "
      "expected");
  EXPECT_EQ(joined(f),
            "`hearth profile -m m.gguf -f TEXT` finds the neurons that the GPU should have\n"
            "`hearth predictor fit -m m.gguf -f TEXT` reads fewer gates, approximately\n"
            "in q8_0 a token reads 50 % of the bytes, in q4_k 29 % (`hearth quantize`)\n");
  f.profiled = f.predictors = true, f.wide = false, f.q4_k_bytes = 8 * kGiB;
  EXPECT_EQ(joined(f), "");
}

TEST(StartLines, AForeignQuantisedFile) {
  StartFacts f = dense();
  f.wide = false, f.sparse_family = true, f.by_neuron = false, f.weight_bytes = 4 * kGiB;
  EXPECT_EQ(joined(f), "--transpose-down computes only the neurons that fire\n");
  f.sparse_family = false;
  EXPECT_EQ(joined(f), "");
  f = divided(f);
  EXPECT_EQ(joined(f), "--transpose-down divides layers between GPU and CPU neuron by neuron\n");
}

TEST(StartLines, AMixtureWithoutAProfile) {
  StartFacts f = divided(dense());
  f.mixture = true, f.wide = false, f.weight_bytes = 18 * kGiB, f.q4_k_bytes = 17 * kGiB;
  EXPECT_NE(tools::plan_line(f).find("42 % of the experts"), std::string::npos);
  EXPECT_EQ(joined(f), "`hearth profile -m m.gguf -f TEXT` finds the experts that the GPU should have\n");
  f.profiled = true;
  EXPECT_EQ(joined(f), "");
}

TEST(StartLines, AMixtureWhoseExpertsAreSparse) {
  StartFacts f = dense();
  f.mixture = f.sparse_family = f.profiled = true, f.by_neuron = f.wide = false, f.weight_bytes = 18 * kGiB;
  EXPECT_EQ(joined(f), "--transpose-down computes only the neurons that fire\n");
  f.by_neuron = true;
  EXPECT_EQ(joined(f), "");
}

TEST(StartLines, AllOnTheGpu) {
  StartFacts f = dense();
  f.place = StartFacts::Place::gpu, f.wide = false, f.tokens_per_second = 463, f.measured = true;
  EXPECT_EQ(tools::plan_line(f), "plan: all on the GPU; 463 tokens/s when it was measured");
  EXPECT_EQ(joined(f), "");
}

TEST(StartLines, ASmallerTypeThatTheGpuHoldsWhole) {
  StartFacts f = divided(dense());
  f.wide = false, f.weight_bytes = 7 * kGiB;
  EXPECT_EQ(joined(f), "in q4_k (4.00 GiB) the GPU holds all of it (`hearth quantize`)\n");
}

// A small model has nothing to gain; what is not known is not said.
TEST(StartLines, OfARun) {
  const TempDir dir;
  const std::string model = (dir / "m.gguf").string();
  write_tiny_model(model, {});
  const std::vector<std::string> args = {"run", "-m", model, "-p", "the", "-n", "2", "--device", "cpu"};
  const auto with = [&](const char* flag) {
    std::vector<std::string> all = args;
    all.push_back(flag);
    const Outcome o = hearth(all);
    EXPECT_EQ(o.status, 0) << o.err;
    return o.err;
  };
  setenv("XDG_CACHE_HOME", (dir / "cache").c_str(), 1);
  const std::string unmeasured = with("--no-measure");
  EXPECT_NE(unmeasured.find("plan: all on the CPU, "), std::string::npos) << unmeasured;
  EXPECT_EQ(unmeasured.find("expected"), std::string::npos) << unmeasured;
  EXPECT_EQ(with("--quiet"), "");
  EXPECT_FALSE(std::filesystem::exists(dir / "cache"));
  const std::string first = with("--verbose"), second = with("--verbose");
  unsetenv("XDG_CACHE_HOME");
  EXPECT_NE(first.find("measuring this machine"), std::string::npos) << first;
  EXPECT_EQ(second.find("measuring this machine"), std::string::npos) << second;
  for (const std::string& said : {first, second}) EXPECT_NE(said.find("tokens/s expected"), std::string::npos) << said;
  EXPECT_EQ(first.find("faster:"), std::string::npos) << first;
}

TEST(FitMemory, SizesOfOtherTypes) {
  const TempDir dir;
  write_tiny_model(dir / "m.gguf", {.type = DType::f16, .n_embd = 256, .n_ff = 512});
  const model::Model m = model::Model::load(dir / "m.gguf");
  EXPECT_EQ(tools::bytes_as(m, DType::f32), m.weight_bytes());  // never more than it is
  EXPECT_EQ(tools::bytes_as(m, DType::q8_0) * 32, m.weight_bytes() * 17);
  const auto smaller = tools::smaller_types(m);
  ASSERT_FALSE(smaller.empty());
  EXPECT_EQ(smaller.front().type, DType::q8_0);
  for (size_t i = 1; i < smaller.size(); ++i) EXPECT_LT(smaller[i].bytes, smaller[i - 1].bytes);
}

std::string refusal(int64_t n_ctx, uint64_t position_bytes, uint64_t available) {
  try {
    tools::check_cache_fits(n_ctx, position_bytes, available);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(FitMemory, ACacheThatDoesNotFitNamesTheContextThatDoes) {
  EXPECT_EQ(refusal(4096, 1 << 20, 4 * kGiB), "");
  EXPECT_EQ(
      refusal(8192, 1 << 20, 5 * kGiB),
      "a context of 8192 takes 8.00 GiB of memory for its KV cache and 5.00 GiB is available; use -c 5120 or less");
  EXPECT_EQ(refusal(5120, 1 << 20, 5 * kGiB), "");
  EXPECT_NE(refusal(8192, 1 << 20, 1 << 20).find("nothing shorter fits"), std::string::npos);
}

TEST(FitMemory, WeightsThatRunFromDisk) {
  tools::HostNeed need{.weights = 17 * kGiB,
                       .available = 10 * kGiB,
                       .token_bytes = 1.5 * static_cast<double>(kGiB),
                       .experts = true,
                       .smaller = {{DType::q4_k, 12 * kGiB}, {DType::q3_k, 9 * kGiB}, {DType::q2_k, 7 * kGiB}},
                       .disk_rate = 3e9};
  EXPECT_EQ(
      tools::disk_warning(need),
      "the weights take 17.00 GiB and 10.00 GiB of memory is available for them: the file is mapped and runs from "
      "disk; a token reads up to 1.50 GiB of it, less where its experts were used before; at this disk's 3.0 GB/s in "
      "pieces "
      "of 128 KiB that is about 1.9 tokens/s; in q3_k it takes 9.00 GiB and fits (hearth quantize)");
  need.disk_rate = {}, need.smaller = {}, need.experts = false;
  EXPECT_EQ(
      tools::disk_warning(need),
      "the weights take 17.00 GiB and 10.00 GiB of memory is available for them: the file is mapped and runs from "
      "disk; a token reads up to 1.50 GiB of it");
  need.available = 17 * kGiB;
  EXPECT_EQ(tools::disk_warning(need), std::nullopt);
}

TEST(FitMemory, TheDisksRate) {
  const TempDir dir;
  std::ofstream(dir / "small") << "a few bytes";
  EXPECT_EQ(tools::measure_disk(dir / "small"), std::nullopt);
  EXPECT_EQ(tools::measure_disk(dir / "none"), std::nullopt);
  if (const auto rate = tools::measure_disk(source_dir() / "models/hearth-demo.gguf")) {
    EXPECT_GT(*rate, 1e5);
    EXPECT_LT(*rate, 1e12);
  }
}

// The CPU's experts are mapped, and more than the memory that may be used.
TEST(FitMemory, ADividedMixtureRunsFromDisk) {
  const TempDir dir;
  const std::string model = (dir / "m.gguf").string();
  std::istringstream flags(
      "--arch qwen3moe --layers 2 --n-embd 256 --n-head 4 --n-ff-exp 512 --experts 64 --experts-used 32 --n-vocab 600 "
      "--n-ctx 64 --type f32");
  std::vector<std::string> synth = {"synth", "-o", model};
  synth.insert(synth.end(), std::istream_iterator<std::string>(flags), {});
  ASSERT_EQ(hearth(synth).status, 0);
  const std::vector<std::string> rest = {"run", "-m", model,    "-p", "ac an aa",
                                         "-n",  "8",  "--temp", "0",  "--ignore-eos"};
  const auto run = [&](std::vector<std::string> more) {
    more.insert(more.begin(), rest.begin(), rest.end());
    return hearth(more);
  };
  const Outcome whole = run({"--device", "cpu", "-q"});
  ASSERT_EQ(whole.status, 0) << whole.err;
  const std::vector<std::string> divided = {"--isa", "reference", "--vram-budget", "0.25", "-b", "8", "--host-memory"};
  std::vector<std::string> little = divided, much = divided;
  little.push_back("0.08"), much.push_back("4");
  const Outcome from_disk = run(little), from_memory = run(much);
  ASSERT_EQ(from_disk.status, 0) << from_disk.err;
  EXPECT_EQ(from_disk.out, whole.out);
  EXPECT_EQ(from_memory.out, whole.out);
  EXPECT_NE(from_disk.err.find("81.92 MiB of memory is available for them: the file is mapped and runs from disk"),
            std::string::npos)
      << from_disk.err;
  EXPECT_NE(from_disk.err.find("less where its experts were used before"), std::string::npos) << from_disk.err;
  EXPECT_NE(from_disk.err.find("hit share = "), std::string::npos) << from_disk.err;
  EXPECT_EQ(from_memory.err.find("runs from disk"), std::string::npos) << from_memory.err;
  // The KV cache and what else must be in memory cannot be mapped.
  little.back() = "0.01";
  EXPECT_TRUE(fails_with(run(little), "and 0.01 GiB may be used"));
}

TEST(FitMemory, AContextThatCannotBeHad) {
  const TempDir dir;
  const std::string model = (dir / "m.gguf").string();
  write_tiny_model(model, {.n_ctx = 64});
  EXPECT_TRUE(
      fails_with(hearth({"run", "-m", model, "-p", "the", "-q", "--device", "cpu", "-c", "1000000000"}), "; use -c "));
}

}  // namespace
}  // namespace hearth::test
