#pragma once
// GGUF v2/v3 files (ggml-org/ggml docs/gguf.md): metadata and tensors, memory-mapped. Every length, count, type and
// offset is checked against the file before it is used; what does not fit throws Error with the file, the key or
// tensor, and the numbers. PowerInfer's variant (magic `PWRI`, same layout) is read too.
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "core/dtype.h"
#include "core/file.h"

namespace hearth::gguf {

// Numbers as stored.
enum class ValueType : uint32_t {
  u8 = 0,
  i8 = 1,
  u16 = 2,
  i16 = 3,
  u32 = 4,
  i32 = 5,
  f32 = 6,
  boolean = 7,
  string = 8,
  array = 9,
  u64 = 10,
  i64 = 11,
  f64 = 12,
};
const char* to_string(ValueType type);

// An array's elements, all of one type. Nested arrays are not used by any known model and are refused.
using Array = std::variant<std::vector<uint8_t>, std::vector<int8_t>, std::vector<uint16_t>, std::vector<int16_t>,
                           std::vector<uint32_t>, std::vector<int32_t>, std::vector<float>, std::vector<bool>,
                           std::vector<std::string>, std::vector<uint64_t>, std::vector<int64_t>, std::vector<double>>;
using Value = std::variant<uint8_t, int8_t, uint16_t, int16_t, uint32_t, int32_t, float, bool, std::string, Array,
                           uint64_t, int64_t, double>;
ValueType type_of(const Value& value);
ValueType element_type(const Array& array);
size_t size(const Array& array);

struct KeyValue {
  std::string key;
  Value value;
};

struct TensorInfo {
  std::string name;
  const DTypeTraits* traits = nullptr;  // never null
  std::vector<int64_t> ne;              // ne[0] is the contiguous dimension (columns); 1 to 4 entries
  uint64_t bytes = 0;
  int file = 0;         // which part of a split file
  uint64_t offset = 0;  // from the start of that file
  int64_t cols() const { return ne[0]; }
  int64_t rows() const {  // product of the other dimensions
    int64_t r = 1;
    for (size_t i = 1; i < ne.size(); ++i) r *= ne[i];
    return r;
  }
};

class File {
 public:
  // Opens a single file, or all parts when `path` is any part of a split one (NAME-0000i-of-0000n.gguf).
  static File open(const std::filesystem::path& path);
  // A file image in memory, which must outlive the result and start at an address that is a multiple of 8. `name`
  // stands for the path in messages. Parts of a split file are refused: they are found by path only.
  static File from_bytes(std::span<const std::byte> image, std::string name);
  // True when the file starts with a magic number that open() knows.
  static bool looks_like_gguf(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  uint32_t version() const { return version_; }
  bool powerinfer() const { return powerinfer_; }
  uint64_t alignment() const { return alignment_; }
  uint64_t total_bytes() const;  // of all parts
  std::vector<std::filesystem::path> part_paths() const;

  const std::vector<KeyValue>& metadata() const { return metadata_; }
  const Value* find(std::string_view key) const;
  // Values, converted between number types when nothing is lost (f64 may be rounded to f32; bool is no number).
  // get: nullopt when the key is absent. require: throws when absent. Both throw when the value has another type or
  // does not fit. T: bool, int32_t, uint32_t, int64_t, uint64_t, float, std::string, and std::vector of int32_t, float,
  // std::string.
  template <typename T>
  std::optional<T> get(std::string_view key) const;
  template <typename T>
  T require(std::string_view key) const;

  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const TensorInfo* find_tensor(std::string_view name) const;
  std::span<const std::byte> data(const TensorInfo& tensor) const;
  // Advice to the kernel about a tensor's pages.
  void will_need(const TensorInfo& tensor) const;
  void dont_need(const TensorInfo& tensor) const;

 private:
  struct Part {
    MappedFile file;  // empty for an image in memory
    std::span<const std::byte> bytes;
  };
  struct Hash {  // look-ups by string_view without a copy
    using is_transparent = void;
    size_t operator()(std::string_view s) const { return std::hash<std::string_view>{}(s); }
  };
  using Index = std::unordered_map<std::string, size_t, Hash, std::equal_to<>>;

  std::filesystem::path path_;
  std::vector<Part> parts_;
  uint32_t version_ = 0;
  bool powerinfer_ = false;
  uint64_t alignment_ = 32;
  std::vector<KeyValue> metadata_;  // of the first part
  std::vector<TensorInfo> tensors_;
  Index key_index_, tensor_index_;
  friend class Parser;
};

// Writes a GGUF v3 file in one pass: metadata and tensor list first, then each tensor's bytes, placed in the order the
// tensors were added. Tensors are aligned to general.alignment where that is set, to 32 bytes otherwise. Nothing
// appears under `path` until finish() has succeeded.
class Writer {
 public:
  explicit Writer(std::filesystem::path path);
  ~Writer();
  void set(std::string key, Value value);  // replaces an earlier value of the same key
  // `ne` as in TensorInfo. Returns the tensor's index. Throws when the name is taken or ne[0] is no multiple of the
  // block size.
  size_t add_tensor(std::string name, DType type, std::vector<int64_t> ne);
  // After the last set/add_tensor: writes the header. Afterwards, tensor data may be written.
  void begin();
  uint64_t tensor_bytes(size_t tensor) const;
  // Writes part of a tensor's data at a byte offset within it: any order, any thread, each byte once.
  void write(size_t tensor, uint64_t offset, std::span<const std::byte> data);
  // Checks that every byte of every tensor was written, flushes, and renames onto `path`.
  void finish();
  uint64_t file_bytes() const;  // header plus all tensors; after begin()

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hearth::gguf
