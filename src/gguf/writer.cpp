// The writer: header first, then tensor data at offsets known in advance, from any number of threads.
#include <atomic>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "gguf/format.h"
#include "gguf/gguf.h"

namespace hearth::gguf {
namespace {

class HeaderBytes {
 public:
  template <typename T>
  requires std::is_arithmetic_v<T>
  void put(T value) {
    const auto* p = reinterpret_cast<const char*>(&value);
    bytes_.append(p, sizeof value);
  }
  void put(bool value) { put(static_cast<uint8_t>(value ? 1 : 0)); }
  void put(std::string_view s) {
    put(static_cast<uint64_t>(s.size()));
    bytes_.append(s);
  }
  void put(const std::string& s) { put(std::string_view(s)); }
  void put(const Array& array) {
    put(static_cast<uint32_t>(element_type(array)));
    put(static_cast<uint64_t>(size(array)));
    std::visit(
        [this](const auto& elements) {
          using T = typename std::remove_cvref_t<decltype(elements)>::value_type;
          for (size_t i = 0; i < elements.size(); ++i)
            put(static_cast<const T&>(elements[i]));  // also unwraps vector<bool>
        },
        array);
  }
  void put(const Value& value) {
    put(static_cast<uint32_t>(type_of(value)));
    std::visit([this](const auto& v) { put(v); }, value);
  }
  void put_raw(std::string_view s) { bytes_.append(s); }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

struct OutTensor {
  std::string name;
  DType type;
  std::vector<int64_t> ne;
  uint64_t bytes = 0;
  uint64_t offset = 0;                     // in the data section
  std::map<uint64_t, uint64_t> written{};  // begin -> end of the merged ranges written so far
};

// Adds [begin, end) to disjoint ranges, merging neighbours. False when some byte was there already.
bool add_range(std::map<uint64_t, uint64_t>& ranges, uint64_t begin, uint64_t end) {
  auto next = ranges.lower_bound(begin);
  if (next != ranges.end() && next->first < end) return false;
  if (next != ranges.begin()) {
    const auto before = std::prev(next);
    if (before->second > begin) return false;
    if (before->second == begin) {
      begin = before->first;
      ranges.erase(before);
    }
  }
  if (next != ranges.end() && next->first == end) {
    end = next->second;
    ranges.erase(next);
  }
  ranges.emplace(begin, end);
  return true;
}

}  // namespace

struct Writer::Impl {
  explicit Impl(const std::filesystem::path& path) : name(path.string()), file(path) {}

  std::string name;
  AtomicFile file;
  std::vector<KeyValue> metadata;
  std::vector<OutTensor> tensors;
  std::unordered_map<std::string, size_t> key_index;
  std::unordered_set<std::string> tensor_names;
  uint64_t alignment = kDefaultAlignment;
  bool begun = false;
  uint64_t data_begin = 0, file_bytes = 0;
  std::mutex mutex;  // guards OutTensor::written
};

Writer::Writer(std::filesystem::path path) : impl_(std::make_unique<Impl>(path)) {}
Writer::~Writer() = default;

void Writer::set(std::string key, Value value) {
  HEARTH_CHECK(!impl_->begun);
  check_key(fmt::format("cannot write '{}'", impl_->name), key);
  const auto [at, is_new] = impl_->key_index.try_emplace(key, impl_->metadata.size());
  if (is_new) {
    impl_->metadata.push_back({std::move(key), std::move(value)});
  } else {
    impl_->metadata[at->second].value = std::move(value);
  }
}

size_t Writer::add_tensor(std::string name, DType type, std::vector<int64_t> ne) {
  HEARTH_CHECK(!impl_->begun);
  check_tensor_name(fmt::format("cannot write '{}'", impl_->name), name);
  const std::string who = fmt::format("cannot write '{}': tensor '{}'", impl_->name, name);
  const uint64_t bytes = checked_tensor_bytes(who, traits(type), ne);
  if (!impl_->tensor_names.insert(name).second) fail("{} appears twice", who);
  impl_->tensors.push_back({std::move(name), type, std::move(ne), bytes});
  return impl_->tensors.size() - 1;
}

void Writer::begin() {
  Impl& w = *impl_;
  HEARTH_CHECK(!w.begun);
  for (const KeyValue& kv : w.metadata) {
    if (kv.key != kAlignmentKey) continue;
    const uint32_t* alignment = std::get_if<uint32_t>(&kv.value);
    if (alignment == nullptr || !valid_alignment(*alignment)) {
      fail("cannot write '{}': {} must be a u32, a power of two from {}", w.name, kAlignmentKey, kMinAlignment);
    }
    w.alignment = *alignment;
  }
  uint64_t offset = 0;
  for (OutTensor& t : w.tensors) {
    t.offset = offset;
    const uint64_t limit = static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) - offset;
    if (t.bytes > limit / 2) fail("cannot write '{}': the tensors take more bytes than a file can have", w.name);
    offset = align_up(offset + t.bytes, w.alignment);
  }
  HeaderBytes header;
  header.put_raw(kMagic);
  header.put(kVersion);
  header.put(static_cast<uint64_t>(w.tensors.size()));
  header.put(static_cast<uint64_t>(w.metadata.size()));
  for (const KeyValue& kv : w.metadata) {
    header.put(kv.key);
    header.put(kv.value);
  }
  for (const OutTensor& t : w.tensors) {
    header.put(t.name);
    header.put(static_cast<uint32_t>(t.ne.size()));
    for (const int64_t n : t.ne) header.put(n);
    header.put(static_cast<uint32_t>(t.type));
    header.put(t.offset);
  }
  w.file.write(header.bytes().data(), header.bytes().size());
  w.data_begin = align_up(header.bytes().size(), w.alignment);
  w.file.pad_to(w.data_begin);
  w.file_bytes = w.data_begin + offset;
  // Some readers load the data section in one piece and expect the padding behind the last tensor to be there, too.
  if (offset > 0) {
    const std::byte zero{};
    w.file.write_at(w.file_bytes - 1, &zero, 1);
  }
  w.begun = true;
}

uint64_t Writer::tensor_bytes(size_t tensor) const {
  return impl_->tensors.at(tensor).bytes;
}

void Writer::write(size_t tensor, uint64_t offset, std::span<const std::byte> data) {
  Impl& w = *impl_;
  HEARTH_CHECK(w.begun && tensor < w.tensors.size());
  OutTensor& t = w.tensors[tensor];
  HEARTH_CHECK(offset <= t.bytes && data.size() <= t.bytes - offset, "tensor '{}'", t.name);
  if (data.empty()) return;
  {
    const std::lock_guard lock(w.mutex);
    HEARTH_CHECK(add_range(t.written, offset, offset + data.size()), "tensor '{}' is written twice at {}", t.name,
                 offset);
  }
  w.file.write_at(w.data_begin + t.offset + offset, data.data(), data.size());
}

void Writer::finish() {
  Impl& w = *impl_;
  HEARTH_CHECK(w.begun);
  for (const OutTensor& t : w.tensors) {
    const bool complete =
        t.written.size() == 1 && t.written.begin()->first == 0 && t.written.begin()->second == t.bytes;
    HEARTH_CHECK(complete, "tensor '{}' was not written completely", t.name);
  }
  w.file.commit();
}

uint64_t Writer::file_bytes() const {
  HEARTH_CHECK(impl_->begun);
  return impl_->file_bytes;
}

}  // namespace hearth::gguf
