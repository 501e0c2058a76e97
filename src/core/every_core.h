#pragma once
// Work of the start, when there is no thread team yet, or none at hand.
#include <cstddef>

#include "core/thread_team.h"

namespace hearth {

// Calls work(i) for every i < n, on as many threads as the process may use cores, the caller's among them: each takes
// the next i when it is done with one. Returns when all are done. `work` must not throw.
void on_every_core(size_t n, FunctionRef<void(size_t i)> work);

}  // namespace hearth
