#include "hub/cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <regex>
#include <set>
#include <thread>

#include "core/error.h"
#include "core/file.h"

namespace hearth::hub {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "models--", kIncomplete = ".incomplete";

bool is_commit(const std::string& text) {
  return text.size() == 40 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

// models--OWNER--NAME
std::string folder_name(const std::string& repository) {
  const size_t slash = repository.find('/');
  return fmt::format("{}{}--{}", kPrefix, repository.substr(0, slash), repository.substr(slash + 1));
}

// OWNER/NAME; empty for another kind of folder.
std::string repository_of(const std::string& folder) {
  if (folder.rfind(kPrefix, 0) != 0) return {};
  const size_t middle = folder.find("--", kPrefix.size());
  if (middle == std::string::npos) return {};
  return folder.substr(kPrefix.size(), middle - kPrefix.size()) + "/" + folder.substr(middle + 2);
}

void make_folder(const fs::path& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) fail("cannot make the folder '{}': {}", path.string(), error.message());
}

// The contents of a folder; empty when it is none.
std::vector<fs::directory_entry> entries(const fs::path& folder) {
  std::vector<fs::directory_entry> all;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) all.push_back(*it);
  std::sort(all.begin(), all.end());
  return all;
}

std::string current_commit(const fs::path& folder) {
  std::error_code ignored;
  const fs::path main = folder / "refs" / "main";
  if (!fs::is_regular_file(main, ignored)) return {};
  std::string commit = read_text_file(main, 4096);
  commit.erase(commit.find_last_not_of(" \r\n") + 1);
  return commit;
}

std::time_t modified(const fs::path& path) {
  struct stat st {};
  return ::stat(path.c_str(), &st) == 0 ? st.st_mtime : 0;
}

// Every file in a snapshot whose bytes are there.
std::vector<RepositoryFile> files_in(const fs::path& snapshot) {
  std::vector<RepositoryFile> files;
  std::error_code error;
  for (fs::recursive_directory_iterator it(snapshot, error), end; !error && it != end; it.increment(error)) {
    std::error_code broken;
    if (!it->is_regular_file(broken) || broken) continue;
    RepositoryFile file{it->path().lexically_relative(snapshot).generic_string(), it->file_size(broken), ""};
    if (it->is_symlink(broken)) file.etag = fs::read_symlink(it->path(), broken).filename().string();
    if (!broken) files.push_back(std::move(file));
  }
  return files;
}

// The files that hearth keeps beside a model's: MODEL.sparse.gguf, MODEL.down_t.gguf, and what else begins like these.
std::vector<fs::path> companions(const fs::path& file) {
  static const std::regex part("-[0-9]{5}-of-[0-9]{5}$");
  const std::string stem = std::regex_replace(file.stem().string(), part, "");
  std::vector<fs::path> found;
  for (const fs::directory_entry& e : entries(file.parent_path())) {
    const std::string name = e.path().filename().string();
    const bool ours = name.rfind(stem + ".sparse.", 0) == 0 || name.rfind(stem + ".down_t.", 0) == 0;
    if (ours && !e.is_symlink() && e.is_regular_file()) found.push_back(e.path());
  }
  return found;
}

uint64_t bytes_of(const fs::path& path) {  // of its own, not of what a link leads to
  struct stat st {};
  return ::lstat(path.c_str(), &st) == 0 && S_ISREG(st.st_mode) ? static_cast<uint64_t>(st.st_size) : 0;
}

uint64_t bytes_below(const fs::path& folder) {
  uint64_t sum = 0;
  std::error_code error;
  for (fs::recursive_directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    sum += bytes_of(it->path());
  return sum;
}

void remove_file(const fs::path& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT)
    fail("cannot remove '{}': {}", path.string(), std::strerror(errno));
}

// Folders that became empty, from `folder` upwards, below `top`.
void remove_empty(fs::path folder, const fs::path& top) {
  for (; folder != top && ::rmdir(folder.c_str()) == 0; folder = folder.parent_path()) continue;
}

}  // namespace

fs::path Cache::folder(const std::string& repository) const {
  return root_ / folder_name(repository);
}
fs::path Cache::blob(const std::string& repository, const std::string& etag) const {
  return folder(repository) / "blobs" / etag;
}
fs::path Cache::incomplete(const std::string& repository, const std::string& etag) const {
  return folder(repository) / "blobs" / (etag + std::string(kIncomplete));
}
fs::path Cache::lock(const std::string& repository, const std::string& etag) const {
  return root_ / ".locks" / folder_name(repository) / (etag + ".lock");
}
fs::path Cache::file(const std::string& repository, const std::string& commit, const std::string& path) const {
  return folder(repository) / "snapshots" / commit / path;
}

bool Cache::has_blob(const std::string& repository, const RepositoryFile& file) const {
  std::error_code absent;
  return !file.etag.empty() && fs::file_size(blob(repository, file.etag), absent) == file.size && !absent;
}

void Cache::make_folders(const std::string& repository) const {
  for (const char* name : {"blobs", "refs", "snapshots"}) make_folder(folder(repository) / name);
  make_folder(lock(repository, "x").parent_path());
}

void Cache::link(const std::string& repository, const std::string& commit, const RepositoryFile& file) const {
  const fs::path from = this->file(repository, commit, file.path);
  make_folder(from.parent_path());
  const fs::path to = blob(repository, file.etag).lexically_relative(from.parent_path());
  std::error_code absent;
  if (fs::read_symlink(from, absent) == to && !absent) return;
  const fs::path temporary = from.string() + fmt::format(".tmp-{}", getpid());
  ::unlink(temporary.c_str());
  if (::symlink(to.c_str(), temporary.c_str()) == 0 && ::rename(temporary.c_str(), from.c_str()) == 0) return;
  const int reason = errno;
  ::unlink(temporary.c_str());
  fail("cannot link '{}': {}", from.string(), std::strerror(reason));
}

void Cache::set_main(const std::string& repository, const std::string& commit) const {
  if (current_commit(folder(repository)) == commit) return;
  AtomicFile file(folder(repository) / "refs" / "main");
  file.write(commit.data(), commit.size());
  file.commit();
}

std::vector<std::string> Cache::repositories() const {
  std::vector<std::string> names;
  for (const fs::directory_entry& e : entries(root_)) {
    const std::string name = repository_of(e.path().filename().string());
    if (!name.empty() && e.is_directory()) names.push_back(name);
  }
  return names;
}

std::vector<Snapshot> Cache::snapshots(const std::string& repository) const {
  const std::string main = current_commit(folder(repository));
  std::vector<std::pair<std::time_t, Snapshot>> all;
  for (const fs::directory_entry& e : entries(folder(repository) / "snapshots")) {
    const std::string commit = e.path().filename().string();
    if (is_commit(commit) && e.is_directory())
      all.push_back({modified(e.path()), {commit, commit == main, files_in(e.path())}});
  }
  std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second.current, a.first) > std::pair(b.second.current, b.first);
  });
  std::vector<Snapshot> snapshots;
  for (auto& [when, snapshot] : all) snapshots.push_back(std::move(snapshot));
  return snapshots;
}

Contents Cache::contents() const {
  Contents contents;
  for (const std::string& repository : repositories()) {
    std::set<std::vector<std::string>> known;  // path and etags of a model
    std::set<std::string> others;
    for (const Snapshot& snapshot : snapshots(repository)) {
      std::set<std::string> parts;
      for (const ModelFiles& model : models_among(snapshot.files)) {
        CachedModel cached{repository, model, snapshot.commit, snapshot.current,
                           file(repository, snapshot.commit, model.path())};
        std::vector<std::string> key = {model.path()};
        for (const RepositoryFile& part : model.parts) {
          parts.insert(part.path), key.push_back(part.etag);
          cached.when = std::max(cached.when, modified(file(repository, snapshot.commit, part.path)));
        }
        if (known.insert(key).second) contents.models.push_back(std::move(cached));
      }
      for (const RepositoryFile& f : snapshot.files) {
        if (parts.count(f.path) != 0 || !others.insert(f.etag.empty() ? snapshot.commit + f.path : f.etag).second)
          continue;
        ++contents.n_others, contents.other_bytes += f.size;
      }
    }
    for (const fs::directory_entry& e : entries(folder(repository) / "blobs")) {
      if (e.path().extension() == kIncomplete)
        contents.unfinished.push_back({repository, e.path(), bytes_of(e.path())});
    }
  }
  return contents;
}

Removal Cache::plan_removal(const ModelName& name) const {
  std::error_code absent;
  if (!fs::is_directory(folder(name.repository), absent))
    fail("'{}' is not in the cache '{}'; `hearth list` shows what is", name.repository, root_.string());
  Removal removal{name.repository};
  std::set<std::string> doomed, kept;  // etags
  for (const Snapshot& snapshot : snapshots(name.repository)) {
    std::set<std::string> parts;
    for (const ModelFiles& model : matching(models_among(snapshot.files), name.wanted)) {
      for (const RepositoryFile& part : model.parts) {
        parts.insert(part.path), doomed.insert(part.etag);
        const fs::path path = file(name.repository, snapshot.commit, part.path);
        removal.files.push_back(path);
        for (const fs::path& beside : companions(path)) removal.files.push_back(beside);
      }
    }
    for (const RepositoryFile& f : snapshot.files) {
      const fs::path path = file(name.repository, snapshot.commit, f.path);
      if (std::find(removal.files.begin(), removal.files.end(), path) == removal.files.end()) kept.insert(f.etag);
    }
  }
  const std::vector<fs::directory_entry> blobs = entries(folder(name.repository) / "blobs");
  const bool unfinished =
      std::any_of(blobs.begin(), blobs.end(), [](const auto& e) { return e.path().extension() == kIncomplete; });
  removal.whole = name.wanted.empty() || (kept.empty() && !unfinished && !removal.files.empty());
  if (removal.whole) {
    removal.bytes = bytes_below(folder(name.repository));
    return removal;
  }
  if (removal.files.empty())
    fail("'{}' in the cache holds no '{}'; `hearth list` shows what is there", name.repository, name.wanted);
  doomed.erase("");
  std::set_difference(doomed.begin(), doomed.end(), kept.begin(), kept.end(), std::back_inserter(removal.etags));
  for (const fs::path& path : removal.files) removal.bytes += bytes_of(path);
  for (const std::string& etag : removal.etags) removal.bytes += bytes_of(blob(name.repository, etag));
  return removal;
}

void Cache::remove(const Removal& removal) const {
  const fs::path top = folder(removal.repository);
  std::vector<std::string> etags = removal.etags;
  if (removal.whole) {
    for (const fs::directory_entry& e : entries(top / "blobs")) {
      const fs::path name = e.path().filename();
      etags.push_back(name.extension() == kIncomplete ? name.stem().string() : name.string());
    }
  }
  std::vector<std::unique_ptr<FileLock>> locks;
  std::sort(etags.begin(), etags.end());
  etags.erase(std::unique(etags.begin(), etags.end()), etags.end());
  make_folder(lock(removal.repository, "x").parent_path());
  for (const std::string& etag : etags) {
    locks.push_back(FileLock::try_lock(lock(removal.repository, etag)));
    if (locks.back() == nullptr)
      fail("'{}' is being downloaded by another process; nothing was removed", removal.repository);
  }
  if (removal.whole) {
    std::error_code error;
    fs::remove_all(top, error);
    if (error) fail("cannot remove '{}': {}", top.string(), error.message());
    fs::remove_all(lock(removal.repository, "x").parent_path(), error);
    return;
  }
  for (const fs::path& path : removal.files) {
    remove_file(path);
    remove_empty(path.parent_path(), top / "snapshots");
  }
  for (const std::string& etag : removal.etags) {
    remove_file(blob(removal.repository, etag));
    remove_file(lock(removal.repository, etag));
  }
  const std::string main = current_commit(top);
  std::error_code absent;
  if (!main.empty() && !fs::exists(top / "snapshots" / main, absent)) remove_file(top / "refs" / "main");
}

std::unique_ptr<FileLock> FileLock::try_lock(const fs::path& path) {
  while (true) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0664);
    if (fd < 0) fail("cannot open the lock '{}': {}", path.string(), std::strerror(errno));
    std::unique_ptr<FileLock> lock(new FileLock(fd));
    if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK || errno == EINTR) return nullptr;
      fail("cannot lock '{}': {}", path.string(), std::strerror(errno));
    }
    struct stat held {
    }, named{};  // its holder may have removed it meanwhile
    if (::fstat(fd, &held) == 0 && ::stat(path.c_str(), &named) == 0 && held.st_ino == named.st_ino) return lock;
  }
}

std::unique_ptr<FileLock> FileLock::wait(const fs::path& path, const std::function<bool()>& cancelled,
                                         const std::function<void()>& waits) {
  bool told = false;
  while (!cancelled()) {
    if (auto lock = try_lock(path)) return lock;
    if (!told) waits();
    told = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return nullptr;
}

FileLock::~FileLock() {
  ::close(fd_);
}

}  // namespace hearth::hub
