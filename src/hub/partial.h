#pragma once
// A file that comes in: blobs/ETAG.incomplete, which another pull goes on with.
#include <filesystem>
#include <functional>
#include <span>
#include <string>

#include "hub/digest.h"

namespace hearth::hub {

class Partial {
 public:
  // Opens or makes it. What is there is read once, for the checksum; it is dropped when it is longer than `size`.
  // Throws Error with the path and the system's reason, as all of these do.
  Partial(std::filesystem::path path, uint64_t size, Checksum kind);
  ~Partial();
  Partial(const Partial&) = delete;
  Partial& operator=(const Partial&) = delete;

  uint64_t have() const { return have_; }
  uint64_t size() const { return size_; }
  void append(std::span<const char> bytes);  // not beyond `size`
  void restart();                            // from the first byte
  void discard();                            // removes it
  // The checksum of all bytes; once.
  std::string checksum() { return digest_.finish(); }
  // Flushes it and renames it to `blob`.
  void finish(const std::filesystem::path& blob);

 private:
  void hash_what_is_there();
  [[noreturn]] void failed(const char* what) const;

  std::filesystem::path path_;
  uint64_t size_, have_ = 0;
  Digest digest_;
  int fd_ = -1;
};

}  // namespace hearth::hub
