// hearth quantize IN OUT TYPE
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/error.h"
#include "core/log.h"
#include "core/thread_team.h"
#include "offline/quantize/quantize.h"
#include "tools/commands.h"
#include "tools/common.h"
#include "tools/figures.h"
#include "tools/output.h"
#include "tools/progress.h"

namespace hearth::tools {
namespace {

struct Options {
  std::string in, out, type, embd_type, head_type, predictor_type, importance;
  std::vector<std::string> tensor_types;
  bool pure = false, dry_run = false;
  bool standard_down = false, transposed_down = false, allow_requantize = false;
  bool quiet = false, verbose = false;
  int threads = 0;
};

DType type_of(const std::string& name, const std::string& what) {
  if (const auto type = parse_dtype(name)) return *type;
  if (offline::parse_file_type(name)) {
    fail("{} is '{}', a mix; expected one type of {}", what, name, computable_names());
  }
  fail("{} is '{}', expected one of {}", what, name, computable_names());
}

offline::FileType file_type_of(const Options& o) {
  const auto type = offline::parse_file_type(o.type);
  if (!type) {
    fail("TYPE is '{}', expected one of {}, or a mix: {}", o.type, computable_names(), offline::mix_names());
  }
  return o.pure ? type->pure() : *type;
}

// "REGEX=TYPE"; an expression may have '=' in it, a type has none.
offline::TensorTypeRule tensor_type_of(const std::string& rule) {
  const size_t at = rule.rfind('=');
  if (at == std::string::npos || at == 0) {
    fail("--tensor-type is '{}', expected REGEX=TYPE, as in 'ffn_up=q6_k'", rule);
  }
  return {rule.substr(0, at), type_of(rule.substr(at + 1), fmt::format("the type of --tensor-type '{}'", rule))};
}

offline::QuantizeOptions library_options(const Options& o) {
  offline::QuantizeOptions q;
  q.type = file_type_of(o);
  if (!o.embd_type.empty()) q.embedding_type = type_of(o.embd_type, "--embd-type");
  if (!o.head_type.empty()) q.head_type = type_of(o.head_type, "--head-type");
  if (!o.predictor_type.empty()) q.predictor_type = type_of(o.predictor_type, "--predictor-type");
  for (const std::string& rule : o.tensor_types) q.tensor_types.push_back(tensor_type_of(rule));
  q.importance = o.importance;
  if (o.standard_down) q.down = offline::DownLayout::standard;
  if (o.transposed_down) q.down = offline::DownLayout::transposed;
  q.allow_requantize = o.allow_requantize;
  q.dry_run = o.dry_run;
  return q;
}

// Each tensor's old and new type and size, and the sums.
std::string table_of(const offline::QuantizeReport& report) {
  size_t width = 5;
  uint64_t bytes_in = 0, bytes_out = 0;
  for (const offline::QuantizedTensor& t : report.tensors) {
    width = std::max(width, t.name.size());
    bytes_in += t.bytes_in, bytes_out += t.bytes_out;
  }
  std::string table;
  const auto add = [&](std::string_view name, std::string_view types, uint64_t in, uint64_t out) {
    table += fmt::format("{:{}}  {:16}  {:>10} -> {:>10}\n", name, width, types, human_bytes(in), human_bytes(out));
  };
  for (const offline::QuantizedTensor& t : report.tensors) {
    add(t.name, fmt::format("{:>6} -> {}", traits(t.from).name, traits(t.to).name), t.bytes_in, t.bytes_out);
  }
  add("total", "", bytes_in, bytes_out);
  return table;
}

void report_importance(const Options& o, const offline::QuantizeReport& report) {
  if (o.importance.empty()) return;
  log::info("{} matrices are quantised by their columns' importance", report.n_weighted);
  if (report.unweighted.empty()) return;
  log::warn("'{}' has no importance of {} matrices ({}{}); they are quantised without", o.importance,
            report.unweighted.size(), report.unweighted.front(), report.unweighted.size() > 1 ? ", ..." : "");
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
  report_importance(o, report);
  if (report.n_down > 0) {
    log::info("ffn_down is {} ({})", report.down_transposed ? "transposed, for sparse use" : "in the standard layout",
              report.down_reason);
  }
  if (o.dry_run) {
    write_out(table_of(report));
    return flush_out();
  }
  log::info("{}: {} from {}; {} tensors converted, {} copied", o.out, human_bytes(report.bytes_out),
            human_bytes(report.bytes_in), report.n_converted, report.n_copied);
}

}  // namespace

void register_quantize(CLI::App& app) {
  const auto o = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("quantize", "Write a GGUF model with its matrices in other types");
  sub->add_option("IN", o->in, "GGUF file (any part of a split one)")->required()->type_name("FILE");
  sub->add_option("OUT", o->out, "GGUF file to write")->required()->type_name("FILE");
  sub->add_option("TYPE", o->type,
                  "one type for every matrix: " + computable_names() +
                      "; or a mix, with llama.cpp's choice of types: " + offline::mix_names() +
                      ". In any case; a name of both kinds means the mix")
      ->required();
  sub->add_flag("--pure", o->pure, "every matrix in the mix's main type: q4_k for Q4_K_M, q2_k for Q2_K");
  sub->add_option("--tensor-type", o->tensor_types,
                  "type of the matrices whose names a regular expression finds, repeatable, the first that matches "
                  "decides: 'ffn_down=q6_k', 'blk\\.[01]\\.=q8_0'")
      ->type_name("REGEX=TYPE")
      ->allow_extra_args(false);
  sub->add_option("--importance,--imatrix", o->importance,
                  "importance matrix, by `hearth profile --importance` or llama.cpp's llama-imatrix: errors count for "
                  "more in columns with larger inputs. Transposed down projections have no use for it")
      ->type_name("FILE");
  sub->add_flag("--dry-run", o->dry_run, "print each tensor's old and new type and size, and the sums; write nothing");
  sub->add_option("--embd-type", o->embd_type,
                  "type of token_embd.weight (default: by TYPE); the head's too when it is tied");
  sub->add_option("--head-type", o->head_type, "type of output.weight (default: by TYPE)");
  sub->add_option("--predictor-type", o->predictor_type,
                  "type of predictors (fc1.weight, fc2.weight), of a model's own file or of a sidecar (default: TYPE, "
                  "but q8_0 for types below 8 bits)");
  CLI::Option* standard =
      sub->add_flag("--standard-down", o->standard_down, "keep ffn_down as other programs expect it");
  sub->add_flag(
         "--transposed-down", o->transposed_down,
         "write ffn_down transposed (ffn_down_t), for sparse use; the default for ReLU-family models without experts")
      ->excludes(standard);
  sub->add_flag("--allow-requantize", o->allow_requantize,
                "convert tensors that are quantised already, losing precision twice");
  add_thread_option(*sub, o->threads);
  add_logging_options(*sub, o->quiet, o->verbose);
  sub->footer(
      "Rows that blocks of 256 do not divide are stored in blocks of 32: q5_0 for q4_k, q5_1 for q5_k, q8_0 for q6_k, "
      "iq4_nl for iq4_xs, q4_0 for q3_k and q2_k; or else in 16 bits.\n"
      "Example: hearth quantize model-f16.gguf model-q8_0.gguf q8_0\n"
      "Example: hearth quantize model-f16.gguf model-q4_k_m.gguf Q4_K_M --importance model.imatrix.gguf\n"
      "Example: hearth quantize model.gguf smaller.gguf f16 --predictor-type q8_0\n"
      "The third leaves everything but the predictors as it is: with half their bytes more neurons fit on a GPU.");
  sub->callback([o] { quantize(*o); });
}

}  // namespace hearth::tools
