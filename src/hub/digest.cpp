#include "hub/digest.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>

#include "core/error.h"

namespace hearth::hub {

Checksum checksum_of(const std::string& etag) {
  const bool hexadecimal =
      std::all_of(etag.begin(), etag.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
  if (!hexadecimal) return Checksum::none;
  return etag.size() == 64 ? Checksum::sha256 : etag.size() == 40 ? Checksum::git_sha1 : Checksum::none;
}

void Digest::Free::operator()(evp_md_ctx_st* context) const {
  EVP_MD_CTX_free(context);
}

Digest::Digest(Checksum kind, uint64_t size) : kind_(kind), size_(size), context_(EVP_MD_CTX_new()) {
  restart();
}

void Digest::restart() {
  if (kind_ == Checksum::none) return;
  const EVP_MD* method = kind_ == Checksum::sha256 ? EVP_sha256() : EVP_sha1();
  if (EVP_DigestInit_ex(context_.get(), method, nullptr) != 1) fail("OpenSSL offers no SHA-256 or SHA-1 here");
  if (kind_ == Checksum::sha256) return;
  const std::string header = fmt::format("blob {}", size_);
  add({header.c_str(), header.size() + 1});  // with its zero byte
}

void Digest::add(std::span<const char> bytes) {
  if (kind_ != Checksum::none) HEARTH_CHECK(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) == 1);
}

std::string Digest::finish() {
  if (kind_ == Checksum::none) return {};
  std::array<unsigned char, EVP_MAX_MD_SIZE> bytes{};
  unsigned n = 0;
  HEARTH_CHECK(EVP_DigestFinal_ex(context_.get(), bytes.data(), &n) == 1);
  return fmt::format("{:02x}", fmt::join(bytes.begin(), bytes.begin() + n, ""));
}

}  // namespace hearth::hub
