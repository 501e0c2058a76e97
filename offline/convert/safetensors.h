#pragma once
// Reader of safetensors checkpoints (huggingface/safetensors, "Format"): one file, or shards named by
// model.safetensors.index.json. Everything the header says is checked against the file before it is used.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/dtype.h"
#include "core/file.h"

namespace hearth::convert {

struct SafeTensor {
  std::string name;
  std::string dtype;                // as in the file: "F16"
  const DTypeTraits* traits;        // null for types that hearth does not convert (integers, 8-bit floats, ...)
  std::vector<int64_t> shape;       // outermost dimension first
  std::span<const std::byte> data;  // row-major, little endian; may be unaligned
  size_t file = 0;                  // which shard
};

// The tensors of one file's bytes; their data point into `file`. Throws Error, starting with `where`, for a header that
// is too long, no JSON, has a bad entry, or whose tensors do not tile the rest of the file exactly.
std::vector<SafeTensor> parse_safetensors(std::span<const std::byte> file, const std::string& where);

class Checkpoint {
 public:
  // Opens `directory`/model.safetensors, or the shards of model.safetensors.index.json. Throws Error when there are
  // none, or when the index and the shards disagree.
  static Checkpoint open(const std::filesystem::path& directory);

  const std::vector<SafeTensor>& tensors() const { return tensors_; }
  const SafeTensor* find(std::string_view name) const;
  // The kernel may drop the pages of a tensor that has been read: memory stays bounded however large the model.
  void dont_need(const SafeTensor& tensor) const { files_[tensor.file].dont_need(tensor.data); }

 private:
  void add_file(const std::filesystem::path& path);

  std::vector<MappedFile> files_;
  std::vector<SafeTensor> tensors_;
  std::unordered_map<std::string, size_t> index_;
};

}  // namespace hearth::convert
