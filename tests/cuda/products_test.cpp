// Products on a GPU, and the linear algebra on top of them, by the same cases as the host's.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "core/thread_team.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "support/linear_algebra_cases.h"
#include "support/products_cases.h"

namespace hearth::test {
namespace {

class GpuProductsTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (cuda::list_gpus(&why).empty()) GTEST_SKIP() << "needs a GPU: " << why;
    products_ = cuda::make_products(0);
  }
  std::unique_ptr<Products> products_;
};

TEST_F(GpuProductsTest, Multiply) {
  check_products(*products_);
}
TEST_F(GpuProductsTest, Transfer) {
  check_transfers(*products_);
}
TEST_F(GpuProductsTest, CountMemory) {
  check_memory(*products_);
}
TEST_F(GpuProductsTest, Adam) {
  check_adam(*products_);
}
TEST_F(GpuProductsTest, Cholesky) {
  check_cholesky(*products_);
}
TEST_F(GpuProductsTest, CholeskyRefusesWhatIsNotPositiveDefinite) {
  check_cholesky_refusal(*products_);
}
TEST_F(GpuProductsTest, TokensInTiles) {
  check_token_products(*products_);
}
TEST_F(GpuProductsTest, SubspaceOfAWideGate) {
  check_wide_svd(*products_);
}

// 16-bit values larger than what visits at once, and the same bits run after run.
TEST_F(GpuProductsTest, LargeOnesAreTheSameEveryTime) {
  constexpr int64_t n = 2000, T = 9000;  // 36 MB of f16
  std::mt19937 rng(3);
  const HostMatrix x(rng, DType::f16, T, n);
  const auto run = [&] {
    const OwnedBlock rows = products_->upload(x.matrix), sum = products_->allocate(n, n);
    products_->multiply(transposed(rows), rows, sum);
    return read(*products_, sum);
  };
  const std::vector<float> first = run();
  EXPECT_EQ(run(), first);
  double want = 0;
  for (size_t t = 0; t < static_cast<size_t>(T); ++t)
    want += static_cast<double>(x.values[t * n + 1999]) * x.values[t * n + 1998];
  EXPECT_NEAR(static_cast<double>(first[1999 * n + 1998]), want, 0.01);
}

// The same fit as the host's, up to rounding.
TEST_F(GpuProductsTest, FitsWhatTheHostFits) {
  constexpr int64_t n = 200, n_ff = 300, T = 900, rank = 32;
  std::mt19937 rng(21);
  const HostMatrix gate(rng, DType::f16, n_ff, n), x(rng, DType::f16, T, n);
  ThreadTeam team(2);
  const auto device = cpu::make_device(team);
  predictor::HostProducts host(*device, team);
  const auto* values = static_cast<const f16_t*>(x.matrix.data);
  const std::vector<float> weights(n_ff, 1.0f);
  const auto fit = [&](Products& products) {
    const predictor::InputMoments m = predictor::moments_of({values, static_cast<size_t>(T * n)}, n, products);
    const predictor::LowRank low = predictor::whitened_svd(gate.matrix, weights, m, rank, products);
    const OwnedBlock fc1 = products.upload({DType::f32, rank, n, low.fc1.data()});
    const OwnedBlock fc2 = products.upload({DType::f32, n_ff, rank, low.fc2.data()});
    const OwnedBlock fitted = products.allocate(n_ff, n);
    products.multiply(fc2, fc1, fitted);  // vectors may differ in sign, their product does not
    return std::pair(low.singular, read(products, fitted));
  };
  const auto [host_singular, host_fit] = fit(host);
  const auto [gpu_singular, gpu_fit] = fit(*products_);
  for (size_t i = 0; i < host_singular.size(); ++i)
    EXPECT_NEAR(gpu_singular[i], host_singular[i], 1e-4f * host_singular[0]);
  double difference = 0, norm = 0;
  for (size_t i = 0; i < host_fit.size(); ++i) {
    difference += std::pow(static_cast<double>(gpu_fit[i] - host_fit[i]), 2);
    norm += std::pow(static_cast<double>(host_fit[i]), 2);
  }
  EXPECT_LT(std::sqrt(difference / norm), 5e-3);
}

}  // namespace
}  // namespace hearth::test
