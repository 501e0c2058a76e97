// PKWARE's APPNOTE.TXT 6.3: end of central directory (4.3.16), central directory (4.3.12), local header (4.3.7).
#include "offline/profile/zip.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "core/error.h"

namespace hearth::offline {
namespace {

constexpr uint32_t kEndSignature = 0x06054b50, kEntrySignature = 0x02014b50, kLocalSignature = 0x04034b50;
constexpr size_t kEndSize = 22, kEntrySize = 46, kLocalSize = 30, kMaxComment = 65535;

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c & 1) != 0 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
    table[i] = c;
  }
  return table;
}

uint32_t crc32(std::span<const std::byte> data) {
  static constexpr std::array<uint32_t, 256> table = crc_table();
  uint32_t c = 0xFFFFFFFFu;
  for (const std::byte b : data) c = table[(c ^ static_cast<uint32_t>(b)) & 0xFF] ^ (c >> 8);
  return ~c;
}

class ZipReader {
 public:
  ZipReader(std::span<const std::byte> archive, const std::string& file) : bytes_(archive), file_(file) {}

  std::vector<ZipMember> read() {
    const size_t end = find_end();
    const size_t count = number<uint16_t>(end + 10), size = number<uint32_t>(end + 12), at = number<uint32_t>(end + 16);
    if (count == 0xFFFF || size == 0xFFFFFFFF || at == 0xFFFFFFFF) {
      fail("'{}' is a 64-bit zip archive, which is not read; expected an activation count of a few hundred kB", file_);
    }
    if (at > end || size > end - at) fail("'{}': the zip directory lies outside of the file", file_);
    std::vector<ZipMember> members;
    size_t entry = at;
    for (size_t i = 0; i < count; ++i) {
      if (at + size - entry < kEntrySize) fail("'{}': the zip directory has {} entries, room for {}", file_, count, i);
      entry = read_entry(entry, at + size, members);
    }
    return members;
  }

 private:
  template <typename T>
  T number(size_t at) const {
    HEARTH_CHECK(at <= bytes_.size() && sizeof(T) <= bytes_.size() - at);
    T value;
    std::memcpy(&value, bytes_.data() + at, sizeof value);
    return value;
  }
  std::string text(size_t at, size_t n) const {
    HEARTH_CHECK(at <= bytes_.size() && n <= bytes_.size() - at);
    return {reinterpret_cast<const char*>(bytes_.data()) + at, n};
  }

  size_t find_end() const {
    if (bytes_.size() >= kEndSize) {
      const size_t last = bytes_.size() - kEndSize, first = last > kMaxComment ? last - kMaxComment : 0;
      for (size_t at = last + 1; at-- > first;) {
        if (number<uint32_t>(at) == kEndSignature) return at;
      }
    }
    fail("'{}' is no zip archive; expected a tensor written by torch.save() of PyTorch 1.6 or later", file_);
  }

  // Adds the member of the entry at `at`; returns where the next entry is.
  size_t read_entry(size_t at, size_t end, std::vector<ZipMember>& members) const {
    if (number<uint32_t>(at) != kEntrySignature) fail("'{}': the zip directory is damaged at byte {}", file_, at);
    const auto flags = number<uint16_t>(at + 8), method = number<uint16_t>(at + 10);
    const auto crc = number<uint32_t>(at + 16);
    const size_t packed = number<uint32_t>(at + 20), size = number<uint32_t>(at + 24);
    const size_t name_size = number<uint16_t>(at + 28), extra = number<uint16_t>(at + 30);
    const size_t comment = number<uint16_t>(at + 32), local = number<uint32_t>(at + 42);
    if (name_size + extra + comment > end - at - kEntrySize) fail("'{}': a zip entry runs over the directory", file_);
    const std::string name = text(at + kEntrySize, name_size);
    if (method != 0 || (flags & 1) != 0 || packed != size) {
      fail("'{}': the member '{}' is compressed or encrypted; torch.save() stores members as they are", file_, name);
    }
    members.push_back({name, member_data(local, size, name)});
    if (crc32(members.back().data) != crc) fail("'{}': the checksum of the member '{}' is wrong", file_, name);
    return at + kEntrySize + name_size + extra + comment;
  }

  std::span<const std::byte> member_data(size_t local, size_t size, const std::string& name) const {
    const size_t total = bytes_.size();
    if (local > total || total - local < kLocalSize || number<uint32_t>(local) != kLocalSignature) {
      fail("'{}': the member '{}' is not where the zip directory says", file_, name);
    }
    const size_t begin = local + kLocalSize + number<uint16_t>(local + 26) + number<uint16_t>(local + 28);
    if (begin > total || size > total - begin) fail("'{}': the member '{}' runs over the end", file_, name);
    return bytes_.subspan(begin, size);
  }

  std::span<const std::byte> bytes_;
  const std::string& file_;
};

}  // namespace

std::vector<ZipMember> read_stored_zip(std::span<const std::byte> archive, const std::string& file) {
  return ZipReader(archive, file).read();
}

}  // namespace hearth::offline
