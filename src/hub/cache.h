#pragma once
// The hub's cache folder, shared with huggingface_hub and llama.cpp:
//   models--OWNER--NAME/blobs/ETAG            a file's bytes; ETAG.incomplete while they come in
//   models--OWNER--NAME/snapshots/COMMIT/FILE a link to its blob
//   models--OWNER--NAME/refs/main             the COMMIT that was the newest
//   .locks/models--OWNER--NAME/ETAG.lock      held (flock) by who brings, links or removes the blob
#include <ctime>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hub/choose.h"

namespace hearth::hub {

// One version of a repository, as far as it is in the cache.
struct Snapshot {
  std::string commit;
  bool current = false;               // refs/main names it
  std::vector<RepositoryFile> files;  // of which the bytes are there
};

struct CachedModel {
  std::string repository;
  ModelFiles model;
  std::string commit;
  bool current = false;
  std::filesystem::path path;  // in the snapshot: what -m takes
  std::time_t when = 0;        // when its last part was complete
};
struct Unfinished {
  std::string repository;
  std::filesystem::path path;
  uint64_t size = 0;  // so far
};
struct Contents {
  std::vector<CachedModel> models;  // each version of each file once
  std::vector<Unfinished> unfinished;
  size_t n_others = 0;  // files that are no models
  uint64_t other_bytes = 0;
};

// All that would be removed.
struct Removal {
  std::string repository;
  bool whole = false;                        // the folder with everything in it
  std::vector<std::filesystem::path> files;  // links, and what hearth keeps beside them (sidecars)
  std::vector<std::string> etags;            // blobs that no other link needs
  uint64_t bytes = 0;                        // that become free
};

class Cache {
 public:
  explicit Cache(std::filesystem::path root) : root_(std::move(root)) {}

  const std::filesystem::path& root() const { return root_; }
  std::filesystem::path folder(const std::string& repository) const;
  std::filesystem::path blob(const std::string& repository, const std::string& etag) const;
  std::filesystem::path incomplete(const std::string& repository, const std::string& etag) const;
  std::filesystem::path lock(const std::string& repository, const std::string& etag) const;
  std::filesystem::path file(const std::string& repository, const std::string& commit, const std::string& path) const;
  bool has_blob(const std::string& repository, const RepositoryFile& file) const;

  // Makes folders, the link of a file to its blob, the reference. Throw Error with the path and the reason.
  void make_folders(const std::string& repository) const;
  void link(const std::string& repository, const std::string& commit, const RepositoryFile& file) const;
  void set_main(const std::string& repository, const std::string& commit) const;

  std::vector<std::string> repositories() const;
  // The current one first, then the newest.
  std::vector<Snapshot> snapshots(const std::string& repository) const;
  Contents contents() const;

  // Throws Error when there is no such thing.
  Removal plan_removal(const ModelName& name) const;
  // Throws Error, and removes nothing, while one of the blobs is being brought.
  void remove(const Removal& removal) const;

 private:
  std::filesystem::path root_;
};

// An exclusive lock of a file, until it is destroyed or the process ends.
class FileLock {
 public:
  // Null when somebody else holds it.
  static std::unique_ptr<FileLock> try_lock(const std::filesystem::path& path);
  // Waits; null when `cancelled` says so. `waits` is called once, when somebody else holds it.
  static std::unique_ptr<FileLock> wait(const std::filesystem::path& path, const std::function<bool()>& cancelled,
                                        const std::function<void()>& waits);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  explicit FileLock(int fd) : fd_(fd) {}
  int fd_;
};

}  // namespace hearth::hub
