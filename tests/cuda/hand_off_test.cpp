// Hand-offs of the GPU device to a CPU thread against the reference's: what the CPU gets, and what y becomes.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "twin_mailbox.h"
#include "twin_predictor.h"

namespace hearth::test {
namespace {

class GpuHandOffTest : public GpuFfnTest {
 protected:
  static constexpr int64_t kCapacity = 2048, kMaxIds = 4096;

  // A layer of n_hot neurons on the device and n_cold on the CPU, as the engine runs it: x is what is posted and what
  // the sums are added to.
  struct Layer {
    Input in;
    TwinShard shard;
    Twin<float> x;
    int64_t n_embd;
  };
  static Layer make_layer(std::mt19937& rng, DType type, int64_t n, int64_t n_embd) {
    Layer layer{make_input(rng, 1, n_embd), TwinShard(*ref_, *gpu_, rng, type, n, n_embd, true, true),
                Twin<float>(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n_embd))), n_embd};
    layer.shard.act = Activation::relu;
    return layer;
  }
  static void expect_same_x(const Layer& layer, double error) {
    EXPECT_LE(relative_error(layer.x.read(kGpu), layer.x.read(kRef)), error);
  }
  static void expect_received(const std::vector<Received>& gpu, const std::vector<Received>& ref, bool values,
                              double error) {
    ASSERT_EQ(gpu.size(), ref.size());
    for (size_t i = 0; i < gpu.size(); ++i) {
      ASSERT_EQ(gpu[i].ids, ref[i].ids) << i;
      EXPECT_LE(relative_error(gpu[i].x, ref[i].x), error) << i;
      if (values) {
        EXPECT_LE(relative_error(gpu[i].values, ref[i].values), error) << i;
      }
    }
  }
};

TEST_F(GpuHandOffTest, PostAndCollect) {
  std::mt19937 rng(30);
  for (const int64_t n : {1, 33, 2048}) {
    SCOPED_TRACE(n);
    Twin<float> x(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n)));
    std::vector<std::vector<Received>> got;
    for (const int s : {kRef, kGpu}) {
      const auto mailbox = device(s).open_mailbox(kCapacity, kMaxIds);
      Server server(*mailbox, n, 3);
      for (int i = 0; i < 3; ++i) device(s).post(*mailbox, x.on(s), n), device(s).collect(*mailbox, x.on(s), n);
      device(s).synchronize();
      got.push_back(server.received());
    }
    expect_received(got[kGpu], got[kRef], false, 1e-6);
    EXPECT_LE(relative_error(x.read(kGpu), x.read(kRef)), 1e-6);
  }
}

TEST_F(GpuHandOffTest, PredictedNeuronsOfBothDevices) {
  std::mt19937 rng(31);
  for (const DType type : {DType::f16, DType::q8_0, DType::q4_0}) {
    for (const int64_t n_cold : {0, 37, 2000}) {
      for (const double density : {0.0, 0.15, 1.0}) {
        const int64_t n = 1003, n_embd = 288;
        SCOPED_TRACE(fmt::format("{} n_cold {} density {}", traits(type).name, n_cold, density));
        Layer l = make_layer(rng, type, n, n_embd);
        l.shard.keep_gates_from_zero(l.in.on(kRef));
        const TwinPredictor p(*ref_, *gpu_, rng, {n + n_cold, n_embd, 96, type, type, true, true}, l.in.on(kRef),
                              density);
        const Twin<int32_t> ids(*ref_, *gpu_, std::vector<int32_t>(static_cast<size_t>(n))),
            counts(*ref_, *gpu_, std::vector<int32_t>(2));
        std::vector<std::vector<Received>> got;
        for (const int s : {kRef, kGpu}) {
          const auto mailbox = device(s).open_mailbox(kCapacity, kMaxIds);
          Server server(*mailbox, n_embd, 2);
          for (int i = 0; i < 2; ++i) {
            device(s).predict(p.on(s), l.in.on(s),
                              {.n_first = n,
                               .first = {ids.on(s), counts.on(s)},
                               .rest = {},
                               .hand_off = {mailbox.get(), l.x.on(s), n_embd}});
            SparseArgs sparse;
            sparse.predicted = ids.on(s), sparse.n_predicted = counts.on(s), sparse.n_active = counts.on(s) + 1;
            sparse.collect = mailbox.get();
            device(s).ffn_sparse(l.shard.on(s), sparse, l.in.on(s), {}, l.x.on(s));
          }
          device(s).synchronize();
          got.push_back(server.received());
        }
        for (const Received& r : got[kGpu]) EXPECT_EQ(r.ids, p.named(n, n + n_cold));
        EXPECT_EQ(counts.read(kGpu), counts.read(kRef));
        expect_received(got[kGpu], got[kRef], false, 2 * bound(type, 1));
        expect_same_x(l, 2 * bound(type, 1));
      }
    }
  }
}

// Between two hand-offs the device may tell what the second will bring. A rank of 1024 is more rows than eight for each
// of the multiprocessors that hints use.
TEST_F(GpuHandOffTest, Hints) {
  std::mt19937 rng(36);
  for (const DType type : {DType::f16, DType::q8_0, DType::q4_0}) {
    for (const auto& [n_linked, rank] : {std::pair<int64_t, int64_t>{0, 64}, {45, 64}, {45, 1024}, {600, 64}}) {
      for (const double density : {0.0, 0.15, 1.0}) {
        const int64_t n = 1003, n_cold = 600, n_embd = 512;
        SCOPED_TRACE(fmt::format("{} linked {} rank {} density {}", traits(type).name, n_linked, rank, density));
        const Layer l = make_layer(rng, type, 1, n_embd);
        const TwinPredictor p(*ref_, *gpu_, rng, {n + n_cold, n_embd, rank, type, type, true, true}, l.in.on(kRef),
                              density);
        std::vector<int32_t> expected = p.named(n, n + n_cold);
        std::erase_if(expected, [&, linked = n_linked](int32_t id) { return id < linked; });
        for (const int s : {kRef, kGpu}) {
          const auto mailbox = device(s).open_mailbox(kCapacity, kMaxIds);
          const auto marks = MailboxMarks::of(n + n_cold, n, static_cast<int32_t>(n + n_linked));
          std::vector<std::vector<int32_t>> hinted;
          std::atomic<int> n_taken = 0;
          std::thread cpu([&] {
            std::fill_n(mailbox->answer_buffer(), n_embd, 0.0f);
            for (int i = 0; i < 4; ++i) {
              mailbox->wait_input();
              mailbox->answer();
              if (i == 3) break;
              const auto ids = mailbox->wait_hints(marks);
              hinted.emplace_back(ids.begin(), ids.end());
              ++n_taken;
            }
          });
          for (int i = 0; i < 4; ++i) {
            // The next hand-off may overtake hints that the CPU has not taken in time; here it must not.
            if (i > 0) device(s).synchronize();
            while (n_taken < std::min(i, 2)) std::this_thread::yield();
            device(s).post(*mailbox, l.x.on(s), n_embd);
            if (i < 2) device(s).hint(p.on(s), l.in.on(s), {mailbox.get(), n, n_linked});
            device(s).collect(*mailbox, l.x.on(s), n_embd);
          }
          device(s).synchronize();
          cpu.join();
          ASSERT_EQ(hinted.size(), 3u);
          EXPECT_EQ(hinted[0], expected) << "device " << s;
          EXPECT_EQ(hinted[1], expected) << "device " << s;
          EXPECT_TRUE(hinted[2].empty()) << "nothing was told";
        }
      }
    }
  }
}

// Some of the CPU's neurons are the device's to compute: it reads their rows from page-locked host memory.
TEST_F(GpuHandOffTest, LinkedNeurons) {
  std::mt19937 rng(34);
  for (const DType type : kAllTypes) {
    for (const int64_t n_linked : {1, 5, 700}) {
      for (const double density : {0.0, 0.15, 1.0}) {
        const int64_t n = 903, n_cold = n_linked + 100, n_embd = 288;
        SCOPED_TRACE(fmt::format("{} n_linked {} density {}", traits(type).name, n_linked, density));
        Layer l = make_layer(rng, type, n, n_embd);
        l.shard.keep_gates_from_zero(l.in.on(kRef));
        TwinShard linked(*ref_, *gpu_, rng, type, n_linked, n_embd, true, true);
        linked.act = Activation::relu;
        linked.keep_gates_from_zero(l.in.on(kRef));
        HostShard pinned(*gpu_, linked.on(kRef));
        const TwinPredictor p(*ref_, *gpu_, rng, {n + n_cold, n_embd, 96, type, type, true, true}, l.in.on(kRef),
                              density);
        // Whose hints pass beside the neurons that are read over the link.
        const TwinPredictor next(*ref_, *gpu_, rng, {n + n_cold, n_embd, n_linked == 700 ? 1024 : 64, type, type},
                                 l.in.on(kRef), density);
        const Twin<int32_t> ids(*ref_, *gpu_, std::vector<int32_t>(static_cast<size_t>(n))),
            linked_ids(*ref_, *gpu_, std::vector<int32_t>(static_cast<size_t>(n_linked))),
            counts(*ref_, *gpu_, std::vector<int32_t>(4));
        std::vector<std::vector<Received>> got;
        for (const int s : {kRef, kGpu}) {
          const auto mailbox = device(s).open_mailbox(kCapacity, kMaxIds);
          Server server(*mailbox, n_embd, 4);
          ASSERT_TRUE(device(s).can_link(pinned.shard()));
          const LinkedNeurons far{device(s).link(pinned.shard(), pinned.link_memory()),
                                  {linked_ids.on(s), counts.on(s) + 2},
                                  counts.on(s) + 3};
          for (int i = 0; i < 4; ++i) {
            device(s).predict(p.on(s), l.in.on(s),
                              {.n_first = n,
                               .first = {ids.on(s), counts.on(s)},
                               .rest = {},
                               .hand_off = {mailbox.get(), l.x.on(s), n_embd},
                               .n_linked = n_linked,
                               .linked = far.named});
            if (i > 0) device(s).hint(next.on(s), l.in.on(s), {mailbox.get(), n, n_linked});
            SparseArgs sparse;
            sparse.predicted = ids.on(s), sparse.n_predicted = counts.on(s), sparse.n_active = counts.on(s) + 1;
            sparse.collect = mailbox.get(), sparse.linked = &far;
            device(s).ffn_sparse(l.shard.on(s), sparse, l.in.on(s), {}, l.x.on(s));
          }
          device(s).synchronize();
          got.push_back(server.received());
        }
        std::vector<int32_t> rest = p.named(n, n + n_cold);
        std::erase_if(rest, [&](int32_t id) { return id < n_linked; });
        for (const Received& r : got[kGpu]) EXPECT_EQ(r.ids, rest);
        EXPECT_EQ(counts.read(kGpu), counts.read(kRef));
        expect_received(got[kGpu], got[kRef], false, 2 * bound(type, 1));
        expect_same_x(l, 2 * bound(type, 1));
      }
    }
  }
}

// Without a hand-off the FFN finds the predicted neurons by itself if it comes next. Whatever comes between, the lists
// are the same, and so are the sums, to the bit.
TEST_F(GpuHandOffTest, ListsThatNobodyHandsOver) {
  std::mt19937 rng(38);
  struct Case {
    int64_t n, n_linked, n_embd;
  };
  for (const DType type : {DType::f16, DType::q8_0, DType::q4_0}) {
    for (const auto& [n, n_linked, n_embd] : {Case{1, 0, 160},
                                              {903, 0, 2592},
                                              {903, 5, 160},
                                              {32, 64, 160},
                                              {1999, 700, 288},
                                              {9001, 0, 96},
                                              {8001, 1203, 96}}) {
      for (const double density : {0.0, 0.11, 1.0}) {
        SCOPED_TRACE(
            fmt::format("{} n {} linked {} n_embd {} density {}", traits(type).name, n, n_linked, n_embd, density));
        Layer l = make_layer(rng, type, n, n_embd);
        l.shard.keep_gates_from_zero(l.in.on(kRef));
        TwinShard linked(*ref_, *gpu_, rng, type, std::max<int64_t>(n_linked, 1), n_embd, true, true);
        linked.act = Activation::relu;
        linked.keep_gates_from_zero(l.in.on(kRef));
        HostShard pinned(*gpu_, linked.on(kRef));
        const PredictorShape shape{n + n_linked, n_embd, 96, type, type, true, true};
        const TwinPredictor p(*ref_, *gpu_, rng, shape, l.in.on(kRef), density),
            other(*ref_, *gpu_, rng, shape, l.in.on(kRef), 0.3);
        const auto room = [&](int64_t size) {
          return Twin<int32_t>(*ref_, *gpu_, std::vector<int32_t>(static_cast<size_t>(size), -1));
        };
        const Twin<int32_t> ids = room(n), other_ids = room(n), linked_ids = room(std::max<int64_t>(n_linked, 1)),
                            other_linked = room(std::max<int64_t>(n_linked, 1)), counts = room(4),
                            other_counts = room(4);
        const std::vector<float> start = random_normal(rng, static_cast<size_t>(n_embd));
        const auto mailbox = gpu_->open_mailbox(kCapacity, kMaxIds + 8192);
        const auto run = [&](int s, auto&& between) {
          const Twin<float> y(*ref_, *gpu_, start);
          const LinkedNeurons far{device(s).link(pinned.shard(), pinned.link_memory()),
                                  {linked_ids.on(s), counts.on(s) + 2},
                                  counts.on(s) + 3};
          PredictArgs args{.n_first = n, .first = {ids.on(s), counts.on(s)}, .rest = {}, .hand_off = {}};
          if (n_linked > 0) args.n_linked = n_linked, args.linked = far.named;
          device(s).predict(p.on(s), l.in.on(s), args);
          between();
          SparseArgs sparse;
          sparse.predicted = ids.on(s), sparse.n_predicted = counts.on(s), sparse.n_active = counts.on(s) + 1;
          if (n_linked > 0) sparse.linked = &far;
          device(s).ffn_sparse(l.shard.on(s), sparse, l.in.on(s), {}, y.on(s));
          return y.read(s);
        };
        const auto expect_lists = [&] {
          EXPECT_EQ(counts.read(kGpu), counts.read(kRef));
          const auto first = [&](const Twin<int32_t>& of, const std::vector<int32_t>& expected) {
            std::vector<int32_t> got = of.read(kGpu);
            got.resize(expected.size());
            EXPECT_EQ(got, expected);
          };
          first(ids, p.named(0, n));
          if (n_linked > 0) first(linked_ids, p.named(n, n + n_linked));
        };
        const std::vector<float> expected = run(kRef, [] {}), y = run(kGpu, [] {});
        EXPECT_LE(relative_error(y, expected), 2 * bound(type, 1));
        expect_lists();
        EXPECT_EQ(run(kGpu, [&] { gpu_->synchronize(); }), y);
        expect_lists();
        EXPECT_EQ(run(kGpu, [&] { gpu_->hint(other.on(kGpu), l.in.on(kGpu), {mailbox.get(), n / 2, 0}); }), y);
        expect_lists();
        EXPECT_EQ(
            run(kGpu,
                [&] {
                  PredictArgs args{
                      .n_first = n, .first = {other_ids.on(kGpu), other_counts.on(kGpu)}, .rest = {}, .hand_off = {}};
                  if (n_linked > 0)
                    args.n_linked = n_linked, args.linked = {other_linked.on(kGpu), other_counts.on(kGpu) + 1};
                  gpu_->predict(other.on(kGpu), l.in.on(kGpu), args);
                }),
            y);
        expect_lists();
        EXPECT_EQ(other_counts.read(kGpu)[0], static_cast<int32_t>(other.named(0, n).size()));
      }
    }
  }
}

// The device has only the gate rows of the last neurons.
TEST_F(GpuHandOffTest, GatesOfTheCpusNeurons) {
  std::mt19937 rng(32);
  for (const DType type : kAllTypes) {
    for (const auto& [n_hot, n_cold] : {std::pair<int64_t, int64_t>{500, 503}, {1, 40}, {63, 1}, {0, 100}}) {
      SCOPED_TRACE(fmt::format("{} hot {} cold {}", traits(type).name, n_hot, n_cold));
      const int64_t n_embd = 160;
      Layer l = make_layer(rng, type, n_hot + n_cold, n_embd);
      l.shard.keep_gates_from_zero(l.in.on(kRef));
      const auto shard = [&, hot = n_hot](int s) {
        FfnShard f = l.shard.on(s);
        f.up.rows = f.down_t.rows = hot;
        return f;
      };
      const Twin<int32_t> n_active(*ref_, *gpu_, {-1}),
          active(*ref_, *gpu_, std::vector<int32_t>(static_cast<size_t>(n_hot + 1), -7));
      std::vector<std::vector<Received>> got;
      for (const int s : {kRef, kGpu}) {
        const auto mailbox = device(s).open_mailbox(kCapacity, kMaxIds);
        Server server(*mailbox, n_embd, 2);
        for (int i = 0; i < 2; ++i) {
          SparseArgs sparse;
          sparse.active_ids = active.on(s), sparse.n_active = n_active.on(s);
          sparse.hand_off = {mailbox.get(), l.x.on(s), n_embd}, sparse.collect = mailbox.get();
          device(s).ffn_sparse(shard(s), sparse, l.in.on(s), {}, l.x.on(s));
        }
        device(s).synchronize();
        got.push_back(server.received());
      }
      EXPECT_EQ(active.read(kGpu), active.read(kRef));
      EXPECT_EQ(n_active.read(kGpu), n_active.read(kRef));
      expect_received(got[kGpu], got[kRef], true, 2 * bound(type, 1));
      expect_same_x(l, 2 * bound(type, 1));
    }
  }
}

// A norm that is done on the way, by the block that hands its result over.
TEST_F(GpuHandOffTest, HandsOverWhatItNorms) {
  std::mt19937 rng(37);
  for (const DType type : {DType::f16, DType::q8_0}) {
    for (const int64_t n_embd : {288, 4128, 5120, 8192}) {
      for (const bool exact : {false, true}) {
        SCOPED_TRACE(fmt::format("{} n_embd {} {}", traits(type).name, n_embd, exact ? "gates" : "predictor"));
        const int64_t n = 40, n_cold = 37;
        const Input factors = make_input(rng, 1, 64);
        Layer l{make_input(rng, 1, n_embd), TwinShard(*ref_, *gpu_, rng, type, n + n_cold, n_embd, true, true),
                Twin<float>(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n_embd))), n_embd};
        l.shard.act = Activation::relu;
        const TwinMatrix maker(*ref_, *gpu_, rng, DType::f16, n_embd, 64, 0.1f);
        const Twin<float> weight(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n_embd)));
        const auto make_input_of = [&](int s) {
          const MatmulPart part{.w = maker.on(s), .y = l.x.on(s), .accumulate = true};
          device(s).matmul({&part, 1}, factors.on(s), 1);
          device(s).norm({NormKind::rms, {weight.on(s), n_embd}, {}, 1e-5f, n_embd}, l.x.on(s), 1, l.in.on(s));
        };
        make_input_of(kRef);
        l.shard.keep_gates_from_zero(l.in.on(kRef));
        const TwinPredictor p(*ref_, *gpu_, rng, {n + n_cold, n_embd, 64, type, type}, l.in.on(kRef), 0.4);
        l.x.reset(kRef);
        const Twin<int32_t> ids(*ref_, *gpu_, std::vector<int32_t>(static_cast<size_t>(n))), count(*ref_, *gpu_, {-1});
        std::vector<std::vector<Received>> got;
        for (const int s : {kRef, kGpu}) {
          const auto mailbox = device(s).open_mailbox(n_embd, kMaxIds);
          Server server(*mailbox, n_embd, 1);
          make_input_of(s);
          const HandOff hand_off{mailbox.get(), l.in.on(s).x, n_embd};
          SparseArgs sparse;
          sparse.collect = mailbox.get();
          FfnShard shard = l.shard.on(s);
          shard.up.rows = shard.down_t.rows = n;
          if (exact) {
            sparse.hand_off = hand_off;
          } else {
            shard.gate.rows = n;
            device(s).predict(p.on(s), l.in.on(s),
                              {.n_first = n, .first = {ids.on(s), count.on(s)}, .rest = {}, .hand_off = hand_off});
            sparse.predicted = ids.on(s), sparse.n_predicted = count.on(s);
          }
          device(s).ffn_sparse(shard, sparse, l.in.on(s), {}, l.x.on(s));
          device(s).synchronize();
          got.push_back(server.received());
        }
        // Roundings of longer sums than those that bound() is for.
        const double error = 2 * bound(type, 1) * std::sqrt(static_cast<double>(n_embd) / 288);
        EXPECT_LE(relative_error(l.in.x.read(kGpu), l.in.x.read(kRef)), 2e-6);
        expect_received(got[kGpu], got[kRef], exact, error);
        EXPECT_EQ(got[kGpu][0].x, l.in.x.read(kGpu)) << "the same numbers on both sides";
        expect_same_x(l, error);
      }
    }
  }
}

// Recorded once, launched often: the mailbox goes on counting, and every launch does the same.
TEST_F(GpuHandOffTest, InAGraph) {
  std::mt19937 rng(33);
  const int64_t n = 900, n_cold = 300, n_embd = 256;
  Layer l = make_layer(rng, DType::f16, n, n_embd);
  l.shard.keep_gates_from_zero(l.in.on(kRef));
  const TwinPredictor p(*ref_, *gpu_, rng, {n + n_cold, n_embd, 64}, l.in.on(kRef), 0.2);
  const Twin<int32_t> ids(*ref_, *gpu_, std::vector<int32_t>(static_cast<size_t>(n))), count(*ref_, *gpu_, {-1});
  const auto mailbox = gpu_->open_mailbox(kCapacity, kMaxIds);
  const auto step = [&] {
    gpu_->predict(p.on(kGpu), l.in.on(kGpu),
                  {.n_first = n,
                   .first = {ids.on(kGpu), count.on(kGpu)},
                   .rest = {},
                   .hand_off = {mailbox.get(), l.x.on(kGpu), n_embd}});
    SparseArgs sparse;
    sparse.predicted = ids.on(kGpu), sparse.n_predicted = count.on(kGpu), sparse.collect = mailbox.get();
    gpu_->ffn_sparse(l.shard.on(kGpu), sparse, l.in.on(kGpu), {}, l.x.on(kGpu));
  };
  constexpr int kLaunches = 20;
  Server server(*mailbox, n_embd, 3 * kLaunches + 3);
  for (int i = 0; i < 3; ++i) step();
  l.x.reset(kGpu);
  gpu_->begin_capture();
  for (int i = 0; i < 3; ++i) step();
  const int graph = gpu_->end_capture();
  for (int i = 0; i < kLaunches; ++i) gpu_->launch(graph);
  gpu_->synchronize();
  for (const Received& r : server.received()) ASSERT_EQ(r.ids, p.named(n, n + n_cold));
}

// A CPU that gives up is not waited for.
TEST_F(GpuHandOffTest, AnAbandonedMailboxEndsTheWait) {
  const Twin<float> x(*ref_, *gpu_, std::vector<float>(64, 1.0f));
  const auto mailbox = gpu_->open_mailbox(kCapacity, kMaxIds);
  gpu_->post(*mailbox, x.on(kGpu), 64);
  gpu_->collect(*mailbox, x.on(kGpu), 64);
  mailbox->wait_request();
  mailbox->abandon();
  gpu_->synchronize();
  EXPECT_TRUE(mailbox->failed());
}

}  // namespace
}  // namespace hearth::test
