#pragma once
// The sidecar `MODEL.sparse.gguf`: what was measured about one model's activations. A GGUF file of architecture
// `hearth-sparse`. Other parts of hearth keep their own tensors and keys in the same file (predictors, thresholds);
// what this reader does not know is carried over unchanged when the file is written again.
//
//   hearth-sparse.version               u32   1
//   hearth-sparse.model.fingerprint     string   fingerprint() of the model
//   hearth-sparse.model.name            string
//   hearth-sparse.model.n_embd          u32
//   hearth-sparse.model.n_ff            u32 [n_layer]   of a mixture's layer, the experts that its router chooses from
//   hearth-sparse.model.n_expert_used   u32 [n_layer]   of those, what a token uses; 0: the layer is dense. Absent: all are
//   hearth-sparse.profile.*             how and over what the statistics were gathered
//   hearth-sparse.profile.union_K_neurons, .union_K_windows   u64 [n_layer], K = 2, 4, 8; optional: NeuronUnion
//   hearth-sparse.profile.foreseen_sums, .foreseen_tokens      f64, u64 [n_layer]; optional: LayerStatistics::foreseen
//   hearth-sparse.profile.inside_sums, .inside_tokens          f64, u64 [n_layer]; optional: LayerStatistics::inside
//   profile.blk.N.inside_used           i64 [n_ff]   optional, of a mixture's layer, with
//   profile.blk.N.inside_active         i64 [neurons of an expert, n_ff]   model/inside_counts.h
//   profile.blk.N.active                i64 [n_ff]
//   profile.blk.N.active_heldout        i64 [n_ff]   optional
//   profile.blk.N.impact                f64 [n_ff]   optional
//   profile.blk.N.moments               f32 [n_embd, n_embd]   optional
//   profile.blk.N.active_tuned          i64 [n_ff]   optional, with thresholds: tokens that exceeded the layer's; of a
//                                                    mixture's layer, that chose the expert
//   hearth-sparse.thresholds.by_layer   f32 [n_layer]   optional, as `hearth tune` chose them
//   hearth-sparse.thresholds.record     string   JSON: how, and what they cost
//   hearth-sparse.thresholds.tokens     u64   counted in active_tuned; 0 or absent: there is none
//   hearth-sparse.thresholds.inside_sums, .inside_tokens       f64, u64 [n_layer]; optional: TunedThresholds::inside
//   hearth-sparse.predictor.*, blk.N.*  predictors (model/predictors.h)
#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gguf/gguf.h"
#include "model/config.h"
#include "model/inside_counts.h"
#include "model/predictors.h"

namespace hearth::model {

// Identifies a model: 16 hexadecimal digits of an xxHash over the architecture, the activation, every tensor's name,
// type and shape, and a sample of every tensor's bytes (its first, middle and last 256). Splitting a file into parts
// does not change it; another quantisation does.
std::string fingerprint(const gguf::File& file);

// Where the sidecar of a model is looked for: `dir/name.gguf` -> `dir/name.sparse.gguf`; of split files, without the
// part's number.
std::filesystem::path sidecar_path(const std::filesystem::path& model);

// A mean that can be continued: of the share of a token's active set that was also active before.
struct MeanShare {
  double sum = 0;
  uint64_t tokens = 0;
  std::optional<double> mean() const {
    return tokens > 0 ? std::optional(sum / static_cast<double>(tokens)) : std::nullopt;
  }
};

// Neurons that the model file's own predictor named, over a few tokens (none: it was not tried, or there is none).
struct NamedNeurons {
  uint64_t named = 0, active = 0;
  std::optional<double> per_active() const {
    return active > 0 ? std::optional(static_cast<double>(named) / static_cast<double>(active)) : std::nullopt;
  }
};

// Sizes of the set of neurons that at least one of k consecutive tokens of a text has active, over every such window.
struct NeuronUnion {
  uint64_t neurons = 0, windows = 0;
  bool operator==(const NeuronUnion&) const = default;
  // Mean share of a layer's n_ff neurons.
  std::optional<double> share(int64_t n_ff) const {
    return windows > 0
               ? std::optional(static_cast<double>(neurons) / static_cast<double>(windows) / static_cast<double>(n_ff))
               : std::nullopt;
  }
};
constexpr std::array<int64_t, 3> kUnionTokens = {2, 4, 8};

// Sums over the tokens profiled so far. "Active": |act(gate)| > threshold. Of a mixture's layer the neurons are its
// experts, without the shared one, and active are those that the router chose.
struct LayerStatistics {
  std::vector<uint64_t> active;          // [n_ff] tokens that had the neuron active
  std::vector<uint64_t> active_heldout;  // [n_ff] the same over the held-out tokens; empty = none were held out
  std::vector<double>
      impact;          // [n_ff] sum over tokens of |value| * ||down row||, value = act(gate) * up; empty = unknown
  MeanShare previous;  // share of a token's active set that the previous token's had
  MeanShare recent;    // share that the union of the previous 64 tokens' sets had
  std::array<NeuronUnion, kUnionTokens.size()> unions;  // of kUnionTokens tokens; no windows = not counted
  NamedNeurons named;
  MeanShare foreseen;  // of a token's experts, those that the router names on the FFN's input of the layer before
  MeanShare inside;    // of the neurons of a token's experts, the shared one among them, those with act(gate) != 0
  InsideCounts inside_counts;  // the same by expert and neuron, of the experts that the router chose
  std::vector<float> moments;  // [n_embd][n_embd] sum of h h^T, h the FFN's input; empty = not gathered
  int64_t n_ff() const { return static_cast<int64_t>(active.size()); }
};
constexpr int64_t kRecentTokens = 64;

struct ProfiledText {
  std::string name;
  std::string hash;  // xxHash of the bytes, 16 hexadecimal digits
  uint64_t bytes = 0;
  bool operator==(const ProfiledText& other) const { return hash == other.hash && bytes == other.bytes; }
};

struct Statistics {
  std::string source;             // "hearth profile", or the import's format
  uint64_t tokens = 0;            // counted in `active`
  uint64_t tokens_heldout = 0;    // counted in `active_heldout`
  bool tokens_estimated = false;  // an import that does not say: the most active neuron is taken as always active
  float threshold = 0.0f;         // of |act(gate)|
  // State that a later run needs to continue, and to refuse to continue something else.
  std::vector<ProfiledText> texts;
  uint64_t window = 0;          // longest sequence, tokens
  uint64_t heldout_every = 0;   // one document of this many is held out; 0 = none
  uint64_t sequences_done = 0;  // of the texts' sequences, in order
  bool complete = false;        // all of the texts were used

  std::vector<LayerStatistics> layers;

  // Frequency of each neuron of a layer in [0, 1]: active / tokens.
  std::vector<double> frequencies(size_t layer) const;
  double density(size_t layer) const;
};

// A neuron of layer l is left out when |act(gate)| <= by_layer[l].
struct TunedThresholds {
  std::vector<float> by_layer;
  std::string record;  // JSON: what `hearth tune --json` printed
  // Tokens for which each neuron's |act(gate)| exceeded its layer's threshold, or that chose each expert of a mixture's
  // layer, [n_layer][n_ff]; empty = not known.
  std::vector<std::vector<uint64_t>> active;
  uint64_t tokens = 0;  // of how many
  // By layer, of mixtures: of the neurons of a token's experts, the shared one among them, those above the threshold;
  // empty = not known.
  std::vector<MeanShare> inside = {};
};

class Sidecar {
 public:
  Sidecar() = default;
  // For a model without one: no statistics yet (all sums zero).
  Sidecar(std::string model_fingerprint, std::string model_name, int64_t n_embd, std::vector<int64_t> n_ff,
          std::vector<int64_t> n_expert_used = {});
  static Sidecar empty_for(const gguf::File& model, const Config& config);

  // Throws Error when the file is no sidecar, of a newer version, or contradicts itself.
  static Sidecar read(const std::filesystem::path& path);
  // The sidecar beside the model or at `path`, checked against the model; nullopt when `path` is not given and there is
  // none beside it. Throws Error when it belongs to another model.
  static std::optional<Sidecar> find(const gguf::File& model, const Config& config,
                                     const std::optional<std::filesystem::path>& path = std::nullopt);
  // Atomically: a reader sees the old file or the new one.
  void write(const std::filesystem::path& path) const;
  // Throws Error saying what differs when this sidecar was not made for that model.
  void check_matches(const gguf::File& model, const Config& config) const;

  bool has_statistics() const { return statistics.tokens > 0; }

  std::string model_fingerprint;
  std::string model_name;
  int64_t n_embd = 0;
  std::vector<int64_t> n_ff;           // by layer; of a mixture, its experts, without the shared one
  std::vector<int64_t> n_expert_used;  // by layer, of those; 0: the layer is dense
  bool is_mixture(size_t layer) const { return n_expert_used[layer] > 0; }
  bool has_mixtures() const {
    return std::ranges::any_of(n_expert_used, [](int64_t n) { return n > 0; });
  }
  Statistics statistics;
  std::optional<TunedThresholds> thresholds;
  // By layer: predictors to be written in place of those in `file`; empty = those are kept.
  std::vector<PredictorData> new_predictors;
  // The file that was read, for the tensors and keys of others (predictors); null for a new sidecar.
  std::shared_ptr<const gguf::File> file;

 private:
  std::string path_;  // for messages
};

}  // namespace hearth::model
