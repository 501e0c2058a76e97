#include "hub/pull.h"

#include <algorithm>

#include "core/error.h"
#include "core/log.h"
#include "core/units.h"

namespace hearth::hub {
namespace {

namespace fs = std::filesystem;

// Brings one model's files into the cache.
class Puller {
 public:
  Puller(const std::string& repository, const Settings& settings, const Watcher& watcher, Client& client)
      : repository_(repository), settings_(settings), watcher_(watcher), client_(client), cache_(settings.cache) {}

  uint64_t bring(const Listing& listing, const ModelFiles& model) {
    cache_.make_folders(repository_);
    require_room(model);
    uint64_t sum = 0;
    for (size_t i = 0; i < model.parts.size(); ++i)
      sum += bring_file(listing.commit, model.parts[i], i + 1, model.parts.size());
    cache_.set_main(repository_, listing.commit);
    return sum;
  }

 private:
  void require_room(const ModelFiles& model) const {
    uint64_t needed = 0;
    for (const RepositoryFile& part : model.parts) {
      if (cache_.has_blob(repository_, part)) continue;
      std::error_code absent;
      const uint64_t have = fs::file_size(cache_.incomplete(repository_, part.etag), absent);
      needed += part.size - (absent ? 0 : std::min(have, part.size));
    }
    const uint64_t room = fs::space(cache_.folder(repository_)).available;
    if (needed > room)
      fail("'{}' needs {} and '{}' has {} free; make room, or name another folder with HF_HOME", model.path(),
           human_bytes(needed), settings_.cache.string(), human_bytes(room));
  }

  uint64_t bring_file(const std::string& commit, const RepositoryFile& listed, size_t number, size_t count) {
    RepositoryFile file = listed;
    if (!cache_.has_blob(repository_, file)) file = client_.facts(repository_, commit, listed);
    const auto lock = FileLock::wait(cache_.lock(repository_, file.etag), settings_.cancelled, [&] {
      settings_.tell(fmt::format("'{}' is being downloaded by another process; waiting for it", file.path));
    });
    if (lock == nullptr) throw Cancelled();
    uint64_t new_bytes = 0;
    if (!cache_.has_blob(repository_, file)) {
      for (bool resumed = true; resumed;) new_bytes += transfer(commit, file, number, count, resumed);
    }
    cache_.link(repository_, commit, file);
    return new_bytes;
  }

  // One file from its first or next byte to its checksum. A wrong one of a file that was resumed, by an older pull
  // perhaps, is answered by one more from the first byte: `resumed` says whether that is to be done.
  uint64_t transfer(const std::string& commit, const RepositoryFile& file, size_t number, size_t count, bool& resumed) {
    constexpr uint64_t kLong = uint64_t{1} << 30;  // a second or more to read
    const Checksum kind = checksum_of(file.etag);
    std::error_code absent;
    const uint64_t there = fs::file_size(cache_.incomplete(repository_, file.etag), absent);
    if (!absent && there >= kLong)
      settings_.tell(fmt::format("reading the {} of '{}' that are there", human_bytes(there), file.path));
    Partial partial(cache_.incomplete(repository_, file.etag), file.size, kind);
    const uint64_t before = partial.have();
    resumed = false;
    watcher_.begins(file, number, count, before);
    try {
      client_.download(repository_, commit, file, partial, watcher_.comes);
    } catch (...) {
      watcher_.ends();
      throw;
    }
    watcher_.ends();
    const std::string checksum = partial.checksum();
    if (kind == Checksum::none) log::warn("the hub gives no checksum of '{}'; its size alone was checked", file.path);
    if (kind == Checksum::none || checksum == file.etag) {
      partial.finish(cache_.blob(repository_, file.etag));
      return file.size - before;
    }
    partial.discard();
    if (before == 0)
      fail("'{}' arrived with the checksum {} where the hub names {}; nothing was kept, try again", file.path, checksum,
           file.etag);
    settings_.tell(fmt::format("'{}' was resumed and has a wrong checksum: it is downloaded anew", file.path));
    resumed = true;
    return file.size - before;
  }

  const std::string& repository_;
  const Settings& settings_;
  const Watcher& watcher_;
  Client& client_;
  Cache cache_;
};

}  // namespace

Pulled pull(const ModelName& name, const Settings& settings, const Watcher& watcher, bool patient) {
  if (settings.offline) fail("HF_HUB_OFFLINE is set, so '{}' cannot be pulled; unset it", name.repository);
  Client client(settings);
  const Listing listing = client.list(name.repository, patient);
  const Choice choice = choose(models_among(listing.files), name);
  const uint64_t bytes = Puller(name.repository, settings, watcher, client).bring(listing, choice.model);
  return {Cache(settings.cache).file(name.repository, listing.commit, choice.model.path()), choice.model, choice.why,
          bytes};
}

Pulled find_cached(const ModelName& name, const Cache& cache) {
  std::vector<ModelFiles> all;
  for (const Snapshot& snapshot : cache.snapshots(name.repository)) {
    const std::vector<ModelFiles> models = models_among(snapshot.files);
    std::vector<ModelFiles> complete;
    for (const ModelFiles& model : matching(models, name.wanted)) {
      if (model.missing == 0) complete.push_back(model);
    }
    if (complete.empty()) continue;
    const Choice choice = choose(models, name);
    return {cache.file(name.repository, snapshot.commit, choice.model.path()), choice.model, choice.why};
  }
  const std::string colon = name.wanted.empty() ? "" : ":";
  fail("'{}{}{}' is not complete in the cache '{}'; `hearth pull` brings it", name.repository, colon, name.wanted,
       cache.root().string());
}

Pulled resolve(const ModelName& name, const Settings& settings, const Watcher& watcher) {
  const Cache cache(settings.cache);
  if (settings.offline) return find_cached(name, cache);
  std::optional<Pulled> cached;
  try {
    cached = find_cached(name, cache);
  } catch (const Error&) {
    return pull(name, settings, watcher);  // nothing to fall back on
  }
  const auto fall_back = [&](const Error& e) {
    log::warn("{}; using what is in the cache: '{}'", e.what(), cached->path.string());
    return *cached;
  };
  try {
    return pull(name, settings, watcher, false);
  } catch (const Unreachable& e) {
    return fall_back(e);
  } catch (const Refused& e) {
    return fall_back(e);
  }
}

}  // namespace hearth::hub
