#include "offline/profile/profile.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>

#include "core/error.h"
#include "engine/engine.h"
#include "offline/profile/counting_device.h"

namespace hearth::offline {
namespace {

// Gathered and asked-for sums must be of the same, or sums of different things would be added.
void check_continues(const model::Statistics& s, const Corpus& corpus, const ProfileOptions& o) {
  if (s.texts != corpus.texts) {
    fail(
        "the sidecar was profiled over other texts ({} of them, first '{}'); give the same texts, or leave out "
        "--resume",
        s.texts.size(), s.texts.empty() ? s.source : s.texts.front().name);
  }
  if (s.window != static_cast<uint64_t>(o.corpus.window)) {
    fail("the sidecar was profiled with windows of {} tokens, not {}; use -c {}", s.window, o.corpus.window, s.window);
  }
  if (s.heldout_every != static_cast<uint64_t>(o.corpus.heldout_every)) {
    fail("the sidecar was profiled with --heldout-every {}, not {}; use the same", s.heldout_every,
         o.corpus.heldout_every);
  }
  if (s.threshold != o.threshold) {
    fail("the sidecar was profiled with --sparse-threshold {}, not {}; use the same", s.threshold, o.threshold);
  }
  if (s.sequences_done > corpus.sequences.size()) {
    fail("the sidecar has {} sequences done of {}; profile again without --resume", s.sequences_done,
         corpus.sequences.size());
  }
  if (o.importance != nullptr) {
    for (const auto& [name, sums] : o.importance->matrices) {
      if (sums.counts.front() == s.tokens) continue;
      fail("the importance of {} is of {} tokens, the sidecar of {}; profile again without --resume", name,
           sums.counts.front(), s.tokens);
    }
    if (o.importance->matrices.empty() && s.tokens > 0) {
      fail("the sidecar was profiled without --importance; leave it out, or profile again without --resume");
    }
  }
  const bool has_moments = s.tokens > 0 && !s.layers.front().moments.empty();
  if (s.tokens > 0 && has_moments != o.moments) {
    fail("the sidecar was profiled {} second moments; {} --moments", has_moments ? "with" : "without",
         has_moments ? "add" : "leave out");
  }
}

void begin(model::Statistics& s, const Corpus& corpus, const ProfileOptions& o) {
  s.source = "hearth profile";
  s.texts = corpus.texts;
  s.window = static_cast<uint64_t>(o.corpus.window);
  s.heldout_every = static_cast<uint64_t>(o.corpus.heldout_every);
  s.threshold = o.threshold;
}

void describe(Importance& importance, const Corpus& corpus, const ProfileOptions& o, uint64_t tokens) {
  importance.datasets.clear();
  for (const model::ProfiledText& text : corpus.texts) importance.datasets.push_back(text.name);
  importance.chunk_size = static_cast<uint32_t>(o.corpus.window);
  importance.chunk_count = std::max(1u, static_cast<uint32_t>(tokens / importance.chunk_size));
}

void check_mixture(const ProfileOptions& o) {
  if (o.importance != nullptr) {
    fail("the importance of experts' matrices is not gathered yet; profile mixtures of experts without --importance");
  }
  if (o.moments) fail("--moments are for predictors, and mixtures of experts have routers; leave it out");
}

uint64_t tokens_wanted(const Corpus& corpus, const ProfileOptions& o) {
  const uint64_t all = corpus.tokens();
  return o.max_tokens > 0 ? std::min(all, o.max_tokens) : all;
}

}  // namespace

void profile(model::Model& model, Device& device, Device& host, ThreadTeam& team, const Corpus& corpus,
             const ProfileOptions& options, model::Sidecar& sidecar,
             FunctionRef<bool(const ProfileProgress&)> keep_going) {
  if (!(options.threshold >= 0) || !std::isfinite(options.threshold)) {
    fail("the sparse threshold is {}, expected 0 or more", options.threshold);
  }
  if (model.config().experts) check_mixture(options);
  model::Statistics& s = sidecar.statistics;
  if (s.sequences_done > 0 || s.tokens > 0) check_continues(s, corpus, options);
  begin(s, corpus, options);

  PredictorTrial trial(model, options.threshold, s);
  std::optional<ImportanceCollector> collector;
  if (options.importance != nullptr) collector.emplace(team, model.file(), *options.importance);
  CountingDevice counting(device, team, model, options.threshold, options.moments, trial,
                          collector ? &*collector : nullptr, s);
  engine::EngineOptions engine_options;
  engine_options.n_ctx = options.corpus.window;
  engine_options.sparsity = engine::Sparsity::off;  // every gate and up is to be seen
  engine_options.use_graph = false;
  engine::Engine engine(model, counting, engine_options);
  engine::Sequence text = engine.sequence();

  const uint64_t total = tokens_wanted(corpus, options), before = s.tokens + s.tokens_heldout;
  const auto start = std::chrono::steady_clock::now();
  bool wanted = true;
  while (wanted && s.sequences_done < corpus.sequences.size() && s.tokens + s.tokens_heldout < total) {
    const Sequence& sequence = corpus.sequences[s.sequences_done];
    text.truncate(0);
    counting.begin_sequence(sequence.heldout);
    engine.eval(text, sequence.ids);
    (sequence.heldout ? s.tokens_heldout : s.tokens) += sequence.ids.size();
    ++s.sequences_done;
    if (options.importance != nullptr) describe(*options.importance, corpus, options, s.tokens);
    const uint64_t done = s.tokens + s.tokens_heldout;
    ProfileProgress progress{done, total};
    progress.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    progress.seconds_left =
        progress.seconds / static_cast<double>(done - before) * static_cast<double>(total > done ? total - done : 0);
    s.complete = s.sequences_done == corpus.sequences.size();
    wanted = keep_going(progress);
  }
  trial.finish(host, s);
}

}  // namespace hearth::offline
