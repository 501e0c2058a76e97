// Memory of the GPU device: copies of all sizes, exact accounting, running out of it.
#include <numeric>

#include "core/error.h"
#include "twin.h"

namespace hearth::test {
namespace {

using GpuMemoryTest = GpuTest;

size_t total(const Device& d) {
  size_t sum = 0;
  for (const MemoryUse& u : d.memory()) sum += u.bytes;
  return sum;
}

TEST_F(GpuMemoryTest, AccountingMatchesTheDriver) {
  constexpr size_t kTolerance = size_t{64} << 20;
  const size_t counted_before = total(*gpu_);
  auto d = cuda::make_device(0);
  const size_t free_before = cuda::list_gpus().at(0).free_bytes;
  const size_t context = total(*d);  // shared with gpu_, and stated by both
  d->reserve({.max_tokens = 512,
              .max_context = 4096,
              .max_cols = 11008,
              .max_rows = 11008,
              .n_vocab = 32000,
              .n_ff = 11008,
              .n_embd = 4096,
              .n_head = 32,
              .n_head_kv = 32,
              .head_dim = 128,
              .quantized_weights = true});
  std::vector<std::byte> host(size_t{48} << 20);
  size_t adopted = 0;
  for (int i = 0; i < 40; ++i) {
    const DType type = i % 2 == 0 ? DType::q4_0 : DType::f16;
    const Matrix m{type, 3000 + 17 * i, 4096, host.data()};
    adopted += d->adopted_bytes(m);
    EXPECT_EQ(d->adopted_bytes(m) % 256, 0u);
    d->adopt(m);
  }
  const DeviceBuffer kv = d->allocate(size_t{700} << 20, Purpose::kv_cache);
  d->synchronize();
  const size_t taken = free_before - cuda::list_gpus().at(0).free_bytes, counted = total(*d) - context;
  EXPECT_LT(std::max(taken, counted) - std::min(taken, counted), kTolerance)
      << "taken " << taken << " counted " << counted;
  for (const MemoryUse& u : d->memory()) {
    if (u.purpose == Purpose::weights) {
      EXPECT_GE(u.bytes, adopted);
      EXPECT_LE(u.bytes, adopted + (size_t{32} << 20));
    }
    if (u.purpose == Purpose::kv_cache) {
      EXPECT_EQ(u.bytes, size_t{700} << 20);
    }
    if (u.purpose == Purpose::context) {
      EXPECT_GT(u.bytes, size_t{32} << 20);
    }
  }
  EXPECT_EQ(total(*gpu_), counted_before);
}

TEST_F(GpuMemoryTest, RunningOutSaysWhatWasAskedAndWhatIsFree) {
  const size_t before = total(*gpu_);
  try {
    const DeviceBuffer b = gpu_->allocate(size_t{1} << 45, Purpose::kv_cache);
    FAIL() << "a GPU with 32 TiB";
  } catch (const Error& e) {
    const std::string message = e.what();
    EXPECT_NE(message.find("32768.00 GiB of KV cache"), std::string::npos) << message;
    EXPECT_NE(message.find("are free"), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos);
  }
  EXPECT_EQ(total(*gpu_), before);
  EXPECT_EQ(gpu_->allocate(1 << 20, Purpose::kv_cache).bytes(), size_t{1} << 20);  // and it still works
}

TEST_F(GpuMemoryTest, CopiesOfAllSizesArriveWhole) {
  std::mt19937 rng(3);
  for (const size_t n : {size_t{1}, size_t{4095}, size_t{1} << 20, (size_t{1} << 20) + 1, (size_t{37} << 20) + 13}) {
    std::vector<uint8_t> sent(n), got(n);
    for (auto& b : sent) b = static_cast<uint8_t>(rng());
    const DeviceBuffer buffer = gpu_->allocate(n, Purpose::activations);
    gpu_->download(got.data(), buffer.as<void>(), n);
    EXPECT_EQ(got, std::vector<uint8_t>(n)) << "fresh memory is zero";
    gpu_->upload(buffer.as<void>(), sent.data(), n);
    std::vector<uint8_t> scribble(sent);
    std::fill(scribble.begin(), scribble.end(), uint8_t{0});  // the source may change after upload() returns
    gpu_->download(got.data(), buffer.as<void>(), n);
    EXPECT_EQ(got, sent) << n << " bytes";
  }
}

TEST_F(GpuMemoryTest, ManySmallUploadsKeepTheirOrder) {
  const DeviceBuffer buffer = gpu_->allocate(sizeof(int32_t), Purpose::activations);
  int32_t got = 0;
  for (int32_t i = 0; i < 40000; ++i)
    gpu_->upload(buffer.as<void>(), &i, sizeof i);  // wraps the ring of staging memory
  gpu_->download(&got, buffer.as<void>(), sizeof got);
  EXPECT_EQ(got, 39999);
}

}  // namespace
}  // namespace hearth::test
