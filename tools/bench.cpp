// `hearth bench`: tokens per second with llama-bench's tests and columns, and how near that is to the machine's limit.
#include "tools/bench.h"

#include <algorithm>
#include <memory>

#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "offline/report/bench_plot.h"
#include "tools/commands.h"
#include "tools/figures.h"
#include "tools/hub_models.h"
#include "tools/output.h"

namespace hearth::tools {
namespace {

using nlohmann::ordered_json;

// Lists where other subcommands take one value: everything is measured with each combination. Empty: not given.
struct Sweep {
  std::vector<std::string> models, thresholds;
  std::vector<double> budgets;  // GiB
  std::vector<double> link_shares;
  std::vector<int64_t> threads, contexts;

  std::vector<std::string> swept_keys() const {
    std::vector<std::string> keys;
    if (models.size() > 1) keys.push_back("model_filename");
    if (thresholds.size() > 1) keys.push_back("sparse_threshold");
    if (contexts.size() > 1) keys.push_back("n_ctx");
    if (link_shares.size() > 1) keys.push_back("link_share");
    return keys;
  }
};

// One combination.
struct Setting {
  ModelOptions model;
  std::string threshold;
};

struct BenchOptions {
  ModelOptions model;
  Sweep sweep;
  std::vector<int64_t> n_prompt = {512}, n_gen = {128}, depths = {0}, parallel = {1};
  int repetitions = 5;
  std::string output = "md", plot, from;
  bool no_bandwidth = false;
};

// Every setting so far with every value; as they are when there is none.
template <typename T, typename Set>
void cross(std::vector<Setting>& settings, const std::vector<T>& values, Set&& set) {
  if (values.empty()) return;
  std::vector<Setting> crossed;
  for (const Setting& s : settings) {
    for (const T& value : values) set(crossed.emplace_back(s), value);
  }
  settings = std::move(crossed);
}

// The first list varies slowest.
std::vector<Setting> settings_of(const BenchOptions& o) {
  std::vector<Setting> all = {{o.model, ""}};
  cross(all, o.sweep.models, [](Setting& s, const std::string& model) { s.model.model = model; });
  cross(all, o.sweep.thresholds, [](Setting& s, const std::string& threshold) {
    s.threshold = threshold;
    s.model.sparse_threshold = parse_threshold(threshold);
  });
  cross(all, o.sweep.contexts, [](Setting& s, int64_t n_ctx) { s.model.n_ctx = n_ctx; });
  cross(all, o.sweep.budgets, [](Setting& s, double budget) { s.model.vram_budget = budget; });
  cross(all, o.sweep.link_shares, [](Setting& s, double share) { s.model.link_share = share; });
  cross(all, o.sweep.threads, [](Setting& s, int64_t threads) { s.model.threads = static_cast<int>(threads); });
  return all;
}

int64_t largest(const std::vector<int64_t>& values) {
  return *std::max_element(values.begin(), values.end());
}

void check_range(const std::vector<int64_t>& values, const char* flag, int64_t low, int64_t high) {
  for (const int64_t v : values) {
    if (v < low || v > high) fail("{} is {}, expected {} to {}", flag, v, low, high);
  }
}

void check(BenchOptions& o) {
  constexpr int64_t kLimit = int64_t{1} << 24;
  check_range(o.n_prompt, "-p", 0, kLimit), check_range(o.n_gen, "-n", 0, kLimit);
  check_range(o.depths, "--ctx-fill", 0, kLimit), check_range(o.sweep.threads, "-t", 1, 1024);
  check_range(o.sweep.contexts, "-c", 0, int64_t{1} << 30), check_range(o.parallel, "--parallel", 1, 256);
  o.model.n_sequences = largest(o.parallel);
  const int64_t needed = largest(o.depths) + std::max({largest(o.n_prompt), largest(o.n_gen), int64_t{1}});
  if (o.sweep.contexts.empty()) o.sweep.contexts = {needed};
  for (int64_t& n_ctx : o.sweep.contexts) {
    if (n_ctx == 0) n_ctx = needed;
    if (n_ctx < needed) fail("-c {} is too short for these tests; they need -c {} or more", n_ctx, needed);
  }
}

// Prints rows as they come and keeps them for the plot.
class Results {
 public:
  Results(const std::string& format, const std::vector<std::string>& swept)
      : table_(format == "md"    ? BenchTable::Format::md
               : format == "csv" ? BenchTable::Format::csv
                                 : BenchTable::Format::json,
               swept),
        is_md_(format == "md"),
        is_json_(format == "json") {
    write_out(table_.begin());
  }
  void put(const ordered_json& row) {
    rows_.push_back(row);
    if (row.contains("error") && !is_json_) return;  // told on stderr
    write_out(table_.row(row));
    if (is_md_ && row.contains("profile") && row.at("profile").is_object()) write_out(profile_table(row));
    flush_out();
  }
  void end() {
    write_out(table_.end());
    flush_out();
  }
  const ordered_json& rows() const { return rows_; }

 private:
  BenchTable table_;
  bool is_md_, is_json_;
  ordered_json rows_ = ordered_json::array();
};

void run_tests(const BenchOptions& o, const Setting& setting, Results& results) {
  Session session(setting.model);
  const model::Model& model = session.model();
  const BenchModel about = {
      model.file().path().string(),
      fmt::format("{} {} {}", model.config().arch, human_count(model.parameters()), model.type_name()),
      model.config().arch,
      model.weight_bytes(),
      model.parameters(),
      model.config().n_layer,
      engine::to_string(session.engine().sparsity()),
      setting.threshold,
      setting.model.link_share,
      session.load_seconds(),
      session.measured_ways()};
  Bench runner(session, o.repetitions, !o.no_bandwidth);
  for (const int64_t depth : o.depths) {
    for (const int64_t n : o.n_prompt) {
      if (n > 0) results.put(bench_json(about, runner.prompt(n, depth)));
    }
    for (const int64_t n : o.n_gen) {
      for (const int64_t n_parallel : o.parallel) {
        if (n > 0) results.put(bench_json(about, runner.generation(n, depth, n_parallel)));
      }
    }
  }
  print_memory(session);
}

std::string name_of(const Setting& s) {
  std::string name = s.model.model;
  if (s.model.vram_budget) name += fmt::format(", --vram-budget {:g}", *s.model.vram_budget);
  if (s.model.link_share) name += fmt::format(", --link-share {:g}", *s.model.link_share);
  if (s.model.threads > 0) name += fmt::format(", -t {}", s.model.threads);
  if (!s.threshold.empty()) name += ", --sparse-threshold " + s.threshold;
  return name + fmt::format(", -c {}", s.model.n_ctx);
}

// One combination that cannot be run, a budget too small, does not end a sweep; it is told, and counted.
size_t measure(const BenchOptions& o, const std::vector<Setting>& settings, Results& results) {
  size_t failed = 0;
  for (const Setting& setting : settings) {
    try {
      run_tests(o, setting, results);
    } catch (const Error& e) {
      if (settings.size() == 1) throw;
      ++failed;
      log::warn("{}: {}", name_of(setting), e.what());
      results.put({{"model_filename", setting.model.model},
                   {"vram_budget",
                    setting.model.vram_budget ? ordered_json(*setting.model.vram_budget * (1 << 30)) : ordered_json()},
                   {"n_threads", setting.model.threads},
                   {"error", e.what()}});
    }
  }
  results.end();
  return failed;
}

void write_plot(const std::string& path, const ordered_json& rows) {
  if (path.empty()) return;
  const std::string svg = offline::bench_plot_svg(rows);
  AtomicFile file(path);
  file.write(svg.data(), svg.size());
  file.commit();
  log::info("plot written to '{}'", path);
}

void bench(BenchOptions o) {
  set_logging(o.model.quiet, o.model.verbose);
  if (!o.from.empty()) {
    if (!o.sweep.models.empty()) fail("--from prints what was measured before; leave out -m");
    const ordered_json rows = read_bench_json(o.from);
    std::vector<std::string> keys = {"n_ctx", "sparse_threshold"};
    const auto has_share = [](const ordered_json& r) { return r.value("link_share", ordered_json()).is_number(); };
    if (std::any_of(rows.begin(), rows.end(), has_share)) keys.push_back("link_share");
    Results results(o.output, keys);
    for (const ordered_json& row : rows) results.put(row);
    results.end();
    return write_plot(o.plot, rows);
  }
  if (o.sweep.models.empty()) fail("no model was given; expected -m FILE, or --from FILE to print former results");
  check(o);
  Results results(o.output, o.sweep.swept_keys());
  const std::vector<Setting> settings = settings_of(o);
  const size_t failed = measure(o, settings, results);
  if (failed < settings.size()) write_plot(o.plot, results.rows());
  if (failed > 0) fail("{} of {} combinations could not be run", failed, settings.size());
}

// In place of the options for one value.
void add_sweep_options(CLI::App& sub, Sweep& s) {
  for (const char* name :
       {"--hf-repo", "--model", "--threads", "--ctx-size", "--vram-budget", "--sparse-threshold", "--link-share"}) {
    sub.remove_option(sub.get_option(name));
  }
  const auto several = [&sub](const char* name, std::vector<std::string>& values, const char* help) {
    return sub.add_option(name, values, help)->expected(1)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  };
  CLI::Option* file =
      several("-m,--model", s.models, "Model file, GGUF (of a split model: any part); may be given several times")
          ->type_name("FILE")
          ->group("Model");
  add_hf_repo_option(sub, *file);
  sub.add_option("-c,--ctx-size", s.contexts, "Context length in tokens (default: what the tests need)")
      ->delimiter(',')
      ->type_name("N,N,...")
      ->group("Sweeps");
  sub.add_option("-t,--threads", s.threads, "CPU threads (default: physical cores that this process may use)")
      ->delimiter(',')
      ->type_name("N,N,...")
      ->group("Sweeps");
  sub.add_option("--vram-budget", s.budgets,
                 "GPU memory that may be used in all; what does not fit is computed by the CPU at the same time "
                 "(default: the whole model on the GPU where it fits)")
      ->delimiter(',')
      ->type_name("GiB,GiB,...")
      ->group("Sweeps");
  sub.add_option(
         "--link-share", s.link_shares,
         "Share of the cold neurons, 0 to 1, that the GPU reads from host memory itself while the CPU reads the "
         "others (default: as the bandwidths balance); 0,0.3 shows whether it pays")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 1.0))
      ->type_name("X,X,...")
      ->group("Sweeps");
  sub.add_option("--sparse-threshold", s.thresholds,
                 "A neuron is active when |act(gate)| exceeds this, as for `hearth run`: numbers, \"sidecar\" or "
                 "\"powerinfer-key\"")
      ->delimiter(',')
      ->type_name("X,X,...")
      ->group("Sweeps");
}

}  // namespace

void register_bench(CLI::App& app) {
  auto o = std::make_shared<BenchOptions>();
  CLI::App* sub = app.add_subcommand("bench", "Measure tokens per second, and how near that is to the machine's limit");
  const auto list = [&](const char* name, std::vector<int64_t>& values, const char* help) {
    return sub->add_option(name, values, help)
        ->delimiter(',')
        ->type_name("N,N,...")
        ->capture_default_str()
        ->group("Tests");
  };
  list("-p,--n-prompt", o->n_prompt, "pp: evaluate a prompt of N tokens; 0: none");
  list("-n,--n-gen", o->n_gen, "tg: generate N tokens one by one; 0: none");
  list("--parallel,--n-parallel", o->parallel,
       "tg: for so many sequences at once, one token of each in a step; t/s is of all together");
  list("-d,--ctx-fill,--n-depth", o->depths, "Run the tests after N tokens of context");
  sub->add_option("-r,--repetitions", o->repetitions, "Repetitions of each test, after one to warm up")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str()
      ->group("Tests");
  sub->add_flag("--no-bandwidth", o->no_bandwidth, "Do not measure the memories' bandwidths beside the repetitions")
      ->group("Tests");
  sub->add_option("-o,--output", o->output, "Format: md, json or csv")
      ->check(CLI::IsMember({"md", "json", "csv"}))
      ->capture_default_str()
      ->group("Output");
  sub->add_option("--plot", o->plot,
                  "Draw tokens per second of generation, with the floor, against what differs between the rows, as SVG")
      ->type_name("FILE")
      ->group("Output");
  sub->add_option("--from", o->from, "Measure nothing: print, or plot, what -o json wrote before")
      ->type_name("FILE")
      ->group("Output");
  sub->add_flag("--profile", o->model.profile,
                "After each test, one more run in which every operation is timed: the time of a token by parts")
      ->group("Output");
  add_model_options(*sub, o->model);
  add_sweep_options(*sub, o->sweep);
  sub->footer(
      "t/s: tokens per second, mean ± standard deviation. GB/s: weights and KV cache that generation reads; % of bw: "
      "its share of the memory's read bandwidth, measured beside each repetition. GFLOP/s: the prompt's arithmetic. Of "
      "a divided model: what the plan expects; the floor, what a token's bytes take at the measured bandwidths, with "
      "GPU and CPU at the same time (docs/explanation/floor.md), and how much of that speed was reached; the share "
      "of the active neurons on the GPU; MB a token and GB/s of either side.\n"
      "Of several values in a list, each is measured with each of the others; the model is loaded again for each.\n"
      "Example: hearth bench -m model.gguf -p 256,512 -n 64 -r 3 -o json\n"
      "Example: hearth bench -m model.gguf --vram-budget 2,4,6,8 -p 0 -n 64 -o json --plot budgets.svg");
  sub->callback([o] { bench(*o); });
}

}  // namespace hearth::tools
