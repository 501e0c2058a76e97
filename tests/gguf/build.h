#pragma once
// Builds GGUF images byte by byte, independently of the writer, so that tests can make any of them wrong.
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace hearth::test {

class ImageBuilder {
 public:
  template <typename T>
  requires std::is_arithmetic_v<T> ImageBuilder& put(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  ImageBuilder& raw(std::string_view s) {
    bytes_.append(s);
    return *this;
  }
  ImageBuilder& str(std::string_view s) { return put(uint64_t{s.size()}).raw(s); }
  ImageBuilder& header(uint64_t n_tensors, uint64_t n_keys, uint32_t version = 3, std::string_view magic = "GGUF") {
    return raw(magic).put(version).put(n_tensors).put(n_keys);
  }
  ImageBuilder& key(std::string_view name, uint32_t type) { return str(name).put(type); }
  ImageBuilder& tensor(std::string_view name, const std::vector<int64_t>& ne, uint32_t type, uint64_t offset) {
    str(name).put(static_cast<uint32_t>(ne.size()));
    for (const int64_t n : ne) put(n);
    return put(type).put(offset);
  }
  // Zero bytes up to the next multiple of `alignment`, and then `data` bytes of 1.
  ImageBuilder& data(size_t bytes, size_t alignment = 32) {
    bytes_.append((alignment - bytes_.size() % alignment) % alignment, '\0');
    bytes_.append(bytes, '\1');
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

inline void write_file(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

inline std::span<const std::byte> as_bytes(std::string_view s) {
  return std::as_bytes(std::span(s.data(), s.size()));
}

}  // namespace hearth::test
