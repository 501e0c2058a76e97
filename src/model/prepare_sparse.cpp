// Transposed down projections of a loaded model (Model::prepare_sparse()).
#include <algorithm>

#include "core/error.h"
#include "core/every_core.h"
#include "model/model.h"
#include "model/sidecar.h"

namespace hearth::model {

struct Model::Downs {
  TransposedDown to;   // without data until it is made
  std::string tensor;  // of the file; of one expert each: the last one's
  std::vector<FfnShard*> shards;
  size_t first = 0;  // of the layer's experts
  const Matrix& from() const { return shards.front()->down; }
};

std::optional<std::string> Model::why_not_by_neuron(int64_t layer) const {
  const Matrix& down = weights_.layers[static_cast<size_t>(layer)].ffn.down;
  if (!down || !is_quantized(down.type)) return std::nullopt;
  if (!transpose_down_.wanted) {
    return fmt::format(
        "blk.{}.ffn_down is {} and stored untransposed; --transpose-down quantises it again when the model is loaded, "
        "`hearth quantize` makes a file with ffn_down_t",
        layer, traits(down.type).name);
  }
  const DType type = transposed_type(down, transpose_down_.type);
  if (can_transpose(down, type)) return std::nullopt;
  return fmt::format("blk.{}.ffn_down would be {}, whose blocks of {} do not divide transposed rows of {}", layer,
                     traits(type).name, traits(type).block_size, down.rows);
}

std::optional<std::string> Model::why_not_by_neuron() const {
  for (int64_t i = 0; i < std::ssize(weights_.layers); ++i) {
    if (auto reason = why_not_by_neuron(i)) return reason;
  }
  return std::nullopt;
}

std::optional<std::string> Model::why_experts_are_whole() const {
  for (size_t l = 0; l < weights_.layers.size(); ++l) {
    for (const Expert& e : weights_.layers[l].experts) {
      if (e.ffn.down_t) continue;
      if (!transpose_down_.wanted) {
        return fmt::format(
            "blk.{}.ffn_down_exps is stored untransposed; --transpose-down transposes it when the model is loaded, "
            "`hearth quantize --transposed-down` makes a file with ffn_down_t_exps",
            l);
      }
      const DType type = transposed_type(e.ffn.down, transpose_down_.type);
      return fmt::format("experts of blk.{} would be {}, whose blocks of {} do not divide transposed rows of {}", l,
                         traits(type).name, traits(type).block_size, e.ffn.down.rows);
    }
  }
  return std::nullopt;
}

Matrix Model::stored_down(size_t layer, size_t expert) const {
  if (layer >= stored_downs_.size() || stored_downs_[layer].empty()) return {};
  return stored_downs_[layer][expert];
}

std::vector<Model::Downs> Model::standard_downs(bool thresholds) {
  std::vector<Downs> all;
  const auto add = [&](size_t layer, const char* suffix, std::span<Expert> experts, FfnShard* ffn, size_t first) {
    Downs d;
    d.first = first;
    for (Expert& e : experts) d.shards.push_back(&e.ffn);
    if (ffn != nullptr) d.shards.push_back(ffn);
    const Matrix& down = d.from();
    const DType type = transposed_type(down, transpose_down_.type);
    if (!down || !can_transpose(down, type)) return;
    const auto n = static_cast<int64_t>(d.shards.size());
    d.tensor = fmt::format("blk.{}.ffn_down{}.weight", layer, suffix);
    d.to = {static_cast<int64_t>(layer), {type, n * down.cols, down.rows}, fmt::format("ffn_down_t{}", suffix), 0};
    if (!experts.empty()) d.to.n_expert = n;
    all.push_back(std::move(d));
  };
  for (size_t l = 0; l < weights_.layers.size(); ++l) {
    LayerWeights& w = weights_.layers[l];
    if (!w.router) {
      add(l, "", {}, &w.ffn, 0);
    } else if (transpose_down_.wanted && (config_.ffn.sparse() || thresholds)) {
      const auto n = static_cast<size_t>(w.router.routing.n_expert);
      add(l, "_exps", std::span(w.experts).first(n), nullptr, 0);
      if (w.router.shared) add(l, "_shexp", {}, &w.experts.back().ffn, n);
    }
  }
  return all;
}

// Gives the shards their rows of d.to, which has data now.
void Model::replace(const Downs& d) {
  const auto layer = static_cast<size_t>(d.to.layer);
  stored_downs_.resize(weights_.layers.size());
  std::vector<Matrix>& stored = stored_downs_[layer];
  stored.resize(std::max<size_t>(1, weights_.layers[layer].experts.size()));
  const int64_t n = d.to.matrix.rows / std::ssize(d.shards);
  for (int64_t i = 0; i < std::ssize(d.shards); ++i) {
    FfnShard& f = *d.shards[static_cast<size_t>(i)];
    stored[d.first + static_cast<size_t>(i)] = f.down;
    f.down_t = d.to.matrix.slice_rows(i * n, n), f.down = {};
  }
}

bool Model::map_transposed(std::span<const Downs> downs) {
  std::vector<TransposedDown> wanted;
  for (const Downs& d : downs) wanted.push_back(d.to);
  auto found = TransposedFile::find(transposed_path(file_->path()), fingerprint(*file_), wanted);
  if (!found) return false;
  transposed_file_ = std::make_unique<TransposedFile>(std::move(*found));
  for (size_t i = 0; i < downs.size(); ++i) {
    Downs mapped = downs[i];
    mapped.to = transposed_file_->downs[i];
    replace(mapped);
  }
  requantization_error_ = transposed_file_->error;
  return true;
}

// Shard by shard on every core: it is reading the file, for most of a large model's loading time otherwise.
void Model::transpose_all(std::span<Downs> downs) {
  struct Item {
    const Downs* downs;
    size_t shard;
    std::byte* memory;
  };
  std::vector<Item> items;
  for (Downs& d : downs) {
    const size_t each = transposed_bytes(d.from(), d.to.matrix.type);
    auto* const memory = owned_matrices_.emplace_back(each * d.shards.size()).as<std::byte>();
    d.to.matrix.data = memory;
    for (size_t i = 0; i < d.shards.size(); ++i) items.push_back({&d, i, memory + i * each});
  }
  std::vector<RequantizationError> errors(items.size());
  on_every_core(items.size(), [&](size_t k) {
    const auto& [d, i, memory] = items[k];
    const Matrix& down = d->shards[i]->down;
    const DType type = d->to.matrix.type;
    transpose(down, type, {memory, transposed_bytes(down, type)}, errors[k]);
    if (i + 1 < d->shards.size()) return;
    if (const auto* t = file_->find_tensor(d->tensor)) file_->dont_need(*t);
  });
  for (const RequantizationError& e : errors) {
    requantization_error_.squared_error += e.squared_error, requantization_error_.squared += e.squared;
  }
  for (const Downs& d : downs) replace(d);
}

std::optional<std::string> Model::prepare_sparse(bool thresholds) {
  if (auto reason = why_not_by_neuron()) return reason;
  std::vector<Downs> all = standard_downs(thresholds);
  const auto exact =
      std::stable_partition(all.begin(), all.end(), [](const Downs& d) { return is_quantized(d.from().type); });
  const std::span quantized(all.begin(), exact);
  const bool mapped = transpose_down_.cached && !quantized.empty() && map_transposed(quantized);
  transpose_all(mapped ? std::span(exact, all.end()) : std::span(all));
  if (!transpose_down_.cached || quantized.empty() || mapped) return std::nullopt;
  std::vector<TransposedDown> made;
  for (const Downs& d : quantized) made.push_back(d.to);
  write_transposed(transposed_path(file_->path()), fingerprint(*file_), made, requantization_error_);
  return std::nullopt;
}

bool Model::owns(const Matrix& matrix) const {
  const auto* const data = static_cast<const std::byte*>(matrix.data);
  return std::any_of(owned_matrices_.begin(), owned_matrices_.end(), [&](const HostBuffer& b) {
    const auto* const begin = b.as<std::byte>();
    return data >= begin && data < begin + b.bytes();
  });
}

void Model::release_ffn(int64_t layer) {
  release_tensors(fmt::format("blk.{}.ffn_", layer));
  LayerWeights& l = weights_.layers[static_cast<size_t>(layer)];
  const Matrix some = l.some_ffn().down_t;
  if (!some || !owns(some)) return;
  std::vector<FfnShard*> shards;
  for (Expert& e : l.experts) shards.push_back(&e.ffn);
  if (shards.empty()) shards.push_back(&l.ffn);
  std::erase_if(owned_matrices_, [&](const HostBuffer& b) {
    return std::ranges::any_of(shards, [&](const FfnShard* f) { return f->down_t.data == b.data(); });
  });
  std::vector<Matrix>& stored = stored_downs_[static_cast<size_t>(layer)];
  for (size_t i = 0; i < shards.size(); ++i) {
    if (stored[i]) shards[i]->down = stored[i], shards[i]->down_t = {};
  }
  stored.clear();
}

}  // namespace hearth::model
