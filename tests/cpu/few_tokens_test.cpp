// The result of a token has the same bits alone and among up to seven others; and weights in the device's own layout
// give the bits that they give in the file's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <memory>
#include <optional>
#include <random>

#include "cpu/cpu.h"
#include "cpu/device_case.h"
#include "cpu/kernels.h"
#include "support/random.h"

namespace hearth::test {
namespace {

// Every kind of format: with scales by block, by 32 and by 16 columns; with minima, bits apart, tables.
constexpr DType kTypes[] = {DType::f32,  DType::f16,  DType::bf16, DType::q8_0,   DType::q4_0, DType::q5_1,
                            DType::q2_k, DType::q4_k, DType::q6_k, DType::iq4_xs, DType::mxfp4};
enum class Kept { as_in_file, packed };

// A device, and inputs for it.
class FewTokens : public testing::TestWithParam<std::tuple<cpu::Isa, DType, Kept>> {
 protected:
  static constexpr int64_t kMost = cpu::kFewTokens, kLimit = 800;

  void SetUp() override {
    device_ = cpu::make_device(team_, std::get<cpu::Isa>(GetParam()));
    Limits l;
    l.max_tokens = 2 * kMost;
    l.max_rows = l.max_cols = l.n_ff = l.n_embd = l.n_vocab = kLimit;
    l.quantized_weights = true;
    device_->reserve(l);
    bound_.emplace(*device_);
  }

  DType type() const { return std::get<DType>(GetParam()); }
  bool packs() const { return std::get<Kept>(GetParam()) == Kept::packed; }
  int64_t cols(int64_t least, int64_t most) {
    const int64_t block = traits(type()).block_size;
    return random_int(rng_, (least + block - 1) / block, std::max<int64_t>(1, most / block)) * block;
  }
  size_t packed_size(const Matrix& m) const { return device_->packed_bytes(m); }

  // Random weights in the file's layout.
  Matrix matrix(int64_t rows, int64_t n_cols) {
    weights_.push_back(std::make_unique<Weights>(random_weights(static_cast<uint32_t>(rng_()), type(), rows, n_cols)));
    return weights_.back()->matrix();
  }
  Matrix packed(const Matrix& m) { return device_->pack(m, static_cast<std::byte*>(bound_->scratch(packed_size(m)))); }
  // ... in the layout that is tested.
  Matrix weights(int64_t rows, int64_t n_cols) {
    const Matrix m = matrix(rows, n_cols);
    return packs() ? packed(m) : device_->adopt(m);
  }
  Act activations(int64_t T, int64_t n) {
    auto& x = inputs_.emplace_back(random_activations(static_cast<uint32_t>(rng_()), static_cast<size_t>(T * n)));
    const Act in{x.data(), bound_->scratch(static_cast<size_t>(T) * device_->q8_bytes(n))};
    device_->quantize(in, T, n);
    return in;
  }
  Act from(Act in, int64_t t, int64_t n) const {
    return {in.x + t * n, static_cast<std::byte*>(in.q8) + static_cast<size_t>(t) * device_->q8_bytes(n)};
  }

  // run(in, T, y) with y [T][n_out] that begins as `initial`: any T tokens together give what each gives alone.
  template <typename Run>
  void expect_same_bits(int64_t n_in, int64_t n_out, Run run) {
    const Act in = activations(kMost, n_in);
    const std::vector<float> initial = random_activations(static_cast<uint32_t>(rng_()), static_cast<size_t>(n_out));
    const auto results = [&](int64_t first, int64_t T) {
      std::vector<float> y;
      for (int64_t t = 0; t < T; ++t) y.insert(y.end(), initial.begin(), initial.end());
      run(from(in, first, n_in), T, y.data());
      return y;
    };
    std::vector<std::vector<float>> alone;
    for (int64_t t = 0; t < kMost; ++t) alone.push_back(results(t, 1));
    for (int64_t T = 2; T <= kMost; ++T) {
      const int64_t first = kMost - T;
      const std::vector<float> together = results(first, T);
      for (int64_t t = 0; t < T; ++t) {
        const float* one = alone[static_cast<size_t>(first + t)].data();
        for (int64_t i = 0; i < n_out; ++i) {
          ASSERT_EQ(std::memcmp(together.data() + t * n_out + i, one + i, sizeof(float)), 0)
              << "token " << t << " of " << T << ", element " << i << " of " << n_out << " (" << n_in
              << " columns): " << together[static_cast<size_t>(t * n_out + i)] << ", alone " << one[i];
        }
      }
    }
  }

  std::mt19937 rng_{5};
  ThreadTeam team_{3};
  std::unique_ptr<Device> device_;
  std::optional<Bound> bound_;
  std::vector<std::unique_ptr<Weights>> weights_;
  std::list<std::vector<float>> inputs_;
};

TEST_P(FewTokens, Matmul) {
  for (int round = 0; round < 12; ++round) {
    const int64_t rows = random_int(rng_, 1, round < 6 ? 40 : 700), n = cols(1, round % 2 == 0 ? 100 : 750);
    const Matrix w = weights(rows, n);
    for (const bool accumulate : {false, true}) {
      expect_same_bits(n, rows, [&](Act in, int64_t T, float* y) {
        const MatmulPart part{.w = w, .y = y, .accumulate = accumulate};
        device_->matmul({&part, 1}, in, T);
      });
    }
  }
}

TEST_P(FewTokens, DenseFfn) {
  for (int round = 0; round < 8; ++round) {
    const bool transposed = round % 2 == 0, gated = round % 4 < 2;
    const int64_t n_embd = cols(1, 300), n = transposed ? random_int(rng_, 1, 700) : cols(1, 700);
    FfnShard s;
    s.act = round < 4 ? Activation::silu : Activation::relu;
    s.gate = weights(n, n_embd);
    if (gated) s.up = weights(n, n_embd);
    (transposed ? s.down_t : s.down) = transposed ? device_->adopt(matrix(n, n_embd)) : weights(n_embd, n);
    const std::vector<float> bias = random_activations(static_cast<uint32_t>(rng_()), static_cast<size_t>(n_embd));
    expect_same_bits(n_embd, n_embd, [&](Act in, int64_t T, float* y) {
      device_->ffn_dense(s, in, T, Vector{bias.data(), n_embd}, y, nullptr);
    });
  }
}

// Rows of embeddings, and products, for few tokens and for a batch.
TEST_P(FewTokens, BothLayoutsGiveTheSameBits) {
  if (!packs()) return;
  for (int round = 0; round < 12; ++round) {
    const int64_t rows = random_int(rng_, 1, 200), n = cols(32, 750);
    const Matrix file = matrix(rows, n), own = packed(file);
    EXPECT_EQ(own.layout, Layout::panels);
    EXPECT_EQ(packed_size(file), static_cast<size_t>((rows + 31) / 32 * 32) * file.row_size()) << "no more than a file";
    std::vector<int32_t> ids(static_cast<size_t>(rows));
    for (int64_t r = 0; r < rows; ++r) ids[static_cast<size_t>(r)] = static_cast<int32_t>(r);
    const auto embedded = [&](const Matrix& m) {
      std::vector<float> x(static_cast<size_t>(rows * n));
      device_->embed(m, ids.data(), {}, nullptr, 0, rows, x.data());
      return x;
    };
    EXPECT_EQ(embedded(own), embedded(file));
    for (const int64_t T : {int64_t{1}, int64_t{3}, kMost, 2 * kMost}) {
      const Act in = activations(T, n);
      const auto products = [&](const Matrix& m) {
        std::vector<float> y(static_cast<size_t>(T * rows));
        const MatmulPart part{.w = m, .y = y.data()};
        device_->matmul({&part, 1}, in, T);
        return y;
      };
      EXPECT_EQ(products(own), products(file)) << T << " tokens, " << rows << " x " << n;
    }
  }
}

TEST_P(FewTokens, Norm) {
  for (const NormKind kind : {NormKind::rms, NormKind::layer}) {
    const int64_t n = random_int(rng_, 2, 700), q8 = static_cast<int64_t>(device_->q8_bytes(n) / sizeof(float));
    const std::vector<float> weight = random_activations(1, static_cast<size_t>(n));
    NormArgs args;
    args.kind = kind, args.n = n, args.weight = {weight.data(), n};
    expect_same_bits(n, n + q8, [&](Act in, int64_t T, float* y) {
      std::vector<float> out(static_cast<size_t>(T * n)), quants(static_cast<size_t>(T * q8));
      device_->norm(args, in.x, T, {out.data(), quants.data()});
      for (int64_t t = 0; t < T; ++t) {
        std::copy_n(out.data() + t * n, n, y + t * (n + q8));
        std::copy_n(quants.data() + t * q8, q8, y + t * (n + q8) + n);
      }
    });
  }
}

// Packed where the device has a layout of its own.
std::vector<FewTokens::ParamType> cases() {
  std::vector<FewTokens::ParamType> all;
  ThreadTeam team(1);
  for (const cpu::Isa isa : cpu::available_isas()) {
    const auto device = cpu::make_device(team, isa);
    for (const DType type : kTypes) {
      all.emplace_back(isa, type, Kept::as_in_file);
      if (device->packed_bytes({type, 32, traits(type).block_size, nullptr}) > 0)
        all.emplace_back(isa, type, Kept::packed);
    }
  }
  return all;
}
std::string name_of(const testing::TestParamInfo<FewTokens::ParamType>& info) {
  std::string name = cpu::to_string(std::get<cpu::Isa>(info.param));
  for (char& c : name) c = c == '-' ? '_' : c;
  const bool packed = std::get<Kept>(info.param) == Kept::packed;
  return name + "_" + traits(std::get<DType>(info.param)).name + (packed ? "_packed" : "");
}
INSTANTIATE_TEST_SUITE_P(Device, FewTokens, testing::ValuesIn(cases()), name_of);

}  // namespace
}  // namespace hearth::test
