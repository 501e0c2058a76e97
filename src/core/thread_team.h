#pragma once
// A team of CPU threads that is created once (one OpenMP parallel region for its whole life) and handed work through
// atomics: a dispatch costs about a microsecond, against a fork and join per matrix. Idle members spin for a short
// while, then sleep.
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
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

class ThreadTeam {
 public:
  // n_threads 0: one per physical core this process may use. Throws Error when n_threads is negative or above 1024.
  explicit ThreadTeam(int n_threads = 0);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const { return size_; }

  // Calls work(begin, end, thread) over consecutive pieces of [0, n) of at most `grain`, handed out by an atomic
  // counter to the caller (thread 0) and to the members that are awake, thread in [0, size()). Returns when all pieces
  // are done, and everything they wrote is visible to the caller; a member that has not got a core by then is not
  // waited for. The pieces depend on n and grain only, never on the number of threads or on timing. One caller at a
  // time, not reentrant; `work` must not throw.
  void for_chunks(int64_t n, int64_t grain, FunctionRef<void(int64_t begin, int64_t end, int thread)> work);

 private:
  struct State;
  void member_loop(int thread);
  void share(FunctionRef<void(int thread)> job);  // job(0) here, job(t) on every member that joins in time

  int size_ = 1;
  std::unique_ptr<State> state_;
};

}  // namespace hearth
