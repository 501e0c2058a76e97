#pragma once
// A fuzz target is one file NAME_fuzz.cpp:
//
//   HEARTH_FUZZ_TARGET(gguf) { ... std::span<const std::byte> data ... }
//
// It must return normally, or throw hearth::Error, for every input. libFuzzer drives it in fuzz_NAME (configure with
// clang and -DHEARTH_FUZZ=ON); the ordinary test suite replays corpus/NAME, and mutations of it, through the same code.
#include <cstddef>
#include <map>
#include <span>
#include <string>

namespace hearth::fuzz {

using Target = void (*)(std::span<const std::byte> data);

inline std::map<std::string, Target>& targets() {
  static std::map<std::string, Target> map;
  return map;
}

struct Registration {
  Registration(const char* name, Target target) { targets().emplace(name, target); }
};

}  // namespace hearth::fuzz

#define HEARTH_FUZZ_TARGET(name)                                                            \
  static void hearth_fuzz_##name(std::span<const std::byte> data);                          \
  static const ::hearth::fuzz::Registration registration_##name(#name, hearth_fuzz_##name); \
  static void hearth_fuzz_##name(std::span<const std::byte> data)
