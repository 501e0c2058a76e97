// Metadata, and the loop that makes and writes every tensor.
#include "offline/synth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <span>
#include <utility>

#include "core/error.h"
#include "gguf/gguf.h"
#include "offline/synth_random.h"
#include "offline/synth_sparsity.h"
#include "offline/synth_vocab.h"
#include "offline/synth_weights.h"

namespace hearth::offline {
namespace {

constexpr int64_t kChunkValues = int64_t{1} << 18;  // values a thread makes before it writes them: 1 MiB of f32

uint32_t u32(int64_t value) {
  return static_cast<uint32_t>(value);
}

void set_metadata(gguf::Writer& w, const SynthOptions& o, const std::vector<double>& law) {
  const SynthShape& s = o.shape;
  const std::string p = s.arch + ".";
  w.set("general.architecture", s.arch);
  w.set("general.name", "synthetic " + s.name);
  w.set("general.file_type", traits(o.type).file_type);
  if (is_quantized(o.type)) w.set("general.quantization_version", uint32_t{2});
  w.set(p + "context_length", u32(s.n_ctx));
  w.set(p + "embedding_length", u32(s.n_embd));
  w.set(p + "block_count", u32(s.n_layer));
  w.set(p + "feed_forward_length", u32(s.n_ff));
  w.set(p + "attention.head_count", u32(s.n_head));
  w.set(p + "attention.head_count_kv", u32(s.n_head_kv));
  w.set(p + (s.layer_norm() ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon"), 1e-5f);
  if (s.n_embd_head > 0) {
    w.set(p + "attention.key_length", u32(s.n_embd_head));
    w.set(p + "attention.value_length", u32(s.n_embd_head));
  }
  if (s.n_expert > 0) {
    w.set(p + "expert_count", u32(s.n_expert));
    w.set(p + "expert_used_count", u32(s.n_expert_used));
    w.set(p + "expert_feed_forward_length", u32(s.n_ff));
    w.set("hearth.synth.expert_skew", static_cast<float>(o.expert_skew));
    w.set("hearth.synth.expert_persistence", static_cast<float>(o.expert_persistence));
  }
  if (s.arch == "smallthinker") w.set(p + "expert_gating_func", uint32_t{2});  // sigmoid
  if (s.window > 0) w.set(p + "attention.sliding_window", u32(s.window));
  if (!s.learned_positions()) {
    w.set(p + "rope.dimension_count", u32(s.head_dim()));
    w.set(p + "rope.freq_base", s.rope_base);
  }
  if (s.arch == "llama") w.set(p + "vocab_size", u32(s.n_vocab));
  w.set("hearth.ffn.activation", o.activation);
  if (!o.dense) {
    w.set("hearth.synth.density", static_cast<float>(mean_of(law)));
    w.set("hearth.synth.hot_share", static_cast<float>(hot_share_of(law)));
  }
  w.set("hearth.synth.drift", static_cast<float>(o.drift));
  w.set("hearth.synth.seed", o.seed);
  // The exact predictor's scores are pre-activations: above 0 is active. PowerInfer's key, for its own readers.
  if (o.predictor_rank > 0) w.set("powerinfer.sparse_threshold", 0.0f);
  set_synth_vocab(w, s.n_vocab);
}

std::filesystem::path directory_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

// Before anything is written.
void check_room(const std::filesystem::path& path, const std::vector<SynthTensor>& tensors) {
  uint64_t bytes = 0;
  for (const SynthTensor& t : tensors) bytes += static_cast<uint64_t>(t.rows) * row_bytes(t.type, t.cols);
  std::error_code unknown;  // some file systems do not tell; then writing will
  const auto space = std::filesystem::space(directory_of(path), unknown);
  if (!unknown && space.available < bytes) {
    constexpr double gib = 1024.0 * 1024.0 * 1024.0;
    fail(
        "'{}' needs {:.2f} GiB, and {:.2f} GiB are free on its disk; choose another place, fewer --layers or a smaller "
        "--type",
        path.string(), static_cast<double>(bytes) / gib, static_cast<double>(space.available) / gib);
  }
}

// Makes and writes tensors with the whole team. The first failure of any thread ends the work and is thrown by write().
class TensorWriter {
 public:
  TensorWriter(gguf::Writer& writer, const SynthWeights& weights, ThreadTeam& team,
               const std::function<void(uint64_t, uint64_t)>& progress, uint64_t total)
      : writer_(writer),
        weights_(weights),
        team_(team),
        progress_(progress),
        total_(total),
        values_(static_cast<size_t>(team.size())),
        bytes_(static_cast<size_t>(team.size())) {}

  void write(size_t index, const SynthTensor& tensor) {
    const bool by_columns = tensor.fill == SynthFill::outputs || tensor.fill == SynthFill::down;
    const int64_t unit = by_columns ? kSynthBlock : 1;
    const int64_t grain = std::max(unit, kChunkValues / tensor.cols / unit * unit);
    team_.for_chunks(tensor.rows, grain, [&](int64_t begin, int64_t end, int thread) {
      if (failed_.load(std::memory_order_relaxed)) return;
      try {
        write_rows(index, tensor, begin, end, static_cast<size_t>(thread));
      } catch (...) {
        const std::lock_guard lock(mutex_);
        if (!failed_.exchange(true)) failure_ = std::current_exception();
      }
    });
    if (failed_) std::rethrow_exception(failure_);
  }

 private:
  void write_rows(size_t index, const SynthTensor& tensor, int64_t begin, int64_t end, size_t thread) {
    std::vector<float>& values = values_[thread];
    std::vector<std::byte>& bytes = bytes_[thread];
    const int64_t rows = end - begin;
    const size_t row = row_bytes(tensor.type, tensor.cols);
    values.resize(static_cast<size_t>(rows * tensor.cols));
    bytes.resize(static_cast<size_t>(rows) * row);
    weights_.fill(tensor, begin, rows, values.data());
    traits(tensor.type).from_float(values.data(), bytes.data(), rows * tensor.cols);
    writer_.write(index, static_cast<uint64_t>(begin) * row, bytes);
    done_ += bytes.size();
    if (thread == 0 && progress_) progress_(done_, total_);
  }

  gguf::Writer& writer_;
  const SynthWeights& weights_;
  ThreadTeam& team_;
  const std::function<void(uint64_t, uint64_t)>& progress_;
  const uint64_t total_;
  std::vector<std::vector<float>> values_;     // per thread
  std::vector<std::vector<std::byte>> bytes_;  // per thread
  std::atomic<uint64_t> done_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::exception_ptr failure_;
};

}  // namespace

SynthReport write_synthetic(const std::filesystem::path& path, const SynthOptions& options, ThreadTeam& team,
                            const std::function<void(uint64_t, uint64_t)>& progress) {
  check_synth_options(options);
  SynthWeights weights(options, team);
  const std::vector<SynthTensor> tensors = weights.tensors();
  check_room(path, tensors);
  gguf::Writer writer(path);
  set_metadata(writer, options, weights.law());
  for (const SynthTensor& t : tensors) {
    writer.add_tensor(t.name, t.type, t.ne());
  }
  writer.begin();
  const auto start = std::chrono::steady_clock::now();
  TensorWriter out(writer, weights, team, progress, writer.file_bytes());
  for (size_t i = 0; i < tensors.size(); ++i) {
    weights.prepare_layer(tensors[i].layer);
    out.write(i, tensors[i]);
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  writer.finish();
  return {writer.file_bytes(), elapsed.count(), mean_of(weights.law()), hot_share_of(weights.law())};
}

}  // namespace hearth::offline
