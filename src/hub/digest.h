#pragma once
// SHA-256 and Git's SHA-1 of files as they come in, with OpenSSL's EVP.
#include <cstdint>
#include <memory>
#include <span>
#include <string>

struct evp_md_ctx_st;

namespace hearth::hub {

// What a file's etag says about its content: 64 hexadecimal digits are the SHA-256 of the bytes (LFS), 40 are Git's
// SHA-1 of "blob SIZE\0" and the bytes. Another etag says nothing.
enum class Checksum { none, git_sha1, sha256 };
Checksum checksum_of(const std::string& etag);

class Digest {
 public:
  // `size` is the whole file's, which Git's checksum begins with.
  Digest(Checksum kind, uint64_t size);
  void restart();
  void add(std::span<const char> bytes);
  // Lower-case hexadecimal digits; empty for Checksum::none. Once, after the last byte.
  std::string finish();

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const;
  };
  Checksum kind_;
  uint64_t size_;
  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

}  // namespace hearth::hub
