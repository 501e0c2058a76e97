#include "core/every_core.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace hearth {

void on_every_core(size_t n, FunctionRef<void(size_t)> work) {
  std::atomic<size_t> next{0};
  const auto run = [&] {
    for (size_t i = next++; i < n; i = next++) work(i);
  };
  const size_t n_threads = std::min(n, static_cast<size_t>(cpu_topology().physical));
  std::vector<std::jthread> threads;
  for (size_t t = 1; t < n_threads; ++t) threads.emplace_back(run);
  run();
}

}  // namespace hearth
