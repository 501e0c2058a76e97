// Linked with exactly one target: hands libFuzzer's inputs to it. Any other exception than Error is a finding, as is a
// crash.
#include <cstdint>

#include "core/error.h"
#include "fuzz/target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const hearth::fuzz::Target target = hearth::fuzz::targets().begin()->second;
  try {
    target({reinterpret_cast<const std::byte*>(data), size});
  } catch (const hearth::Error&) {  // the right answer to most inputs
  }
  return 0;
}
