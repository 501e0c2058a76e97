// Products, and norms done on the way between them: a maker may leave half of the norm that its reader names
// (NextNorm). With rows of at least 2112 elements products do (on 132 multiprocessors); shorter ones are normed by
// kernels of their own.
#include "few_tokens.h"
#include "twin_predictor.h"

namespace hearth::test {
namespace {

class GpuNextNormTest : public GpuFfnTest {
 protected:
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

  // x [T][n] += maker in, and what norms and products make of x: normed, other and y, z. Every operation is done for
  // `count` tokens from t on.
  struct Operands {
    static constexpr int64_t kIn = 64, kFew = 5;
    int64_t T, n, rows;
    TwinMatrix maker, reader, half_reader;
    Twin<float> weight, other_weight, bias;
    TwinAct in, normed, other;
    Twin<float> x, y, z;

    Operands(std::mt19937& rng, DType maker_type, DType reader_type, int64_t n_embd, int64_t reader_rows,
             int64_t n_tokens = 1)
        : T(n_tokens),
          n(n_embd),
          rows(reader_rows),
          maker(*ref_, *gpu_, rng, maker_type, n, kIn),
          reader(*ref_, *gpu_, rng, reader_type, rows, n, 0.1f),
          half_reader(*ref_, *gpu_, rng, DType::f16, kFew, n, 0.1f),
          weight(*ref_, *gpu_, noise(rng, n)),
          other_weight(*ref_, *gpu_, noise(rng, n)),
          bias(*ref_, *gpu_, noise(rng, n)),
          in(*ref_, *gpu_, T, kIn, steps(rng, T * kIn)),
          normed(*ref_, *gpu_, T, n, noise(rng, T * n)),
          other(*ref_, *gpu_, T, n, noise(rng, T * n)),
          x(*ref_, *gpu_, noise(rng, T * n)),
          y(*ref_, *gpu_, noise(rng, T * rows)),
          z(*ref_, *gpu_, noise(rng, T * kFew)) {
      for (const int s : {kRef, kGpu}) device(s).quantize(in.on(s), T, kIn);
    }

    NormArgs norm(int s) const { return {NormKind::rms, {weight.on(s), n}, {}, 1e-5f, n}; }
    NormArgs other_norm(int s) const { return {NormKind::rms, {other_weight.on(s), n}, {}, 1e-5f, n}; }
    NextNorm next(int s) const { return {norm(s), reader.on(s), true}; }
    Input normed_x(int s, int64_t t = 0) const { return {norm(s), x.on(s) + t * n, normed.on(s, t)}; }
    Input other_x(int s, int64_t t = 0) const { return {other_norm(s), x.on(s) + t * n, other.on(s, t)}; }

    void make_x(int s, const NextNorm* follows, int64_t t, int64_t count) const {
      const MatmulPart part{.w = maker.on(s), .bias = {bias.on(s), n}, .y = x.on(s) + t * n, .accumulate = true};
      device(s).matmul({&part, 1}, in.on(s, t), count, follows);
    }
    void make_x(int s) const {
      const NextNorm follows = next(s);
      make_x(s, &follows, 0, T);
    }
    void read(int s, const Input& from, float* to, int64_t count) const {
      const MatmulPart part{.w = reader.on(s), .y = to, .accumulate = true};
      device(s).matmul({&part, 1}, from, count);
    }
    void read(int s, const Input& from) const { read(s, from, y.on(s), T); }
    void read_half(int s, const Input& from) const {
      const MatmulPart part{.w = half_reader.on(s), .y = z.on(s)};
      device(s).matmul({&part, 1}, from, T);
    }

    // What `op` leaves on the GPU is what it leaves on the reference, up to roundings. Few of the 8-bit form's steps
    // fall the other way; what is quantised twice (`bound`) differs by more.
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

struct MakerAndReader {
  DType maker, reader;
  int64_t n, rows;
};
// Short ones, 67 blocks of 32, one with few rows to read it, the longest that is done so, and longer.
constexpr MakerAndReader kProducts[] = {{DType::q8_0, DType::q8_0, 256, 320},   {DType::q8_0, DType::q8_0, 2144, 2144},
                                        {DType::q4_0, DType::q8_0, 2144, 2500}, {DType::f16, DType::q4_0, 2144, 2150},
                                        {DType::q8_0, DType::q4_0, 4096, 4096}, {DType::q8_0, DType::q8_0, 4096, 40},
                                        {DType::q8_0, DType::q4_0, 8192, 8192}, {DType::q8_0, DType::q8_0, 8224, 32},
                                        {DType::q8_0, DType::f16, 2144, 2144}};

TEST_F(GpuNextNormTest, ProductNormProduct) {
  std::mt19937 rng(1);
  for (const MakerAndReader& c : kProducts) {
    for (const int64_t T : {1, 3}) {
      SCOPED_TRACE(
          fmt::format("{} then {} n {} rows {} T {}", traits(c.maker).name, traits(c.reader).name, c.n, c.rows, T));
      Operands o(rng, c.maker, c.reader, c.n, c.rows, T);
      o.expect_same("once", [&](int s) { o.make_x(s), o.read(s, o.normed_x(s)); });
      o.expect_same("its result is read again in both forms", [&](int s) {
        o.make_x(s), o.read(s, o.normed_x(s));
        o.read_half(s, o.normed.on(s));
        o.read(s, o.normed.on(s));
      });
    }
  }
}

TEST_F(GpuNextNormTest, TokensAmongOthers) {
  std::mt19937 rng(2);
  for (const MakerAndReader& c : kProducts) {
    for (const int64_t T : {2, 5, 8}) {
      if (T != 5 && c.n > 4096) continue;
      SCOPED_TRACE(
          fmt::format("{} then {} n {} rows {} T {}", traits(c.maker).name, traits(c.reader).name, c.n, c.rows, T));
      Operands o(rng, c.maker, c.reader, c.n, c.rows, T);
      const NextNorm next = o.next(kGpu);
      expect_as_alone(*gpu_, T, {{o.x, T}, {o.normed.x, T}, {o.y, T}}, [&](int64_t t, int64_t count) {
        o.make_x(kGpu, &next, t, count);
        o.read(kGpu, o.normed_x(kGpu, t), o.y.on(kGpu) + t * o.rows, count);
      });
      // A reader of the last row alone, as a head is.
      const std::vector<float> all = o.y.read(kGpu);
      for (Twin<float>* changed : {&o.x, &o.y}) changed->reset(kGpu);
      o.make_x(kGpu, &next, 0, T);
      o.read(kGpu, o.normed_x(kGpu, T - 1), o.y.on(kGpu) + (T - 1) * o.rows, 1);
      const std::vector<float> last = o.y.read(kGpu);
      EXPECT_TRUE(std::equal(last.end() - o.rows, last.end(), all.end() - o.rows));
    }
  }
}

TEST_F(GpuNextNormTest, OtherOrders) {
  std::mt19937 rng(3);
  for (const int64_t n : {416, 2144}) {
    SCOPED_TRACE(fmt::format("n {}", n));
    Operands o(rng, DType::q8_0, DType::q8_0, n, n);
    o.expect_same("only the product", [&](int s) { o.make_x(s); });
    o.expect_same("nobody was told", [&](int s) { o.make_x(s, nullptr, 0, 1), o.read(s, o.normed_x(s)); });
    o.expect_same("two products", [&](int s) { o.make_x(s), o.make_x(s), o.read(s, o.normed_x(s)); });
    o.expect_same("two norms", [&](int s) {
      o.make_x(s), o.read(s, o.other_x(s));
      o.read(s, o.normed_x(s));
    });
    o.expect_same("a norm by itself between", [&](int s) {
      o.make_x(s);
      device(s).norm(o.norm(s), o.x.on(s), 1, o.normed.on(s));
      o.read(s, o.other_x(s));
    });
    o.expect_same("no 8-bit form", [&](int s) {
      o.make_x(s), o.read_half(s, Input(o.norm(s), o.x.on(s), {o.normed.x.on(s), nullptr}));
    });
    o.expect_same("read by a product of another type", [&](int s) { o.make_x(s), o.read_half(s, o.normed_x(s)); });
    o.expect_same("read by products of two types", [&](int s) {
      o.make_x(s);
      const MatmulPart parts[] = {{.w = o.reader.on(s), .y = o.y.on(s)}, {.w = o.half_reader.on(s), .y = o.z.on(s)}};
      device(s).matmul(parts, o.normed_x(s), 1);
    });
    o.expect_same("the reader adds to x", [&](int s) { o.make_x(s), o.read(s, o.normed_x(s), o.x.on(s), 1); });
    o.expect_same("x is replaced", [&](int s) {
      o.make_x(s);
      device(s).upload(o.x.on(s), o.bias.initial().data(), o.x.bytes());
      o.read(s, o.normed_x(s));
    });
    o.expect_same("another's norm is read",
                  [&](int s) { o.make_x(s), o.read(s, Input(o.norm(s), o.bias.on(s), o.normed.on(s))); });
  }
}

TEST_F(GpuNextNormTest, OtherNorms) {
  std::mt19937 rng(4);
  Operands o(rng, DType::q8_0, DType::q8_0, 2144, 2144);
  o.expect_same("layer norm", [&](int s) {
    const NormArgs layer{NormKind::layer, {o.weight.on(s), o.n}, {o.bias.on(s), o.n}, 1e-5f, o.n};
    const NextNorm next{layer, o.reader.on(s), true};
    o.make_x(s, &next, 0, 1);
    o.read(s, Input(layer, o.x.on(s), o.normed.on(s)));
  });
}

// The FFN of a layer and the products around it.
TEST_F(GpuNextNormTest, FfnBetweenProducts) {
  std::mt19937 rng(5);
  for (const DType type : {DType::q8_0, DType::q4_0}) {
    for (const int64_t n_ff : {2208, 1088}) {  // with fewer neurons than columns: the plain norm before it
      SCOPED_TRACE(fmt::format("{} n_ff {}", traits(type).name, n_ff));
      const int64_t T = 3;
      Operands o(rng, type, type, 2144, 2144, T);
      const TwinShard shard(*ref_, *gpu_, rng, type, n_ff, o.n, true, false);
      const auto layer = [&](int s, int64_t t, int64_t count) {
        const FfnShard f = shard.on(s);
        const NextNorm ffn{o.norm(s), f.gate, false}, next{o.other_norm(s), o.reader.on(s), true};
        o.make_x(s, &ffn, t, count);
        device(s).ffn_dense(f, o.normed_x(s, t), count, {}, o.x.on(s) + t * o.n, &next);
        o.read(s, o.other_x(s, t), o.y.on(s) + t * o.rows, count);
      };
      o.expect_same(
          "layer", [&](int s) { layer(s, 0, T); }, 2e-2);
      // A recording of it does the same, and so does each token alone.
      const auto direct = o.y.read(kGpu);
      for (Twin<float>* t : {&o.x, &o.normed.x, &o.other.x, &o.y}) t->reset(kGpu);
      gpu_->recording()->begin();
      layer(kGpu, 0, T);
      gpu_->recording()->launch(gpu_->recording()->end());
      EXPECT_EQ(o.y.read(kGpu), direct);
      expect_as_alone(*gpu_, T, {{o.x, T}, {o.normed.x, T}, {o.other.x, T}, {o.y, T}},
                      [&](int64_t t, int64_t count) { layer(kGpu, t, count); });
    }
  }
}

// The same with the active neurons alone: gates that do the norm before them, and a sum that leaves half of the norm
// after it.
TEST_F(GpuNextNormTest, SparseFfnBetweenProducts) {
  std::mt19937 rng(7);
  for (const DType type : {DType::f16, DType::q8_0, DType::q4_0}) {
    const int64_t n = 2144, n_ff = 2205, T = 4;
    SCOPED_TRACE(traits(type).name);
    Operands o(rng, type, DType::q8_0, n, n, T);
    TwinShard shard(*ref_, *gpu_, rng, type, n_ff, n, true, true);
    shard.act = Activation::relu;
    o.make_x(kRef);
    ref_->norm(o.norm(kRef), o.x.on(kRef), T, o.normed.on(kRef));
    shard.keep_gates_from_zero(o.normed.on(kRef));  // of the first token
    const Twin<int32_t> n_active(*ref_, *gpu_, std::vector<int32_t>(static_cast<size_t>(T), -1));
    const auto layer = [&](int s, int64_t t, int64_t count) {
      const FfnShard f = shard.on(s);
      const NextNorm ffn{o.norm(s), f.gate, false}, next{o.other_norm(s), o.reader.on(s), true};
      o.make_x(s, &ffn, t, count);
      sparse_ffn(s).ffn_sparse(f, {.n_active = n_active.on(s) + t}, o.normed_x(s, t), count, {}, o.x.on(s) + t * n,
                               &next);
      o.read(s, o.other_x(s, t), o.y.on(s) + t * o.rows, count);
    };
    o.T = 1;
    o.expect_same(
        "layer", [&](int s) { layer(s, 0, 1); }, 2e-2);
    EXPECT_EQ(n_active.read(kGpu)[0], n_active.read(kRef)[0]);
    expect_as_alone(*gpu_, T, {{o.x, T}, {o.normed.x, T}, {o.other.x, T}, {o.y, T}, {n_active, T}},
                    [&](int64_t t, int64_t count) { layer(kGpu, t, count); });
  }
}

// A predictor that does the norm of x by itself.
TEST_F(GpuNextNormTest, PredictorAfterAProduct) {
  std::mt19937 rng(6);
  struct Case {
    DType maker, type;
  };
  for (const auto& [maker, type] : {Case{DType::q8_0, DType::f16},
                                    {DType::q8_0, DType::q8_0},
                                    {DType::f16, DType::q8_0},
                                    {DType::f16, DType::f16}}) {
    SCOPED_TRACE(fmt::format("{} then {}", traits(maker).name, traits(type).name));
    Operands o(rng, maker, type, 2144, 32);
    o.make_x(kRef);
    ref_->norm(o.norm(kRef), o.x.on(kRef), 1, o.normed.on(kRef));
    for (const DType fc2 : {DType::f16, type}) {  // in two kernels, and in one
      const PredictorShape shape{.n = 500, .n_embd = o.n, .rank = 64, .fc1 = type, .fc2 = fc2};
      const TwinPredictor p(*ref_, *gpu_, rng, shape, o.normed.on(kRef), 0.2);
      const TwinLists own(*ref_, *gpu_, 1, shape.n);
      o.expect_same("predictor", [&](int s) {
        const NextNorm next{o.norm(s), p.on(s).fc1, false};
        o.make_x(s, &next, 0, 1);
        sparse_ffn(s).predict(p.on(s), o.normed_x(s), 1, {shape.n, own.on(s), 0, {}, {}});
        o.read(s, o.normed.on(s));
      });
      EXPECT_EQ(own.read(kGpu, 0, shape.n), p.named(0, shape.n));
    }
  }
}

}  // namespace
}  // namespace hearth::test
