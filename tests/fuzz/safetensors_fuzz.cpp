// Any bytes as a safetensors file: every byte of every accepted tensor is read.
#include <vector>

#include "fuzz/target.h"
#include "offline/convert/safetensors.h"

HEARTH_FUZZ_TARGET(safetensors) {
  static volatile unsigned sink;                                // keeps the reads
  const std::vector<std::byte> copy(data.begin(), data.end());  // its end is guarded by ASan
  for (const hearth::convert::SafeTensor& t : hearth::convert::parse_safetensors(copy, "fuzz")) {
    unsigned sum = 0;
    for (const std::byte b : t.data) sum += static_cast<unsigned>(b);
    sink = sink + sum;
  }
}
