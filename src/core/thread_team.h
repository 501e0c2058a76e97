#pragma once
// A team of CPU threads that is created once (one OpenMP parallel region for its whole life) and handed work through
// atomics: a dispatch costs about a microsecond, against a fork and join per matrix. Idle members spin for a short
// while, then sleep.
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <type_traits>

namespace hearth {

// A non-owning reference to a callable; the callable must outlive the call it is passed to.
template <typename Signature>
class FunctionRef;
template <typename R, typename... Args>
class FunctionRef<R(Args...)> {
 public:
  template <typename F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef>)
      FunctionRef(F&& f)  // NOLINT: implicit on purpose, as for std::function
      : object_(const_cast<void*>(static_cast<const void*>(&f))), call_([](void* object, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(object))(args...);
        }) {}
  R operator()(Args... args) const { return call_(object_, args...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

struct CpuTopology {
  int logical = 1;   // hardware threads this process may use (affinity mask and cgroup quota honoured)
  int physical = 1;  // cores behind them, at most `logical`
};
CpuTopology cpu_topology();

struct ThreadTeamOptions {
  // Members keep to the first hardware thread of each core that the process may use, wherever among them the scheduler
  // likes it. With `pin`, each keeps to one core of its own when the team has one for every core; that made no
  // difference to a dispatch on an idle 16-core machine (0.9 us without, 1.0 us with), and a second process suffers.
  // Nothing is done when the team has more members than there are cores.
  bool pin = false;
  // How long idle members spin before they sleep: longer than any gap between two operations of a token, also where a
  // GPU works in between, but not through a pause between prompts. Members of a team that does not fit never spin.
  std::chrono::microseconds spin{1000};
};

class ThreadTeam {
 public:
  static constexpr auto kNothing = [](int /*thread*/, int64_t /*step*/) { return false; };
  // Consecutive pieces of [0, n) of at most `grain`, each for one call of work(begin, end, thread).
  struct Round {
    int64_t n = 0, grain = 1;
    FunctionRef<void(int64_t begin, int64_t end, int thread)> work;
    // The work of a thread that waits for this round's last pieces: calls with step 0, 1, ... until one returns false or
    // the next round begins. A thread that is inside a call then comes late by what is left of it. Not after the last
    // round, nor after a `direct` one.
    FunctionRef<bool(int thread, int64_t step)> meanwhile = kNothing;
    // A round has at most as many pieces as threads: nobody calls between() after it, nor waits. Each thread goes
    // on with the next round at once, whose work waits for the pieces that it needs (wait_pieces()).
    bool direct = false;
    int64_t pieces() const { return (n + grain - 1) / grain; }
  };

  // n_threads 0: one per physical core this process may use. Throws Error when n_threads is negative or above 1024.
  explicit ThreadTeam(int n_threads = 0, ThreadTeamOptions options = {});
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const { return size_; }

  // Calls work(begin, end, thread) over consecutive pieces of [0, n) of at most `grain`, on the caller (thread 0) and
  // the members that are awake, thread in [0, size()): piece t to thread t, later ones to whoever comes first.
  // Returns when all pieces are done, and everything they wrote is visible to the caller; a member that has not got a
  // core by then is not waited for. The pieces depend on n and grain only, never on the number of threads or on timing.
  // One caller at a time, not reentrant; `work` must not throw.
  void for_chunks(int64_t n, int64_t grain, FunctionRef<void(int64_t begin, int64_t end, int thread)> work);

  // The same for several rounds, kMostRounds at most, in one dispatch. When the pieces of round i are all done, one
  // thread calls between(i) (unless the round is `direct`), which may also change n and grain of later rounds; then the
  // next begins, or, when none of the later ones has any pieces by then, the dispatch ends. What was written before is
  // visible to whatever comes after.
  static constexpr size_t kMostRounds = 3;
  void for_rounds(std::span<const Round> rounds, FunctionRef<void(size_t finished)> between);

  // In the work of a round that comes after round `direct`, which is: waits until piece `first` of that one is done,
  // and returns the end, `end` at most, of the pieces from there on that are; what they wrote is visible. Calls
  // meanwhile() over and over while it waits.
  int64_t wait_pieces(size_t direct, int64_t first, int64_t end, FunctionRef<void()> meanwhile) const;

 private:
  struct State;
  void member_loop(int thread);
  // Calls job(0) here, and job(t) on every member that joins before it is left out.
  void share(FunctionRef<void(int thread)> job);
  // True when member t has not joined the current job; from then on it cannot.
  bool leave_out(int t);
  // Runs a thread's part of a round, for the caller with that of the members left out; returns the number of pieces.
  int64_t run_round(const Round& round, size_t number, int thread);

  int size_ = 1;
  std::unique_ptr<State> state_;
};

}  // namespace hearth
