// The reader. Nothing in a file is believed: every count is compared with the bytes that are left before anything is
// allocated or skipped, so that memory stays proportional to the header's real size.
#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <numeric>

#include "gguf/format.h"
#include "gguf/gguf.h"

namespace hearth::gguf {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF is read in place: this needs a little-endian machine");

// Metadata and tensor list together. The largest real ones are some 20 MB (a vocabulary of 256k and its merges); the
// limit keeps a hostile file of many gigabytes from filling memory with keys.
constexpr size_t kMaxHeader = size_t{128} << 20;

// Reads little-endian values from a span, and never beyond it.
class Cursor {
 public:
  Cursor(std::span<const std::byte> bytes, const std::string& name)
      : bytes_(bytes.first(std::min(bytes.size(), kMaxHeader))), total_(bytes.size()), name_(name) {}

  size_t position() const { return position_; }
  size_t remaining() const { return bytes_.size() - position_; }

  template <typename T>
  T read(std::string_view what) {
    need(sizeof(T), what);
    T value;
    std::memcpy(&value, bytes_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return value;
  }

  std::string read_string(std::string_view what) {
    const auto length = read<uint64_t>(what);
    need(length, what);
    std::string s(reinterpret_cast<const char*>(bytes_.data()) + position_, length);
    position_ += length;
    return s;
  }

  // Throws unless `count` items of at least `bytes_each` can follow.
  void need_items(uint64_t count, size_t bytes_each, std::string_view what) const {
    if (count <= remaining() / bytes_each) return;
    fail("'{}': {} claims {} entries of at least {} bytes, {} bytes {}", name_, what, count, bytes_each, remaining(),
         left());
  }

 private:
  void need(uint64_t bytes, std::string_view what) const {
    if (bytes <= remaining()) return;
    fail("'{}': {} at byte {} needs {} bytes, {} {}", name_, what, position_, bytes, remaining(), left());
  }
  std::string left() const {
    if (bytes_.size() < total_) return fmt::format("are left of the {} MiB that metadata may take", kMaxHeader >> 20);
    return "are left: the file is damaged or was not copied completely";
  }

  std::span<const std::byte> bytes_;
  size_t total_;
  const std::string& name_;
  size_t position_ = 0;
};

size_t stored_bytes(ValueType type) {
  return with_type(type, [](auto tag) -> size_t {
    using T = typename decltype(tag)::type;
    if constexpr (std::same_as<T, std::string>)
      return sizeof(uint64_t);  // at least its length
    else
      return sizeof(T);
  });
}

// The parts of NAME-0000i-of-0000n.gguf; nullopt for another kind of name.
struct SplitName {
  std::string prefix;
  int number = 0, count = 0;

  static std::optional<SplitName> parse(const std::filesystem::path& path) {
    constexpr std::string_view shape = "-00000-of-00000.gguf";  // 0: a digit
    const std::string name = path.filename().string();
    if (name.size() <= shape.size()) return std::nullopt;
    const std::string_view tail = std::string_view(name).substr(name.size() - shape.size());
    for (size_t i = 0; i < shape.size(); ++i) {
      const bool fits = shape[i] == '0' ? tail[i] >= '0' && tail[i] <= '9' : tail[i] == shape[i];
      if (!fits) return std::nullopt;
    }
    return SplitName{name.substr(0, name.size() - shape.size()), std::stoi(std::string(tail.substr(1, 5))),
                     std::stoi(std::string(tail.substr(10, 5)))};
  }
  std::string part(int i) const { return fmt::format("{}-{:05}-of-{:05}.gguf", prefix, i, count); }
};

// PowerInfer branched off before i8, i16 and i32 moved up to make room for more quantised types.
uint32_t from_powerinfer_type(uint32_t type) {
  return type >= 16 && type <= 18 ? type + 8 : type;
}

}  // namespace

// Reads one part after the other into a File.
class Parser {
 public:
  explicit Parser(File& file) : file_(file) {}

  void parse_part(std::span<const std::byte> bytes, const std::string& name) {
    const bool first = part_ == 0;
    Cursor cursor(bytes, name);
    const bool powerinfer = read_magic(cursor, name);
    const uint32_t version = read_version(cursor, name);
    const auto n_tensors = cursor.read<uint64_t>("the number of tensors");
    const auto n_keys = cursor.read<uint64_t>("the number of metadata keys");
    // Smallest entries: a name of one byte with its length, then type and value; or dimensions, one size, type and
    // offset.
    cursor.need_items(n_keys, 8 + 1 + 4 + 1, "the metadata");
    cursor.need_items(n_tensors, 8 + 1 + 4 + 8 + 4 + 8, "the tensor list");
    File part;  // metadata of this part alone; the file keeps the first one's
    part.path_ = name;
    for (uint64_t i = 0; i < n_keys; ++i) read_key(cursor, name, part);
    const uint64_t alignment = read_alignment(name, part);
    const size_t first_tensor = file_.tensors_.size();
    for (uint64_t i = 0; i < n_tensors; ++i) read_tensor(cursor, name, powerinfer);
    place_tensors(bytes.size(), cursor.position(), name, alignment, first_tensor);
    if (first) {
      file_.version_ = version;
      file_.powerinfer_ = powerinfer;
      file_.alignment_ = alignment;
      file_.metadata_ = part.metadata_;
      file_.key_index_ = part.key_index_;
    }
    split_number_ = part.get<uint64_t>("split.no").value_or(0);
    split_count_ = part.get<uint64_t>("split.count").value_or(1);
    ++part_;
  }

  uint64_t split_number() const { return split_number_; }
  uint64_t split_count() const { return split_count_; }

 private:
  static bool read_magic(Cursor& cursor, const std::string& name) {
    const auto bytes = cursor.read<std::array<char, 4>>("the magic number");
    const std::string_view magic(bytes.data(), bytes.size());
    if (magic != kMagic && magic != kMagicPowerInfer) {
      fail("'{}' is not a GGUF file: it starts with bytes {:02x}, 'GGUF' was expected", name,
           fmt::join(std::span(reinterpret_cast<const uint8_t*>(bytes.data()), 4), " "));
    }
    return magic == kMagicPowerInfer;
  }

  static uint32_t read_version(Cursor& cursor, const std::string& name) {
    const auto version = cursor.read<uint32_t>("the version");
    const uint32_t swapped = __builtin_bswap32(version);
    if (version > 0xFFFF && swapped <= 0xFFFF) {
      fail("'{}' is a big-endian GGUF; convert it with gguf-py's gguf_convert_endian to little-endian", name);
    }
    if (version == 1) fail("'{}' is GGUF version 1, versions 2 and 3 are read: convert the model again", name);
    if (version != 2 && version != 3) fail("'{}' is GGUF version {}, versions 2 and 3 are read", name, version);
    return version;
  }

  static ValueType read_type(Cursor& cursor, const std::string& name, const std::string& key) {
    const auto type = cursor.read<uint32_t>("a value's type");
    if (type > static_cast<uint32_t>(ValueType::f64)) {
      fail("'{}': the key '{}' has a value of unknown type {}, 0 to 12 were expected", name, key, type);
    }
    return static_cast<ValueType>(type);
  }

  template <typename T>
  static T read_scalar(Cursor& cursor, const std::string& name, const std::string& key) {
    if constexpr (std::same_as<T, std::string>) {
      return cursor.read_string("a string");
    } else if constexpr (std::same_as<T, bool>) {
      const auto byte = cursor.read<uint8_t>("a bool");
      if (byte > 1) fail("'{}': the key '{}' has a bool of value {}, 0 or 1 was expected", name, key, byte);
      return byte == 1;
    } else {
      return cursor.read<T>("a number");
    }
  }

  static Array read_array(Cursor& cursor, const std::string& name, const std::string& key) {
    const ValueType type = read_type(cursor, name, key);
    if (type == ValueType::array)
      fail("'{}': the key '{}' is an array of arrays, which no known model uses", name, key);
    const auto count = cursor.read<uint64_t>("an array's length");
    cursor.need_items(count, stored_bytes(type), fmt::format("the array '{}'", key));
    return with_type(type, [&](auto tag) -> Array {
      using T = typename decltype(tag)::type;
      std::vector<T> elements;
      elements.reserve(count);
      for (uint64_t i = 0; i < count; ++i) elements.push_back(read_scalar<T>(cursor, name, key));
      return elements;
    });
  }

  static void read_key(Cursor& cursor, const std::string& name, File& part) {
    std::string key = cursor.read_string("a metadata key");
    check_key(fmt::format("'{}'", name), key);
    const ValueType type = read_type(cursor, name, key);
    Value value;
    if (type == ValueType::array) {
      value = read_array(cursor, name, key);
    } else {
      value = with_type(type, [&](auto tag) -> Value {
        using T = typename decltype(tag)::type;
        return Value(std::in_place_type<T>, read_scalar<T>(cursor, name, key));
      });
    }
    if (!part.key_index_.emplace(key, part.metadata_.size()).second)
      fail("'{}': the key '{}' appears twice", name, key);
    part.metadata_.push_back({std::move(key), std::move(value)});
  }

  static uint64_t read_alignment(const std::string& name, const File& part) {
    const uint64_t alignment = part.get<uint64_t>(kAlignmentKey).value_or(kDefaultAlignment);
    if (!valid_alignment(alignment)) {
      fail("'{}': {} is {}, a power of two from {} to {} was expected", name, kAlignmentKey, alignment, kMinAlignment,
           kMaxAlignment);
    }
    return alignment;
  }

  void read_tensor(Cursor& cursor, const std::string& name, bool powerinfer) {
    TensorInfo t;
    t.name = cursor.read_string("a tensor's name");
    check_tensor_name(fmt::format("'{}'", name), t.name);
    const std::string who = fmt::format("'{}': tensor '{}'", name, t.name);
    const auto n_dims = cursor.read<uint32_t>("a tensor's number of dimensions");
    if (n_dims < 1 || n_dims > kMaxDims) fail("{} has {} dimensions, 1 to {} were expected", who, n_dims, kMaxDims);
    for (uint32_t i = 0; i < n_dims; ++i) t.ne.push_back(cursor.read<int64_t>("a tensor's dimension"));
    const auto stored_type = cursor.read<uint32_t>("a tensor's type");
    t.traits = find_traits(powerinfer ? from_powerinfer_type(stored_type) : stored_type);
    if (t.traits == nullptr) fail("{} has the unknown type number {}; a newer hearth may know it", who, stored_type);
    t.bytes = checked_tensor_bytes(who, *t.traits, t.ne);
    t.file = part_;
    t.offset = cursor.read<uint64_t>("a tensor's offset");  // from the start of the data, until place_tensors()
    if (!file_.tensor_index_.emplace(t.name, file_.tensors_.size()).second) fail("{} appears twice", who);
    file_.tensors_.push_back(std::move(t));
  }

  // Turns offsets into the data section into offsets into the file, once they are known to be inside, aligned and
  // disjoint.
  void place_tensors(size_t file_bytes, size_t header_bytes, const std::string& name, uint64_t alignment,
                     size_t first) {
    const uint64_t data_begin = align_up(header_bytes, alignment);
    const uint64_t data_bytes = file_bytes > data_begin ? file_bytes - data_begin : 0;
    for (size_t i = first; i < file_.tensors_.size(); ++i) {
      TensorInfo& t = file_.tensors_[i];
      if (t.offset % alignment != 0) {
        fail("'{}': tensor '{}' starts at {}, a multiple of the alignment {} was expected", name, t.name, t.offset,
             alignment);
      }
      if (t.offset > data_bytes || t.bytes > data_bytes - t.offset) {
        fail(
            "'{}': tensor '{}' takes {} bytes from {}, the file has {} bytes of tensor data: it is damaged or was not "
            "copied "
            "completely",
            name, t.name, t.bytes, t.offset, data_bytes);
      }
      t.offset += data_begin;
    }
    std::vector<size_t> order(file_.tensors_.size() - first);
    std::iota(order.begin(), order.end(), first);
    std::sort(order.begin(), order.end(),
              [&](size_t a, size_t b) { return file_.tensors_[a].offset < file_.tensors_[b].offset; });
    for (size_t i = 1; i < order.size(); ++i) {
      const TensorInfo& a = file_.tensors_[order[i - 1]];
      const TensorInfo& b = file_.tensors_[order[i]];
      if (a.offset + a.bytes > b.offset) fail("'{}': the data of tensors '{}' and '{}' overlap", name, a.name, b.name);
    }
  }

  File& file_;
  int part_ = 0;
  uint64_t split_number_ = 0, split_count_ = 1;
};

File File::open(const std::filesystem::path& path) {
  const auto read_part = [](File& file, Parser& parser, const std::filesystem::path& part_path) {
    Part part{MappedFile(part_path), {}};
    part.bytes = part.file.bytes();
    parser.parse_part(part.bytes, part_path.string());
    file.parts_.push_back(std::move(part));
  };
  File file;
  file.path_ = path;
  Parser parser(file);
  read_part(file, parser, path);
  const uint64_t count = parser.split_count();
  if (count <= 1) return file;

  // One part of several: start again, with the first.
  const std::optional<SplitName> split = SplitName::parse(path);
  if (!split || static_cast<uint64_t>(split->count) != count || split->number < 1 || split->number > split->count) {
    fail("'{}' is part {} of {} of a split model; parts must keep names like NAME-00001-of-{:05}.gguf", path.string(),
         parser.split_number() + 1, count, count);
  }
  File whole;
  whole.path_ = path;
  Parser parts(whole);
  for (int i = 1; i <= split->count; ++i) {
    const std::filesystem::path part_path = path.parent_path() / split->part(i);
    if (!std::filesystem::exists(part_path)) {
      fail("'{}' is one of {} parts, but '{}' is missing", path.string(), count, part_path.string());
    }
    read_part(whole, parts, part_path);
    if (parts.split_count() != count || parts.split_number() + 1 != static_cast<uint64_t>(i)) {
      fail("'{}' says that it is part {} of {}, part {} of {} was expected from its name", part_path.string(),
           parts.split_number() + 1, parts.split_count(), i, count);
    }
  }
  const uint64_t expected = whole.get<uint64_t>("split.tensors.count").value_or(whole.tensors_.size());
  if (expected != whole.tensors_.size()) {
    fail("'{}': the {} parts hold {} tensors, split.tensors.count says {}", path.string(), count, whole.tensors_.size(),
         expected);
  }
  return whole;
}

File File::from_bytes(std::span<const std::byte> image, std::string name) {
  HEARTH_CHECK(reinterpret_cast<uintptr_t>(image.data()) % kMinAlignment == 0);
  File file;
  file.path_ = name;
  Parser parser(file);
  parser.parse_part(image, name);
  if (parser.split_count() > 1)
    fail("'{}' is one of {} parts of a split model, which must be files", name, parser.split_count());
  file.parts_.push_back({MappedFile(), image});
  return file;
}

bool File::looks_like_gguf(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::array<char, 4> magic{};
  if (!in.read(magic.data(), magic.size())) return false;
  const std::string_view m(magic.data(), magic.size());
  return m == kMagic || m == kMagicPowerInfer;
}

uint64_t File::total_bytes() const {
  uint64_t sum = 0;
  for (const Part& part : parts_) sum += part.bytes.size();
  return sum;
}

std::vector<std::filesystem::path> File::part_paths() const {
  std::vector<std::filesystem::path> paths;
  for (const Part& part : parts_) paths.push_back(part.file.path());
  return paths;
}

const Value* File::find(std::string_view key) const {
  const auto it = key_index_.find(key);
  return it == key_index_.end() ? nullptr : &metadata_[it->second].value;
}

const TensorInfo* File::find_tensor(std::string_view name) const {
  const auto it = tensor_index_.find(name);
  return it == tensor_index_.end() ? nullptr : &tensors_[it->second];
}

std::span<const std::byte> File::data(const TensorInfo& tensor) const {
  return parts_[static_cast<size_t>(tensor.file)].bytes.subspan(tensor.offset, tensor.bytes);
}

void File::will_need(const TensorInfo& tensor) const {
  parts_[static_cast<size_t>(tensor.file)].file.will_need(data(tensor));
}

void File::dont_need(const TensorInfo& tensor) const {
  parts_[static_cast<size_t>(tensor.file)].file.dont_need(data(tensor));
}

}  // namespace hearth::gguf
