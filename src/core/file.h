#pragma once
// Reading files through a mapping and writing them so that a reader never sees half a file.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace hearth {

// A whole file mapped read-only. Move-only. Throws Error when the file cannot be opened, is no regular file, or is
// empty.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(data_), size_}; }
  const std::filesystem::path& path() const { return path_; }
  // Tells the kernel that a range will be needed soon, or not again.
  void will_need(std::span<const std::byte> range) const;
  void dont_need(std::span<const std::byte> range) const;

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
  std::filesystem::path path_;
};

// Writes to a file without a name in the target's folder, which is gone when the process is, however it ends; commit()
// flushes it and renames it onto PATH. Where the file system has no such files it is PATH.tmp-PID, and removed unless
// committed. PATH stays as it was until then. Throws Error with the path and the system's reason (disk full,
// no permission).
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t bytes);
  void write_at(uint64_t offset, const void* data, size_t bytes);  // may be called from several threads
  void pad_to(uint64_t offset);                                    // zero bytes from the current end to offset
  uint64_t position() const { return position_; }
  void commit();

 private:
  std::filesystem::path path_, temporary_;
  int fd_ = -1;
  bool named_ = false;  // the temporary file has its name already
  uint64_t position_ = 0;
};

// The whole of a small text file. Throws Error when it cannot be read or is larger than `limit` bytes.
std::string read_text_file(const std::filesystem::path& path, size_t limit = size_t{1} << 30);

}  // namespace hearth
