// Stands in for the CUDA backend in builds without a CUDA toolkit.
#include "core/error.h"
#include "cuda/cuda.h"
#include "cuda/layout.h"

namespace hearth::cuda {

namespace {
constexpr const char* kWhy = "this hearth was built without CUDA";
}

std::vector<GpuInfo> list_gpus(std::string* why) {
  if (why != nullptr) *why = kWhy;
  return {};
}
void require_libraries() {
  fail("{}", kWhy);
}
Bandwidth measure_bandwidth(int /*gpu*/) {
  fail("{}", kWhy);
}
size_t scratch_bytes(const GpuInfo& /*gpu*/, const Limits& /*limits*/) {
  fail("{}", kWhy);
}
size_t q8_bytes(int64_t n) {
  return static_cast<size_t>(q8_row_bytes(n));
}
std::unique_ptr<Device> make_device(int /*gpu*/, const GpuShape& /*at_most*/) {
  fail("no GPU to run on: {}; use --device cpu", kWhy);
}
std::unique_ptr<Products> make_products(int /*gpu*/) {
  fail("no GPU to multiply on: {}; use --device cpu", kWhy);
}

}  // namespace hearth::cuda
