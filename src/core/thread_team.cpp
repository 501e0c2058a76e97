#include "core/thread_team.h"

#include <hwloc.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <fstream>
#include <set>
#include <span>
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

void keep_to(std::span<const int> cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // best effort
}

// Polls until `done`. Somebody may need this core to get there, at once where the team has no core for every member.
template <typename Done>
void spin_until(bool crowded, Done done) {
  for (int64_t spins = 0; !done(); ++spins) {
    cpu_pause();
    if (crowded || spins > 4000) std::this_thread::yield();
  }
}

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

// One job at a time, numbered. Every member has a slot: the number of the last job that it joined, left, or was left
// out of. A member joins by compare-and-swap on its slot alone, so members do not fight over a cache line; one that
// comes late, because its core was taken, finds its slot closed and touches nothing of the job: the caller has done its
// piece and need not wait for it.
struct ThreadTeam::State {
  static constexpr size_t kLine = 128;  // processors fetch lines in pairs
  enum Where : uint32_t { left = 0, inside = 1, closed = 2 };
  static uint32_t slot_value(uint32_t job, Where where) { return job << 2 | where; }
  struct alignas(kLine) Slot {
    std::atomic<uint32_t> value{0};
  };
  struct alignas(kLine) Counter {
    std::atomic<int64_t> value{0};
  };

  static constexpr auto kNoJob = [](int /*thread*/) {};
  // All that threads watch, on one line.
  struct alignas(kLine) Call {
    // Idle members, who may sleep on it: the number of the current job.
    std::atomic<uint32_t> epoch{0};
    FunctionRef<void(int)> job = kNoJob;
    // Threads between two rounds: the round that has begun last, as kMostRounds times the job's number plus the
    // round's, and the number of the job's rounds up to the last one that had pieces when that round began.
    std::atomic<uint32_t> opened{0};
    std::atomic<uint32_t> n_rounds{0};
  };

  // So many threads share a call: a line that was written goes to those who want it one after the other.
  static constexpr int kThreadsPerCall = 4;
  Call& call_of(int thread) { return calls[static_cast<size_t>(thread / kThreadsPerCall)]; }
  std::vector<Call> calls;
  uint32_t job_number = 0;  // of the last job; written by the caller, read by members inside
  alignas(kLine) std::atomic<int> sleepers{0};
  // By thread: the last direct round in which its piece was done, numbered as in `opened`.
  struct alignas(kLine) Finished {
    std::atomic<uint32_t> round{0};
  };
  std::vector<Finished> finished;
  Counter next[kMostRounds];  // of each round: the next piece that is nobody's first
  Counter done[kMostRounds];  // its finished pieces, and one for its opening
  bool pin = false;
  alignas(kLine) std::atomic<int> arrived{0};
  std::atomic<bool> stop{false};
  std::vector<Slot> slots;
  std::vector<int> cores;          // one hardware thread of each that the process may use; empty: members keep to none
  std::chrono::microseconds spin;  // none when the team does not fit: the core is needed by a member with work
  std::thread host;                // the thread that opens the OpenMP region
};

ThreadTeam::ThreadTeam(int n_threads, ThreadTeamOptions options) {
  if (n_threads < 0 || n_threads > 1024)
    fail("the number of threads is {}, expected 1 to 1024 (0 = physical cores)", n_threads);
  size_ = n_threads > 0 ? n_threads : cpu_topology().physical;
  if (size_ == 1) return;
  state_ = std::make_unique<State>();
  state_->slots = std::vector<State::Slot>(static_cast<size_t>(size_));
  state_->finished = std::vector<State::Finished>(static_cast<size_t>(size_));
  const int members = size_ - 1;
  state_->calls = std::vector<State::Call>(static_cast<size_t>(members / State::kThreadsPerCall + 1));
  int logical = 0;
  state_->cores = allowed_cores(&logical);
  const bool fits = std::ssize(state_->cores) >= size_;
  state_->spin = fits ? options.spin : std::chrono::microseconds{0};
  if (!fits) state_->cores.clear();
  state_->pin = options.pin && std::ssize(state_->cores) == size_;
  state_->host = std::thread([this, members] {
#pragma omp parallel for num_threads(members) schedule(static, 1)
    for (int i = 0; i < members; ++i) member_loop(i + 1);
  });
  while (state_->arrived.load(std::memory_order_acquire) != members) std::this_thread::yield();
}

ThreadTeam::~ThreadTeam() {
  if (!state_) return;
  state_->stop = true;
  for (State::Call& call : state_->calls) {
    call.epoch.fetch_add(1, std::memory_order_seq_cst);
    call.epoch.notify_all();
  }
  // The join alone would do; thread sanitizer does not see through OpenMP's own synchronisation.
  while (state_->arrived.load(std::memory_order_acquire) != 0) std::this_thread::yield();
  state_->host.join();
}

void ThreadTeam::member_loop(int thread) {
  State& s = *state_;
  const std::span<const int> cores = s.cores;
  if (!cores.empty()) keep_to(s.pin ? cores.subspan(static_cast<size_t>(thread), 1) : cores);
  std::atomic<uint32_t>& slot = s.slots[static_cast<size_t>(thread)].value;
  State::Call& call = s.call_of(thread);
  uint32_t seen = 0;
  s.arrived.fetch_add(1, std::memory_order_release);
  for (;;) {
    const auto sleep_at = std::chrono::steady_clock::now() + s.spin;
    uint32_t job;
    for (int spins = 0; (job = call.epoch.load(std::memory_order_acquire)) == seen; ++spins) {
      cpu_pause();
      if ((spins & 127) == 127 && std::chrono::steady_clock::now() > sleep_at) {
        s.sleepers.fetch_add(1, std::memory_order_seq_cst);
        call.epoch.wait(seen, std::memory_order_seq_cst);
        s.sleepers.fetch_sub(1, std::memory_order_seq_cst);
      }
    }
    if (s.stop) break;
    seen = job;
    uint32_t last = slot.load(std::memory_order_relaxed);
    // Left out of this job, or of one that has come since: only an older one may be replaced.
    if (static_cast<int32_t>((job << 2) - (last & ~3u)) <= 0) continue;
    if (!slot.compare_exchange_strong(last, State::slot_value(job, State::inside), std::memory_order_acquire)) continue;
    call.job(thread);
    slot.store(State::slot_value(job, State::left), std::memory_order_release);
  }
  s.arrived.fetch_sub(1, std::memory_order_release);
}

bool ThreadTeam::leave_out(int t) {
  std::atomic<uint32_t>& slot = state_->slots[static_cast<size_t>(t)].value;
  const uint32_t job = state_->job_number;
  const uint32_t closed = State::slot_value(job, State::closed);
  uint32_t last = slot.load(std::memory_order_relaxed);
  if (last == closed) return true;
  if (last >> 2 == (job & (~0u >> 2))) return false;
  return slot.compare_exchange_strong(last, closed, std::memory_order_relaxed);
}

void ThreadTeam::share(FunctionRef<void(int)> job) {
  State& s = *state_;
  for (State::Counter& next : s.next) next.value.store(size_, std::memory_order_relaxed);
  for (State::Counter& done : s.done) done.value.store(0, std::memory_order_relaxed);
  const uint32_t number = ++s.job_number;
  for (State::Call& call : s.calls) {
    call.job = job;
    call.epoch.store(number, std::memory_order_release);
  }
  // This thread's access to `sleepers` comes before or after a sleeper's, both being writes: a sleeper that it does not
  // see sees the new number.
  if (s.sleepers.fetch_add(0, std::memory_order_seq_cst) > 0) {
    for (State::Call& call : s.calls) call.epoch.notify_all();
  }
  job(0);
  for (int t = 1; t < size_; ++t) {
    const std::atomic<uint32_t>& slot = s.slots[static_cast<size_t>(t)].value;
    const uint32_t inside = State::slot_value(number, State::inside);
    if (leave_out(t)) continue;
    spin_until(s.spin.count() == 0, [&] { return slot.load(std::memory_order_acquire) != inside; });
  }
}

int64_t ThreadTeam::run_round(const Round& round, size_t number, int thread) {
  const int64_t pieces = round.pieces();
  int64_t done = 0;
  const auto run = [&](int64_t piece) {
    round.work(piece * round.grain, std::min(round.n, (piece + 1) * round.grain), thread);
    ++done;
  };
  if (thread < pieces) run(thread);
  std::atomic<int64_t>& next = state_->next[number].value;
  while (pieces > size_) {
    const int64_t piece = next.fetch_add(1, std::memory_order_relaxed);
    if (piece >= pieces) break;
    run(piece);
  }
  for (int t = 1; thread == 0 && t < std::min<int64_t>(size_, pieces); ++t) {
    if (leave_out(t)) run(t);
  }
  return done;
}

void ThreadTeam::for_chunks(int64_t n, int64_t grain, FunctionRef<void(int64_t, int64_t, int)> work) {
  if (n <= 0) return;
  HEARTH_CHECK(grain > 0);
  if (size_ == 1 || n <= grain) {
    for (int64_t begin = 0; begin < n; begin += grain) work(begin, std::min(n, begin + grain), 0);
    return;
  }
  const Round round{n, grain, work};
  share([&](int thread) { run_round(round, 0, thread); });
}

namespace {

// Whether a round has begun or ended, by a number that may be of a later one of the same job by the time that a thread
// looks. Older numbers are of other jobs.
bool has_reached(const std::atomic<uint32_t>& number, uint32_t round) {
  return number.load(std::memory_order_acquire) - round < ThreadTeam::kMostRounds;
}

// The number of rounds up to the last one that has pieces.
size_t used_rounds(std::span<const ThreadTeam::Round> rounds) {
  while (!rounds.empty() && rounds.back().pieces() == 0) rounds = rounds.first(rounds.size() - 1);
  return rounds.size();
}

}  // namespace

void ThreadTeam::for_rounds(std::span<const Round> rounds, FunctionRef<void(size_t)> between) {
  HEARTH_CHECK(!rounds.empty() && rounds.size() <= kMostRounds, "{} rounds", rounds.size());
  for (const Round& round : rounds) {
    HEARTH_CHECK(!round.direct || round.pieces() <= size_, "{} pieces for {} threads", round.pieces(), size_);
  }
  if (size_ == 1) {
    size_t n_rounds = rounds.size();
    for (size_t i = 0; i < n_rounds; ++i) {
      for_chunks(rounds[i].n, rounds[i].grain, rounds[i].work);
      if (i + 1 == n_rounds) return;
      if (rounds[i].direct) continue;
      between(i);
      n_rounds = used_rounds(rounds);
    }
    return;
  }
  State& s = *state_;
  const uint32_t first = (s.job_number + 1) * static_cast<uint32_t>(kMostRounds);  // of the coming job
  share([&](int thread) {
    const State::Call& call = s.call_of(thread);
    size_t n_rounds = rounds.size();
    // Who opens a round has a part in it besides its pieces: it does not end before all calls say that it began, nor
    // without anybody when it is empty.
    bool opens = thread == 0;
    for (uint32_t i = 0; i < n_rounds; ++i) {
      const int64_t parts = run_round(rounds[i], i, thread) + (opens ? 1 : 0);
      if (i + 1 == n_rounds) return;
      const uint32_t opening = first + i + 1;
      if (rounds[i].direct) {
        const auto pieces = static_cast<int>(rounds[i].pieces());
        const auto finish = [&](int t) {
          s.finished[static_cast<size_t>(t)].round.store(opening, std::memory_order_release);
        };
        if (thread < pieces) finish(thread);
        for (int t = 1; thread == 0 && t < pieces; ++t) {
          if (leave_out(t)) finish(t);
        }
        opens = thread == 0;
        continue;
      }
      opens =
          parts > 0 && s.done[i].value.fetch_add(parts, std::memory_order_acq_rel) + parts == rounds[i].pieces() + 1;
      if (opens) {
        between(i);
        const auto used = static_cast<uint32_t>(used_rounds(rounds));
        for (State::Call& c : s.calls) {
          c.n_rounds.store(used, std::memory_order_relaxed);
          c.opened.store(opening, std::memory_order_release);
        }
      } else {
        int64_t step = 0;
        spin_until(s.spin.count() == 0, [&] {
          if (has_reached(call.opened, opening)) return true;
          if (step >= 0) step = rounds[i].meanwhile(thread, step) ? step + 1 : -1;
          return false;
        });
      }
      n_rounds = call.n_rounds.load(std::memory_order_relaxed);
    }
  });
}

int64_t ThreadTeam::wait_pieces(size_t direct, int64_t first, int64_t end, FunctionRef<void()> meanwhile) const {
  if (size_ == 1) return end;
  const State& s = *state_;
  const uint32_t round = s.job_number * static_cast<uint32_t>(kMostRounds) + static_cast<uint32_t>(direct) + 1;
  const auto is_done = [&](int64_t t) { return has_reached(s.finished[static_cast<size_t>(t)].round, round); };
  spin_until(s.spin.count() == 0, [&] {
    if (is_done(first)) return true;
    meanwhile();
    return false;
  });
  int64_t at = first + 1;
  while (at < end && is_done(at)) ++at;
  return at;
}

}  // namespace hearth
