// The host's products, and what is built on products alone.
#include <gtest/gtest.h>

#include "core/error.h"
#include "core/thread_team.h"
#include "cpu/cpu.h"
#include "predictor/products.h"
#include "support/linear_algebra_cases.h"
#include "support/products_cases.h"

namespace hearth::predictor {
namespace {

class HostProductsTest : public testing::Test {
 protected:
  ThreadTeam team_{2};
  std::unique_ptr<Device> device_ = cpu::make_device(team_);
  HostProducts products_{*device_, team_};
};

TEST_F(HostProductsTest, Multiply) {
  test::check_products(products_);
}
TEST_F(HostProductsTest, Transfer) {
  test::check_transfers(products_);
}
TEST_F(HostProductsTest, CountMemory) {
  test::check_memory(products_);
}
TEST_F(HostProductsTest, Adam) {
  test::check_adam(products_);
}
TEST_F(HostProductsTest, Cholesky) {
  test::check_cholesky(products_);
}
TEST_F(HostProductsTest, CholeskyRefusesWhatIsNotPositiveDefinite) {
  test::check_cholesky_refusal(products_);
}
TEST_F(HostProductsTest, TokensInTiles) {
  test::check_token_products(products_);
}
TEST_F(HostProductsTest, SubspaceOfAWideGate) {
  test::check_wide_svd(products_);
}

}  // namespace
}  // namespace hearth::predictor
