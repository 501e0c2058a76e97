#pragma once
// Runs a model on a device: places the weights, owns the activations and the KV cache, and evaluates tokens.
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/device.h"
#include "core/thread_team.h"
#include "engine/activations.h"
#include "engine/forward.h"
#include "engine/host_half.h"
#include "engine/kv_cache.h"
#include "engine/placement.h"
#include "engine/split_weights.h"
#include "engine/stall_watch.h"
#include "engine/traffic.h"
#include "model/model.h"

namespace hearth::engine {

// off: every neuron. exact: every gate, then up and down of the active neurons alone. predict: in layers with a
// predictor the gates of the neurons it names alone; exact in the others. auto_: predict where the model has
// predictors; exact where it loses nothing (the ReLU families) and the file allows it; otherwise off.
enum class Sparsity { off, exact, predict, auto_ };
Sparsity parse_sparsity(std::string_view name);  // "off", "exact", "predict", "auto"; throws Error
const char* to_string(Sparsity sparsity);

struct EngineOptions {
  int64_t n_ctx = 0;      // 0: the model's own, at most 4096
  int64_t n_batch = 512;  // prompt tokens evaluated at once
  Sparsity sparsity = Sparsity::auto_;
  float sparse_threshold = 0.0f;        // a neuron is active when |act(gate)| > threshold; above 0 changes the result
  std::vector<float> layer_thresholds;  // [n_layer], instead of sparse_threshold; empty: that one for every layer
  int64_t stream_tokens = 32;  // of a divided model: batches of at least this many tokens compute the CPU's neurons on
                               // the main device, streaming their rows to it; 0 = none do
  bool look_ahead = true;      // where the placement says so (LayerPlacement::look_ahead)
  bool copy_weights = false;   // what the CPU reads: copy_from_file() (engine/place.h)
  bool use_graph = true;       // record a decode step once and replay it, where the device can
  // How long one side of a divided model waits for the other before the pass fails.
  std::chrono::milliseconds patience = Mailbox::kPatience;
  // Called, with one line that says why, when a pass has failed that way and still cannot be ended because a side is
  // stuck, or when a device's results do not come for as long; to end the process is all that can be done then. Empty:
  // it goes on waiting.
  std::function<void(const std::string& why)> on_stall;
};

// Where a divided model lives: which of its parts the main device takes, and who computes the rest.
struct Division {
  Device& host;  // a CPU device
  const Placement& placement;
  ThreadTeam& team;  // copies rows while the model is loaded
};

class Engine {
 public:
  // `model` must outlive the engine; in a sparse mode its down projections are transposed (Model::prepare_sparse).
  // Throws Error when the options cannot be met: exact asked of a file that cannot be, a context beyond what the model
  // supports.
  Engine(model::Model& model, Device& device, const EngineOptions& options);
  // The same model on two devices. The placement must have been checked against the model (check_placement).
  Engine(model::Model& model, Device& device, const EngineOptions& options, const Division& division);
  ~Engine();

  const model::Config& config() const { return model_.config(); }
  Device& device() { return device_; }
  Sparsity sparsity() const { return sparsity_; }  // off, exact or predict
  int64_t n_ctx() const { return n_ctx_; }
  int64_t n_past() const { return n_past_; }

  // Appends tokens to the sequence; the logits of the last one, [n_vocab], valid until the next call. Throws Error when
  // an id is out of range or the context would overflow; then nothing has changed.
  std::span<const float> eval(std::span<const int32_t> ids);
  // Appends tokens and calls visit(i, logits) for the token ids[i], i = 0, 1, …
  void eval_all(std::span<const int32_t> ids, FunctionRef<void(int64_t i, std::span<const float> logits)> visit);
  // Appends one token; the most likely next one, found on the device.
  int32_t eval_greedy(int32_t id);
  // The logits [n_vocab] of the token that was appended last, alone.
  std::span<const float> last_logits();

  // Forgets everything after the first n tokens.
  void truncate(int64_t n);

  const DensityStats& density() const { return density_; }
  // Bytes that a decode step reads at a context of n_kv positions, with active neurons as in `counted`
  // (engine/traffic.h).
  TokenTraffic traffic(const DensityStats& counted, int64_t n_kv) const;

 private:
  Engine(model::Model& model, Device& device, const EngineOptions& options, const Division* division);
  void check_room(std::span<const int32_t> ids) const;
  ForwardArgs forward_args(int64_t max_kv);
  void upload_tokens(std::span<const int32_t> ids);
  void run_pass(FunctionRef<void()> device_part, bool recorded, int64_t T);
  void run_on_both(FunctionRef<void()> device_part, bool recorded, int64_t T);
  void watch(StallWatch::Phase phase);
  void fetch(void* host, const void* device, size_t bytes);
  void forward_chunk(std::span<const int32_t> ids);  // through all layers, advances n_past
  void decode_step(int32_t id);                      // one token, logits on the device or in host_logits_
  // Logits of rows [first, first + count) of the last chunk; calls visit(i, logits) for i = 0, 1, … count - 1.
  void head_rows(int64_t first, int64_t count, FunctionRef<void(int64_t i, std::span<const float> logits)> visit);
  std::span<const float> keep_logits(int64_t row);  // that row's of the last chunk, in host_logits_
  // After decode_step(): counts the active neurons; the most likely next token, unless the head is on the host.
  int32_t finish_step();
  bool head_on_host() const { return split_ && split_->output_on_host; }
  bool embedding_on_host() const { return split_ && split_->embedding_on_host; }

  model::Model& model_;
  Device& device_;
  EngineOptions options_;
  std::unique_ptr<StallWatch> stall_watch_;  // goes after everything that waits for the device
  Sparsity sparsity_ = Sparsity::off;
  int64_t n_ctx_ = 0, n_past_ = 0;
  DeviceBuffer copied_weights_;          // with EngineOptions::copy_weights
  model::Weights weights_;               // the main device's
  std::optional<SplitWeights> split_;    // set when the model is divided
  std::vector<LayerSplit> layers_;       // how each layer is run
  std::unique_ptr<Mailbox> mailbox_;     // with split_
  std::unique_ptr<ColdStream> stream_;   // with split_
  std::unique_ptr<HostHalf> host_half_;  // with split_
  Activations act_;
  KvCache kv_;
  std::vector<float> host_logits_;
  DensityStats density_;
  std::vector<int> graphs_;  // by shape class (log2 of the context bound); -1 = not captured
};

}  // namespace hearth::engine
