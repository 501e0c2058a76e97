#pragma once
// Shared by the reader and the writer; not part of the public interface. Source: ggml-org/ggml docs/gguf.md.
#include <array>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "core/error.h"
#include "gguf/gguf.h"

namespace hearth::gguf {

inline constexpr std::string_view kMagic = "GGUF";
inline constexpr std::string_view kMagicPowerInfer = "PWRI";
inline constexpr uint32_t kVersion = 3;  // v2 has the same layout; v3 only added big-endian files
inline constexpr const char* kAlignmentKey = "general.alignment";
inline constexpr uint64_t kDefaultAlignment = 32;
// Tensor data is read through typed pointers, the widest of 8 bytes. The specification asks for a multiple of 8, too.
inline constexpr uint64_t kMinAlignment = 8;
inline constexpr uint64_t kMaxAlignment = uint64_t{1} << 30;
inline constexpr size_t kMaxDims = 4;
inline constexpr size_t kMaxTensorName = 64;
inline constexpr size_t kMaxKey = 65535;

inline bool valid_alignment(uint64_t a) {
  return a >= kMinAlignment && a <= kMaxAlignment && (a & (a - 1)) == 0;
}
// `alignment` is a power of two, and value + alignment does not overflow.
inline uint64_t align_up(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) & ~(alignment - 1);
}

// Bytes that a terminal or a text file would not show as they are.
inline bool has_control_bytes(std::string_view s) {
  for (const char c : s) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) return true;
  }
  return false;
}

// Calls f(std::type_identity<T>{}) with the C++ type of a value that is no array.
template <typename F>
decltype(auto) with_type(ValueType type, F&& f) {
  switch (type) {
    case ValueType::u8:
      return f(std::type_identity<uint8_t>{});
    case ValueType::i8:
      return f(std::type_identity<int8_t>{});
    case ValueType::u16:
      return f(std::type_identity<uint16_t>{});
    case ValueType::i16:
      return f(std::type_identity<int16_t>{});
    case ValueType::u32:
      return f(std::type_identity<uint32_t>{});
    case ValueType::i32:
      return f(std::type_identity<int32_t>{});
    case ValueType::f32:
      return f(std::type_identity<float>{});
    case ValueType::boolean:
      return f(std::type_identity<bool>{});
    case ValueType::string:
      return f(std::type_identity<std::string>{});
    case ValueType::u64:
      return f(std::type_identity<uint64_t>{});
    case ValueType::i64:
      return f(std::type_identity<int64_t>{});
    case ValueType::f64:
      return f(std::type_identity<double>{});
    case ValueType::array:
      break;
  }
  HEARTH_CHECK(false, "value type {}", static_cast<uint32_t>(type));
  __builtin_unreachable();
}

// Bytes of a tensor of type `traits` and shape `ne`. Throws Error, beginning with `who`, for a shape that cannot be: no
// or too many dimensions, a dimension below 1, columns that are no whole blocks, or a size beyond 2^63.
uint64_t checked_tensor_bytes(std::string_view who, const DTypeTraits& traits, const std::vector<int64_t>& ne);
void check_key(std::string_view who, std::string_view key);
void check_tensor_name(std::string_view who, std::string_view name);

}  // namespace hearth::gguf
