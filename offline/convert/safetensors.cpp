#include "offline/convert/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <set>

#include "core/error.h"
#include "offline/convert/json.h"

namespace hearth::convert {
namespace {

constexpr uint64_t kMaxHeader = 100'000'000;  // the format's own limit
constexpr size_t kMaxDims = 8;

struct SafeType {
  std::string_view name;
  uint64_t bytes;
  std::optional<DType> converts_as;
};
constexpr std::array kTypes = {
    SafeType{"F32", 4, DType::f32}, SafeType{"F16", 2, DType::f16}, SafeType{"BF16", 2, DType::bf16},
    SafeType{"F64", 8, {}},         SafeType{"C64", 8, {}},         SafeType{"I64", 8, {}},
    SafeType{"U64", 8, {}},         SafeType{"I32", 4, {}},         SafeType{"U32", 4, {}},
    SafeType{"I16", 2, {}},         SafeType{"U16", 2, {}},         SafeType{"I8", 1, {}},
    SafeType{"U8", 1, {}},          SafeType{"BOOL", 1, {}},        SafeType{"F8_E4M3", 1, {}},
    SafeType{"F8_E5M2", 1, {}},     SafeType{"F8_E8M0", 1, {}},
};

const SafeType* find_type(std::string_view name) {
  const auto it = std::find_if(kTypes.begin(), kTypes.end(), [&](const SafeType& t) { return t.name == name; });
  return it == kTypes.end() ? nullptr : &*it;
}

std::optional<uint64_t> as_u64(const Json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  return value.get<uint64_t>();
}

// Reads `shape` and returns the tensor's bytes; throws when the product does not fit 63 bits.
uint64_t read_shape(const Json& entry, uint64_t element_bytes, SafeTensor& t, const std::string& where) {
  const auto shape = entry.find("shape");
  if (shape == entry.end() || !shape->is_array() || shape->size() > kMaxDims) {
    fail("{}: tensor {} has no shape of at most {} dimensions", where, t.name, kMaxDims);
  }
  uint64_t bytes = element_bytes;
  for (const Json& dimension : *shape) {
    const auto n = as_u64(dimension);
    uint64_t product = 0;
    if (!n || *n > INT64_MAX || __builtin_mul_overflow(bytes, *n, &product) || product > INT64_MAX) {
      fail("{}: tensor {} has the impossible shape {}", where, t.name, shown(*shape));
    }
    bytes = product;
    t.shape.push_back(static_cast<int64_t>(*n));
  }
  return bytes;
}

SafeTensor read_entry(const std::string& name, const Json& entry, std::span<const std::byte> buffer,
                      const std::string& where) {
  SafeTensor t{name, {}, nullptr, {}, {}, 0};
  if (!entry.is_object()) fail("{}: tensor {} is described by {}, expected an object", where, name, shown(entry));
  const auto dtype = entry.find("dtype");
  const SafeType* type = dtype != entry.end() && dtype->is_string() ? find_type(dtype->get<std::string>()) : nullptr;
  if (type == nullptr) {
    fail("{}: tensor {} has the unknown dtype {}", where, name, dtype != entry.end() ? shown(*dtype) : "(none)");
  }
  t.dtype = type->name;
  t.traits = type->converts_as ? &traits(*type->converts_as) : nullptr;
  const uint64_t bytes = read_shape(entry, type->bytes, t, where);

  const auto offsets = entry.find("data_offsets");
  const bool pair = offsets != entry.end() && offsets->is_array() && offsets->size() == 2;
  const auto begin = pair ? as_u64((*offsets)[0]) : std::nullopt;
  const auto end = pair ? as_u64((*offsets)[1]) : std::nullopt;
  if (!begin || !end || *begin > *end) fail("{}: tensor {} has no pair of ascending data_offsets", where, name);
  if (*end > buffer.size()) {
    fail("{}: tensor {} ends at byte {}, but the file holds {} bytes of data; is the download complete?", where, name,
         *end, buffer.size());
  }
  if (*end - *begin != bytes) {
    fail("{}: tensor {} has {} bytes of data, but its shape and type need {}", where, name, *end - *begin, bytes);
  }
  t.data = buffer.subspan(*begin, bytes);
  return t;
}

// The format forbids overlaps and holes: what no tensor names could hide anything.
void check_tiling(const std::vector<SafeTensor>& tensors, std::span<const std::byte> buffer, const std::string& where) {
  std::vector<const SafeTensor*> order;
  for (const SafeTensor& t : tensors) order.push_back(&t);
  std::sort(order.begin(), order.end(), [](const SafeTensor* a, const SafeTensor* b) {
    return std::pair(a->data.data(), a->data.size()) < std::pair(b->data.data(), b->data.size());
  });
  size_t position = 0;
  for (const SafeTensor* t : order) {
    const auto begin = static_cast<size_t>(t->data.data() - buffer.data());
    if (begin < position) fail("{}: the data of tensor {} overlaps another tensor's", where, t->name);
    if (begin > position) fail("{}: {} bytes before tensor {} belong to no tensor", where, begin - position, t->name);
    position = begin + t->data.size();
  }
  if (position != buffer.size()) fail("{}: the last {} bytes belong to no tensor", where, buffer.size() - position);
}

// Shard names come from the index: they must stay in the directory.
void check_shard_name(const std::string& name, const std::string& where) {
  const bool plain =
      !name.empty() && name != "." && name != ".." && name.find_first_of(std::string("/\\\0", 3)) == std::string::npos;
  if (!plain) fail("{}: weight_map names the file {}, expected a plain file name", where, shown(Json(name)));
}

// shard -> tensors, from the index file.
std::map<std::string, std::set<std::string>> read_index(const std::filesystem::path& path) {
  const std::string where = fmt::format("'{}'", path.string());
  const Json json = read_json_object(path);
  const auto map = json.find("weight_map");
  if (map == json.end() || !map->is_object() || map->empty()) fail("{}: weight_map is missing or empty", where);
  std::map<std::string, std::set<std::string>> shards;
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string()) fail("{}: weight_map gives {} for {}, expected a file name", where, shown(file), tensor);
    check_shard_name(file.get<std::string>(), where);
    shards[file.get<std::string>()].insert(tensor);
  }
  return shards;
}

[[noreturn]] void fail_without_weights(const std::filesystem::path& directory) {
  for (const char* name : {"pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth"}) {
    if (std::filesystem::exists(directory / name)) {
      fail(
          "'{}' has weights only as {} (a Python pickle); save the model as safetensors (save_pretrained does) and "
          "convert that",
          directory.string(), name);
    }
  }
  fail("'{}' has neither model.safetensors nor model.safetensors.index.json; is it a Hugging Face model directory?",
       directory.string());
}

}  // namespace

std::vector<SafeTensor> parse_safetensors(std::span<const std::byte> file, const std::string& where) {
  uint64_t header_bytes = 0;
  if (file.size() < sizeof header_bytes) fail("{}: {} bytes are too few for a safetensors file", where, file.size());
  std::memcpy(&header_bytes, file.data(), sizeof header_bytes);  // little endian, as is every machine hearth runs on
  if (header_bytes > kMaxHeader)
    fail("{}: no safetensors file: its header would be {} bytes long", where, header_bytes);
  if (header_bytes > file.size() - sizeof header_bytes) {
    fail("{}: the header is {} bytes long, but the file only {}; is the download complete?", where, header_bytes,
         file.size());
  }
  const auto header = file.subspan(sizeof header_bytes, header_bytes);
  const auto buffer = file.subspan(sizeof header_bytes + header_bytes);
  const Json json =
      parse_json_object({reinterpret_cast<const char*>(header.data()), header.size()}, where + ": header");
  std::vector<SafeTensor> tensors;
  for (const auto& [name, entry] : json.items()) {
    if (name != "__metadata__") tensors.push_back(read_entry(name, entry, buffer, where));
  }
  check_tiling(tensors, buffer, where);
  return tensors;
}

void Checkpoint::add_file(const std::filesystem::path& path) {
  files_.emplace_back(path);
  const std::string where = fmt::format("'{}'", path.string());
  for (SafeTensor& t : parse_safetensors(files_.back().bytes(), where)) {
    t.file = files_.size() - 1;
    if (!index_.emplace(t.name, tensors_.size()).second) fail("{}: tensor {} is in two shards", where, t.name);
    tensors_.push_back(std::move(t));
  }
}

Checkpoint Checkpoint::open(const std::filesystem::path& directory) {
  Checkpoint checkpoint;
  if (std::filesystem::exists(directory / "model.safetensors")) {
    checkpoint.add_file(directory / "model.safetensors");
    return checkpoint;
  }
  const auto index = directory / "model.safetensors.index.json";
  if (!std::filesystem::exists(index)) fail_without_weights(directory);
  for (const auto& [shard, names] : read_index(index)) {
    const size_t first = checkpoint.tensors_.size();
    checkpoint.add_file(directory / shard);
    for (size_t i = first; i < checkpoint.tensors_.size(); ++i) {
      const std::string& name = checkpoint.tensors_[i].name;
      if (!names.contains(name))
        fail("'{}': tensor {} is not listed for this shard in '{}'", shard, name, index.string());
    }
    for (const std::string& name : names) {
      if (checkpoint.find(name) == nullptr)
        fail("'{}': the index promises tensor {}, but it is not there", shard, name);
    }
  }
  return checkpoint;
}

const SafeTensor* Checkpoint::find(std::string_view name) const {
  const auto it = index_.find(std::string(name));
  return it == index_.end() ? nullptr : &tensors_[it->second];
}

}  // namespace hearth::convert
