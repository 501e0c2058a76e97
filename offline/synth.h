#pragma once
// Synthetic models of real shapes whose activation sparsity is prescribed, so that sparse inference can be measured
// without anybody's weights. offline/synth_sparsity.h explains how the density is made.
//
// The file holds llama.cpp's metadata and tensor names, a SentencePiece vocabulary whose words can be tokenised,
// and in hearth.synth.* the statistics that were asked for. Same options, same bytes, whatever the number of threads.
//
// Drift (SynthOptions::drift = X): a share X of the variance of a word's embedding is the direction of its topic.
// Topics are consecutive ranges of the vocabulary, each direction correlated by 0.7 with its neighbour's. While a text
// stays in a topic its tokens share that part of the residual stream, so the same neurons keep firing; as it moves on
// through the vocabulary the active set changes slowly. The output head prefers words of the current topic, so
// generated text (sampled, not greedy) behaves the same. Over all topics a neuron's firing probability is unchanged.
// Measured (tiny shape with 4096 words, X = 0.5, density 0.2; the cold 74 % of the neurons that fire for at least half
// of a window of 16 tokens; overlap = |A and B| / min(|A|, |B|)): adjacent windows of one topic 0.69, of neighbouring
// topics 0.45, windows six topics apart 0.14.
//
// Persistence (SynthOptions::expert_persistence = P): a share P of the variance over tokens of a router's logits is their
// topic's, in every layer, so that the tokens of one topic choose some experts again and again. Routers read the topics'
// directions, of which an embedding has at least the share P (a larger drift keeps its own). Over all topics experts are
// as popular as expert_skew says.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/thread_team.h"

namespace hearth::offline {

struct SynthShape {
  std::string name = "custom";
  std::string arch =
      "llama";  // llama (gated, RMSNorm), opt (ReLU, LayerNorm, learned positions), falcon (parallel block),
                // and mixtures: qwen3moe (norms of q and k), gpt-oss (windows, sinks, biases), smallthinker (ReLU)
  int64_t n_layer = 0, n_embd = 0, n_ff = 0, n_head = 0, n_head_kv = 0, n_vocab = 0, n_ctx = 0;
  float rope_base = 10000.0f;
  int64_t n_embd_head = 0;                           // elements of a head; 0: n_embd / n_head
  int64_t n_expert = 0, n_expert_used = 0;           // mixtures of experts, of n_ff neurons each
  int64_t window = 0;                                // positions that layers with a window see (gpt-oss, smallthinker)
  double expert_skew = 0.5, expert_persistence = 0;  // SynthOptions's, as published for this model
  int64_t head_dim() const { return n_embd_head > 0 ? n_embd_head : n_embd / n_head; }
  bool qk_norm() const { return arch == "qwen3moe"; }
  bool mixture() const { return qk_norm() || gpt_oss() || arch == "smallthinker"; }  // always
  bool gpt_oss() const { return arch == "gpt-oss"; }
  const char* default_activation() const {
    if (n_expert == 0 || arch == "smallthinker") return "relu";
    return gpt_oss() ? "clamped_silu" : "silu";
  }
  bool gated() const { return !layer_norm(); }
  bool layer_norm() const { return arch == "opt" || arch == "falcon"; }
  bool parallel_block() const { return arch == "falcon"; }
  bool learned_positions() const { return arch == "opt"; }
};
// llama-7b, llama-13b, llama-70b, mistral-7b, opt-30b, falcon-40b, mixtral-8x7b, qwen3-30b-a3b, gpt-oss-20b,
// smallthinker-21b, tiny. Throws Error with this list for another name.
SynthShape find_synth_shape(std::string_view name);

struct SynthOptions {
  SynthShape shape;
  DType type = DType::f16;
  double density = 0.11;   // mean share of active neurons, of a smallthinker's of those of the chosen experts
  double hot_share = 0.9;  // of the activations, taken by the hottest 26 % of the neurons
  int64_t predictor_rank =
      0;  // rows of fc1; the gate then has rank (predictor_rank - 2) / 2 plus one. 0: full rank, no predictor
  DType predictor_type = DType::f16;
  double drift = 0;                 // see above; 0 to 0.9
  bool dense = false;               // no control: every neuron fires for half of the tokens
  std::string activation = "relu";  // or, with `dense`, silu; of gpt-oss clamped_silu
  // For mixtures: how unequally experts are liked: the standard deviation of what a router adds for an expert whatever
  // the token is, over that of what depends on the token. 0: all alike.
  double expert_skew = 0.5;
  double expert_persistence = 0;  // see above; 0 to 0.9
  bool transposed_down =
      true;  // blk.N.ffn_down_t.weight [n_embd, n_ff] instead of blk.N.ffn_down.weight [n_ff, n_embd]; ffn_down_t_exps
  uint64_t seed = 1;
};

struct SynthReport {
  uint64_t bytes = 0;  // of the file
  double seconds = 0;  // making and writing the tensors, without the final flush
  double density = 0;  // of the law that was solved for
  double hot_share = 0;
};

// Writes the model; `progress` (optional) is called with bytes done and bytes in all. Throws Error for options that
// contradict each other, and when the disk has not enough room.
SynthReport write_synthetic(const std::filesystem::path& path, const SynthOptions& options, ThreadTeam& team,
                            const std::function<void(uint64_t done, uint64_t total)>& progress = nullptr);

// Throws Error naming the flag when the options cannot be met.
void check_synth_options(const SynthOptions& options);

// A text for such a model: n token ids after BOS, random words that stay in a topic for `words_per_topic` tokens and
// then move to the next. Uniform over the vocabulary's words when the model has no drift.
std::vector<int32_t> synthetic_text(int64_t n_vocab, int64_t n, int64_t words_per_topic, uint64_t seed);

}  // namespace hearth::offline
