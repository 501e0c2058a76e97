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
    TwinAct in;
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
  static void expect_received(const std::vector<Received>& gpu, const std::vector<Received>& ref, double error) {
    ASSERT_EQ(gpu.size(), ref.size());
    for (size_t i = 0; i < gpu.size(); ++i) {
      ASSERT_EQ(gpu[i].ids, ref[i].ids) << i;
      EXPECT_LE(relative_error(gpu[i].x, ref[i].x), error) << i;
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
      const auto mailbox = hand_offs(s).open_mailbox(kCapacity, kMaxIds);
      Server server(*mailbox, n, 3, 1, Server::Brings::x);
      for (int i = 0; i < 3; ++i) hand_offs(s).post(*mailbox, x.on(s), n), hand_offs(s).collect(*mailbox, x.on(s), n);
      device(s).synchronize();
      got.push_back(server.received());
    }
    expect_received(got[kGpu], got[kRef], 1e-6);
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
        const TwinLists own(*ref_, *gpu_, 1, n);
        const Twin<int32_t> n_active(*ref_, *gpu_, {-1});
        std::vector<std::vector<Received>> got;
        for (const int s : {kRef, kGpu}) {
          const auto mailbox = hand_offs(s).open_mailbox(kCapacity, kMaxIds);
          Server server(*mailbox, n_embd, 2);
          for (int i = 0; i < 2; ++i) {
            sparse_ffn(s).predict(p.on(s), l.in.on(s), 1, {n, own.on(s), 0, {}, {mailbox.get(), l.x.on(s), n_embd}});
            const SparseArgs sparse{.candidates = own.on(s), .n_active = n_active.on(s), .collect = mailbox.get()};
            sparse_ffn(s).ffn_sparse(l.shard.on(s), sparse, l.in.on(s), 1, {}, l.x.on(s), nullptr);
          }
          device(s).synchronize();
          got.push_back(server.received());
        }
        for (const Received& r : got[kGpu]) EXPECT_EQ(r.ids, p.named(n, n + n_cold));
        EXPECT_EQ(n_active.read(kGpu), n_active.read(kRef));
        expect_received(got[kGpu], got[kRef], 2 * bound(type, 1));
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
          const auto mailbox = hand_offs(s).open_mailbox(kCapacity, kMaxIds);
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
            hand_offs(s).post(*mailbox, l.x.on(s), n_embd);
            if (i < 2) hand_offs(s).hint(p.on(s), l.in.on(s), {mailbox.get(), n, n_linked});
            hand_offs(s).collect(*mailbox, l.x.on(s), n_embd);
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
  for (const DType type : gpu_types()) {
    for (const int64_t n_linked : {1, 5, 700}) {
      for (const double density : {0.0, 0.15, 1.0}) {
        const int64_t n = 903, n_cold = n_linked + 100, n_embd = whole_blocks(type, 288);
        SCOPED_TRACE(fmt::format("{} n_linked {} density {}", traits(type).name, n_linked, density));
        Layer l = make_layer(rng, type, n, n_embd);
        l.shard.keep_gates_from_zero(l.in.on(kRef));
        TwinShard linked(*ref_, *gpu_, rng, type, n_linked, n_embd, true, true);
        linked.act = Activation::relu;
        linked.keep_gates_from_zero(l.in.on(kRef));
        HostShard pinned(*gpu_, linked.on(kRef));
        const int64_t rank = whole_blocks(type, 96), next_rank = whole_blocks(type, n_linked == 700 ? 1024 : 64);
        const TwinPredictor p(*ref_, *gpu_, rng, {n + n_cold, n_embd, rank, type, type, true, true}, l.in.on(kRef),
                              density);
        // Whose hints pass beside the neurons that are read over the link.
        const TwinPredictor next(*ref_, *gpu_, rng, {n + n_cold, n_embd, next_rank, type, type}, l.in.on(kRef), density);
        const TwinLists own(*ref_, *gpu_, 1, n), far_lists(*ref_, *gpu_, 1, n_linked);
        const Twin<int32_t> n_active(*ref_, *gpu_, {-1, -1});
        std::vector<std::vector<Received>> got;
        for (const int s : {kRef, kGpu}) {
          const auto mailbox = hand_offs(s).open_mailbox(kCapacity, kMaxIds);
          Server server(*mailbox, n_embd, 4);
          ASSERT_TRUE(device(s).cold_rows()->can_link(pinned.shard()));
          const LinkedNeurons far{device(s).cold_rows()->link(pinned.shard(), pinned.link_memory()), far_lists.on(s),
                                  n_active.on(s) + 1};
          for (int i = 0; i < 4; ++i) {
            sparse_ffn(s).predict(p.on(s), l.in.on(s), 1,
                                  {n, own.on(s), n_linked, far.named, {mailbox.get(), l.x.on(s), n_embd}});
            if (i > 0) hand_offs(s).hint(next.on(s), l.in.on(s), {mailbox.get(), n, n_linked});
            SparseArgs sparse{.candidates = own.on(s), .n_active = n_active.on(s), .collect = mailbox.get()};
            sparse.linked = &far;
            sparse_ffn(s).ffn_sparse(l.shard.on(s), sparse, l.in.on(s), 1, {}, l.x.on(s), nullptr);
          }
          device(s).synchronize();
          got.push_back(server.received());
        }
        std::vector<int32_t> rest = p.named(n, n + n_cold);
        std::erase_if(rest, [&](int32_t id) { return id < n_linked; });
        for (const Received& r : got[kGpu]) EXPECT_EQ(r.ids, rest);
        EXPECT_EQ(n_active.read(kGpu), n_active.read(kRef));
        expect_received(got[kGpu], got[kRef], 2 * bound(type, 1));
        expect_same_x(l, 2 * bound(type, 1));
      }
    }
  }
}

// Without a hand-off. What comes between the prediction and the FFN changes nothing: the same sums, to the bit.
TEST_F(GpuHandOffTest, NeuronsThatNobodyHandsOver) {
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
        const TwinLists own(*ref_, *gpu_, 1, n), other_own(*ref_, *gpu_, 1, n), far_lists(*ref_, *gpu_, 1, n_linked),
            other_far(*ref_, *gpu_, 1, n_linked);
        const Twin<int32_t> n_active(*ref_, *gpu_, {-1, -1});
        const std::vector<float> start = random_normal(rng, static_cast<size_t>(n_embd));
        const auto mailbox = hand_offs(kGpu).open_mailbox(kCapacity, kMaxIds + 8192);
        const auto run = [&](int s, auto&& between) {
          const Twin<float> y(*ref_, *gpu_, start);
          const LinkedNeurons far{device(s).cold_rows()->link(pinned.shard(), pinned.link_memory()), far_lists.on(s),
                                  n_active.on(s) + 1};
          sparse_ffn(s).predict(p.on(s), l.in.on(s), 1, {n, own.on(s), n_linked, far_lists.on(s), {}});
          between();
          SparseArgs sparse{.candidates = own.on(s), .n_active = n_active.on(s)};
          if (n_linked > 0) sparse.linked = &far;
          sparse_ffn(s).ffn_sparse(l.shard.on(s), sparse, l.in.on(s), 1, {}, y.on(s), nullptr);
          return y.read(s);
        };
        const std::vector<float> expected = run(kRef, [] {}), y = run(kGpu, [] {});
        EXPECT_LE(relative_error(y, expected), 2 * bound(type, 1));
        EXPECT_EQ(n_active.read(kGpu), n_active.read(kRef));
        EXPECT_EQ(run(kGpu,
                      [&] {
                        hand_offs(kGpu).hint(other.on(kGpu), l.in.on(kGpu), {mailbox.get(), n / 2, 0});
                      }),
                  y);
        const auto predict_other = [&] {
          sparse_ffn(kGpu).predict(other.on(kGpu), l.in.on(kGpu), 1,
                                   {n, other_own.on(kGpu), n_linked, other_far.on(kGpu), {}});
        };
        EXPECT_EQ(run(kGpu, predict_other), y);
        EXPECT_EQ(n_active.read(kGpu), n_active.read(kRef));
      }
    }
  }
}

// A norm that is done on the way, by the block that hands its result over.
TEST_F(GpuHandOffTest, HandsOverWhatItNorms) {
  std::mt19937 rng(37);
  for (const DType type : {DType::f16, DType::q8_0}) {
    for (const int64_t n_embd : {288, 4128, 5120, 8192}) {
      SCOPED_TRACE(fmt::format("{} n_embd {}", traits(type).name, n_embd));
      const int64_t n = 40, n_cold = 37;
      const TwinAct factors = make_input(rng, 1, 64);
      Layer l{make_input(rng, 1, n_embd), TwinShard(*ref_, *gpu_, rng, type, n + n_cold, n_embd, true, true),
              Twin<float>(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n_embd))), n_embd};
      l.shard.act = Activation::relu;
      const TwinMatrix maker(*ref_, *gpu_, rng, DType::f16, n_embd, 64, 0.1f);
      const Twin<float> weight(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n_embd)));
      const auto input_of = [&](int s) {
        return Input({NormKind::rms, {weight.on(s), n_embd}, {}, 1e-5f, n_embd}, l.x.on(s), l.in.on(s));
      };
      const auto make_x = [&](int s, const NextNorm* next) {
        const MatmulPart part{.w = maker.on(s), .y = l.x.on(s), .accumulate = true};
        device(s).matmul({&part, 1}, factors.on(s), 1, next);
      };
      make_x(kRef, nullptr);
      ref_->norm(input_of(kRef).norm, l.x.on(kRef), 1, l.in.on(kRef));
      l.shard.keep_gates_from_zero(l.in.on(kRef));
      const TwinPredictor p(*ref_, *gpu_, rng, {n + n_cold, n_embd, 64, type, type}, l.in.on(kRef), 0.4);
      l.x.reset(kRef);
      const TwinLists own(*ref_, *gpu_, 1, n);
      std::vector<std::vector<Received>> got;
      for (const int s : {kRef, kGpu}) {
        const auto mailbox = hand_offs(s).open_mailbox(n_embd, kMaxIds);
        Server server(*mailbox, n_embd, 1);
        const NextNorm next{input_of(s).norm, p.on(s).fc1, false};
        make_x(s, &next);
        const HandOff hand_off{mailbox.get(), l.in.on(s).x, n_embd};
        FfnShard shard = l.shard.on(s);
        shard.gate.rows = shard.up.rows = shard.down_t.rows = n;
        sparse_ffn(s).predict(p.on(s), input_of(s), 1, {n, own.on(s), 0, {}, hand_off});
        const SparseArgs sparse{.candidates = own.on(s), .collect = mailbox.get()};
        sparse_ffn(s).ffn_sparse(shard, sparse, l.in.on(s), 1, {}, l.x.on(s), nullptr);
        device(s).synchronize();
        got.push_back(server.received());
      }
      // Roundings of longer sums than those that bound() is for.
      const double error = 2 * bound(type, 1) * std::sqrt(static_cast<double>(n_embd) / 288);
      EXPECT_LE(relative_error(l.in.x.read(kGpu), l.in.x.read(kRef)), 2e-6);
      expect_received(got[kGpu], got[kRef], error);
      EXPECT_EQ(got[kGpu][0].x, l.in.x.read(kGpu)) << "the same numbers on both sides";
      expect_same_x(l, error);
    }
  }
}

// Recorded once, launched often: the mailbox goes on counting, and every launch does the same.
TEST_F(GpuHandOffTest, InARecording) {
  std::mt19937 rng(33);
  const int64_t n = 900, n_cold = 300, n_embd = 256;
  Layer l = make_layer(rng, DType::f16, n, n_embd);
  l.shard.keep_gates_from_zero(l.in.on(kRef));
  const TwinPredictor p(*ref_, *gpu_, rng, {n + n_cold, n_embd, 64}, l.in.on(kRef), 0.2);
  const TwinLists own(*ref_, *gpu_, 1, n);
  const auto mailbox = hand_offs(kGpu).open_mailbox(kCapacity, kMaxIds);
  const auto step = [&] {
    sparse_ffn(kGpu).predict(p.on(kGpu), l.in.on(kGpu), 1,
                             {n, own.on(kGpu), 0, {}, {mailbox.get(), l.x.on(kGpu), n_embd}});
    const SparseArgs sparse{.candidates = own.on(kGpu), .collect = mailbox.get()};
    sparse_ffn(kGpu).ffn_sparse(l.shard.on(kGpu), sparse, l.in.on(kGpu), 1, {}, l.x.on(kGpu), nullptr);
  };
  constexpr int kLaunches = 20;
  Server server(*mailbox, n_embd, 3 * kLaunches + 3);
  for (int i = 0; i < 3; ++i) step();
  l.x.reset(kGpu);
  gpu_->recording()->begin();
  for (int i = 0; i < 3; ++i) step();
  const int id = gpu_->recording()->end();
  for (int i = 0; i < kLaunches; ++i) gpu_->recording()->launch(id);
  gpu_->synchronize();
  for (const Received& r : server.received()) ASSERT_EQ(r.ids, p.named(n, n + n_cold));
}

// A CPU that gives up is not waited for.
TEST_F(GpuHandOffTest, AnAbandonedMailboxEndsTheWait) {
  const Twin<float> x(*ref_, *gpu_, std::vector<float>(64, 1.0f));
  const auto mailbox = hand_offs(kGpu).open_mailbox(kCapacity, kMaxIds);
  hand_offs(kGpu).post(*mailbox, x.on(kGpu), 64);
  hand_offs(kGpu).collect(*mailbox, x.on(kGpu), 64);
  mailbox->wait_input();
  mailbox->abandon();
  gpu_->synchronize();
  EXPECT_TRUE(mailbox->failed());
}

}  // namespace
}  // namespace hearth::test
