// hearth profile: which neurons fire and which experts are chosen, into the sidecar.
#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/log.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "model/model.h"
#include "model/sidecar.h"
#include "offline/profile/import.h"
#include "offline/profile/profile.h"
#include "offline/profile/summary.h"
#include "text/tokenizer.h"
#include "tools/commands.h"
#include "tools/common.h"
#include "tools/figures.h"
#include "tools/interrupt.h"
#include "tools/output.h"
#include "tools/progress.h"

namespace hearth::tools {
namespace {

constexpr auto kSaveEvery = std::chrono::minutes(2);  // so that a crash costs no more

struct Options {
  std::string model, output, importance, import_directory, device = "auto";
  std::vector<std::string> texts;
  std::optional<uint64_t> tokens;
  std::optional<std::string> activation;
  offline::ProfileOptions profile;
  int gpu = 0, threads = 0;
  bool resume = false, show = false, json = false;
  bool quiet = false, verbose = false;
};

std::unique_ptr<Device> make_device(const Options& o, ThreadTeam& team) {
  std::string why;
  if (o.device == "cuda" || (o.device == "auto" && !cuda::list_gpus(&why).empty())) return cuda::make_device(o.gpu);
  if (o.device == "auto") log::info("no GPU is used: {}", why);
  return cpu::make_device(team);
}

void show(const Options& o, const model::Sidecar& sidecar) {
  if (!sidecar.has_statistics()) fail("the sidecar holds no statistics yet; `hearth profile -f TEXT` gathers them");
  if (o.json) return write_json(offline::summary_json(sidecar));
  write_out(offline::summary_table(sidecar));
}

// The sidecar to add to: the one at `path`, with its statistics when they are to be continued, or a new one.
model::Sidecar open_sidecar(const Options& o, const model::Model& m, const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) {
    if (o.resume) fail("there is no sidecar '{}' to resume; leave out --resume", path.string());
    return model::Sidecar::empty_for(m.file(), m.config());
  }
  model::Sidecar sidecar = *model::Sidecar::find(m.file(), m.config(), path);
  if (!o.resume) {
    if (sidecar.has_statistics())
      log::info("the statistics in '{}' are replaced; --resume goes on with them", path.string());
    sidecar.statistics = model::Sidecar::empty_for(m.file(), m.config()).statistics;
  }
  return sidecar;
}

// Texts through the model. True when it was interrupted.
bool gather(const Options& o, model::Model& m, const std::filesystem::path& path, model::Sidecar& sidecar) {
  offline::ProfileOptions options = o.profile;
  offline::Importance importance;
  if (!o.importance.empty()) {
    if (o.resume) importance = offline::Importance::read(o.importance);
    options.importance = &importance;
  }
  const auto tokenizer = text::Tokenizer::load(m.file());
  const std::vector<std::filesystem::path> files(o.texts.begin(), o.texts.end());
  const offline::Corpus corpus = offline::read_corpus(files, *tokenizer, o.profile.corpus);
  ThreadTeam team(o.threads);
  const std::unique_ptr<Device> device = make_device(o, team), host = cpu::make_device(team);
  log::info("profiling {} on {}: {} tokens in {} sequences", m.config().name, device->name(), corpus.tokens(),
            corpus.sequences.size());
  const InterruptGuard interrupt;
  std::optional<Progress> progress;
  auto saved = std::chrono::steady_clock::now();
  uint64_t earlier = sidecar.statistics.tokens + sidecar.statistics.tokens_heldout;
  offline::profile(m, *device, *host, team, corpus, options, sidecar, [&](const offline::ProfileProgress& p) {
    if (!progress) progress.emplace(static_cast<int64_t>(p.tokens_total - std::min(p.tokens_total, earlier)));
    progress->update(static_cast<int64_t>(p.tokens_done - earlier),
                     fmt::format("{:.0f} tokens/s", static_cast<double>(p.tokens_done - earlier) / p.seconds));
    if (std::chrono::steady_clock::now() - saved > kSaveEvery) {
      sidecar.write(path);
      if (!importance.matrices.empty()) importance.write(o.importance);
      saved = std::chrono::steady_clock::now();
    }
    return !interrupt.requested();
  });
  if (!importance.matrices.empty()) {
    importance.write(o.importance);
    log::info("{}: the importance of {} matrices, for `hearth quantize --importance`", o.importance,
              importance.matrices.size());
  }
  return interrupt.requested();
}

void profile(Options o) {
  set_logging(o.quiet, o.verbose);
  model::Model m = model::Model::load(o.model, {o.activation});
  const std::filesystem::path path = o.output.empty() ? model::sidecar_path(o.model) : std::filesystem::path(o.output);
  if (o.show) {
    const auto sidecar = model::Sidecar::find(m.file(), m.config(), path);
    return show(o, *sidecar);
  }
  if (o.texts.empty() == o.import_directory.empty()) {
    fail("give texts to profile (-f FILE...), or --import DIR, or --show");
  }
  model::Sidecar sidecar = open_sidecar(o, m, path);
  bool interrupted = false;
  if (!o.import_directory.empty()) {
    if (!o.importance.empty()) fail("an import has no inputs of matrices; --importance takes texts (-f FILE...)");
    if (o.resume) fail("an import replaces the statistics; leave out --resume");
    offline::import_powerinfer(o.import_directory, o.tokens, sidecar);
  } else {
    o.profile.max_tokens = o.tokens.value_or(0);
    interrupted = gather(o, m, path, sidecar);
  }
  sidecar.write(path);
  const model::Statistics& s = sidecar.statistics;
  log::info("{}: {} tokens profiled, {} held out{}", path.string(), s.tokens, s.tokens_heldout,
            interrupted ? "; interrupted, --resume goes on" : "");
  show(o, sidecar);
  if (interrupted) throw CLI::RuntimeError(kInterruptedStatus);
}

void add_gathering_options(CLI::App& sub, Options& o) {
  sub.add_option("-f,--file", o.texts, "Texts to profile; documents are separated by <|endoftext|>")
      ->type_name("FILE")
      ->group("Profile");
  sub.add_option("--tokens", o.tokens,
                 "Stop after this many tokens (default: all); with --import: how many were counted")
      ->check(CLI::PositiveNumber)
      ->group("Profile");
  sub.add_flag("--resume", o.resume, "Go on where an earlier run with the same texts stopped")->group("Profile");
  sub.add_option("-c,--ctx-size", o.profile.corpus.window, "Longest piece of a document evaluated at once, tokens")
      ->capture_default_str()
      ->group("Profile");
  sub.add_option("--heldout-every", o.profile.corpus.heldout_every,
                 "Keep one document of this many out of the profile, to test it on; 0: none")
      ->capture_default_str()
      ->group("Profile");
  sub.add_option("--sparse-threshold", o.profile.threshold, "A neuron is active when |act(gate)| exceeds this")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->group("Profile");
  sub.add_flag("--moments", o.profile.moments, "Also gather the second moments of each FFN's input (for predictors)")
      ->group("Profile");
  sub.add_option("--importance", o.importance,
                 "Also write the importance of matrices' columns (the mean squares of their inputs, in llama.cpp's "
                 "imatrix format) to this GGUF file, for `hearth quantize --importance`")
      ->type_name("FILE")
      ->group("Profile");
  sub.add_option("--import", o.import_directory, "Take PowerInfer's counts from a directory of activation_N.pt instead")
      ->type_name("DIR")
      ->group("Profile");
}

}  // namespace

void register_profile(CLI::App& app) {
  const auto o = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand(
      "profile", "Find out which neurons fire, or which experts are chosen, and keep it beside the model");
  add_model_file_option(*sub, o->model);
  sub->add_option("-o,--output,--sidecar", o->output, "Sidecar to write or show (default: MODEL.sparse.gguf)")
      ->type_name("FILE")
      ->group("Model");
  sub->add_option("--activation", o->activation, "Take the FFN's activation to be this, whatever the file says")
      ->group("Model");
  add_gathering_options(*sub, *o);
  sub->add_flag(
         "--show", o->show,
         "Show what the sidecar holds, and gather nothing: by layer, how many neurons a token needs, and how many "
         "2, 4 and 8 consecutive tokens need together; of mixtures, what the hottest experts cover, and how many of a "
         "token's experts the token before used")
      ->group("Profile");
  sub->add_flag("--json", o->json, "Print the summary as JSON")->group("General");
  add_thread_option(*sub, o->threads);
  sub->add_option("--device", o->device, "cpu, cuda, or auto: the GPU when there is one")
      ->check(CLI::IsMember({"cpu", "cuda", "auto"}))
      ->capture_default_str()
      ->group("Hardware");
  sub->add_option("--gpu,--main-gpu", o->gpu, "Number of the GPU")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->group("Hardware");
  add_logging_options(*sub, o->quiet, o->verbose);
  sub->footer(
      "Ctrl-C keeps what was gathered; --resume goes on.\n"
      "Example: hearth profile -m model.gguf -f books.txt --tokens 100000\n"
      "Example: hearth profile -m model-f16.gguf -f books.txt --importance model.imatrix.gguf");
  sub->callback([o] { profile(*o); });
}

}  // namespace hearth::tools
