// The measurements of `hearth bench`.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>

#include "core/error.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "tools/bench.h"
#include "tools/progress.h"

namespace hearth::tools {
namespace {

using engine::Part;

double seconds_of(const std::array<double, engine::kParts>& parts, Part part) {
  return parts[static_cast<size_t>(part)];
}

}  // namespace

MeanSd mean_sd(std::span<const double> values) {
  MeanSd r;
  if (values.empty()) return r;
  for (const double v : values) r.mean += v / static_cast<double>(values.size());
  double squares = 0;
  for (const double v : values) squares += (v - r.mean) * (v - r.mean);
  if (values.size() > 1) r.sd = std::sqrt(squares / static_cast<double>(values.size() - 1));
  return r;
}

double prompt_flops(const model::Model& model, int64_t T, int64_t n_past) {
  const model::Config& c = model.config();
  const auto size = [](const Matrix& m) { return m ? static_cast<double>(m.rows) * static_cast<double>(m.cols) : 0.0; };
  double weights = 0;
  for (const model::LayerWeights& l : model.weights().layers) {
    for (const Matrix* m : {&l.wq, &l.wk, &l.wv, &l.wo, &l.ffn.gate, &l.ffn.up, &l.ffn.down, &l.ffn.down_t}) {
      weights += size(*m);
    }
  }
  double seen = 0;  // positions seen, summed over tokens and layers
  for (int64_t l = 0; l < c.n_layer; ++l) {
    for (int64_t t = 0; t < T; ++t) seen += static_cast<double>(c.seen(l, n_past + t + 1));
  }
  const double attention = 4.0 * static_cast<double>(c.n_head * c.head_dim) * seen;
  return 2.0 * weights * static_cast<double>(T) + attention + 2.0 * size(model.weights().output);
}

std::string BenchRow::test() const {
  std::string name = n_prompt > 0 ? fmt::format("pp{}", n_prompt) : fmt::format("tg{}", n_gen);
  if (n_parallel > 1) name += fmt::format(" × {}", n_parallel);
  return n_depth > 0 ? fmt::format("{} @ d{}", name, n_depth) : name;
}

std::vector<double> BenchRow::rates() const {
  std::vector<double> r;
  for (const double s : seconds) r.push_back(static_cast<double>(n_prompt + n_gen * n_parallel) / s);
  return r;
}

Bench::Bench(Session& session, int repetitions, bool measure_bandwidth)
    : session_(session),
      engine_(session.engine()),
      text_(session.text()),
      repetitions_(repetitions),
      measure_bandwidth_(measure_bandwidth) {}

BenchRow Bench::prompt(int64_t n, int64_t depth) {
  const std::vector<int32_t> ids = random_ids(n);
  BenchRow row = new_row(depth);
  row.n_prompt = n;
  const bool measure = std::exchange(measure_bandwidth_, false);  // arithmetic is what limits a prompt
  repeat(row, depth, [&] { engine_.eval(text_, ids); });
  measure_bandwidth_ = measure;
  row.flops_per_second = prompt_flops(session_.model(), n, depth) / mean_sd(row.seconds).mean;
  if (session_.profiler() != nullptr) row.profile = profiled(depth, 1, [&] { engine_.eval(text_, ids); });
  return row;
}

BenchRow Bench::generation(int64_t n, int64_t depth, int64_t n_parallel) {
  const std::vector<int32_t> ids = random_ids(n * n_parallel);
  const auto generate = [&] {
    for (auto at = ids.begin(); at != ids.end(); at += n_parallel) {
      engine::Batch batch;
      batch.add(text_, {&*at, 1});
      for (size_t i = 0; i < others_.size(); ++i) batch.add(others_[i], {&at[static_cast<std::ptrdiff_t>(i) + 1], 1});
      engine_.eval(batch);
      for (int64_t row = 0; row < n_parallel; ++row) engine_.best(row);
    }
  };
  BenchRow row = new_row(depth);
  row.n_gen = n, row.n_parallel = n_parallel;
  n_parallel_ = n_parallel;
  const engine::DensityStats before = engine_.density();
  repeat(row, depth, generate);
  const engine::DensityStats counted = engine_.density().since(before);
  row.density = counted.density();
  n_parallel_ = 1, others_.clear();
  if (n_parallel > 1) return row;  // what a token reads depends on how much its neighbours need the same
  const engine::TokenTraffic traffic = engine_.traffic(counted, depth + n / 2);
  row.token_bytes = traffic.total();
  engine::SideBytes bandwidth = bandwidths_;
  row.memory_bandwidth = bandwidth.main;
  if (row.division) row.division->bandwidth = bandwidth;
  if (bandwidth.host == 0) bandwidth.host = bandwidth.main;
  if (bandwidth.link == 0) bandwidth.link = bandwidth.host;  // a stand-in for a GPU
  if (bandwidth.main > 0) row.floor_seconds = engine::floor_seconds(traffic, bandwidth);
  if (row.division) {
    row.division->hit_share = 1 - counted.host_share();
  }
  if (session_.profiler() != nullptr) row.profile = profiled(depth, n, generate);
  return row;
}

BenchRow Bench::new_row(int64_t depth) {
  BenchRow row;
  row.backend = !session_.planned() ? (session_.on_gpu() ? "CUDA" : "CPU") : session_.on_gpu() ? "CUDA+CPU" : "CPU+CPU";
  row.device = session_.device().name();
  row.threads = session_.team().size();
  row.n_depth = depth;
  row.n_ctx = engine_.n_ctx();
  row.density = NAN;
  if (!session_.planned()) return row;
  const PlannedRun& plan = *session_.planned();
  row.division = BenchDivision{.vram_budget = plan.placement.vram_budget,
                               .gpu_bytes_planned = plan.placement.planned_bytes(),
                               .expected_rate = plan.tokens_per_second.value_or(0),
                               .hit_share = NAN};
  for (const MemoryUse& use : session_.device().memory()) row.division->gpu_bytes_used += use.bytes;
  return row;
}

// Random tokens: no text is needed, so models without a vocabulary work too. The same ones for every test of a length,
// so that runs compare.
std::vector<int32_t> Bench::random_ids(int64_t n) {
  std::mt19937 random(20240229);
  std::vector<int32_t> ids(static_cast<size_t>(n));
  std::uniform_int_distribution<int32_t> any(0, static_cast<int32_t>(engine_.config().n_vocab) - 1);
  for (int32_t& id : ids) id = any(random);
  return ids;
}

// Beside every repetition: on a shared machine the bandwidth itself changes from second to second.
void Bench::measure_bandwidths() {
  if (!measure_bandwidth_) return;
  const double host = session_.planned() || !session_.on_gpu() ? cpu::measure_read_bandwidth(session_.team()) : 0;
  const auto gpu = session_.gpu();
  const cuda::Bandwidth device = gpu ? cuda::measure_bandwidth(*gpu) : cuda::Bandwidth{.memory_read = host};
  const double share = 1.0 / repetitions_;
  bandwidths_ += {share * device.memory_read, session_.planned() ? share * host : 0, share * device.host_to_device};
}

// Times work() on a context of `depth` tokens, after one run to warm up.
template <typename Work>
void Bench::repeat(BenchRow& row, int64_t depth, Work&& work) {
  bandwidths_ = {};
  text_.truncate(0);
  if (depth > 0) engine_.eval(text_, random_ids(depth));
  while (std::ssize(others_) < n_parallel_ - 1) others_.push_back(text_.fork("bench"));
  LiveLine live(false);
  const auto tokens = static_cast<double>(row.n_prompt + row.n_gen * row.n_parallel);
  const auto show = [&] {
    const double seconds = mean_sd(row.seconds).mean;
    const auto done = std::ssize(row.seconds);
    const double hits = session_.planned() ? 1 - engine_.density().host_share() : NAN;
    live.show(row.test() + ": " +
              live_text("repetitions", done, repetitions_, seconds > 0 ? tokens / seconds : 0, hits,
                        done > 0 ? seconds * static_cast<double>(repetitions_ - done) : -1));
  };
  for (int i = -1; i < repetitions_; ++i) {
    truncate(depth);
    if (live.due()) show();
    if (i >= 0) measure_bandwidths();
    const auto begin = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    if (i >= 0) row.seconds.push_back(seconds.count());
  }
}

void Bench::truncate(int64_t depth) {
  text_.truncate(depth);
  for (engine::Sequence& other : others_) other.truncate(depth);
}

int64_t Bench::hand_offs() const {
  if (!session_.planned()) return 0;
  const auto& layers = session_.planned()->placement.layers;
  const int64_t n_ff = engine_.config().n_ff;
  return std::count_if(layers.begin(), layers.end(),
                       [&](const engine::LayerPlacement& l) { return !l.ffn_on_gpu(n_ff); });
}

// One more run, with the profilers on. Per pass.
template <typename Work>
BenchProfile Bench::profiled(int64_t depth, int64_t passes, Work&& work) {
  truncate(depth);
  const auto each = [&](engine::ProfilingDevice* profiler, auto& parts, BenchProfile::Rows& rows) {
    if (profiler == nullptr) return;
    parts = profiler->parts();
    rows = profiler->rows();
    for (double& p : parts) p /= static_cast<double>(passes);
    for (auto& r : rows) r.seconds /= static_cast<double>(passes);
    profiler->enable(false);
  };
  for (engine::ProfilingDevice* p : {session_.profiler(), session_.host_profiler()}) {
    if (p != nullptr) p->enable(true), p->reset();
  }
  work();
  BenchProfile profile;
  each(session_.profiler(), profile.main, profile.main_rows);
  each(session_.host_profiler(), profile.host, profile.host_rows);
  for (BenchProfile::Rows* rows : {&profile.main_rows, &profile.host_rows}) {
    for (auto& r : *rows) {
      r.calls /= passes;
      r.weight_bytes /= static_cast<size_t>(passes);
    }
  }
  if (hand_offs() == 0) return profile;
  const double hot = session_.profiler()->ffn_beside_hand_offs() / static_cast<double>(passes);
  const double cold = seconds_of(profile.host, Part::ffn), wait = seconds_of(profile.main, Part::wait);
  profile.hand_off = std::max(0.0, hot + wait - std::max(hot, cold)) / static_cast<double>(hand_offs());
  return profile;
}

}  // namespace hearth::tools
