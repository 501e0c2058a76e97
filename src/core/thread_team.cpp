#include "core/thread_team.h"

#include <hwloc.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hearth {
namespace {

void cpu_pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Cores granted by the cgroup (v2, then v1); infinity when there is no quota.
double cgroup_cpu_quota() {
  std::ifstream v2("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (v2 >> quota >> period) {
    return quota == "max" || period <= 0 ? INFINITY : std::strtod(quota.c_str(), nullptr) / period;
  }
  std::ifstream v1_quota("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), v1_period("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  double q = -1;
  if (v1_quota >> q && v1_period >> period && q > 0 && period > 0) return q / period;
  return INFINITY;
}

// One logical CPU of each physical core that this process may run on, in topology order.
std::vector<int> allowed_cores(int* logical) {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cores;
  *logical = 0;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cores;
  *logical = CPU_COUNT(&set);
  hwloc_topology_t topology;
  if (hwloc_topology_init(&topology) != 0) return cores;
  if (hwloc_topology_load(topology) == 0) {
    std::set<unsigned> seen;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &set)) continue;
      const hwloc_obj_t pu = hwloc_get_pu_obj_by_os_index(topology, static_cast<unsigned>(cpu));
      const hwloc_obj_t core = pu != nullptr ? hwloc_get_ancestor_obj_by_type(topology, HWLOC_OBJ_CORE, pu) : nullptr;
      if (core == nullptr || seen.insert(core->logical_index).second) cores.push_back(cpu);
    }
  }
  hwloc_topology_destroy(topology);
  return cores;
}

// Not to one core each: another process may keep that one busy, and a second team would be pinned to the same.
void keep_to(const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // best effort
}

// Spinning longer than any gap between two operations of a token, but not through a pause between prompts.
constexpr auto kSpin = std::chrono::microseconds(200);

}  // namespace

CpuTopology cpu_topology() {
  CpuTopology t;
  const auto cores = allowed_cores(&t.logical);
  t.logical = std::max(1, t.logical);
  t.physical = cores.empty() ? t.logical : static_cast<int>(cores.size());
  const double quota = cgroup_cpu_quota();
  if (quota < t.logical) t.logical = std::max(1, static_cast<int>(std::floor(quota)));
  t.physical = std::min(t.physical, t.logical);
  return t;
}

struct ThreadTeam::State {
  // One job at a time. `gate` holds the job's number (high half), whether it may still be joined, and how many members
  // are inside it. A member joins by compare-and-swap, so one that comes late, because its core was taken, finds the
  // gate closed and touches nothing of the job: the caller need not wait for it.
  static constexpr uint64_t kOpen = uint64_t{1} << 31;
  static constexpr uint64_t kInside = kOpen - 1;
  alignas(64) std::atomic<uint64_t> gate{0};
  alignas(64) std::atomic<uint32_t> epoch{0};  // the job's number again: what idle members watch and sleep on
  alignas(64) std::atomic<int64_t> next_chunk{0};
  alignas(64) std::atomic<int> sleepers{0};
  const FunctionRef<void(int)>* job = nullptr;  // published by `gate`
  std::atomic<bool> stop{false};
  std::atomic<int> arrived{0};
  std::vector<int> cores;                  // members keep to one hardware thread per core, when the team fits
  std::chrono::microseconds spin = kSpin;  // none when the team does not fit: the core is needed by a member with work
  std::thread host;                        // the thread that opens the OpenMP region
};

ThreadTeam::ThreadTeam(int n_threads) {
  if (n_threads < 0 || n_threads > 1024)
    fail("the number of threads is {}, expected 1 to 1024 (0 = physical cores)", n_threads);
  size_ = n_threads > 0 ? n_threads : cpu_topology().physical;
  if (size_ == 1) return;
  state_ = std::make_unique<State>();
  int logical = 0;
  state_->cores = allowed_cores(&logical);
  if (static_cast<int>(state_->cores.size()) < size_)
    state_->cores.clear();  // oversubscribed: leave it to the scheduler
  state_->host = std::thread([this] {
    const int members = size_ - 1;
#pragma omp parallel for num_threads(members) schedule(static, 1)
    for (int i = 0; i < members; ++i) member_loop(i + 1);
  });
  while (state_->arrived.load(std::memory_order_acquire) != size_ - 1) std::this_thread::yield();
}

ThreadTeam::~ThreadTeam() {
  if (!state_) return;
  state_->stop = true;
  state_->epoch.fetch_add(1, std::memory_order_seq_cst);
  state_->epoch.notify_all();
  // The join alone would do; thread sanitizer does not see through OpenMP's own synchronisation.
  while (state_->arrived.load(std::memory_order_acquire) != 0) std::this_thread::yield();
  state_->host.join();
}

void ThreadTeam::member_loop(int thread) {
  State& s = *state_;
  if (!s.cores.empty()) keep_to(s.cores);
  uint32_t seen = 0;
  s.arrived.fetch_add(1, std::memory_order_release);
  for (;;) {
    const auto sleep_at = std::chrono::steady_clock::now() + s.spin;
    for (int spins = 0; s.epoch.load(std::memory_order_acquire) == seen; ++spins) {
      cpu_pause();
      if ((spins & 127) == 127 && std::chrono::steady_clock::now() > sleep_at) {
        s.sleepers.fetch_add(1, std::memory_order_seq_cst);
        s.epoch.wait(seen, std::memory_order_seq_cst);
        s.sleepers.fetch_sub(1, std::memory_order_seq_cst);
      }
    }
    if (s.stop) break;
    uint64_t gate = s.gate.load(std::memory_order_acquire);
    seen = static_cast<uint32_t>(gate >> 32);
    bool joined = false;
    while ((gate & State::kOpen) != 0 && static_cast<uint32_t>(gate >> 32) == seen && !joined) {
      joined = s.gate.compare_exchange_weak(gate, gate + 1, std::memory_order_acquire);
    }
    if (!joined) continue;
    (*s.job)(thread);
    s.gate.fetch_sub(1, std::memory_order_release);
  }
  s.arrived.fetch_sub(1, std::memory_order_release);
}

void ThreadTeam::share(FunctionRef<void(int)> job) {
  State& s = *state_;
  s.job = &job;
  const uint32_t number = s.epoch.load(std::memory_order_relaxed) + 1;
  s.gate.store((static_cast<uint64_t>(number) << 32) | State::kOpen, std::memory_order_release);
  s.epoch.store(number, std::memory_order_seq_cst);
  if (s.sleepers.load(std::memory_order_seq_cst) > 0) s.epoch.notify_all();
  job(0);
  s.gate.fetch_and(~State::kOpen, std::memory_order_acq_rel);
  for (int spins = 0; (s.gate.load(std::memory_order_acquire) & State::kInside) != 0; ++spins) {
    cpu_pause();
    if (spins > 20000 || s.spin.count() == 0) std::this_thread::yield();  // a member may wait for this core
  }
}

void ThreadTeam::for_chunks(int64_t n, int64_t grain, FunctionRef<void(int64_t, int64_t, int)> work) {
  if (n <= 0) return;
  HEARTH_CHECK(grain > 0);
  if (size_ == 1 || n <= grain) {
    for (int64_t begin = 0; begin < n; begin += grain) work(begin, std::min(n, begin + grain), 0);
    return;
  }
  State& s = *state_;
  s.next_chunk.store(0, std::memory_order_relaxed);
  share([&](int thread) {
    for (;;) {
      const int64_t begin = s.next_chunk.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= n) return;
      work(begin, std::min(n, begin + grain), thread);
    }
  });
}

}  // namespace hearth
