#pragma once
// Hugging Face directories that a test makes up, and what becomes of them.
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "gguf/gguf.h"
#include "hf_reference.h"
#include "offline/convert/convert.h"
#include "support/paths.h"
#include "support/random.h"

namespace hearth::test {

struct HfTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};
using HfTensors = std::map<std::string, HfTensor>;

inline std::string bytes_of(const void* data, size_t n) {
  return {static_cast<const char*>(data), n};
}
inline HfTensor f32(std::vector<int64_t> shape, const std::vector<float>& values) {
  return {"F32", std::move(shape), bytes_of(values.data(), values.size() * sizeof(float))};
}
inline HfTensor random_f32(std::mt19937& rng, std::vector<int64_t> shape) {
  size_t n = 1;
  for (const int64_t d : shape) n *= static_cast<size_t>(d);
  return f32(std::move(shape), random_normal(rng, n, 0.1f, 0.5f));
}

inline void write_safetensors(const std::filesystem::path& path, const HfTensors& tensors) {
  nlohmann::json header;
  std::string data;
  for (const auto& [name, t] : tensors) {
    header[name] = {
        {"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {data.size(), data.size() + t.bytes.size()}}};
    data += t.bytes;
  }
  const std::string text = header.dump();
  const uint64_t n = text.size();
  spill(path, bytes_of(&n, sizeof n) + text + data);
}

// The GGUF of a checkpoint with a tokenizer of 296 tokens.
inline gguf::File convert_tensors(const TempDir& dir, const nlohmann::json& config, const HfTensors& tensors,
                                  DType type, const std::function<void(std::string_view)>& on_notice) {
  namespace fs = std::filesystem;
  const fs::path hf = dir / "hf";
  fs::create_directories(hf);
  for (const char* name : {"tokenizer.json", "tokenizer_config.json"}) {
    fs::copy_file(data_dir() / "zoo" / "qwen2-relu" / name, hf / name, fs::copy_options::overwrite_existing);
  }
  spill(hf / "config.json", config.dump());
  write_safetensors(hf / "model.safetensors", tensors);
  convert::Options options;
  options.type = type, options.n_threads = 2, options.on_notice = on_notice;
  convert::convert_checkpoint(hf, dir / "m.gguf", options);
  return gguf::File::open(dir / "m.gguf");
}

// A tensor's values, one row behind the other; none where it is absent.
inline std::vector<float> floats_of(const gguf::File& file, const std::string& name) {
  const gguf::TensorInfo* t = file.find_tensor(name);
  if (t == nullptr) return {};
  std::vector<float> all(static_cast<size_t>(t->rows() * t->cols()));
  for (int64_t r = 0; r < t->rows(); ++r) {
    const auto row = file.data(*t).subspan(static_cast<size_t>(r) * row_bytes(t->traits->type, t->cols()));
    t->traits->to_float(row.data(), all.data() + r * t->cols(), t->cols());
  }
  return all;
}

}  // namespace hearth::test
