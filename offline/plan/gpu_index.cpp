#include "offline/plan/gpu_index.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "core/error.h"
#include "gguf/gguf.h"

namespace hearth::offline {
namespace {

std::optional<std::vector<int32_t>> ids_of(const gguf::File& file, const std::string& name) {
  const gguf::TensorInfo* t = file.find_tensor(name);
  if (t == nullptr) return std::nullopt;
  if (t->traits->type != DType::i32 || t->rows() != 1) {
    fail("'{}': {} is {} [{}], expected one row of i32", file.path().string(), name, t->traits->name,
         fmt::join(t->ne, ", "));
  }
  std::vector<int32_t> ids(static_cast<size_t>(t->cols()));
  std::memcpy(ids.data(), file.data(*t).data(), ids.size() * sizeof(int32_t));
  return ids;
}

// The ids whose flag is set.
std::vector<int32_t> flagged(const gguf::File& file, const std::string& name, const std::vector<int32_t>& flags,
                             int64_t n_ff) {
  if (static_cast<int64_t>(flags.size()) != n_ff) {
    fail("'{}': {} has {} entries, and the model {} neurons a layer; it was made for another model",
         file.path().string(), name, flags.size(), n_ff);
  }
  std::vector<int32_t> ids;
  for (size_t i = 0; i < flags.size(); ++i) {
    if (flags[i] != 0 && flags[i] != 1) {
      fail("'{}': {} says {} of neuron {}, expected 0 or 1", file.path().string(), name, flags[i], i);
    }
    if (flags[i] == 1) ids.push_back(static_cast<int32_t>(i));
  }
  return ids;
}

std::vector<int32_t> checked_bucket(const gguf::File& file, const std::string& name, std::vector<int32_t> ids,
                                    int64_t n_ff) {
  std::sort(ids.begin(), ids.end());
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= n_ff) {
      fail("'{}': {} names neuron {}, expected 0 to {}; it was made for another model", file.path().string(), name,
           ids[i], n_ff - 1);
    }
    if (i > 0 && ids[i] == ids[i - 1]) fail("'{}': {} names neuron {} twice", file.path().string(), name, ids[i]);
  }
  return ids;
}

}  // namespace

std::vector<std::vector<int32_t>> read_gpu_index(const std::filesystem::path& path, int64_t n_layer, int64_t n_ff) {
  const gguf::File file = gguf::File::open(path);
  std::vector<std::vector<int32_t>> buckets;
  for (int64_t l = 0; l < n_layer; ++l) {
    const std::string idx = fmt::format("blk.{}.gpu_idx", l), bucket = fmt::format("blk.{}.gpu_bucket", l);
    const auto flags = ids_of(file, idx);
    auto ids = ids_of(file, bucket);
    if (!flags && !ids)
      fail("'{}' has neither {} nor {}; is it a .generated.gpuidx of this model?", path.string(), idx, bucket);
    if (ids) ids = checked_bucket(file, bucket, std::move(*ids), n_ff);
    if (flags) {
      std::vector<int32_t> from_flags = flagged(file, idx, *flags, n_ff);
      if (ids && *ids != from_flags) {
        fail("'{}': {} has {} neurons that are not the {} of {}; let PowerInfer make the file again", path.string(),
             bucket, ids->size(), from_flags.size(), idx);
      }
      ids = std::move(from_flags);
    }
    buckets.push_back(std::move(*ids));
  }
  if (const auto extra = fmt::format("blk.{}.gpu_idx", n_layer); file.find_tensor(extra) != nullptr) {
    fail("'{}' has {}, and the model {} layers; it was made for another model", path.string(), extra, n_layer);
  }
  return buckets;
}

}  // namespace hearth::offline
