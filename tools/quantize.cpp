// hearth quantize IN OUT TYPE
#include <memory>
#include <optional>
#include <string>

#include "core/dtype.h"
#include "core/error.h"
#include "core/log.h"
#include "core/thread_team.h"
#include "offline/quantize.h"
#include "tools/commands.h"
#include "tools/common.h"
#include "tools/figures.h"
#include "tools/progress.h"

namespace hearth::tools {
namespace {

struct Options {
  std::string in, out, type, embd_type, head_type, predictor_type;
  bool standard_down = false, transposed_down = false, allow_requantize = false;
  bool quiet = false, verbose = false;
  int threads = 0;
};

DType type_of(const std::string& name, const char* what) {
  if (const auto type = parse_dtype(name)) return *type;
  std::string known;
  for (const DTypeTraits& t : all_traits()) {
    if (t.computable()) known += (known.empty() ? "" : ", ") + std::string(t.name);
  }
  fail("{} is '{}', expected one of {}", what, name, known);
}

offline::QuantizeOptions library_options(const Options& o) {
  offline::QuantizeOptions q;
  q.type = type_of(o.type, "TYPE");
  if (!o.embd_type.empty()) q.embedding_type = type_of(o.embd_type, "--embd-type");
  if (!o.head_type.empty()) q.head_type = type_of(o.head_type, "--head-type");
  if (!o.predictor_type.empty()) q.predictor_type = type_of(o.predictor_type, "--predictor-type");
  if (o.standard_down) q.down = offline::DownLayout::standard;
  if (o.transposed_down) q.down = offline::DownLayout::transposed;
  q.allow_requantize = o.allow_requantize;
  return q;
}

void quantize(const Options& o) {
  set_logging(o.quiet, o.verbose);
  offline::QuantizeOptions options = library_options(o);
  std::optional<Progress> progress;
  options.progress = [&](const offline::QuantizeProgress& p) {
    if (!progress) progress.emplace(static_cast<int64_t>(p.n_tensors));
    progress->update(static_cast<int64_t>(p.tensor),
                     fmt::format("{} {} -> {}", p.name, traits(p.from).name, traits(p.to).name));
  };
  ThreadTeam team(o.threads);
  const offline::QuantizeReport report = offline::quantize(o.in, o.out, options, team);
  progress.reset();
  for (const std::string& fallback : report.fallbacks) log::warn("{}", fallback);
  if (report.n_down > 0) {
    log::info("ffn_down is {} ({})", report.down_transposed ? "transposed, for sparse use" : "in the standard layout",
              report.down_reason);
  }
  log::info("{}: {} from {}; {} tensors converted, {} copied", o.out, human_bytes(report.bytes_out),
            human_bytes(report.bytes_in), report.n_converted, report.n_copied);
}

}  // namespace

void register_quantize(CLI::App& app) {
  const auto o = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("quantize", "Write a GGUF model with its matrices in another type");
  sub->add_option("IN", o->in, "GGUF file (any part of a split one)")->required();
  sub->add_option("OUT", o->out, "GGUF file to write")->required();
  sub->add_option("TYPE", o->type, "type of the matrices: f32, f16, bf16, q8_0, q4_0")->required();
  sub->add_option("--embd-type", o->embd_type,
                  "type of token_embd.weight (default: TYPE); the head's too when it is tied");
  sub->add_option("--head-type", o->head_type, "type of output.weight (default: TYPE)");
  sub->add_option("--predictor-type", o->predictor_type,
                  "type of predictors (fc1.weight, fc2.weight), of a model's own file or of a sidecar (default: TYPE, "
                  "but q8_0 for q4_0)");
  CLI::Option* standard =
      sub->add_flag("--standard-down", o->standard_down, "keep ffn_down as other programs expect it");
  sub->add_flag("--transposed-down", o->transposed_down,
                "write ffn_down transposed (ffn_down_t), for sparse use; the default for ReLU-family models")
      ->excludes(standard);
  sub->add_flag("--allow-requantize", o->allow_requantize,
                "convert tensors that are quantised already, losing precision twice");
  add_thread_option(*sub, o->threads);
  add_logging_options(*sub, o->quiet, o->verbose);
  sub->footer(
      "Example: hearth quantize model-f16.gguf model-q8_0.gguf q8_0\n"
      "Example: hearth quantize model.gguf smaller.gguf f16 --predictor-type q8_0\n"
      "The second leaves everything but the predictors as it is: with half their bytes more neurons fit on a GPU.");
  sub->callback([o] { quantize(*o); });
}

}  // namespace hearth::tools
