#include "model/transposed_file.h"

#include <cmath>

#include "core/error.h"
#include "model/sidecar.h"

namespace hearth::model {
namespace {

constexpr const char* kArchitecture = "hearth-transposed";
constexpr const char* kFingerprint = "hearth-transposed.model.fingerprint";
constexpr const char *kSquaredError = "hearth-transposed.squared_error", *kSquared = "hearth-transposed.squared";

std::string tensor_name(int64_t layer) {
  return fmt::format("blk.{}.ffn_down_t.weight", layer);
}

double number(const gguf::File& file, const char* key) {
  const gguf::Value* value = file.find(key);
  const double* x = value != nullptr ? std::get_if<double>(value) : nullptr;
  if (x == nullptr || !std::isfinite(*x) || *x < 0) {
    fail("'{}' has no {} that is a number of 0 or more; delete it and it is made again", file.path().string(), key);
  }
  return *x;
}

}  // namespace

std::filesystem::path transposed_path(const std::filesystem::path& model) {
  // The sidecar's name without its own ending.
  return sidecar_path(model).replace_extension().replace_extension(".down_t.gguf");
}

std::optional<TransposedFile> TransposedFile::find(const std::filesystem::path& path, const std::string& fingerprint,
                                                   const std::vector<TransposedDown>& wanted) {
  if (!std::filesystem::exists(path)) return std::nullopt;
  TransposedFile found{gguf::File::open(path), {}, {}};
  const gguf::File& file = found.file;
  if (const auto arch = file.get<std::string>("general.architecture").value_or(""); arch != kArchitecture) {
    fail("'{}' holds no transposed down projections: its architecture is '{}', expected '{}'; move it away",
         path.string(), arch, kArchitecture);
  }
  if (file.require<std::string>(kFingerprint) != fingerprint) return std::nullopt;
  for (const TransposedDown& w : wanted) {
    const gguf::TensorInfo* t = file.find_tensor(tensor_name(w.layer));
    const Matrix& m = w.matrix;
    if (t == nullptr || t->traits->type != m.type || t->ne != std::vector<int64_t>{m.cols, m.rows}) return std::nullopt;
    found.layers.push_back({w.layer, {m.type, m.rows, m.cols, file.data(*t).data()}});
  }
  found.error = {number(file, kSquaredError), number(file, kSquared)};
  return found;
}

void write_transposed(const std::filesystem::path& path, const std::string& fingerprint,
                      const std::vector<TransposedDown>& layers, const RequantizationError& error) {
  gguf::Writer out(path);
  out.set("general.architecture", std::string(kArchitecture));
  out.set(kFingerprint, fingerprint);
  out.set(kSquaredError, error.squared_error);
  out.set(kSquared, error.squared);
  std::vector<size_t> tensors;
  for (const auto& [layer, m] : layers) tensors.push_back(out.add_tensor(tensor_name(layer), m.type, {m.cols, m.rows}));
  out.begin();
  for (size_t i = 0; i < layers.size(); ++i) {
    const Matrix& m = layers[i].matrix;
    out.write(tensors[i], 0, {static_cast<const std::byte*>(m.data), m.bytes()});
  }
  out.finish();
}

}  // namespace hearth::model
