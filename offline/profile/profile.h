#pragma once
// Runs a model over texts and gathers which neurons fire.
#include <cstdint>

#include "core/device.h"
#include "core/thread_team.h"
#include "model/model.h"
#include "model/sidecar.h"
#include "offline/profile/corpus.h"
#include "offline/quantize/importance.h"

namespace hearth::offline {

struct ProfileOptions {
  CorpusOptions corpus;     // as the corpus was made
  uint64_t max_tokens = 0;  // stop after the sequence that reaches this many; 0 = all
  float threshold = 0.0f;   // a neuron is active when |act(gate)| > threshold
  bool moments = false;     // also gather the second moments of the FFN's input (n_embd^2 floats a layer)
  // Also sum the squares of what matrices read, over the tokens that are not held out; null: do not. Must be empty, or
  // of the earlier run that the statistics are of.
  Importance* importance = nullptr;
};

struct ProfileProgress {
  uint64_t tokens_done = 0, tokens_total = 0;  // of all runs together
  double seconds = 0;                          // of this run
  double seconds_left = 0;
};

// Adds to the sidecar's statistics, which must be empty or of an earlier run over the same texts with the same options
// (Error otherwise: they would not add up). Sequences done earlier are skipped. After every sequence, `keep_going` is
// asked; when it answers false, what was gathered stays and the statistics say that they are incomplete. The file's own
// predictors are tried on a few of the tokens, on `host`, a host device nobody else uses.
void profile(model::Model& model, Device& device, Device& host, ThreadTeam& team, const Corpus& corpus,
             const ProfileOptions& options, model::Sidecar& sidecar,
             FunctionRef<bool(const ProfileProgress&)> keep_going);

}  // namespace hearth::offline
