// The cost of a hand-off for the CPU beyond its bytes: dispatches of the team, mailboxes, and short lists of neurons;
// and how memory likes the ways in which the rows of a list can be laid out and read.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>

#include "bench_lists.h"
#include "core/mailbox.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"
#include "cpu/tiling.h"

namespace hearth::bench {
namespace {

// As many neurons as four layers of a 7B have, 1.1 GB in f16, and so many lists that even a large cache of all cores
// has lost most of their rows when one comes again, unless they are short.
constexpr int64_t kNeurons = 4 * 11008, kEmbd = 4096;
constexpr size_t kLists = 256;

using Ids = std::vector<int32_t>;

std::vector<Ids> random_lists(int64_t n) {
  std::mt19937 rng(5);
  Ids all(kNeurons);
  std::iota(all.begin(), all.end(), 0);
  std::vector<Ids> lists(kLists);
  for (Ids& ids : lists) {
    std::shuffle(all.begin(), all.end(), rng);
    ids.reserve(1);  // an empty list is one, too
    ids.assign(all.begin(), all.begin() + n);
    std::sort(ids.begin(), ids.end());
  }
  return lists;
}

// Weights of ones and zeros as far as bits go; only where they lie matters. One buffer serves all that run.
const std::byte* weights(ThreadTeam& team, size_t bytes) {
  static HostBuffer buffer;
  if (buffer.bytes() < bytes) {
    buffer = HostBuffer(bytes);
    team.for_chunks(static_cast<int64_t>(bytes), 1 << 20, [](int64_t begin, int64_t end, int) {
      std::fill(buffer.data() + begin, buffer.data() + end, std::byte{0x11});
    });
  }
  return buffer.data();
}

void add_team(ThreadTeam& team) {
  benchmark::RegisterBenchmark("team/empty", [&team](benchmark::State& state) {
    for (auto _ : state) team.for_chunks(team.size(), 1, [](int64_t, int64_t, int) {});
  })->UseRealTime();
  for (const bool direct : {false, true}) {
    const char* name = direct ? "team/empty-rounds/direct" : "team/empty-rounds";
    benchmark::RegisterBenchmark(name, [&team, direct](benchmark::State& state) {
      const auto nothing = [](int64_t, int64_t, int) {};
      std::array<ThreadTeam::Round, 2> rounds{{{team.size(), 1, nothing}, {team.size(), 1, nothing}}};
      rounds[0].direct = direct;
      for (auto _ : state) team.for_rounds(rounds, [](size_t) {});
    })->UseRealTime();
  }
  benchmark::RegisterBenchmark("mailbox/round-trip", [](benchmark::State& state) {
    HostMailbox box(kEmbd, kNeurons);
    std::vector<float> x(1);
    std::thread cpu([&box] {
      while (box.wait_input()[0] == 0.0f) box.answer();
      box.answer();
    });
    for (auto _ : state) {
      box.post(x.data(), 1);
      box.collect(x.data(), 0);
    }
    x[0] = 1.0f;
    box.post(x.data(), 1);
    cpu.join();
  })->UseRealTime();
}

// How the CPU is told which neurons it has.
enum class Told {
  predicted,  // as a predictor names them
  hinted,     // the same, and nearly all of them before: their rows have been fetched
  again,      // the list that it has just been told: nothing comes from memory
};
constexpr std::array kTold = {"predicted", "hinted", "again"};

// A list of the same length, one in twelve of whose neurons are others.
Ids nearly(const Ids& list) {
  Ids other = list;
  for (size_t i = 0; i < other.size(); i += 12) {
    const int32_t end = i + 1 < list.size() ? list[i + 1] : kNeurons;
    other[i] = std::min(end - 1, list[i] + 1);
  }
  return other;
}

// ffn_sparse() of one token with a list of neurons, as the CPU's side of a layer runs it.
void add_list(ThreadTeam& team, cpu::Isa isa, DType type, int64_t n, Told told, double bandwidth) {
  auto* b = benchmark::RegisterBenchmark(
      fmt::format("list/{}/{}={}", traits(type).name, kTold[static_cast<size_t>(told)], n).c_str(),
      [=, &team](benchmark::State& state) {
        const auto device = cpu::make_device(team, isa);
        Limits l;
        l.max_cols = l.n_embd = kEmbd;
        l.max_rows = l.n_ff = kNeurons;
        l.quantized_weights = is_quantized(type);
        device->reserve(l);
        const Matrix shape{type, kNeurons, kEmbd, nullptr, nullptr};
        const std::byte* all = weights(team, 3 * shape.bytes());
        const auto matrix = [&](size_t i) { return Matrix{type, kNeurons, kEmbd, all + i * shape.bytes(), nullptr}; };
        FfnShard shard;
        shard.gate = matrix(0), shard.up = matrix(1), shard.down_t = matrix(2);
        shard.act = Activation::relu;
        const std::vector<float> bias(kNeurons, 1e6f);  // all active
        shard.gate_bias = {bias.data(), kNeurons};
        std::vector<float> x(kEmbd, 1.0f), y(kEmbd), weight(kEmbd, 1.0f);
        std::vector<std::byte> q8(device->q8_bytes(kEmbd));
        const Act in{x.data(), q8.data()};
        device->norm({.weight = {weight.data(), kEmbd}, .n = kEmbd}, x.data(), 1, in);
        auto lists = random_lists(n);
        auto count = static_cast<int32_t>(n);
        const HostMailbox nothing_comes(1, 1);
        size_t next = 0;
        for (auto _ : state) {
          Ids& list = lists[told == Told::again ? 0 : next++ % kLists];
          SparseArgs sparse;
          sparse.candidates = NeuronLists{list.data(), &count, kNeurons};
          if (told == Told::hinted) device->row_prefetch()->fetch(shard, nearly(list), nothing_comes);
          // As a hand-off brings it: the input has just been written, the output been cleared.
          std::fill(x.begin(), x.end(), 1.0f);
          std::fill(y.begin(), y.end(), 0.0f);
          device->row_prefetch()->fetch_input(shard, in, nothing_comes);
          const auto start = std::chrono::steady_clock::now();
          device->sparse_ffn()->ffn_sparse(shard, sparse, in, 1, {}, y.data(), nullptr);
          state.SetIterationTime(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        }
        const double bytes = static_cast<double>(shape.row_size()) * static_cast<double>(n) * 3;
        state.counters["GB"] = benchmark::Counter(bytes / 1e9, benchmark::Counter::kIsIterationInvariantRate);
        state.counters["bytes_us"] = bytes / bandwidth * 1e6;
      });
  b->UseManualTime()->Unit(benchmark::kMicrosecond);
}

enum class Layout {
  separate,  // whole rows of up, then of down, from two matrices
  bundles,   // the same, each neuron's two rows side by side
  stripes,   // whole rows of up, then stripes of columns of down, one for each of 16 threads
};

void add_layout(ThreadTeam& team, cpu::Isa isa, const char* name, Layout layout, int64_t n, double bandwidth) {
  auto* b = benchmark::RegisterBenchmark(
      fmt::format("rows/f16/{}/n={}", name, n).c_str(), [=, &team](benchmark::State& state) {
        constexpr size_t kRow = kEmbd * 2, kStripes = 16;
        constexpr auto kF16 = static_cast<size_t>(cpu::WeightType::f16);
        const cpu::Kernels& k = cpu::kernels(isa);
        const size_t stride = layout == Layout::bundles ? 2 * kRow : kRow;
        const std::byte* up = weights(team, 2 * kNeurons * kRow);
        const std::byte* down = up + (layout == Layout::bundles ? kRow : kNeurons * kRow);
        const auto lists = random_lists(n);
        std::vector<float> x(kEmbd, 1.0f), v(static_cast<size_t>(n)), sums(static_cast<size_t>(team.size()) * kEmbd);
        const int64_t piece = std::max<int64_t>(1, n / (16 * (n > 500 ? 4 : 1)));
        size_t next = 0;
        for (auto _ : state) {
          const int32_t* ids = lists[next++ % kLists].data();
          team.for_chunks(n, piece, [&](int64_t begin, int64_t end, int thread) {
            const cpu::RowsView u{up, stride, ids + begin, end - begin}, d{down, stride, ids + begin, end - begin};
            k.dot_rows[kF16](u, layout == Layout::stripes ? nullptr : &d, kEmbd, x.data(), 0, 1, v.data() + begin, 0);
            if (layout == Layout::stripes) return;
            k.axpy_rows[kF16](d, nullptr, kEmbd, v.data() + begin, sums.data() + thread * kEmbd);
          });
          if (layout != Layout::stripes) continue;
          team.for_chunks(kStripes, 1, [&](int64_t stripe, int64_t, int) {
            const size_t columns = kEmbd / kStripes, at = static_cast<size_t>(stripe) * columns;
            k.axpy_rows[kF16]({down + 2 * at, stride, ids, n}, nullptr, columns, v.data(), sums.data() + at);
          });
        }
        const double bytes = 2.0 * kRow * static_cast<double>(n);
        state.counters["GB"] = benchmark::Counter(bytes / 1e9, benchmark::Counter::kIsIterationInvariantRate);
        state.counters["bytes_us"] = bytes / bandwidth * 1e6;
      });
  b->UseRealTime()->Unit(benchmark::kMicrosecond);
}

}  // namespace

void add_lists(ThreadTeam& team, cpu::Isa isa, double bandwidth) {
  add_team(team);
  for (const DType type : {DType::f16, DType::q8_0, DType::q4_0}) {
    for (const int64_t n : {0, 16, 60, 120, 240, 1200}) {
      for (const Told told : {Told::predicted, Told::hinted, Told::again})
        add_list(team, isa, type, n, told, bandwidth);
    }
  }
  for (const int64_t n : {120, 1200}) {
    add_layout(team, isa, "separate", Layout::separate, n, bandwidth);
    add_layout(team, isa, "bundles", Layout::bundles, n, bandwidth);
    add_layout(team, isa, "stripes", Layout::stripes, n, bandwidth);
  }
}

}  // namespace hearth::bench
