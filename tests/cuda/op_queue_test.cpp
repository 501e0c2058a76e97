// Products, norms and products of one token in every order: what the GPU device holds back and does elsewhere must not
// be seen. With a norm's result of at least 2112 elements products leave norms to each other (on 132 multiprocessors);
// shorter ones are done one by one.
#include <fmt/format.h>

#include "twin_mailbox.h"
#include "twin_predictor.h"

namespace hearth::test {
namespace {

class GpuOpQueueTest : public GpuTest {
 protected:
  // An activation of n elements with its 8-bit form on both devices.
  struct Activation {
    explicit Activation(std::vector<float> initial)
        : x(*ref_, *gpu_, initial),
          ref_q8(*ref_, *gpu_, std::vector<std::byte>(ref_->q8_bytes(static_cast<int64_t>(initial.size())))),
          gpu_q8(*ref_, *gpu_, std::vector<std::byte>(gpu_->q8_bytes(static_cast<int64_t>(initial.size())))) {}
    Act on(int s) const { return {x.on(s), s == kGpu ? gpu_q8.on(s) : ref_q8.on(s)}; }
    Twin<float> x;
    Twin<std::byte> ref_q8, gpu_q8;
  };
  static std::vector<float> noise(std::mt19937& rng, int64_t n) {
    return random_normal(rng, static_cast<size_t>(n), 2.0f);
  }
  // Whole multiples of amax / 127 in every block: the 8-bit form loses nothing.
  static std::vector<float> steps(std::mt19937& rng, int64_t n) {
    std::vector<float> v;
    for (int64_t i = 0; i < n; ++i) {
      v.push_back(static_cast<float>(i % 32 == 7 ? 127 : random_int(rng, -127, 127)) / 64.0f);
    }
    return v;
  }

  // x [n] += maker in, and what norms and products make of x: normed, other and y, z.
  struct Operands {
    static constexpr int64_t kIn = 64, kFew = 5;
    int64_t n, rows;
    TwinMatrix maker, reader, half_reader;
    Twin<float> weight, other_weight, bias;
    Activation in, normed, other;
    Twin<float> x, y, z;

    Operands(std::mt19937& rng, DType maker_type, DType reader_type, int64_t n_embd, int64_t reader_rows)
        : n(n_embd),
          rows(reader_rows),
          maker(*ref_, *gpu_, rng, maker_type, n, kIn),
          reader(*ref_, *gpu_, rng, reader_type, rows, n, 0.1f),
          half_reader(*ref_, *gpu_, rng, DType::f16, kFew, n, 0.1f),
          weight(*ref_, *gpu_, noise(rng, n)),
          other_weight(*ref_, *gpu_, noise(rng, n)),
          bias(*ref_, *gpu_, noise(rng, n)),
          in(steps(rng, kIn)),
          normed(noise(rng, n)),
          other(noise(rng, n)),
          x(*ref_, *gpu_, noise(rng, n)),
          y(*ref_, *gpu_, noise(rng, rows)),
          z(*ref_, *gpu_, noise(rng, kFew)) {
      for (const int s : {kRef, kGpu}) device(s).quantize(in.on(s), 1, kIn);
    }

    // The operations, on side s.
    void make_x(int s) const {
      const MatmulPart part{.w = maker.on(s), .bias = {bias.on(s), n}, .y = x.on(s), .accumulate = true};
      device(s).matmul({&part, 1}, in.on(s), 1);
    }
    void norm_x(int s) const { norm(s, weight, x, normed.on(s)); }
    void norm(int s, const Twin<float>& weights, const Twin<float>& from, Act to) const {
      device(s).norm({NormKind::rms, {weights.on(s), n}, {}, 1e-5f, n}, from.on(s), 1, to);
    }
    void read(int s, Act from, const Twin<float>& to) const {
      const MatmulPart part{.w = reader.on(s), .y = to.on(s), .accumulate = true};
      device(s).matmul({&part, 1}, from, 1);
    }
    void read_half(int s, Act from) const {
      const MatmulPart part{.w = half_reader.on(s), .y = z.on(s)};
      device(s).matmul({&part, 1}, from, 1);
    }

    // What `op` leaves on the GPU is what it leaves on the reference, up to roundings.
    // Few of the 8-bit form's steps fall the other way; what is quantised twice (`bound`) differs by more.
    void expect_same(const char* what, const std::function<void(int)>& op, double bound = 2e-3) {
      SCOPED_TRACE(what);
      for (Twin<float>* t : {&x, &normed.x, &other.x, &y, &z}) t->reset();
      run_twins<float>(*ref_, *gpu_, {&x, &normed.x, &other.x, &y, &z}, [&](int s, Device&) { op(s); });
      EXPECT_LE(error(x), bound);
      EXPECT_LE(error(normed.x), 2e-6);
      EXPECT_LE(error(other.x), bound > 2e-3 ? bound : 2e-6);
      EXPECT_LE(error(y), bound);
      EXPECT_LE(error(z), 2e-6);
    }
    static double error(const Twin<float>& t) { return relative_error(t.read(kGpu), t.read(kRef)); }
  };
};

TEST_F(GpuOpQueueTest, ProductNormProduct) {
  std::mt19937 rng(1);
  struct Case {
    DType maker, reader;
    int64_t n, rows;
  };
  // Short ones, 67 blocks of 32, one with few rows to read it, the longest that is done so, and longer.
  for (const Case c : {Case{DType::q8_0, DType::q8_0, 256, 320},
                       {DType::q8_0, DType::q8_0, 2144, 2144},
                       {DType::q4_0, DType::q8_0, 2144, 2500},
                       {DType::f16, DType::q4_0, 2144, 2150},
                       {DType::q8_0, DType::q4_0, 4096, 4096},
                       {DType::q8_0, DType::q8_0, 4096, 40},
                       {DType::q8_0, DType::q4_0, 8192, 8192},
                       {DType::q8_0, DType::q8_0, 8224, 32},
                       {DType::q8_0, DType::f16, 2144, 2144}}) {
    SCOPED_TRACE(fmt::format("{} then {} n {} rows {}", traits(c.maker).name, traits(c.reader).name, c.n, c.rows));
    Operands o(rng, c.maker, c.reader, c.n, c.rows);
    o.expect_same("once", [&](int s) {
      o.make_x(s), o.norm_x(s);
      o.read(s, o.normed.on(s), o.y);
    });
    o.expect_same("its result is read again in both forms", [&](int s) {
      o.make_x(s), o.norm_x(s);
      o.read(s, o.normed.on(s), o.y);
      o.read_half(s, o.normed.on(s));
      o.read(s, o.normed.on(s), o.y);
    });
  }
}

TEST_F(GpuOpQueueTest, OtherOrders) {
  std::mt19937 rng(2);
  for (const int64_t n : {416, 2144}) {
    SCOPED_TRACE(fmt::format("n {}", n));
    Operands o(rng, DType::q8_0, DType::q8_0, n, n);
    o.expect_same("nobody reads the norm", [&](int s) { o.make_x(s), o.norm_x(s); });
    o.expect_same("only the product", [&](int s) { o.make_x(s); });
    o.expect_same("two products", [&](int s) {
      o.make_x(s), o.make_x(s), o.norm_x(s);
      o.read(s, o.normed.on(s), o.y);
    });
    o.expect_same("two norms, read in the other order", [&](int s) {
      o.make_x(s), o.norm_x(s);
      o.norm(s, o.other_weight, o.x, o.other.on(s));
      o.read(s, o.normed.on(s), o.y);
      o.read(s, o.other.on(s), o.y);
    });
    o.expect_same("a norm of a norm", [&](int s) {
      o.make_x(s), o.norm_x(s);
      o.norm(s, o.other_weight, o.normed.x, o.other.on(s));
      o.read(s, o.other.on(s), o.y);
    });
    o.expect_same("a norm in place", [&](int s) {
      o.make_x(s);
      o.norm(s, o.weight, o.x, {o.x.on(s), o.normed.on(s).q8});
      o.read(s, {o.x.on(s), o.normed.on(s).q8}, o.y);
    });
    o.expect_same("a norm of something else", [&](int s) {
      o.make_x(s);
      o.norm(s, o.weight, o.bias, o.normed.on(s));
      o.read(s, o.normed.on(s), o.y);
    });
    o.expect_same("no 8-bit form", [&](int s) {
      o.make_x(s);
      o.norm(s, o.weight, o.x, {o.normed.x.on(s), nullptr});
      o.read_half(s, {o.normed.x.on(s), nullptr});
    });
    o.expect_same("read by a product of another type", [&](int s) {
      o.make_x(s), o.norm_x(s);
      o.read_half(s, o.normed.on(s));
    });
    o.expect_same("read by products of two types", [&](int s) {
      o.make_x(s), o.norm_x(s);
      const MatmulPart parts[] = {{.w = o.reader.on(s), .y = o.y.on(s)}, {.w = o.half_reader.on(s), .y = o.z.on(s)}};
      device(s).matmul(parts, o.normed.on(s), 1);
    });
    o.expect_same("the reader adds to x", [&](int s) {
      o.make_x(s), o.norm_x(s);
      o.read(s, o.normed.on(s), o.x);
    });
    o.expect_same("x is replaced before the reader", [&](int s) {
      o.make_x(s), o.norm_x(s);
      device(s).upload(o.x.on(s), o.bias.initial().data(), o.x.bytes());
      o.read(s, o.normed.on(s), o.y);
    });
    o.expect_same("x is replaced before the norm", [&](int s) {
      o.make_x(s);
      device(s).upload(o.x.on(s), o.bias.initial().data(), o.x.bytes());
      o.norm_x(s);
      o.read(s, o.normed.on(s), o.y);
    });
    o.expect_same("the norm's result is replaced", [&](int s) {
      o.make_x(s), o.norm_x(s);
      device(s).upload(o.normed.x.on(s), o.bias.initial().data(), o.x.bytes());
      device(s).quantize(o.normed.on(s), 1, n);
      o.norm(s, o.other_weight, o.normed.x, o.other.on(s));
    });
    o.expect_same("another norm's result is read", [&](int s) {
      o.norm(s, o.other_weight, o.bias, o.other.on(s));
      o.make_x(s), o.norm_x(s);
      o.read(s, o.other.on(s), o.y);
    });
  }
}

// x, then a layer norm of it, or the norm of more than one token: the plain kernels.
TEST_F(GpuOpQueueTest, OtherNorms) {
  std::mt19937 rng(3);
  Operands o(rng, DType::q8_0, DType::q8_0, 2144, 2144);
  o.expect_same("layer norm", [&](int s) {
    o.make_x(s);
    const Vector weight{o.weight.on(s), o.n}, bias{o.bias.on(s), o.n};
    device(s).norm({NormKind::layer, weight, bias, 1e-5f, o.n}, o.x.on(s), 1, o.normed.on(s));
    o.read(s, o.normed.on(s), o.y);
  });
  o.expect_same("a part of x", [&](int s) {
    o.make_x(s);
    const int64_t half = o.n / 64 * 32;
    device(s).norm({NormKind::rms, {o.weight.on(s), half}, {}, 1e-5f, half}, o.x.on(s), 1, o.normed.on(s));
  });
}

// The FFN of a layer and the products around it.
TEST_F(GpuOpQueueTest, FfnBetweenProducts) {
  std::mt19937 rng(4);
  for (const DType type : {DType::q8_0, DType::q4_0}) {
    for (const int64_t n_ff : {2208, 1088}) {  // with fewer neurons than columns: the plain norm before it
      SCOPED_TRACE(fmt::format("{} n_ff {}", traits(type).name, n_ff));
      Operands o(rng, type, type, 2144, 2144);
      const TwinShard shard(*ref_, *gpu_, rng, type, n_ff, o.n, true, false);
      const auto layer = [&](int s) {
        o.make_x(s), o.norm_x(s);
        device(s).ffn_dense(shard.on(s), o.normed.on(s), 1, {}, o.x.on(s));
        o.norm(s, o.other_weight, o.x, o.other.on(s));
        o.read(s, o.other.on(s), o.y);
      };
      o.expect_same("layer", layer, 2e-2);
      // A graph of it does the same.
      const auto direct = o.y.read(kGpu);
      for (Twin<float>* t : {&o.x, &o.normed.x, &o.other.x, &o.y}) t->reset(kGpu);
      gpu_->begin_capture();
      layer(kGpu);
      gpu_->launch(gpu_->end_capture());
      EXPECT_EQ(o.y.read(kGpu), direct);
    }
  }
}

// The same with the active neurons alone, all of them the device's, or some of the CPU's too: gates that do the norm
// before them, which the CPU gets with its neurons, and a sum that leaves half of the norm after it.
TEST_F(GpuOpQueueTest, SparseFfnBetweenProducts) {
  std::mt19937 rng(7);
  for (const DType type : {DType::f16, DType::q8_0, DType::q4_0}) {
    for (const int64_t n_cold : {0, 1203}) {
      const int64_t n = 2144, n_ff = 2205;
      SCOPED_TRACE(fmt::format("{} n_cold {}", traits(type).name, n_cold));
      Operands o(rng, type, DType::q8_0, n, n);
      TwinShard shard(*ref_, *gpu_, rng, type, n_ff, n, true, true);
      shard.act = hearth::Activation::relu;
      o.make_x(kRef), o.norm_x(kRef);
      shard.keep_gates_from_zero(o.normed.on(kRef));
      const Twin<int32_t> n_active(*ref_, *gpu_, {-1});
      std::vector<std::vector<Received>> got(2);
      const auto layer = [&](int s) {
        const auto mailbox = device(s).open_mailbox(n, n_ff);
        Server server(*mailbox, n, n_cold > 0 ? 1 : 0);
        o.make_x(s), o.norm_x(s);
        FfnShard whole = shard.on(s);
        SparseArgs sparse;
        sparse.n_active = n_active.on(s);
        if (n_cold > 0) {
          whole.up.rows = whole.down_t.rows = n_ff - n_cold;
          sparse.hand_off = {mailbox.get(), o.normed.on(s).x, n}, sparse.collect = mailbox.get();
        }
        device(s).ffn_sparse(whole, sparse, o.normed.on(s), {}, o.x.on(s));
        o.norm(s, o.other_weight, o.x, o.other.on(s));
        o.read(s, o.other.on(s), o.y);
        device(s).synchronize();
        got[static_cast<size_t>(s)] = server.received();
      };
      o.expect_same("layer", layer, 2e-2);
      EXPECT_EQ(n_active.read(kGpu), n_active.read(kRef));
      ASSERT_EQ(got[kGpu].size(), got[kRef].size());
      for (size_t i = 0; i < got[kGpu].size(); ++i) {
        EXPECT_EQ(got[kGpu][i].ids, got[kRef][i].ids);
        EXPECT_LE(relative_error(got[kGpu][i].x, got[kRef][i].x), 2e-6);
      }
    }
  }
}

// A predictor that does the norm of x by itself.
TEST_F(GpuOpQueueTest, PredictorAfterAProduct) {
  std::mt19937 rng(5);
  struct Case {
    DType maker, type;
  };
  for (const auto& [maker, type] : {Case{DType::q8_0, DType::f16},
                                    {DType::q8_0, DType::q8_0},
                                    {DType::f16, DType::q8_0},
                                    {DType::f16, DType::f16}}) {
    SCOPED_TRACE(fmt::format("{} then {}", traits(maker).name, traits(type).name));
    Operands o(rng, maker, type, 2144, 32);
    o.make_x(kRef), o.norm_x(kRef);
    const PredictorShape shape{.n = 500, .n_embd = o.n, .rank = 64, .fc1 = type, .fc2 = DType::f16};
    const TwinPredictor p(*ref_, *gpu_, rng, shape, o.normed.on(kRef), 0.2);
    Twin<int32_t> ids(*ref_, *gpu_, std::vector<int32_t>(500, -1)), count(*ref_, *gpu_, {-1});
    const auto named = p.named(0, shape.n);
    o.expect_same("predictor", [&](int s) {
      o.make_x(s), o.norm_x(s);
      device(s).predict(p.on(s), o.normed.on(s),
                        {.n_first = shape.n, .first = {ids.on(s), count.on(s)}, .rest = {}, .hand_off = {}});
      o.read(s, o.normed.on(s), o.y);
    });
    ASSERT_EQ(count.read(kGpu)[0], static_cast<int32_t>(named.size()));
    auto got = ids.read(kGpu);
    got.resize(named.size());
    EXPECT_EQ(got, named);
  }
}

// More than one token: nothing is held back.
TEST_F(GpuOpQueueTest, TwoTokens) {
  std::mt19937 rng(6);
  const int64_t n = 2144, T = 2;
  const TwinMatrix maker(*ref_, *gpu_, rng, DType::q8_0, n, 64), reader(*ref_, *gpu_, rng, DType::q8_0, n, n, 0.1f);
  const Twin<float> weight(*ref_, *gpu_, noise(rng, n));
  const auto q8 = [&](Device& d, int64_t columns) { return std::vector<std::byte>(2 * d.q8_bytes(columns)); };
  const Twin<float> in(*ref_, *gpu_, steps(rng, T * 64));
  const Twin<std::byte> ref_in(*ref_, *gpu_, q8(*ref_, 64)), gpu_in(*ref_, *gpu_, q8(*gpu_, 64)),
      ref_normed(*ref_, *gpu_, q8(*ref_, n)), gpu_normed(*ref_, *gpu_, q8(*gpu_, n));
  Twin<float> x(*ref_, *gpu_, noise(rng, T * n)), normed(*ref_, *gpu_, noise(rng, T * n)),
      y(*ref_, *gpu_, noise(rng, T * n));
  run_twins<float>(*ref_, *gpu_, {&x, &normed, &y}, [&](int s, Device& d) {
    const Act input{in.on(s), s == kGpu ? gpu_in.on(s) : ref_in.on(s)};
    const Act result{normed.on(s), s == kGpu ? gpu_normed.on(s) : ref_normed.on(s)};
    d.quantize(input, T, 64);
    const MatmulPart make{.w = maker.on(s), .y = x.on(s), .accumulate = true};
    d.matmul({&make, 1}, input, T);
    d.norm({NormKind::rms, {weight.on(s), n}, {}, 1e-5f, n}, x.on(s), T, result);
    const MatmulPart read{.w = reader.on(s), .y = y.on(s)};
    d.matmul({&read, 1}, result, T);
  });
  EXPECT_LE(relative_error(normed.read(kGpu), normed.read(kRef)), 2e-6);
  EXPECT_LE(relative_error(y.read(kGpu), y.read(kRef)), 1e-3);
}

}  // namespace
}  // namespace hearth::test
