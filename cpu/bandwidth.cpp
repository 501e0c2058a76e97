#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "core/buffer.h"
#include "cpu/cpu.h"
#include "cpu/isa.h"

namespace hearth::cpu {

double measure_read_bandwidth(ThreadTeam& team) {
  constexpr size_t kBytes = size_t{2} << 30;  // far beyond any last-level cache: servers have hundreds of MiB
  constexpr int64_t kPiece = int64_t{256} << 10;
  constexpr int kPasses = 3;
  const Kernels& k = kernels(best_isa());
  HostBuffer buffer(kBytes);
  const auto bytes = static_cast<int64_t>(kBytes);
  // Written first: pages that were never touched all read from one page of zeros.
  team.for_chunks(bytes, kPiece, [&](int64_t begin, int64_t end, int) {
    std::memset(buffer.data() + begin, 1, static_cast<size_t>(end - begin));
  });
  std::atomic<uint64_t> sink{0};
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    team.for_chunks(bytes, kPiece, [&](int64_t begin, int64_t end, int) {
      sink.fetch_xor(k.read(buffer.data() + begin, static_cast<size_t>(end - begin)), std::memory_order_relaxed);
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(kBytes) / seconds.count());
  }
  return best;
}

}  // namespace hearth::cpu
