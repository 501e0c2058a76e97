#pragma once
// Every subcommand that runs a model has this in common: its flags, and a loaded model on a device.
#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/thread_team.h"
#include "engine/engine.h"
#include "engine/profiling_device.h"
#include "model/model.h"
#include "model/sidecar.h"
#include "text/tokenizer.h"
#include "tools/choose_placement.h"
#include "tools/choose_sparsity.h"
#include "tools/thresholds.h"

namespace hearth::tools {

// --transpose-down and what belongs to it.
struct TransposeDownOptions {
  bool wanted = false, cached = false;
  std::string type;  // empty: each projection's own
  model::TransposeDown chosen() const;
};

struct ModelOptions {
  std::string model;
  std::string device = "auto";  // cpu, cuda, auto
  int gpu = 0;
  std::optional<std::string> gpu_layers;  // llama.cpp's -ngl
  int threads = 0;                        // 0: physical cores
  int64_t n_ctx = 0;                      // 0: the model's, at most 4096
  int64_t n_batch = 512;
  int64_t n_sequences = 1;  // of n_ctx positions each; set by subcommands
  std::string sparsity = "auto";
  SparseThreshold sparse_threshold;
  std::string predictor = "auto";  // none, auto, or a method that every predictor must be of
  std::optional<std::string> activation;
  TransposeDownOptions transpose_down;
  std::optional<std::string> isa;
  std::optional<double> vram_budget;     // GiB; divides the model between GPU and CPU
  std::optional<std::string> plan;       // a saved plan to obey instead of making one
  std::optional<std::string> gpu_index;  // PowerInfer's choice of hot neurons
  std::optional<std::string> sidecar;    // activation statistics and predictors; default: beside the model
  std::optional<double> link_share;      // of a divided model's cold neurons, read by the GPU; default: as planned
  std::optional<int64_t> stream_tokens;  // of a divided model; default: as the plan's machine makes it
  bool no_look_ahead = false;
  std::optional<double> host_memory;   // GiB that may be used; default: what is available
  bool mmap = false, no_mmap = false;  // neither: as there is memory
  bool no_graph = false;
  bool no_measure = false;  // --sparsity auto: take predictors where there are any
  bool quiet = false, verbose = false;
  bool profile = false;  // decorate the devices with a ProfilingDevice each, switched off; no flag of its own
};

// -q/--quiet and -v/--verbose alone.
void add_logging_options(CLI::App& sub, bool& quiet, bool& verbose);
void set_logging(bool quiet, bool verbose);
// -t/--threads alone.
void add_thread_option(CLI::App& sub, int& threads);
// -m/--model, which is required, and -hf in its place (hub_models.h).
void add_model_file_option(CLI::App& sub, std::string& model);
// All of ModelOptions.
void add_model_options(CLI::App& sub, ModelOptions& options);
void add_transpose_down(CLI::App& sub, TransposeDownOptions& options);

// Gives the model the predictors of its sidecar (null: its own are kept), or takes them all away, as --predictor says.
// Throws Error when a method is named and a layer has a predictor of another, or none has one.
void choose_predictors(model::Model& model, const model::Sidecar* sidecar, const std::string& wanted);
void add_predictor_option(CLI::App& sub, std::string& predictor);

// A model, ready to evaluate tokens. Its constructor says on stderr what is used and why, in one line.
class Session {
 public:
  // Throws Error when the model, the device or their combination cannot be used.
  explicit Session(const ModelOptions& options);

  model::Model& model() { return *model_; }
  engine::Engine& engine() { return *engine_; }
  engine::Sequence& text() { return *text_; }  // the one that run, logits, perplexity and bench evaluate
  Device& device() { return engine_->device(); }
  ThreadTeam& team() { return *team_; }
  bool on_gpu() const { return gpu_.has_value(); }
  std::optional<int> gpu() const { return gpu_; }
  // Null unless options.profile, the second also unless the model is divided.
  engine::ProfilingDevice* profiler() { return profiler_.get(); }
  engine::ProfilingDevice* host_profiler() { return host_profiler_.get(); }
  const model::Sidecar* sidecar() const { return sidecar_ ? &*sidecar_ : nullptr; }  // null: there is none
  // The ways that --sparsity auto compared, where it had to; else empty.
  const std::vector<Way>& measured_ways() const { return measured_ways_; }
  double load_seconds() const { return load_seconds_; }
  // Thresholds leave out neurons that are not zero.
  bool thresholded() const { return !thresholds_.by_layer.empty(); }
  std::span<const float> thresholds() const { return thresholds_.by_layer; }
  // Neurons that are not zero may be left out, by thresholds or predictors. Large batches are dense: to see what that
  // does, tokens must be evaluated a few at a time.
  bool approximates() const {
    const engine::Sparsity s = engine_->sparsity();
    return s == engine::Sparsity::predict || (s == engine::Sparsity::exact && thresholded());
  }
  // Appends ids to the text and calls visit(i, logits) for each; a few at a time where that makes a difference.
  void eval_all(std::span<const int32_t> ids, FunctionRef<void(int64_t i, std::span<const float> logits)> visit);
  const std::optional<PlannedRun>& planned() const { return planned_; }  // when the model is divided

  // The model's vocabulary; null when its file has none.
  const text::Tokenizer* tokenizer();
  // Throws Error when there is none; `wanted_for` names the flag or subcommand that needs it.
  const text::Tokenizer& require_tokenizer(std::string_view wanted_for);
  // The text of one token; empty without a vocabulary and for padding ids beyond it.
  std::string piece(int32_t id);

 private:
  void start_fastest(const ModelOptions& options);
  std::string speeds_key(const ModelOptions& options) const;
  void start(const ModelOptions& options);
  void stop();
  bool start_on_gpu(const ModelOptions& options);
  void start_on_cpu(const ModelOptions& options);
  void start_divided(const ModelOptions& options);
  bool copies_weights(const ModelOptions& options) const;
  void make_engine(const ModelOptions& options);
  void check_host_memory(const ModelOptions& options) const;
  void warn_of_disk(const ModelOptions& options);
  std::string sparsity_reason(const ModelOptions& options);
  std::string sparsity_reason_alone(const ModelOptions& options);  // without what was measured

  std::unique_ptr<ThreadTeam> team_;
  std::unique_ptr<model::Model> model_;
  std::optional<model::Sidecar> sidecar_;
  std::unique_ptr<Device> device_, host_device_;  // the second when the model is divided
  std::optional<PlannedRun> planned_;
  std::unique_ptr<engine::ProfilingDevice> profiler_, host_profiler_;
  std::unique_ptr<engine::Engine> engine_;  // after everything it refers to
  std::optional<engine::Sequence> text_;
  std::unique_ptr<text::Tokenizer> tokenizer_;
  std::optional<int> gpu_;
  ChosenThresholds thresholds_;
  std::vector<Way> measured_ways_;
  double load_seconds_ = 0;
};

}  // namespace hearth::tools
