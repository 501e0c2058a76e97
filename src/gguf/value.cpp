// Metadata values: names, sizes, and conversions that lose nothing.
#include <cmath>
#include <concepts>
#include <limits>
#include <utility>

#include "gguf/format.h"
#include "gguf/gguf.h"

namespace hearth::gguf {
namespace {

template <typename T>
constexpr bool is_number = std::is_arithmetic_v<T> && !std::same_as<T, bool>;

// `from` as a To, or nullopt when that would change its value (f64 is rounded to f32, but does not overflow).
template <typename To, typename From>
std::optional<To> convert_number(From from) {
  if constexpr (std::integral<To> && std::integral<From>) {
    if (!std::in_range<To>(from)) return std::nullopt;
    return static_cast<To>(from);
  } else if constexpr (std::integral<To>) {
    // The bounds are powers of two, hence exact in floating point; NaN fails the first comparison.
    const auto low = static_cast<double>(std::numeric_limits<To>::min());
    const double high = std::ldexp(1.0, std::numeric_limits<To>::digits);
    const auto d = static_cast<double>(from);
    if (!(d >= low && d < high) || d != std::floor(d)) return std::nullopt;
    return static_cast<To>(d);
  } else if constexpr (std::integral<From>) {
    // Beyond 24 bits an integer may fall between two floats.
    constexpr int64_t exact = int64_t{1} << std::numeric_limits<To>::digits;
    if (std::cmp_greater(from, exact) || std::cmp_less(from, -exact)) return std::nullopt;
    return static_cast<To>(from);
  } else {
    if (std::isfinite(from) && std::fabs(from) > std::numeric_limits<To>::max()) return std::nullopt;
    return static_cast<To>(from);
  }
}

template <typename T>
struct Target {
  static std::optional<T> from(const Value& value) {
    return std::visit(
        [](const auto& v) -> std::optional<T> {
          using V = std::remove_cvref_t<decltype(v)>;
          if constexpr (std::same_as<V, T>) {
            return v;
          } else if constexpr (is_number<T> && is_number<V>) {
            return convert_number<T>(v);
          } else {
            return std::nullopt;
          }
        },
        value);
  }
};

template <typename T>
struct Target<std::vector<T>> {
  static std::optional<std::vector<T>> from(const Value& value) {
    const Array* array = std::get_if<Array>(&value);
    if (array == nullptr) return std::nullopt;
    return std::visit([](const auto& elements) { return convert(elements); }, *array);
  }
  template <typename V>
  static std::optional<std::vector<T>> convert(const std::vector<V>& elements) {
    if constexpr (std::same_as<V, T>) {
      return elements;
    } else if constexpr (is_number<T> && is_number<V>) {
      std::vector<T> out;
      out.reserve(elements.size());
      for (const V e : elements) {
        const std::optional<T> converted = convert_number<T>(e);
        if (!converted) return std::nullopt;
        out.push_back(*converted);
      }
      return out;
    } else {
      return std::nullopt;
    }
  }
};

template <typename T>
std::string target_name() {
  if constexpr (std::same_as<T, bool>)
    return "a bool";
  else if constexpr (std::same_as<T, float>)
    return "a number (f32)";
  else if constexpr (std::same_as<T, std::string>)
    return "a string";
  else if constexpr (std::integral<T>)
    return fmt::format("a whole number from {} to {}", std::numeric_limits<T>::min(), std::numeric_limits<T>::max());
  else if constexpr (std::same_as<T, std::vector<int32_t>>)
    return "an array of whole numbers (i32)";
  else if constexpr (std::same_as<T, std::vector<float>>)
    return "an array of numbers (f32)";
  else
    return "an array of strings";
}

// The found value, short enough for a one-line message.
std::string describe(const Value& value) {
  return std::visit(
      [&](const auto& v) -> std::string {
        using V = std::remove_cvref_t<decltype(v)>;
        if constexpr (std::same_as<V, Array>) {
          return fmt::format("an array of {} {}", size(v), to_string(element_type(v)));
        } else if constexpr (std::same_as<V, std::string>) {
          return fmt::format("a string of {} bytes", v.size());
        } else {
          return fmt::format("{} {}", to_string(type_of(value)), v);
        }
      },
      value);
}

}  // namespace

const char* to_string(ValueType type) {
  switch (type) {
    case ValueType::u8:
      return "u8";
    case ValueType::i8:
      return "i8";
    case ValueType::u16:
      return "u16";
    case ValueType::i16:
      return "i16";
    case ValueType::u32:
      return "u32";
    case ValueType::i32:
      return "i32";
    case ValueType::f32:
      return "f32";
    case ValueType::boolean:
      return "bool";
    case ValueType::string:
      return "string";
    case ValueType::array:
      return "array";
    case ValueType::u64:
      return "u64";
    case ValueType::i64:
      return "i64";
    case ValueType::f64:
      return "f64";
  }
  return "?";
}

// The alternatives of Value are in the order of the stored numbers; those of Array as well, with `array` itself left
// out.
ValueType type_of(const Value& value) {
  return static_cast<ValueType>(value.index());
}

ValueType element_type(const Array& array) {
  const size_t index = array.index();
  return static_cast<ValueType>(index < static_cast<size_t>(ValueType::array) ? index : index + 1);
}

size_t size(const Array& array) {
  return std::visit([](const auto& elements) { return elements.size(); }, array);
}

template <typename T>
std::optional<T> File::get(std::string_view key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  std::optional<T> converted = Target<T>::from(*value);
  if (!converted)
    fail("'{}': the key '{}' should be {}, it is {}", path_.string(), key, target_name<T>(), describe(*value));
  return converted;
}

template <typename T>
T File::require(std::string_view key) const {
  std::optional<T> value = get<T>(key);
  if (!value)
    fail("'{}' has no key '{}' ({} was expected); it is incomplete or of a kind hearth does not know", path_.string(),
         key, target_name<T>());
  return std::move(*value);
}

#define HEARTH_INSTANTIATE(T)                                     \
  template std::optional<T> File::get<T>(std::string_view) const; \
  template T File::require<T>(std::string_view) const;
HEARTH_INSTANTIATE(bool)
HEARTH_INSTANTIATE(int32_t)
HEARTH_INSTANTIATE(uint32_t)
HEARTH_INSTANTIATE(int64_t)
HEARTH_INSTANTIATE(uint64_t)
HEARTH_INSTANTIATE(float)
HEARTH_INSTANTIATE(std::string)
HEARTH_INSTANTIATE(std::vector<int32_t>)
HEARTH_INSTANTIATE(std::vector<float>)
HEARTH_INSTANTIATE(std::vector<std::string>)
#undef HEARTH_INSTANTIATE

uint64_t checked_tensor_bytes(std::string_view who, const DTypeTraits& traits, const std::vector<int64_t>& ne) {
  if (ne.empty() || ne.size() > kMaxDims) fail("{} has {} dimensions, 1 to {} were expected", who, ne.size(), kMaxDims);
  for (size_t i = 0; i < ne.size(); ++i) {
    if (ne[i] < 1) fail("{} has dimension {} of size {}, at least 1 was expected", who, i, ne[i]);
  }
  if (ne[0] % traits.block_size != 0) {
    fail("{} has {} columns, type {} needs a multiple of {}", who, ne[0], traits.name, traits.block_size);
  }
  constexpr auto limit = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  // Elements as well as bytes must stay countable: a block may hold more elements than bytes.
  uint64_t elements = 1, bytes = 0;
  bool overflow = false;
  for (const int64_t n : ne)
    overflow |= __builtin_mul_overflow(elements, static_cast<uint64_t>(n), &elements) || elements > limit;
  if (!overflow) {
    const uint64_t blocks = elements / static_cast<uint64_t>(traits.block_size);
    overflow = __builtin_mul_overflow(blocks, static_cast<uint64_t>(traits.block_bytes), &bytes) || bytes > limit;
  }
  if (overflow) fail("{} has dimensions [{}], more elements or bytes than 2^63", who, fmt::join(ne, ", "));
  return bytes;
}

void check_key(std::string_view who, std::string_view key) {
  if (key.empty()) fail("{}: a metadata key is empty", who);
  if (key.size() > kMaxKey)
    fail("{}: a metadata key is {} bytes long, at most {} were expected", who, key.size(), kMaxKey);
  if (has_control_bytes(key)) fail("{}: a metadata key has control characters in it", who);
}

void check_tensor_name(std::string_view who, std::string_view name) {
  if (name.empty()) fail("{}: a tensor's name is empty", who);
  if (name.size() > kMaxTensorName) {
    fail("{}: a tensor's name is {} bytes long, at most {} were expected", who, name.size(), kMaxTensorName);
  }
  if (has_control_bytes(name)) fail("{}: a tensor's name has control characters in it", who);
}

}  // namespace hearth::gguf
