#include "model/transposed_file.h"

#include <cmath>

#include "core/error.h"
#include "model/sidecar.h"

namespace hearth::model {
namespace {

constexpr const char* kArchitecture = "hearth-transposed";
constexpr const char* kFingerprint = "hearth-transposed.model.fingerprint";
constexpr const char *kSquaredError = "hearth-transposed.squared_error", *kSquared = "hearth-transposed.squared";

std::string tensor_name(const TransposedDown& down) {
  return fmt::format("blk.{}.{}.weight", down.layer, down.name);
}
std::vector<int64_t> dimensions(const TransposedDown& down) {
  const Matrix& m = down.matrix;
  return down.n_expert > 0 ? std::vector{m.cols, m.rows / down.n_expert, down.n_expert} : std::vector{m.cols, m.rows};
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
    const gguf::TensorInfo* t = file.find_tensor(tensor_name(w));
    if (t == nullptr || t->traits->type != w.matrix.type || t->ne != dimensions(w)) return std::nullopt;
    found.downs.emplace_back(w).matrix.data = file.data(*t).data();
  }
  found.error = {number(file, kSquaredError), number(file, kSquared)};
  return found;
}

void write_transposed(const std::filesystem::path& path, const std::string& fingerprint,
                      const std::vector<TransposedDown>& downs, const RequantizationError& error) {
  gguf::Writer out(path);
  out.set("general.architecture", std::string(kArchitecture));
  out.set(kFingerprint, fingerprint);
  out.set(kSquaredError, error.squared_error);
  out.set(kSquared, error.squared);
  std::vector<size_t> tensors;
  for (const TransposedDown& d : downs) tensors.push_back(out.add_tensor(tensor_name(d), d.matrix.type, dimensions(d)));
  out.begin();
  for (size_t i = 0; i < downs.size(); ++i) {
    const Matrix& m = downs[i].matrix;
    out.write(tensors[i], 0, {static_cast<const std::byte*>(m.data), m.bytes()});
  }
  out.finish();
}

}  // namespace hearth::model
