#include "offline/quantize/importance.h"

#include <cmath>
#include <cstring>
#include <span>

#include "core/error.h"
#include "gguf/gguf.h"

namespace hearth::offline {
namespace {

constexpr std::string_view kSquares = ".in_sum2", kCounts = ".counts";

// The values of NAME.in_sum2 or NAME.counts: f32, finite, not negative.
std::vector<float> values_of(const gguf::File& file, const gguf::TensorInfo& t) {
  if (t.traits->type != DType::f32) {
    fail("'{}': tensor '{}' is {}, expected f32", file.path().string(), t.name, t.traits->name);
  }
  std::vector<float> values(static_cast<size_t>(t.cols() * t.rows()));
  std::memcpy(values.data(), file.data(t).data(), values.size() * sizeof(float));
  for (const float v : values) {
    if (!(v >= 0) || !std::isfinite(v)) {
      fail("'{}': tensor '{}' has the value {}, expected finite numbers of 0 or more; make the file anew",
           file.path().string(), t.name, v);
    }
  }
  return values;
}

Importance::Sums read_sums(const gguf::File& file, const gguf::TensorInfo& squares, const std::string& name) {
  const gguf::TensorInfo* counts = file.find_tensor(name + std::string(kCounts));
  if (counts == nullptr)
    fail("'{}': tensor '{}{}' is missing; is the file complete?", file.path().string(), name, kCounts);
  const std::vector<float> sums = values_of(file, squares);
  Importance::Sums result;
  result.squares.assign(sums.begin(), sums.end());
  for (const float c : values_of(file, *counts)) result.counts.push_back(static_cast<uint64_t>(std::llround(c)));
  if (result.counts.empty() || result.squares.size() % result.counts.size() != 0) {
    fail("'{}': '{}' has {} sums and {} counts, expected one count for each of its matrices", file.path().string(),
         name, result.squares.size(), result.counts.size());
  }
  return result;
}

gguf::File open_importance(const std::filesystem::path& path) {
  if (std::filesystem::is_regular_file(path) && !gguf::File::looks_like_gguf(path)) {
    fail(
        "'{}' is no GGUF file; make one with `hearth profile --importance` or llama-imatrix (which converts its older "
        "imatrix.dat with --in-file OLD -o NEW.gguf)",
        path.string());
  }
  gguf::File file = gguf::File::open(path);
  const std::string type = file.get<std::string>("general.type").value_or("model");
  if (type != "imatrix") {
    fail(
        "'{}' is a GGUF of the kind '{}', expected an importance matrix (general.type imatrix), as `hearth profile "
        "--importance` writes it",
        path.string(), type);
  }
  return file;
}

}  // namespace

Importance Importance::read(const std::filesystem::path& path) {
  const gguf::File file = open_importance(path);
  Importance all;
  all.datasets = file.get<std::vector<std::string>>("imatrix.datasets").value_or(std::vector<std::string>{});
  all.chunk_count = file.get<uint32_t>("imatrix.chunk_count").value_or(0);
  all.chunk_size = file.get<uint32_t>("imatrix.chunk_size").value_or(0);
  for (const gguf::TensorInfo& t : file.tensors()) {
    if (!t.name.ends_with(kSquares)) continue;
    const std::string name = t.name.substr(0, t.name.size() - kSquares.size());
    all.matrices.emplace(name, read_sums(file, t, name));
  }
  if (all.matrices.empty()) fail("'{}' holds no matrix's importance; is the file complete?", path.string());
  return all;
}

void Importance::write(const std::filesystem::path& path) const {
  gguf::Writer writer(path);
  writer.set("general.type", std::string("imatrix"));
  writer.set("imatrix.datasets", gguf::Array(datasets));
  writer.set("imatrix.chunk_count", chunk_count);
  writer.set("imatrix.chunk_size", chunk_size);
  for (const auto& [name, sums] : matrices) {
    const auto n = static_cast<int64_t>(sums.counts.size());
    writer.add_tensor(name + std::string(kSquares), DType::f32, {static_cast<int64_t>(sums.squares.size()) / n, n});
    writer.add_tensor(name + std::string(kCounts), DType::f32, {1, n});
  }
  writer.begin();
  size_t tensor = 0;
  const auto put = [&](const auto& values) {
    const std::vector<float> floats(values.begin(), values.end());
    writer.write(tensor++, 0, std::as_bytes(std::span(floats)));
  };
  for (const auto& [name, sums] : matrices) put(sums.squares), put(sums.counts);
  writer.finish();
}

std::vector<float> Importance::means(std::string_view name) const {
  const auto found = matrices.find(name);
  if (found == matrices.end()) return {};
  const Sums& s = found->second;
  const size_t columns = s.squares.size() / s.counts.size();
  std::vector<float> means(s.squares.size(), 1.0f);
  for (size_t i = 0; i < means.size(); ++i) {
    const uint64_t count = s.counts[i / columns];
    if (count > 0) means[i] = static_cast<float>(s.squares[i] / static_cast<double>(count));
  }
  return means;
}

}  // namespace hearth::offline
