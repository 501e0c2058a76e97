#pragma once
// A model placed on one or two devices, and ready to evaluate batches of tokens: weights, placement, schedules, and the
// memory of the KV cache. What belongs to a text is in its Sequence.
#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/cold_rows.h"
#include "core/device.h"
#include "core/thread_team.h"
#include "engine/activations.h"
#include "engine/batch.h"
#include "engine/host_side.h"
#include "engine/main_side.h"
#include "engine/sequence.h"
#include "engine/share_out.h"
#include "engine/split_weights.h"
#include "engine/stall_watch.h"
#include "engine/traffic.h"
#include "model/model.h"

namespace hearth::engine {

constexpr int64_t kDefaultContext = 4096;  // when the model allows more: a KV cache nobody asked for costs memory

struct EngineOptions {
  int64_t n_ctx = 0;        // positions of a sequence; 0: the model's own, at most 4096
  int64_t n_batch = 512;    // tokens evaluated at once
  int64_t n_sequences = 1;  // of n_ctx positions, that the KV cache has pages for
  Sparsity sparsity = Sparsity::auto_;
  float sparse_threshold = 0.0f;        // a neuron is active when |act(gate)| > threshold; above 0 changes the result.
                                        // Of experts, too, wherever they are
  std::vector<float> layer_thresholds;  // [n_layer], instead of sparse_threshold; empty: that one for every layer
  int64_t stream_tokens = 32;  // of a divided model: batches of at least this many tokens compute the CPU's neurons on
                               // the main device, streaming their rows to it, or some of its experts beside the CPU; 0
                               // = none do. Experts are streamed where copy_weights has them copied: where a file is
                               // mapped they may be on disk
  ShareRates share_rates;      // of a mixture: which experts are streamed
  bool look_ahead = true;      // where the placement says so (LayerPlacement::look_ahead)
  bool copy_weights = false;   // what the CPU reads: copy_from_file() (engine/adopt_weights.h)
  bool use_graph = true;       // record a step of few tokens once and replay it, where the device can
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
  const Schedule& schedule() const { return schedule_; }
  int64_t n_ctx() const { return n_ctx_; }
  int64_t n_batch() const { return act_.n_batch; }
  const PagePool& pages() const { return *pool_; }

  // An empty text. `name` is what errors call it.
  Sequence sequence(std::string name = "text") const { return Sequence(pool_, std::move(name)); }

  // Evaluates at most n_batch tokens and appends them to their sequences. Results stay until the next evaluation.
  // Throws Error when an id is out of range, a context would overflow, or the KV cache is full; then nothing has
  // changed.
  void eval(const Batch& batch);
  // The last evaluation's logits [n_vocab] of a row that wanted them, valid until the next call of this or eval();
  // and the most likely next token, found on the device where that has them.
  std::span<const float> logits(int64_t row);
  int32_t best(int64_t row);

  // --- one sequence ---
  // Appends any number of tokens; the logits of the last one, [n_vocab], valid until the next call.
  std::span<const float> eval(Sequence& sequence, std::span<const int32_t> ids);
  // Appends tokens and calls visit(i, logits) for the token ids[i], i = 0, 1, … `every_neuron`: as
  // Batch::compute_every_neuron().
  void eval_all(Sequence& sequence, std::span<const int32_t> ids,
                FunctionRef<void(int64_t i, std::span<const float> logits)> visit, bool every_neuron = false);
  // Appends one token; the most likely next one.
  int32_t eval_greedy(Sequence& sequence, int32_t id);

  const DensityStats& density() const { return density_; }
  void reset_density();
  // Bytes that a decode step reads at a context of n_kv positions, with active neurons as in `counted`
  // (engine/traffic.h).
  TokenTraffic traffic(const DensityStats& counted, int64_t n_kv) const;

 private:
  Engine(model::Model& model, Device& device, const EngineOptions& options, const Division* division);
  void divide(const Division& division, int64_t n_batch);
  BatchKind kind(const Batch& batch) const;
  void check(std::span<const int32_t> ids) const;
  void upload(const PagedBatch& paged);
  void main_part(const PassShape& shape, BatchKind kind);
  int record(int64_t T, int64_t max_kv, BatchKind kind);
  void eval_in_batches(Sequence& sequence, std::span<const int32_t> ids, Logits wanted, bool every_neuron,
                       FunctionRef<void(int64_t first, int64_t count)> visit);
  void run_on_both(FunctionRef<void()> device_part, bool recorded, const PassShape& shape, BatchKind kind);
  void watch(StallWatch::Phase phase);
  void fetch(void* host, const void* device, size_t bytes);
  void fetch_counts();
  void count_active(int64_t T);
  void count_experts(int64_t T);
  void count_neurons(size_t layer, int64_t T, bool main_skips);
  bool head_on_host() const { return split_ && split_->output_on_host; }
  bool embedding_on_host() const { return split_ && split_->embedding_on_host; }
  std::vector<bool> attention_layers(bool on_host) const;

  model::Model& model_;
  Device& device_;
  EngineOptions options_;
  std::unique_ptr<StallWatch> stall_watch_;  // goes after everything that waits for the device
  Sparsity sparsity_ = Sparsity::off;
  int64_t n_ctx_ = 0;
  DeviceBuffer copied_weights_;        // with EngineOptions::copy_weights
  std::optional<PageLock> page_lock_;  // of copied_weights_, where experts are streamed
  model::Weights weights_;             // the main device's
  std::optional<SplitWeights> split_;  // set when the model is divided
  std::vector<MainRows> rows_;
  Schedule schedule_;
  std::shared_ptr<PagePool> pool_;
  Activations act_;
  KvCache kv_;
  std::unique_ptr<ForwardContext> context_;
  std::unique_ptr<MainSide> main_side_;
  // With split_:
  std::unique_ptr<Mailbox> mailbox_;
  std::unique_ptr<ColdStream> stream_;
  Activations host_act_;
  KvCache host_kv_;
  std::unique_ptr<ForwardContext> host_context_;
  std::unique_ptr<HostSide> host_side_;

  // The results of the last evaluation.
  struct Results {
    int64_t n_rows = 0;
    std::vector<bool> wanted;      // by row: its logits
    int64_t first = 0, count = 0;  // rows whose logits have been computed
    std::vector<int32_t> counts;   // Activations::n_active and what follows it, once downloaded
  };
  Results results_;
  std::vector<int32_t> inputs_;  // what upload() sends
  std::vector<float> logits_;
  DensityStats density_;
  // Recorded steps, by number of tokens and log2 of the context bound; -1 = not recorded.
  std::array<std::array<int, 64>, kFewTokens + 1> recorded_;
};

}  // namespace hearth::engine
