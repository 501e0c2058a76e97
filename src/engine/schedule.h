#pragma once
// The work of one layer as data: two lists of steps, one for the main device and one for the CPU (the host). They are
// compiled once for every layer and kind of batch; both sides only execute their list. compile() is the one place that
// decides who does what. check() runs both lists against each other: it proves that they end, that every hand-off is
// answered, and that every part of the layer is added to the residual stream once, from the right input.
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "core/ops.h"
#include "engine/placement.h"

namespace hearth::engine {

// The part of a layer that the main device has beside what its weights say.
struct MainRows {
  int64_t n_hot = 0;  // neurons of its own, of all of its experts; all others are the host's, or linked
  FfnShard linked;    // the first of the host's rows, which it reads in place for batches that skip neurons; or none
  double expert_neuron_bytes = 0;  // of a neuron of its experts, in the form that it reads; 0: as in the file
};

// How many tokens a pass has, which decides what of a layer is computed where.
enum class BatchKind {
  one,       // skips neurons; the host prefetches rows
  few,       // up to kFewTokens: skips neurons
  many,      // computes every neuron where it lives
  streamed,  // computes every neuron; those of the host, or some of its chosen experts, visit the main device
};
constexpr int kBatchKinds = 4;
constexpr BatchKind kBatchKindList[kBatchKinds] = {BatchKind::one, BatchKind::few, BatchKind::many,
                                                   BatchKind::streamed};
const char* to_string(BatchKind kind);
// Whether batches of a kind compute only the neurons that are found to be needed, where a layer can.
inline bool skips_neurons(BatchKind kind) {
  return kind == BatchKind::one || kind == BatchKind::few;
}

// Facts of one layer, by the configuration and the placement. Invariants are checked by check_facts().
struct LayerFacts {
  bool parallel = false;      // x += attention(n_a(x)) + ffn(n_f(x)); otherwise one after the other
  bool post_norms = false;    // what a half adds to x is normed before: x += norm(half), on the main device
  bool host_attends = false;  // the host has the attention, and the layer's cache
  bool hot = true;            // the main device has rows of some neurons
  bool cold = false;          // the host has rows of some neurons
  Selection selection = Selection::all;
  bool main_predicts = true;    // with Selection::predictor: it is on the main device, and names the host's neurons too
  bool reads_residual = false;  // the predictor reads x before the norm
  bool linked = false;          // the main device reads some cold rows over the link, for batches that skip neurons
  bool all_linked = false;      // all of them: the host is not asked
  bool hinted = false;          // the host is told which rows to prefetch while the layer before is computed
  bool streamable = false;      // the cold rows, or experts, can visit the main device
  bool experts = false;         // a mixture: hot and cold are of experts
  bool main_routes = false;     // the main device chooses the experts, for the host too; otherwise the host does
  bool early_router = false;    // the router reads the layer's input, before attention
  bool foreseen = false;        // the host names the layer's experts on the input of the layer before, to prefetch them
  // Whether a hand-off brings the CPU the layer's input and experts.
  bool brings_experts() const { return experts && cold && main_routes; }
  bool operator==(const LayerFacts&) const = default;
};

// --- steps. A step names what it reads and writes; sizes, weights and buffers are the executing side's. ---

// The input of attention, predictor or FFN.
enum class Reads {
  norm_of_x,  // the norm of the residual stream, done by the operation that reads it, and kept for later steps
  normed,     // what an earlier step has made, or a hand-off has brought
  residual,   // x itself
};
enum class Half { attention, ffn };
// Who reads the residual stream next, through a norm of its own: the step that adds to x may prepare that norm.
enum class NextReader { nobody, predictor, ffn, attention, head };
enum class Neurons { all, by_gates, listed };
enum class Letter {  // what a hand-off brings
  x,
  ffn_input,
  x_and_neurons,
  ffn_input_and_neurons,
  ffn_input_and_experts,
};

struct Norm {
  Half half;
};  // both sides: x -> the input of that half
struct Attend {
  Reads reads;
  NextReader next = NextReader::nobody;
};  // both sides: += attention
struct Predict {
  Reads reads;
  std::optional<Letter> posts;
};            // both sides: lists; on the main device of both sides
struct Ffn {  // both sides: += the side's neurons
  Neurons neurons;
  Reads reads;
  bool hands_over = false;  // main: also adds the answer. Host: publishes its answer part by part
  bool linked = false;      // main: also computes the linked neurons
  NextReader next = NextReader::nobody;
};
struct Route {
  Reads reads;
};  // both sides: the experts of every token
struct Experts {
  Reads reads;
  bool skips = false;      // neurons that are not active
  bool that_stay = false;  // host: without those that visit the main device (engine/share_out.h)
};                         // both sides: += the chosen experts that the side has
struct Post {
  Letter letter;
};                // main: begins a hand-off without neurons
struct Hint {};   // main: the next layer's predictor on this layer's input
struct Fetch {};  // main: learns which of the host's experts visit it, which begin to come
struct Stream {
  Reads reads;
};                  // main: += the cold neurons, or the experts that were fetched, which visit it
struct Collect {};  // main: x += the answer
struct Branch {};   // main: what is added from here on is not added to x, but to a sum of its own, which is zero
struct Join {
  Half half;
};                   // main: x += the post-norm of that sum; what follows is added to x again
struct Prefetch {};  // host: rows that a hint named, until the next hand-off
struct Foresee {};   // host: rows of the experts that the router names for the layer before, until the next hand-off
struct Take {
  Letter letter;
};                      // host: waits for the vector of a hand-off
struct TakeNeurons {};  // host: waits for its neurons
struct AddInput {};     // host: x = what the hand-off brought + the answer so far
struct Answer {};       // host: ends the hand-off
using Step = std::variant<Norm, Attend, Predict, Ffn, Route, Experts, Post, Hint, Fetch, Stream, Collect, Branch, Join,
                          Prefetch, Foresee, Take, TakeNeurons, AddInput, Answer>;

struct LayerSchedule {
  std::vector<Step> main, host;
};

// The lists of one layer. `next`: the facts of the layer after it, or null.
LayerSchedule compile(const LayerFacts& layer, const LayerFacts* next, BatchKind kind);

// Throws Error naming the layer when facts contradict each other, within a layer or with the layer before.
void check_facts(std::span<const LayerFacts> layers);

// The fault of the lists, in one line; nothing when they are right.
std::optional<std::string> check(const LayerFacts& layer, BatchKind kind, const LayerSchedule& schedule);

// All layers, by kind of batch: compiled and checked.
class Schedule {
 public:
  Schedule() = default;
  // Throws Error as check_facts() does.
  explicit Schedule(std::vector<LayerFacts> layers);
  const LayerSchedule& layer(BatchKind kind, int64_t layer) const {
    return by_kind_[static_cast<size_t>(kind)][static_cast<size_t>(layer)];
  }
  const std::vector<LayerFacts>& facts() const { return facts_; }
  // One line a run of equal layers and side: "layers 0-3, one, main: attend(norm of x), ...".
  std::string print(BatchKind kind) const;

 private:
  std::vector<LayerFacts> facts_;
  std::vector<LayerSchedule> by_kind_[kBatchKinds];
};

std::string to_string(const Step& step);

}  // namespace hearth::engine
