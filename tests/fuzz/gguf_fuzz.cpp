// Any bytes as a GGUF file: all metadata and all tensor data of what is accepted is read.
#include <cstring>
#include <vector>

#include "core/error.h"
#include "fuzz/target.h"
#include "gguf/gguf.h"

namespace {

volatile unsigned g_sink;  // keeps the reads

template <typename T>
void convert_all(const hearth::gguf::File& file) {
  for (const hearth::gguf::KeyValue& kv : file.metadata()) {
    try {
      g_sink = g_sink + file.get<T>(kv.key).has_value();
    } catch (const hearth::Error&) {
    }
  }
}

}  // namespace

HEARTH_FUZZ_TARGET(gguf) {
  std::vector<std::byte> aligned(data.begin(), data.end());  // as a mapping would be, and with its end guarded by ASan
  const auto file = hearth::gguf::File::from_bytes(aligned, "fuzz.gguf");
  convert_all<bool>(file);
  convert_all<int32_t>(file);
  convert_all<uint64_t>(file);
  convert_all<float>(file);
  convert_all<std::string>(file);
  convert_all<std::vector<int32_t>>(file);
  convert_all<std::vector<float>>(file);
  convert_all<std::vector<std::string>>(file);
  for (const hearth::gguf::TensorInfo& t : file.tensors()) {
    unsigned sum = 0;
    for (const std::byte b : file.data(t)) sum += static_cast<unsigned>(b);
    g_sink = g_sink + sum;
    if (t.traits->computable()) {  // what is accepted can be computed with: no row may reach beyond the data
      std::vector<float> row(static_cast<size_t>(t.cols()));
      t.traits->to_float(file.data(t).data(), row.data(), t.cols());
    }
  }
}
