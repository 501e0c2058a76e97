#include "offline/predictor/sample_store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "core/file.h"

namespace hearth::offline {

// The first page.
struct SampleStore::Header {
  std::array<char, 64> identity;  // two hashes: whose the values are, and since when the machine runs
  std::atomic<uint64_t> progress;
};

namespace {

constexpr uint64_t kHeaderBytes = 4096;

// Changes with every start of the machine; empty where the system does not tell.
std::string boot_id() {
  const std::filesystem::path path = "/proc/sys/kernel/random/boot_id";
  if (!std::filesystem::exists(path)) return {};
  std::array<char, 64> text{};
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const ssize_t n = fd < 0 ? 0 : ::read(fd, text.data(), text.size());
  if (fd >= 0) ::close(fd);
  return {text.data(), static_cast<size_t>(n < 0 ? 0 : n)};
}

std::array<char, 64> hashed(const std::string& identity, uint64_t values) {
  const std::string all = fmt::format("{} values for {}", values, identity), boot = boot_id();
  const std::string text = fmt::format("hearth samples {:016x} {:016x}", XXH3_64bits(all.data(), all.size()),
                                       XXH3_64bits(boot.data(), boot.size()));
  std::array<char, 64> result{};
  HEARTH_CHECK(text.size() < result.size());
  std::copy(text.begin(), text.end(), result.begin());
  return result;
}

}  // namespace

void SampleStore::map(int fd) {
  const uint64_t bytes = kHeaderBytes + n_ * sizeof(f16_t);
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (p == MAP_FAILED)
    fail("no memory for {} bytes of activations: {}; give fewer --tokens", bytes, std::strerror(errno));
  header_ = static_cast<Header*>(p);
  values_ = reinterpret_cast<f16_t*>(static_cast<std::byte*>(p) + kHeaderBytes);
}

SampleStore::SampleStore(uint64_t values) : n_(values) {
  map(-1);
}

SampleStore::SampleStore(const std::filesystem::path& file, const std::string& identity, uint64_t values) : n_(values) {
  static_assert(sizeof(Header) <= kHeaderBytes);
  const int fd = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) fail("cannot write '{}': {}", file.string(), std::strerror(errno));
  const uint64_t bytes = kHeaderBytes + n_ * sizeof(f16_t);
  // Room is taken now: a page that finds none while it is written ends the program.
  const int room = ::lseek(fd, 0, SEEK_END) > static_cast<off_t>(bytes) ? ::ftruncate(fd, 0) : 0;
  const int taken = room != 0 ? errno : ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  if (taken != 0) {
    ::close(fd);
    std::filesystem::remove(file);
    fail("no room for {:.2f} GB of activations in '{}': {}", static_cast<double>(bytes) / 1e9, file.string(),
         std::strerror(taken));
  }
  map(fd);
  ::close(fd);
  const std::array<char, 64> wanted = hashed(identity, values);
  if (header_->identity == wanted) return;
  header_->progress = 0;
  header_->identity = wanted;
}

SampleStore::~SampleStore() {
  if (header_ != nullptr) munmap(header_, kHeaderBytes + n_ * sizeof(f16_t));
}

uint64_t SampleStore::progress() const {
  return header_->progress.load(std::memory_order_acquire);
}
void SampleStore::set_progress(uint64_t progress) {
  header_->progress.store(progress, std::memory_order_release);
}

}  // namespace hearth::offline
