#include "core/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace hearth {
namespace {

constexpr uintptr_t kPage = 4096;

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() {
    if (fd_ >= 0) ::close(fd_);
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

size_t open_regular(const std::filesystem::path& path, int fd) {
  if (fd < 0) fail("cannot open '{}': {}", path.string(), std::strerror(errno));
  struct stat st {};
  if (fstat(fd, &st) != 0) fail("cannot read the size of '{}': {}", path.string(), std::strerror(errno));
  if (S_ISDIR(st.st_mode)) fail("'{}' is a directory, a file was expected", path.string());
  if (!S_ISREG(st.st_mode)) fail("'{}' is not a regular file", path.string());
  return static_cast<size_t>(st.st_size);
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  size_ = open_regular(path, fd.get());
  if (size_ == 0) fail("'{}' is empty", path.string());
  void* p = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (p == MAP_FAILED) fail("cannot map '{}' ({} bytes): {}", path.string(), size_, std::strerror(errno));
  data_ = p;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)), path_(std::move(other.path_)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(path_, other.path_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(data_, size_);
}

void MappedFile::will_need(std::span<const std::byte> range) const {
  if (range.empty()) return;
  const auto begin = reinterpret_cast<uintptr_t>(range.data()) / kPage * kPage;
  const auto end = reinterpret_cast<uintptr_t>(range.data()) + range.size();
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_WILLNEED);
}

void MappedFile::dont_need(std::span<const std::byte> range) const {
  // Only whole pages inside the range: its neighbours may still be in use.
  const auto begin = (reinterpret_cast<uintptr_t>(range.data()) + kPage - 1) / kPage * kPage;
  const auto end = (reinterpret_cast<uintptr_t>(range.data()) + range.size()) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

AtomicFile::AtomicFile(std::filesystem::path path) : path_(std::move(path)) {
  if (std::filesystem::is_directory(path_)) fail("cannot write '{}': it is a directory", path_.string());
  temporary_ = path_;
  temporary_ += fmt::format(".tmp-{}", getpid());
  const std::filesystem::path folder = path_.has_parent_path() ? path_.parent_path() : ".";
  fd_ = ::open(folder.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0644);
  named_ = fd_ < 0;
  if (named_) fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0) fail("cannot write '{}': {}", path_.string(), std::strerror(errno));
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) {
    ::close(fd_);
    if (named_) ::unlink(temporary_.c_str());
  }
}

void AtomicFile::write(const void* data, size_t bytes) {
  write_at(position_, data, bytes);
  position_ += bytes;
}

void AtomicFile::write_at(uint64_t offset, const void* data, size_t bytes) {
  const auto* p = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const ssize_t n = ::pwrite(fd_, p, std::min<size_t>(bytes, size_t{1} << 30), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail("cannot write '{}': {}", path_.string(), std::strerror(n == 0 ? EIO : errno));
    p += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<size_t>(n);
  }
}

void AtomicFile::pad_to(uint64_t offset) {
  HEARTH_CHECK(offset >= position_);
  static constexpr std::array<std::byte, 4096> zeros{};
  while (position_ < offset) write(zeros.data(), std::min<uint64_t>(zeros.size(), offset - position_));
}

void AtomicFile::commit() {
  HEARTH_CHECK(fd_ >= 0);
  // Without fsync a crash after the rename may leave an empty file under the final name.
  if (::fsync(fd_) != 0 && errno != EINVAL) fail("cannot write '{}': {}", path_.string(), std::strerror(errno));
  int reason = 0;
  if (!named_) {  // a name to rename from: linking cannot replace what is there
    ::unlink(temporary_.c_str());
    const std::string self = fmt::format("/proc/self/fd/{}", fd_);
    if (::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, temporary_.c_str(), AT_SYMLINK_FOLLOW) != 0) reason = errno;
  }
  if (::close(std::exchange(fd_, -1)) != 0 && reason == 0) reason = errno;
  if (reason == 0 && ::rename(temporary_.c_str(), path_.c_str()) != 0) reason = errno;
  if (reason == 0) return;
  ::unlink(temporary_.c_str());
  fail("cannot write '{}': {}", path_.string(), std::strerror(reason));
}

std::string read_text_file(const std::filesystem::path& path, size_t limit) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const size_t size = open_regular(path, fd.get());
  if (size > limit) fail("'{}' is {} bytes long, at most {} were expected", path.string(), size, limit);
  std::string text(size, '\0');
  size_t done = 0;
  while (done < size) {
    const ssize_t n = ::read(fd.get(), text.data() + done, size - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("cannot read '{}': {}", path.string(), std::strerror(errno));
    if (n == 0) break;  // shrank while we read it
    done += static_cast<size_t>(n);
  }
  text.resize(done);
  return text;
}

}  // namespace hearth
