#pragma once
// Hostile and damaged GGUF images, each with the words that its error must contain.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "gguf/build.h"

namespace hearth::test {

struct Malformed {
  std::string name;
  std::string image;
  std::string message;  // part of the error
};

// A sound file of two keys and two tensors; its images are the base of the truncations.
inline std::string sound_image() {
  ImageBuilder b;
  b.header(2, 2).key("general.architecture", 8).str("llama").key("llama.block_count", 4).put(uint32_t{1});
  b.tensor("a", {32, 2}, 0, 0).tensor("b", {32, 2}, 8, 256);
  return b.data(256 + 68).bytes();
}

namespace malformed_detail {

constexpr uint64_t kHuge = uint64_t{1} << 60;

inline ImageBuilder one_key(uint32_t type) {
  return ImageBuilder().header(0, 1).key("k", type);
}
inline ImageBuilder one_array(uint32_t element_type, uint64_t count) {
  return one_key(9).put(element_type).put(count);
}
// A file of one tensor "t" with 4 KiB of data behind it.
inline std::string one_tensor(const std::vector<int64_t>& ne, uint32_t type, uint64_t offset = 0) {
  return ImageBuilder().header(1, 0).tensor("t", ne, type, offset).data(4096).bytes();
}
inline std::string alignment(uint32_t value) {
  return ImageBuilder().header(0, 1).key("general.alignment", 4).put(value).bytes();
}

inline void add_headers(std::vector<Malformed>& v) {
  const std::string sound = sound_image();
  v.push_back({"wrong_magic", ImageBuilder().header(0, 0, 3, "GGML").bytes(), "not a GGUF file"});
  v.push_back(
      {"safetensors", ImageBuilder().put(uint64_t{64}).raw(R"({"__metadata__":{}})").bytes(), "not a GGUF file"});
  v.push_back({"magic_alone", "GGUF", "the version"});
  v.push_back({"three_bytes", "GGU", "the magic number"});
  v.push_back({"version_0", ImageBuilder().header(0, 0, 0).bytes(), "version 0"});
  v.push_back({"version_1", ImageBuilder().header(0, 0, 1).bytes(), "version 1"});
  v.push_back({"version_4", ImageBuilder().header(0, 0, 4).bytes(), "version 4"});
  v.push_back({"big_endian", ImageBuilder().header(0, 0, 0x03000000).bytes(), "big-endian"});
  v.push_back({"no_counts", sound.substr(0, 8), "the number of tensors"});
  v.push_back({"half_a_count", sound.substr(0, 20), "the number of metadata keys"});
  v.push_back({"huge_key_count", ImageBuilder().header(0, kHuge).bytes(), "the metadata claims"});
  v.push_back({"huge_tensor_count", ImageBuilder().header(kHuge, 0).bytes(), "the tensor list claims"});
  v.push_back({"negative_tensor_count", ImageBuilder().header(~uint64_t{0}, 0).bytes(), "the tensor list claims"});
  v.push_back(
      {"one_key_too_many", ImageBuilder().header(0, 2).key("k", 4).put(uint32_t{1}).data(64, 1).bytes(), "needs"});
  v.push_back({"cut_in_metadata", sound.substr(0, 60), "bytes"});
  v.push_back({"cut_in_tensor_list", sound.substr(0, sound.size() - 324 - 64), "tensor"});
  v.push_back({"cut_in_data", sound.substr(0, sound.size() - 1), "not copied completely"});
}

inline void add_keys(std::vector<Malformed>& v) {
  v.push_back({"empty_key", ImageBuilder().header(0, 1).key("", 4).put(uint64_t{1}).bytes(), "key is empty"});
  v.push_back(
      {"huge_key_length", ImageBuilder().header(0, 1).put(kHuge).raw("key and more bytes").bytes(), "a metadata key"});
  v.push_back(
      {"long_key", ImageBuilder().header(0, 1).key(std::string(65536, 'k'), 4).put(1u).bytes(), "65536 bytes long"});
  v.push_back(
      {"control_in_key", ImageBuilder().header(0, 1).key("a\nb", 4).put(uint32_t{1}).bytes(), "control characters"});
  v.push_back({"unknown_value_type", one_key(13).put(uint64_t{0}).bytes(), "unknown type 13"});
  v.push_back({"huge_value_type", one_key(0xFFFFFFFF).put(uint64_t{0}).bytes(), "unknown type 4294967295"});
  v.push_back({"cut_value", one_key(10).put(uint16_t{0}).bytes(), "a number"});
  v.push_back({"huge_string", one_key(8).put(kHuge).bytes(), "a string"});
  v.push_back({"wrapping_string", one_key(8).put(~uint64_t{0} - 7).bytes(), "a string"});
  v.push_back({"cut_string", one_key(8).put(uint64_t{10}).raw("nine byte").bytes(), "needs 10 bytes, 9 are left"});
  v.push_back({"bool_2", one_key(7).put(uint8_t{2}).bytes(), "bool of value 2"});
  v.push_back({"nested_array", one_array(9, 1).put(uint32_t{4}).put(uint64_t{0}).bytes(), "array of arrays"});
  v.push_back({"array_of_unknown", one_array(77, 1).put(uint64_t{0}).bytes(), "unknown type 77"});
  v.push_back({"huge_array", one_array(4, kHuge).put(uint64_t{0}).bytes(), "the array 'k' claims"});
  v.push_back({"wrapping_array", one_array(10, uint64_t{1} << 61).put(uint64_t{0}).bytes(), "the array 'k' claims"});
  v.push_back({"huge_string_array", one_array(8, kHuge).put(uint64_t{0}).bytes(), "the array 'k' claims"});
  v.push_back({"array_one_too_long", one_array(6, 3).put(1.0f).put(2.0f).bytes(), "the array 'k' claims 3"});
  v.push_back({"string_array_overrun", one_array(8, 2).str("fits").put(uint64_t{99}).bytes(), "a string"});
  v.push_back({"bool_array_3", one_array(7, 2).put(uint8_t{1}).put(uint8_t{3}).bytes(), "bool of value 3"});
  v.push_back({"duplicate_key",
               ImageBuilder().header(0, 2).key("k", 0).put(uint8_t{1}).key("k", 0).put(uint8_t{1}).raw("....").bytes(),
               "'k' appears twice"});
  v.push_back({"alignment_0", alignment(0), "general.alignment is 0"});
  v.push_back({"alignment_1", alignment(1), "general.alignment is 1"});
  v.push_back({"alignment_24", alignment(24), "a power of two"});
  v.push_back({"alignment_2_31", alignment(1u << 31), "a power of two"});
  v.push_back({"alignment_string", ImageBuilder().header(0, 1).key("general.alignment", 8).str("32").bytes(),
               "'general.alignment' should be a whole number"});
  v.push_back({"alignment_negative", ImageBuilder().header(0, 1).key("general.alignment", 5).put(int32_t{-32}).bytes(),
               "'general.alignment' should be a whole number"});
  v.push_back(
      {"split_count_float", ImageBuilder().header(0, 1).key("split.count", 6).put(1.5f).bytes(), "'split.count'"});
  v.push_back({"a_part_alone", ImageBuilder().header(0, 1).key("split.count", 2).put(uint16_t{2}).bytes(), "2 parts"});
}

inline void add_tensors(std::vector<Malformed>& v) {
  const auto two = [](const char* a, const char* b, uint64_t offset) {
    return ImageBuilder().header(2, 0).tensor(a, {32}, 0, 0).tensor(b, {32}, 0, offset).data(4096).bytes();
  };
  const auto named = [](const std::string& name) {
    return ImageBuilder().header(1, 0).tensor(name, {32}, 0, 0).data(4096).bytes();
  };
  v.push_back({"empty_tensor_name", named(""), "tensor's name is empty"});
  v.push_back({"long_tensor_name", named(std::string(65, 't')), "65 bytes long"});
  v.push_back({"nul_in_tensor_name", named(std::string("a\0b", 3)), "control characters"});
  v.push_back({"huge_tensor_name", ImageBuilder().header(1, 0).put(kHuge).data(64).bytes(), "a tensor's name"});
  v.push_back({"no_dimensions", one_tensor({}, 0), "0 dimensions"});
  v.push_back({"five_dimensions", one_tensor({1, 1, 1, 1, 1}, 0), "5 dimensions"});
  v.push_back({"huge_dimensions", ImageBuilder().header(1, 0).str("t").put(0xFFFFFFFFu).data(64).bytes(),
               "4294967295 dimensions"});
  v.push_back({"zero_columns", one_tensor({0, 4}, 0), "of size 0"});
  v.push_back({"zero_rows", one_tensor({4, 0}, 0), "of size 0"});
  v.push_back({"negative_rows", one_tensor({4, -1}, 0), "of size -1"});
  v.push_back({"elements_overflow", one_tensor({int64_t{1} << 32, int64_t{1} << 32}, 0), "2^63"});
  v.push_back({"elements_wrap_to_small", one_tensor({int64_t{1} << 32, int64_t{1} << 32, 1}, 24), "2^63"});
  v.push_back({"bytes_overflow", one_tensor({int64_t{1} << 61}, 0), "2^63"});
  v.push_back({"packed_elements_overflow", one_tensor({int64_t{1} << 62, 4}, 2), "2^63"});
  v.push_back({"half_a_block", one_tensor({48, 2}, 8), "a multiple of 32"});
  v.push_back({"part_of_a_k_block", one_tensor({128, 2}, 12), "a multiple of 256"});
  v.push_back({"unknown_type", one_tensor({32}, 999), "unknown type number 999"});
  v.push_back({"removed_type", one_tensor({32}, 4), "unknown type number 4"});  // q4_2, withdrawn from ggml
  v.push_back({"duplicate_tensor", two("t", "t", 128), "'t' appears twice"});
  v.push_back({"overlapping_tensors", two("t", "u", 96), "'t' and 'u' overlap"});
  v.push_back({"same_place", two("t", "u", 0), "overlap"});
  v.push_back({"misaligned_offset", one_tensor({32}, 0, 8), "a multiple of the alignment"});
  v.push_back({"offset_past_end", one_tensor({32}, 0, 1 << 20), "the file has 4096 bytes"});
  v.push_back({"offset_near_2_64", one_tensor({32}, 0, ~uint64_t{31}), "the file has 4096 bytes"});
  v.push_back({"bytes_past_end", one_tensor({32, 33}, 0), "takes 4224 bytes"});
  v.push_back({"end_one_past", one_tensor({32, 32}, 0, 32), "from 32"});
  v.push_back({"no_data_section", ImageBuilder().header(1, 0).tensor("t", {32}, 0, 0).bytes(), "the file has 0 bytes"});
  v.push_back(
      {"data_needs_alignment",
       ImageBuilder().header(1, 1).key("general.alignment", 4).put(1u << 20).tensor("t", {32}, 0, 0).data(4096).bytes(),
       "the file has 0 bytes"});
  v.push_back({"powerinfer_number_in_gguf", one_tensor({32}, 31), "unknown type number 31"});
}

}  // namespace malformed_detail

inline std::vector<Malformed> malformed_images() {
  std::vector<Malformed> v;
  malformed_detail::add_headers(v);
  malformed_detail::add_keys(v);
  malformed_detail::add_tensors(v);
  return v;
}

}  // namespace hearth::test
