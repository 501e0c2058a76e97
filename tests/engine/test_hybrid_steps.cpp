// Ten thousand FFNs divided between two devices: what a thread sanitizer looks at for races. Built for it: cmake
// --preset tsan.
#include "support/hybrid_steps.h"

namespace hearth {
namespace {

TEST(HybridSteps, TenThousandInARow) {
  const auto main = cpu::make_reference_device();
  test::expect_hybrid_steps(*main, 0, 10'000);
}

}  // namespace
}  // namespace hearth
