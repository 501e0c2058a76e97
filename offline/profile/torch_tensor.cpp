// A saved tensor is a zip archive with NAME/data.pkl and NAME/data/KEY. The pickle (protocol 2 of Python's pickle
// module) builds
//   torch._utils._rebuild_tensor_v2(('storage', torch.LongStorage, KEY, 'cpu', numel), offset, size, stride, False, {})
#include "offline/profile/torch_tensor.h"

#include <cstring>
#include <limits>
#include <memory>
#include <unordered_map>
#include <variant>

#include "core/error.h"
#include "offline/profile/zip.h"

namespace hearth::offline {
namespace {

constexpr size_t kMaxPickle = 4096;  // bytes: a tensor's has 150; also bounds how deep tuples nest
constexpr size_t kMaxValues = 1000;  // on the stack or in the memo: a tensor needs about twenty

struct Value;
using Tuple = std::vector<Value>;
struct Mark {};
struct None {};
struct Global {
  std::string name;  // "module.attribute": only compared, never imported
};
struct Storage {
  std::string type, key;
  int64_t elements = 0;
};
struct Tensor {
  Storage storage;
  int64_t offset = 0, size = 0;
};
struct Value : std::variant<None, Mark, bool, int64_t, std::string, Global, Storage, Tensor, std::shared_ptr<Tuple>> {
  using variant::variant;
};

// Interprets the instructions that torch.save() uses for a tensor.
class Unpickler {
 public:
  Unpickler(std::span<const std::byte> code, const std::string& file) : code_(code), file_(file) {}

  Tensor run() {
    if (code_.size() > kMaxPickle) refuse("its pickle is larger than any saved tensor's");
    while (at_ < code_.size()) {
      const uint8_t op = byte();
      if (op == '.') return require<Tensor>(pop(), "a tensor");
      step(op);
      if (stack_.size() > kMaxValues || memo_.size() > kMaxValues)
        refuse("its pickle makes more values than any saved tensor's");
    }
    refuse("it ends early");
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    fail("'{}' is no saved integer vector: {}; expected torch.save() of a LongTensor with one count per neuron", file_,
         why);
  }

  void step(uint8_t op) {
    switch (op) {
      case 0x80:  // PROTO
        if (const uint8_t protocol = byte(); protocol < 2 || protocol > 4) refuse("its pickle protocol is not 2 to 4");
        return;
      case 'c':  // GLOBAL
        return push_global();
      case '(':
        return push(Mark{});
      case 'X':  // BINUNICODE
        return push(text(number<uint32_t>()));
      case 'K':
        return push(static_cast<int64_t>(byte()));
      case 'M':
        return push(static_cast<int64_t>(number<uint16_t>()));
      case 'J':
        return push(static_cast<int64_t>(number<int32_t>()));
      case 0x88:
        return push(true);
      case 0x89:
        return push(false);
      case 'N':
        return push(None{});
      case ')':
        return push(std::make_shared<Tuple>());
      case '}':  // EMPTY_DICT: what follows the tensor's arguments; nothing may be put into it
        return push(None{});
      case 't':
        return push_tuple_to_mark();
      case 0x85:
      case 0x86:
      case 0x87:
        return push_tuple(op - 0x84u);
      case 'q':
        return remember(byte());
      case 'r':
        return remember(number<uint32_t>());
      case 'h':
        return recall(byte());
      case 'j':
        return recall(number<uint32_t>());
      case 'Q':
        return push_storage();
      case 'R':
        return reduce();
      default:
        refuse(fmt::format("its pickle has the instruction 0x{:02x}", op));
    }
  }

  uint8_t byte() { return number<uint8_t>(); }
  template <typename T>
  T number() {
    if (code_.size() - at_ < sizeof(T)) refuse("its pickle is cut");
    T value;
    std::memcpy(&value, code_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  std::string text(size_t n) {
    if (code_.size() - at_ < n) refuse("a text in its pickle is cut");
    at_ += n;
    return {reinterpret_cast<const char*>(code_.data()) + at_ - n, n};
  }
  std::string line() {
    const auto rest = code_.subspan(at_);
    const void* end = std::memchr(rest.data(), '\n', rest.size());
    if (end == nullptr) refuse("a line in its pickle is cut");
    std::string s = text(static_cast<size_t>(static_cast<const std::byte*>(end) - rest.data()));
    ++at_;
    return s;
  }

  void push(Value v) { stack_.push_back(std::move(v)); }
  Value pop() {
    if (stack_.empty()) refuse("its pickle takes more than it made");
    Value v = std::move(stack_.back());
    stack_.pop_back();
    return v;
  }
  template <typename T>
  T require(Value v, const char* wanted) const {
    T* value = std::get_if<T>(static_cast<typename Value::variant*>(&v));
    if (value == nullptr) refuse(fmt::format("its pickle lacks {}", wanted));
    return std::move(*value);
  }

  void push_global() {
    const std::string module = line(), attribute = line();
    push(Global{module + "." + attribute});
  }
  void push_tuple(size_t n) {
    auto tuple = std::make_shared<Tuple>(n);
    for (size_t i = n; i-- > 0;) (*tuple)[i] = pop();
    push(std::move(tuple));
  }
  void push_tuple_to_mark() {
    size_t n = 0;
    while (n < stack_.size() && !std::holds_alternative<Mark>(stack_[stack_.size() - 1 - n])) ++n;
    if (n == stack_.size()) refuse("its pickle lacks a mark");
    push_tuple(n);
    Value tuple = pop();
    pop();  // the mark
    push(std::move(tuple));
  }
  void remember(size_t slot) {
    if (stack_.empty()) refuse("its pickle takes more than it made");
    memo_[slot] = stack_.back();
  }
  void recall(size_t slot) {
    const auto it = memo_.find(slot);
    if (it == memo_.end()) refuse("its pickle uses what it did not keep");
    push(it->second);
  }

  // BINPERSID: ('storage', type, key, device, elements)
  void push_storage() {
    const auto id = require<std::shared_ptr<Tuple>>(pop(), "a storage");
    if (id->size() != 5 || require<std::string>((*id)[0], "a storage") != "storage") refuse("its storage is unusual");
    push(Storage{require<Global>((*id)[1], "a storage's type").name, require<std::string>((*id)[2], "a storage's key"),
                 require<int64_t>((*id)[4], "a storage's size")});
  }

  void reduce() {
    const auto arguments = require<std::shared_ptr<Tuple>>(pop(), "arguments");
    const auto function = require<Global>(pop(), "a function").name;
    if (function == "collections.OrderedDict" && arguments->empty()) return push(None{});  // no backward hooks
    if (function != "torch._utils._rebuild_tensor_v2" || arguments->size() < 4) {
      refuse(fmt::format("its pickle calls {}", function));
    }
    const auto size = require<std::shared_ptr<Tuple>>((*arguments)[2], "a shape");
    const auto stride = require<std::shared_ptr<Tuple>>((*arguments)[3], "strides");
    if (size->size() != 1 || stride->size() != 1) refuse(fmt::format("it has {} dimensions", size->size()));
    Tensor t{require<Storage>((*arguments)[0], "a storage"), require<int64_t>((*arguments)[1], "an offset"),
             require<int64_t>((*size)[0], "a size")};
    if (require<int64_t>((*stride)[0], "a stride") != 1) refuse("it is not contiguous");
    if (t.offset < 0 || t.size < 0 || t.storage.elements < 0 || t.offset > t.storage.elements ||
        t.size > t.storage.elements - t.offset) {
      refuse("it reaches beyond its storage");
    }
    push(std::move(t));
  }

  std::span<const std::byte> code_;
  const std::string& file_;
  size_t at_ = 0;
  std::vector<Value> stack_;
  std::unordered_map<size_t, Value> memo_;
};

template <typename T>
std::vector<int64_t> elements(std::span<const std::byte> data, const Tensor& t, const std::string& file) {
  const size_t available = data.size() / sizeof(T);
  if (static_cast<uint64_t>(t.storage.elements) > available) {
    fail("'{}': the storage has {} elements and its data {}; the file is damaged", file, t.storage.elements, available);
  }
  std::vector<T> values(static_cast<size_t>(t.size));
  if (!values.empty()) {
    std::memcpy(values.data(), data.data() + static_cast<size_t>(t.offset) * sizeof(T), values.size() * sizeof(T));
  }
  return {values.begin(), values.end()};
}

const ZipMember* find_suffix(const std::vector<ZipMember>& members, const std::string& suffix) {
  for (const ZipMember& m : members) {
    if (m.name.ends_with(suffix)) return &m;
  }
  return nullptr;
}

}  // namespace

std::vector<int64_t> read_torch_vector(std::span<const std::byte> image, const std::string& file) {
  const std::vector<ZipMember> members = read_stored_zip(image, file);
  const ZipMember* pickle = find_suffix(members, "/data.pkl");
  if (pickle == nullptr) fail("'{}' has no data.pkl; expected a tensor written by torch.save()", file);
  const Tensor tensor = Unpickler(pickle->data, file).run();
  const ZipMember* data = find_suffix(members, "/data/" + tensor.storage.key);
  if (data == nullptr) fail("'{}' lacks the data of its storage '{}'", file, tensor.storage.key);
  if (tensor.storage.type == "torch.LongStorage") return elements<int64_t>(data->data, tensor, file);
  if (tensor.storage.type == "torch.IntStorage") return elements<int32_t>(data->data, tensor, file);
  fail("'{}' holds a {}, expected torch.LongStorage or torch.IntStorage", file, tensor.storage.type);
}

}  // namespace hearth::offline
