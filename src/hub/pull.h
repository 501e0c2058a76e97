#pragma once
// A model by its name on the hub, as a file of this machine.
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "hub/cache.h"
#include "hub/choose.h"
#include "hub/client.h"
#include "hub/settings.h"

namespace hearth::hub {

// Told what a pull does.
struct Watcher {
  // A file begins to come, the number-th of so many that the model has; `have` bytes are there from before.
  std::function<void(const RepositoryFile& file, size_t number, size_t count, uint64_t have)> begins;
  std::function<void(uint64_t have)> comes;
  std::function<void()> ends;  // also before an error is thrown
};

struct Pulled {
  std::filesystem::path path;  // of the first part, in its snapshot
  ModelFiles model;
  std::string why;         // as in Choice
  uint64_t new_bytes = 0;  // that came over the network
};

// Asks the hub, and brings what is missing. Nothing is under its final name before its size and checksum are right.
// Throws Refused, Unreachable, Cancelled, Error.
Pulled pull(const ModelName& name, const Settings& settings, const Watcher& watcher, bool patient = true);

// From the cache alone. Throws Error when it does not hold all of the model.
Pulled find_cached(const ModelName& name, const Cache& cache);

// What -hf means: pull(), and with a warning what is in the cache where the hub cannot be asked; offline, the cache.
Pulled resolve(const ModelName& name, const Settings& settings, const Watcher& watcher);

}  // namespace hearth::hub
