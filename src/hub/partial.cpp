#include "hub/partial.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "core/error.h"

namespace hearth::hub {

Partial::Partial(std::filesystem::path path, uint64_t size, Checksum kind)
    : path_(std::move(path)), size_(size), digest_(kind, size) {
  fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (fd_ < 0) failed("open");
  try {
    struct stat st {};
    if (::fstat(fd_, &st) != 0 || !S_ISREG(st.st_mode)) failed("use");
    if (static_cast<uint64_t>(st.st_size) > size_) {
      restart();
    } else {
      hash_what_is_there();
    }
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

Partial::~Partial() {
  if (fd_ >= 0) ::close(fd_);
}

void Partial::failed(const char* what) const {
  fail("cannot {} '{}': {}", what, path_.string(), std::strerror(errno));
}

void Partial::hash_what_is_there() {
  std::vector<char> buffer(size_t{1} << 20);
  while (true) {
    const ssize_t n = ::read(fd_, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) failed("read");
    if (n == 0) return;
    digest_.add({buffer.data(), static_cast<size_t>(n)});
    have_ += static_cast<uint64_t>(n);
  }
}

void Partial::append(std::span<const char> bytes) {
  HEARTH_CHECK(bytes.size() <= size_ - have_);
  for (std::span<const char> rest = bytes; !rest.empty();) {
    const ssize_t n = ::pwrite(fd_, rest.data(), rest.size(), static_cast<off_t>(have_ + (bytes.size() - rest.size())));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) failed("write");
    rest = rest.subspan(static_cast<size_t>(n));
  }
  digest_.add(bytes);
  have_ += bytes.size();
}

void Partial::restart() {
  if (::ftruncate(fd_, 0) != 0) failed("empty");
  have_ = 0;
  digest_.restart();
}

void Partial::discard() {
  restart();
  ::unlink(path_.c_str());
}

void Partial::finish(const std::filesystem::path& blob) {
  HEARTH_CHECK(have_ == size_);
  if (::fsync(fd_) != 0) failed("flush");
  if (::rename(path_.c_str(), blob.c_str()) != 0) failed("rename");
  const int folder = ::open(blob.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) ::fsync(folder), ::close(folder);  // the name, too, outlives a crash
}

}  // namespace hearth::hub
