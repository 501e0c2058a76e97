// Speed of the CPU device's operations, per instruction set: GB/s of weights (share of the measured read bandwidth) and
// GFLOP/s. Each case is the tests' (tests/cpu/device_case.h) and must agree with the oracle before it is timed.
//   bench_cpu [--threads=N] [--pin] [--isa=avx2] [Google Benchmark's flags]
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <tuple>

#include "bench_gemm.h"
#include "bench_lists.h"
#include "core/error.h"
#include "cpu/cpu.h"
#include "cpu/device_case.h"

namespace hearth::bench {
namespace {

using test::AttentionShape;
using test::Bound;
using test::Case;
using test::FfnShape;

double bandwidth = 0;  // bytes/s that the team reads

void verify(const Case& c, Device& device) {
  const auto run = [&](Device& d) {
    d.reserve(c.limits);
    Bound bound(d);
    const auto op = c.bind(bound);
    bound.reset();
    op();
    return bound.read();
  };
  const auto reference = cpu::make_reference_device();
  const auto want = run(*reference), have = run(device);
  for (size_t o = 0; o < want.size(); ++o) {
    for (size_t i = 0; i < want[o].second.size(); ++i) {
      const double a = want[o].second[i], b = have[o].second[i];
      if (std::isnan(a) && std::isnan(b)) continue;
      if (!(std::fabs(a - b) <= c.tolerance[o][i])) {
        fail("{}: {}[{}] is {}, the oracle says {} within {}", c.name, want[o].first, i, b, a, c.tolerance[o][i]);
      }
    }
  }
}

void report(benchmark::State& state, double bytes, double flops) {
  const auto per_second = benchmark::Counter::kIsIterationInvariantRate;
  state.counters["GB"] = benchmark::Counter(bytes / 1e9, per_second);
  state.counters["GFLOP"] = benchmark::Counter(flops / 1e9, per_second);
  state.counters["of_bandwidth"] = benchmark::Counter(bytes / bandwidth, per_second);
}

// `small` is verified, `make` is timed: the oracle would take minutes at the full size.
void add(const std::string& name, ThreadTeam& team, cpu::Isa isa, std::function<Case()> small,
         std::function<Case()> make) {
  auto* b =
      benchmark::RegisterBenchmark((name + "/" + cpu::to_string(isa)).c_str(), [=, &team](benchmark::State& state) {
        const auto device = cpu::make_device(team, isa);
        verify(small(), *device);
        const Case c = make();
        device->reserve(c.limits);
        Bound bound(*device);
        const auto op = c.bind(bound);
        bound.reset();
        for (auto _ : state) op();
        report(state, c.bytes, c.flops);
      });
  b->UseRealTime()->Unit(benchmark::kMicrosecond);
}

void add_all(ThreadTeam& team, cpu::Isa isa) {
  for (const DType type :
       {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_0, DType::q4_k, DType::q5_k, DType::q6_k}) {
    const char* t = traits(type).name;
    // Decode: 128 MiB or more of weights, far beyond the caches.
    const int64_t rows = type == DType::q4_0 ? 65536 : 16384;
    for (const bool packed : {false, true}) {
      if (packed && !is_quantized(type)) continue;
      const char* layout = packed ? "/packed" : "";
      for (const int64_t T : {1, 2, 4, 8}) {
        add(
            fmt::format("matmul/{}{}/T={}", t, layout, T), team, isa,
            [=] { return test::matmul_case(1, type, T, {128}, 4096, {.packed = packed}); },
            [=] { return test::matmul_speed(type, T, rows, 4096, packed); });
      }
      for (const int64_t T : {16, 64, 256}) {
        add(
            fmt::format("matmul/{}{}/T={}", t, layout, T), team, isa,
            [=] { return test::matmul_case(1, type, T, {64}, 2048, {.packed = packed}); },
            [=] { return test::matmul_speed(type, T, 4096, 4096, packed); });
      }
    }
    for (const double density : {-1.0, 0.1, 0.02}) {
      FfnShape s{.type = type, .n = 352, .n_embd = 1024, .sparse = density >= 0, .density = density};
      FfnShape large = s;
      large.n = 11008;
      large.n_embd = 4096;
      add(
          density < 0 ? fmt::format("ffn/{}/dense", t) : fmt::format("ffn/{}/density={}", t, density), team, isa,
          [=] { return test::ffn_case(1, s); }, [=] { return test::ffn_speed(large); });
    }
  }
  using Kind = test::PredictShape::Kind;
  for (const auto& [name, kind, type] : {std::tuple{"low-rank/f16", Kind::low_rank, DType::f16},
                                         {"low-rank/q4_0", Kind::low_rank, DType::q4_0},
                                         {"gate-copy/q4_0", Kind::gate_copy, DType::q4_0}}) {
    const test::PredictShape s{.kind = kind, .type = type, .n = 11008, .n_embd = 4096, .rank = 1024, .density = 0.11};
    test::PredictShape small = s;
    small.n = 500, small.n_embd = 256, small.rank = 64;
    add(
        fmt::format("predict/{}", name), team, isa, [=] { return test::predict_case(1, small); },
        [=] { return test::predict_case(1, s); });
  }
  const auto add_attention = [&](const std::string& name, const AttentionShape& large) {
    AttentionShape small = large;
    for (test::AttentionRun& run : small.runs)
      run.T = std::min<int64_t>(run.T, 40), run.first_pos = std::min<int64_t>(run.first_pos, 511);
    add(
        name, team, isa, [=] { return test::attention_case(1, small); }, [=] { return test::attention_speed(large); });
  };
  for (const int64_t context : {512, 8192}) {
    for (const int64_t kv : {32, 8}) {
      add_attention(fmt::format("attention/T=1/ctx={}/kv={}", context, kv),
                    {.runs = {{1, context - 1}}, .n_head = 32, .n_head_kv = kv, .head_dim = 128});
    }
  }
  add_attention("attention/T=8/ctx=512/kv=8",
                {.runs = std::vector<test::AttentionRun>(8, {1, 511}), .n_head = 32, .n_head_kv = 8, .head_dim = 128});
  add_attention("attention/T=256/kv=8", {.runs = {{256, 0}}, .n_head = 32, .n_head_kv = 8, .head_dim = 128});
}

void add_others(int threads) {
  const auto gemm = [](const std::string& name, auto multiply) {
    benchmark::RegisterBenchmark(name.c_str(),
                                 [=](benchmark::State& state) {
                                   const int64_t T = 256, n = 4096;
                                   const std::vector<float> x(static_cast<size_t>(T * n), 1.0f),
                                       w(static_cast<size_t>(n * n), 0.5f);
                                   std::vector<float> y(static_cast<size_t>(T * n));
                                   for (auto _ : state) multiply(T, n, n, x.data(), w.data(), y.data());
                                   HEARTH_CHECK(y[0] == 0.5f * static_cast<float>(n));
                                   report(state, static_cast<double>(n * n * 4), 2.0 * static_cast<double>(T * n * n));
                                 })
        ->UseRealTime()
        ->Unit(benchmark::kMicrosecond);
  };
  gemm("gemm/f32/T=256/eigen-1-thread", gemm_eigen);
#ifdef HEARTH_HAS_OPENBLAS
  gemm(fmt::format("gemm/f32/T=256/openblas-{}-threads", threads),
       [threads](auto... args) { gemm_openblas(threads, args...); });
#else
  (void)threads;
#endif
}

}  // namespace
}  // namespace hearth::bench

int main(int argc, char** argv) {
  int threads = 0, kept = 1;
  hearth::ThreadTeamOptions options;
  std::vector<hearth::cpu::Isa> isas = {hearth::cpu::best_isa()};
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--threads=", 10) == 0) {
      threads = std::atoi(argv[i] + 10);
    } else if (std::strcmp(argv[i], "--pin") == 0) {
      options.pin = true;
    } else if (std::strncmp(argv[i], "--isa=", 6) == 0) {
      isas.clear();
      for (const auto isa : hearth::cpu::available_isas()) {
        if (std::strcmp(argv[i] + 6, "all") == 0 || std::strcmp(argv[i] + 6, hearth::cpu::to_string(isa)) == 0)
          isas.push_back(isa);
      }
    } else {
      argv[kept++] = argv[i];
    }
  }
  argc = kept;
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  hearth::ThreadTeam team(threads, options);
  hearth::bench::bandwidth = hearth::cpu::measure_read_bandwidth(team);
  fmt::print(stderr, "{} threads read {:.1f} GB/s\n", team.size(), hearth::bench::bandwidth / 1e9);
  for (const auto isa : isas) {
    hearth::bench::add_all(team, isa);
    hearth::bench::add_lists(team, isa, hearth::bench::bandwidth);
  }
  hearth::bench::add_others(team.size());
  benchmark::RunSpecifiedBenchmarks();
}
