#include "offline/convert/powerinfer.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "gguf/gguf.h"
#include "model/model.h"
#include "model/predictors.h"
#include "model/sidecar.h"

namespace hearth::convert {
namespace {

bool ends_with(const std::string& s, std::string_view end) {
  return s.size() >= end.size() && std::string_view(s).substr(s.size() - end.size()) == end;
}

// Keys that mean something to PowerInfer alone.
bool own_key(const std::string& key) {
  return key.starts_with("powerinfer.") || key.starts_with("split.") || key == "hearth.ffn.activation";
}

struct Renamed {
  const gguf::TensorInfo* from = nullptr;
  size_t index = 0;
  bool transposed = false;
};

// Rows of `size`-byte elements as columns.
std::vector<std::byte> transposed(std::span<const std::byte> in, int64_t rows, int64_t cols, size_t size) {
  std::vector<std::byte> out(in.size());
  constexpr int64_t tile = 64;
  for (int64_t r0 = 0; r0 < rows; r0 += tile) {
    for (int64_t c0 = 0; c0 < cols; c0 += tile) {
      for (int64_t c = c0; c < std::min(cols, c0 + tile); ++c) {
        for (int64_t r = r0; r < std::min(rows, r0 + tile); ++r) {
          std::memcpy(out.data() + static_cast<size_t>(c * rows + r) * size,
                      in.data() + static_cast<size_t>(r * cols + c) * size, size);
        }
      }
    }
  }
  return out;
}

class Rewriter {
 public:
  Rewriter(const model::Model& model, const std::filesystem::path& out, const Options& options)
      : model_(model), file_(model.file()), out_(out), options_(options) {}

  uint64_t write() {
    for (const gguf::KeyValue& kv : file_.metadata()) {
      if (!own_key(kv.key)) out_.set(kv.key, kv.value);
    }
    out_.set("hearth.ffn.activation", model_.config().ffn.activation);
    for (const gguf::TensorInfo& t : file_.tensors()) add(t);
    if (quantised_ > 0) {
      notice(
          fmt::format("{} quantised ffn_down_t stay transposed, as hearth wants them; other programs do not read them",
                      quantised_));
    }
    out_.begin();
    uint64_t done = 0, total = 0;
    for (const Renamed& r : tensors_) total += r.from->bytes;
    for (const Renamed& r : tensors_) {
      if (options_.on_progress) options_.on_progress({r.from->name, done, total});
      const auto data = file_.data(*r.from);
      if (r.transposed) {
        out_.write(r.index, 0,
                   transposed(data, r.from->rows(), r.from->cols(), static_cast<size_t>(r.from->traits->block_bytes)));
      } else {
        out_.write(r.index, 0, data);
      }
      file_.dont_need(*r.from);
      done += r.from->bytes;
    }
    const uint64_t bytes = out_.file_bytes();
    out_.finish();
    return bytes;
  }
  size_t n_tensors() const { return tensors_.size(); }

 private:
  void notice(const std::string& text) const {
    if (options_.on_notice) options_.on_notice(text);
  }

  void add(const gguf::TensorInfo& t) {
    if (ends_with(t.name, ".fc1.weight") || ends_with(t.name, ".fc2.weight")) return;
    constexpr std::string_view down_t = ".ffn_down_t.";
    const size_t at = t.name.find(down_t);
    const bool exact = t.traits->block_size == 1;
    if (at == std::string::npos || !exact) {
      quantised_ += at != std::string::npos ? 1 : 0;
      tensors_.push_back({&t, out_.add_tensor(t.name, t.traits->type, t.ne), false});
      return;
    }
    const std::string name = t.name.substr(0, at) + ".ffn_down." + t.name.substr(at + down_t.size());
    const bool matrix = t.ne.size() == 2;  // a bias keeps its shape
    const std::vector<int64_t> ne = matrix ? std::vector<int64_t>{t.ne[1], t.ne[0]} : t.ne;
    tensors_.push_back({&t, out_.add_tensor(name, t.traits->type, ne), matrix});
  }

  const model::Model& model_;
  const gguf::File& file_;
  gguf::Writer out_;
  const Options& options_;
  std::vector<Renamed> tensors_;
  size_t quantised_ = 0;
};

model::OwnedMatrix copy_of(const Matrix& m) {
  model::OwnedMatrix out{m.type, m.rows, m.cols, {}};
  const auto* data = static_cast<const std::byte*>(m.data);
  out.data.assign(data, data + m.bytes());
  return out;
}

std::vector<model::PredictorData> predictors_of(const model::Model& model) {
  std::vector<model::PredictorData> layers;
  for (const model::LayerWeights& l : model.weights().layers) {
    model::PredictorData p;
    const Predictor& w = l.predictor.weights;
    if (w) {
      p.method = l.predictor.method, p.input = l.predictor.input, p.relu = w.relu;
      p.fc1 = copy_of(w.fc1), p.fc2 = copy_of(w.fc2);
      p.threshold.assign(w.threshold.data, w.threshold.data + w.threshold.n);
    }
    layers.push_back(std::move(p));
  }
  return layers;
}

}  // namespace

bool is_powerinfer_file(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored) && gguf::File::looks_like_gguf(path) &&
         gguf::File::open(path).powerinfer();
}

Summary convert_powerinfer(const std::filesystem::path& in, const std::filesystem::path& out, const Options& options) {
  const model::Model model = model::Model::load(in, {.activation = options.ffn});
  if (!model.file().powerinfer())
    fail("'{}' is no PowerInfer file (magic PWRI); there is nothing to convert", in.string());
  std::error_code ignored;
  if (std::filesystem::equivalent(in, out, ignored))
    fail("'{}' is the input; give another file to write", out.string());
  Rewriter rewriter(model, out, options);
  Summary s;
  s.architecture = model.config().arch, s.activation = model.config().ffn.activation;
  s.file_bytes = rewriter.write();
  s.n_tensors = rewriter.n_tensors();
  std::vector<model::PredictorData> predictors = predictors_of(model);
  if (std::none_of(predictors.begin(), predictors.end(), [](const auto& p) { return !p.method.empty(); })) return s;
  const model::Model written = model::Model::load(out);
  model::Sidecar sidecar = model::Sidecar::empty_for(written.file(), written.config());
  sidecar.new_predictors = std::move(predictors);
  const std::filesystem::path path = model::sidecar_path(out);
  if (std::filesystem::exists(path) && options.on_notice) {
    options.on_notice(fmt::format("'{}' is replaced: it belonged to another file", path.string()));
  }
  sidecar.write(path);
  if (options.on_notice) options.on_notice(fmt::format("the predictors are in '{}'", path.string()));
  return s;
}

}  // namespace hearth::convert
