// `hearth bench`: tokens per second with llama-bench's tests and columns, and how near that is to the machine's limit.
#include "tools/bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <random>

#include "core/error.h"
#include "core/log.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "tools/commands.h"
#include "tools/common.h"
#include "tools/output.h"
#include "tools/report.h"

namespace hearth::tools {
namespace {

struct BenchOptions {
  ModelOptions model;
  std::vector<int64_t> n_prompt = {512}, n_gen = {128}, depths = {0};
  int repetitions = 5;
  std::string output = "md";
  bool no_bandwidth = false;
};

double measured_bandwidth(Session& session) {
  if (const auto gpu = session.gpu()) return cuda::measure_bandwidth(*gpu).memory_read;
  return cpu::measure_read_bandwidth(session.team());
}

// Runs the tests on one session.
class Bench {
 public:
  Bench(Session& session, int repetitions, bool measure_bandwidth)
      : session_(session),
        engine_(session.engine()),
        repetitions_(repetitions),
        measure_bandwidth_(measure_bandwidth) {}

  BenchRow prompt(int64_t n, int64_t depth) {
    const std::vector<int32_t> ids = random_ids(n);
    BenchRow row = new_row(depth);
    row.n_prompt = n;
    row.seconds = repeat(
        depth, [] {}, [&] { engine_.eval(ids); });
    row.flops_per_second = prompt_flops(session_.model(), n, depth) / mean_sd(row.seconds).mean;
    return row;
  }

  BenchRow generation(int64_t n, int64_t depth) {
    const std::vector<int32_t> ids = random_ids(n);
    BenchRow row = new_row(depth);
    row.n_gen = n;
    const engine::DensityStats before = engine_.density();
    // Measured beside every repetition: on a shared machine the bandwidth itself changes from second to second.
    std::vector<double> bandwidths;
    row.seconds = repeat(
        depth,
        [&] {
          if (measure_bandwidth_) bandwidths.push_back(measured_bandwidth(session_));
        },
        [&] {
          for (const int32_t id : ids) engine_.eval_greedy(id);
        });
    const engine::DensityStats counted = engine_.density().since(before);
    row.density = counted.density(engine_.config().n_ff);
    const double bytes = engine_.traffic(counted, depth + n / 2).total().total();
    row.bytes_per_second = bytes * static_cast<double>(n) / mean_sd(row.seconds).mean;
    row.memory_bandwidth = measure_bandwidth_ ? mean_sd(bandwidths).mean : 0;
    return row;
  }

 private:
  BenchRow new_row(int64_t depth) {
    BenchRow row;
    row.backend = session_.on_gpu() ? "CUDA" : "CPU";
    row.device = session_.device().name();
    row.threads = session_.team().size();
    row.n_depth = depth;
    row.density = NAN;
    return row;
  }

  // Random tokens: no text is needed, so models without a vocabulary work too. The seed is fixed, so runs compare.
  std::vector<int32_t> random_ids(int64_t n) {
    std::vector<int32_t> ids(static_cast<size_t>(n));
    std::uniform_int_distribution<int32_t> any(0, static_cast<int32_t>(engine_.config().n_vocab) - 1);
    for (int32_t& id : ids) id = any(random_);
    return ids;
  }

  // Seconds of each repetition of work(), after one to warm up, all on a context of `depth` tokens; before() is not
  // timed.
  template <typename Before, typename Work>
  std::vector<double> repeat(int64_t depth, Before&& before, Work&& work) {
    engine_.truncate(0);
    if (depth > 0) engine_.eval(random_ids(depth));
    std::vector<double> seconds;
    for (int i = -1; i < repetitions_; ++i) {
      engine_.truncate(depth);
      if (i == 0 && session_.profiler() != nullptr) session_.profiler()->reset();
      if (i >= 0) before();
      const auto begin = std::chrono::steady_clock::now();
      work();
      if (i >= 0) seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    return seconds;
  }

  Session& session_;
  engine::Engine& engine_;
  int repetitions_;
  bool measure_bandwidth_;
  std::mt19937 random_{20240229};
};

void print_profile(engine::ProfilingDevice& profiler, const BenchRow& row) {
  double total = 0;
  for (const auto& r : profiler.rows()) total += r.seconds;
  const double passes = static_cast<double>(row.seconds.size()) * static_cast<double>(std::max<int64_t>(1, row.n_gen));
  write_out(fmt::format("\n{}: operations of one {}, with a synchronisation round each\n", row.test(),
                        row.n_gen > 0 ? "token" : "prompt"));
  write_out(fmt::format("{:<32} {:>8} {:>11} {:>7} {:>9}\n", "operation", "calls", "us", "share", "GB/s"));
  for (const auto& r : profiler.rows()) {
    const std::string rate =
        r.weight_bytes > 0 ? fmt::format("{:.2f}", static_cast<double>(r.weight_bytes) / r.seconds / 1e9) : "";
    write_out(fmt::format("{:<32} {:>8.0f} {:>11.1f} {:>6.1f}% {:>9}\n", r.operation,
                          static_cast<double>(r.calls) / passes, r.seconds / passes * 1e6, r.seconds / total * 100,
                          rate));
  }
  write_out(fmt::format("{:<32} {:>8} {:>11.1f}\n", "sum", "", total / passes * 1e6));
}

int64_t largest(const std::vector<int64_t>& values) {
  return *std::max_element(values.begin(), values.end());
}

void check_sizes(const std::vector<int64_t>& values, const char* flag) {
  constexpr int64_t kLimit = int64_t{1} << 24;
  for (const int64_t v : values) {
    if (v < 0 || v > kLimit) fail("{} is {}, expected 0 to {}", flag, v, kLimit);
  }
}

void bench(BenchOptions o) {
  check_sizes(o.n_prompt, "-p"), check_sizes(o.n_gen, "-n"), check_sizes(o.depths, "--ctx-fill");
  const int64_t needed = largest(o.depths) + std::max({largest(o.n_prompt), largest(o.n_gen), int64_t{1}});
  if (o.model.n_ctx == 0) o.model.n_ctx = needed;
  if (o.model.n_ctx < needed)
    fail("-c {} is too short for these tests; they need -c {} or more", o.model.n_ctx, needed);
  Session session(o.model);
  const model::Model& model = session.model();
  const BenchModel about = {
      model.file().path().string(),
      fmt::format("{} {} {}", model.config().arch, human_count(model.parameters()), model.type_name()),
      model.config().arch,
      model.weight_bytes(),
      model.parameters(),
      engine::to_string(session.engine().sparsity())};

  if (o.output == "md") write_out(markdown_header());
  if (o.output == "csv") write_out(csv_header());
  if (o.output == "json") write_out("[");
  bool first = true;
  Bench runner(session, o.repetitions, !o.no_bandwidth);
  const auto put = [&](const BenchRow& row) {
    if (o.output == "md") write_out(markdown_row(about, row));
    if (o.output == "csv") write_out(csv_row(about, row));
    if (o.output == "json") write_out((first ? "\n  " : ",\n  ") + json_row(about, row));
    first = false;
    if (session.profiler() != nullptr) print_profile(*session.profiler(), row);
    flush_out();
  };
  for (const int64_t depth : o.depths) {
    for (const int64_t n : o.n_prompt) {
      if (n > 0) put(runner.prompt(n, depth));
    }
    for (const int64_t n : o.n_gen) {
      if (n > 0) put(runner.generation(n, depth));
    }
  }
  if (o.output == "json") write_out("\n]\n");
  flush_out();
  print_memory(session);
}

}  // namespace

void register_bench(CLI::App& app) {
  auto o = std::make_shared<BenchOptions>();
  CLI::App* sub = app.add_subcommand("bench", "Measure tokens per second");
  const auto list = [&](const char* name, std::vector<int64_t>& values, const char* help) {
    return sub->add_option(name, values, help)
        ->delimiter(',')
        ->type_name("N,N,...")
        ->capture_default_str()
        ->group("Tests");
  };
  list("-p,--n-prompt", o->n_prompt, "pp: evaluate a prompt of N tokens; 0: none");
  list("-n,--n-gen", o->n_gen, "tg: generate N tokens one by one; 0: none");
  list("-d,--ctx-fill,--n-depth", o->depths, "Run the tests after N tokens of context");
  sub->add_option("-r,--repetitions", o->repetitions, "Repetitions of each test, after one to warm up")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str()
      ->group("Tests");
  sub->add_flag("--no-bandwidth", o->no_bandwidth, "Do not measure the memory's bandwidth beside the repetitions")
      ->group("Tests");
  auto* output = sub->add_option("-o,--output", o->output, "Format: md, json or csv")
                     ->check(CLI::IsMember({"md", "json", "csv"}))
                     ->capture_default_str()
                     ->group("Output");
  sub->add_flag("--profile", o->model.profile,
                "After each test, the time of every operation; slows the test down, as each operation is waited for")
      ->excludes(output)
      ->group("Output");
  add_model_options(*sub, o->model);
  sub->footer(
      "t/s: tokens per second, mean ± standard deviation. GB/s: weights and KV cache that generation reads; % of bw: "
      "its share of the memory's read bandwidth, measured beside each repetition. GFLOP/s: the prompt's arithmetic.\n"
      "Example: hearth bench -m model.gguf -p 256,512 -n 64 -r 3 -o json");
  sub->callback([o] { bench(*o); });
}

}  // namespace hearth::tools
