// hearth tune: how much quality to give for how much speed, into the sidecar.
#include <charconv>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "model/model.h"
#include "model/sidecar.h"
#include "offline/profile/corpus.h"
#include "offline/tune/decode_speed.h"
#include "offline/tune/record.h"
#include "offline/tune/tune.h"
#include "text/tokenizer.h"
#include "tools/choose_placement.h"
#include "tools/commands.h"
#include "tools/common.h"
#include "tools/interrupt.h"
#include "tools/output.h"
#include "tools/progress.h"

namespace hearth::tools {
namespace {

constexpr int64_t kMeasuredTokens = 48, kMeasuredPrompt = 16;

struct Options {
  std::string model, device = "auto", max_ppl_increase;
  std::vector<std::string> texts;
  std::optional<std::string> validation, save_validation, sidecar, state, activation;
  TransposeDownOptions transpose_down;
  std::optional<double> vram_budget;  // GiB
  offline::TuneRequest request;
  uint64_t fit_tokens = 8192, validation_tokens = 8192;
  MachineOptions machine;
  bool no_measure = false, json = false, quiet = false, verbose = false;
};

// "1%" or "1": percent.
double parse_percent(const std::string& text) {
  std::string_view number = text;
  if (number.ends_with('%')) number.remove_suffix(1);
  double value = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), value);
  if (error != std::errc() || end != number.data() + number.size() || !(value > 0)) {
    fail("--max-ppl-increase is '{}', expected percent above 0, as 1%", text);
  }
  return value / 100;
}

std::unique_ptr<Device> make_device(const Options& o, const model::Model& m, ThreadTeam& team) {
  if (o.device == "cpu") return cpu::make_device(team);
  std::string why;
  const std::optional<cuda::GpuInfo> gpu = find_gpu(o.machine.gpu, why);
  const bool fits = gpu && m.weight_bytes() < gpu->free_bytes;
  if (o.device == "cuda" || fits) return cuda::make_device(o.machine.gpu);
  log::info("the CPU compares: {}", gpu ? "the weights do not fit the GPU" : why);
  return cpu::make_device(team);
}

// The parts of the texts: a file of its own for validation, or every third document.
struct Parts {
  offline::TextPart fit, validation;
  std::vector<model::ProfiledText> texts;
};
Parts read_parts(const Options& o, const text::Tokenizer& tokenizer) {
  std::string text;
  for (const std::string& file : o.texts) {
    if (!text.empty()) text += "<|endoftext|>";
    text += read_text_file(file);
  }
  const offline::SplitText split =
      o.validation ? offline::SplitText{text, read_text_file(*o.validation)} : offline::split_text(text);
  if (o.save_validation) {
    AtomicFile file(*o.save_validation);
    file.write(split.validation.data(), split.validation.size());
    file.commit();
  }
  Parts parts;
  const int64_t window = o.request.window;
  parts.fit = offline::make_part(split.fit, tokenizer, window, o.fit_tokens);
  parts.validation = offline::make_part(split.validation, tokenizer, window, o.validation_tokens);
  std::vector<std::filesystem::path> files(o.texts.begin(), o.texts.end());
  if (o.validation) files.emplace_back(*o.validation);
  for (const auto& file : files) parts.texts.push_back(offline::identify_text(file));
  return parts;
}

// The machine that time is planned for.
void set_plan(Options& o, const model::Model& m) {
  std::string why;
  const std::optional<cuda::GpuInfo> gpu = o.device == "cpu" ? std::nullopt : find_gpu(o.machine.gpu, why);
  offline::PlanRequest& plan = o.request.plan;
  plan.vram_budget =
      o.vram_budget || gpu ? choose_budget(o.vram_budget, o.machine, gpu, why) : 0;  // without a GPU: the CPU alone
  set_machine(o.machine, gpu, m, plan);
}

// Decoding is measured where it would run as it is planned: all on the device that compared, of this machine.
bool can_measure(const Options& o, const Device& device) {
  const MachineOptions& m = o.machine;
  const bool this_machine = !m.gpu_bw && !m.cpu_bw && !m.pcie_bw;
  const bool cpu_alone = device.is_host() && o.request.plan.vram_budget == 0;
  return !o.no_measure && this_machine && (cpu_alone || (!device.is_host() && !o.vram_budget));
}

void measure(model::Model& m, Device& device, const Parts& parts, offline::TuneResult& result) {
  const auto n = static_cast<int64_t>(parts.validation.ids.size());
  const auto prompt = std::span(parts.validation.ids).first(static_cast<size_t>(std::min(kMeasuredPrompt, n)));
  const auto speed = [&](offline::CurveSetting& s) {
    s.measured_tps = offline::measure_decode(m, device, s.thresholds, prompt, kMeasuredTokens);
  };
  if (device.is_host()) {  // an engine for each costs nothing there; on a GPU it places the weights again
    for (offline::CurveSetting& s : result.global) speed(s);
    for (offline::CurveSetting& s : result.layered) speed(s);
  } else if (!result.global.empty()) {
    speed(result.global.front());
  }
  speed(result.chosen);
}

std::string flags_to_copy(const Options& o, bool mixture, const offline::CurveSetting& chosen) {
  std::string flags = fmt::format("hearth run -m {}", o.model);
  const TransposeDownOptions& t = o.transpose_down;
  if (t.wanted) flags += " --transpose-down";
  if (!t.type.empty()) flags += " --transpose-down-type " + t.type;
  if (t.cached) flags += " --transpose-down-cache";
  if (o.sidecar) flags += fmt::format(" --sidecar {}", *o.sidecar);
  if (o.vram_budget && *o.vram_budget > 0) flags += fmt::format(" --vram-budget {}", *o.vram_budget);
  if (!mixture) flags += " --sparsity exact";  // what was measured: no predictor leaves out more
  return flags + (chosen.global ? fmt::format(" --sparse-threshold {}", *chosen.global) : " --sparse-threshold sidecar");
}

void tune(Options o) {
  set_logging(o.quiet, o.verbose);
  if (!o.max_ppl_increase.empty()) o.request.goal.max_ppl_increase = parse_percent(o.max_ppl_increase);
  model::Model m = model::Model::load(o.model, {o.activation, o.transpose_down.chosen()});
  if (o.transpose_down.wanted) {
    if (const auto reason = m.prepare_sparse(true)) fail("thresholds cannot be tuned with this file: {}", *reason);
  }
  const std::filesystem::path sidecar_path =
      o.sidecar ? std::filesystem::path(*o.sidecar) : model::sidecar_path(o.model);
  auto sidecar = std::filesystem::exists(sidecar_path) ? *model::Sidecar::find(m.file(), m.config(), sidecar_path)
                                                       : model::Sidecar::empty_for(m.file(), m.config());
  const auto tokenizer = text::Tokenizer::load(m.file());
  const Parts parts = read_parts(o, *tokenizer);
  set_plan(o, m);
  ThreadTeam team(o.machine.threads);
  const std::unique_ptr<Device> device = make_device(o, m, team);

  offline::ModelShape shape = offline::shape_of(m, o.request.plan.reserve.matrix_bytes);  // exact gates: predictors play no part
  o.request.state = o.state.value_or(sidecar_path.string() + ".tune");
  o.request.key = fmt::format("{} {} window {} tokens {} {}", shape.fingerprint, device->name(), o.request.window,
                              parts.fit.targets(), parts.validation.targets());
  if (o.transpose_down.wanted) o.request.key += fmt::format(" transposed {}", o.transpose_down.type);
  for (const auto& t : parts.texts) o.request.key += " " + t.hash;
  log::info("tuning {} on {}: {} tokens to tune on, {} to judge on", m.config().name, device->name(),
            parts.fit.targets(), parts.validation.targets());

  const InterruptGuard interrupt;
  std::optional<Progress> progress;
  std::optional<offline::TuneResult> result =
      offline::tune(m, *device, team, parts.fit, parts.validation, o.request, shape, [&](const auto& p) {
        if (!progress) progress.emplace(p.total);
        progress->update(p.done, p.stage);
        return !interrupt.requested();
      });
  progress.reset();
  if (!result) {
    log::info("interrupted; the same command goes on from '{}'", o.request.state.string());
    throw CLI::RuntimeError(kInterruptedStatus);
  }
  if (can_measure(o, *device)) measure(m, *device, parts, *result);

  const offline::TuneContext context{m.config().name,     shape.fingerprint,         device->name(),
                                     parts.texts,         o.validation.has_value(),  o.request.window,
                                     parts.fit.targets(), parts.validation.targets()};
  const nlohmann::json record = offline::tune_record(*result, o.request, context);
  sidecar.thresholds = model::TunedThresholds{result->chosen.thresholds, record.dump(),
                                              std::move(result->chosen_active), result->counted_tokens,
                                              std::move(result->chosen_inside)};
  sidecar.write(sidecar_path);
  if (o.json) {
    write_json(record);
  } else {
    write_out(offline::tune_table(*result));
    write_out(flags_to_copy(o, static_cast<bool>(m.config().experts), result->chosen) + "\n");
  }
  log::info("thresholds by layer written to '{}'", sidecar_path.string());
}

void add_goals(CLI::App& sub, Options& o) {
  sub.add_option("--max-kl", o.request.goal.max_kl,
                 "The fastest setting with at most this KL divergence from dense, nats")
      ->group("Goal");
  sub.add_option("--max-ppl-increase", o.max_ppl_increase,
                 "The fastest setting with at most this increase of the perplexity, percent")
      ->type_name("P%")
      ->group("Goal");
  sub.add_option("--target-tps", o.request.goal.target_tps,
                 "The least loss that reaches this many tokens/s by the plan (deterministic, unlike a measurement)")
      ->type_name("T")
      ->group("Goal");
  sub.add_option("--density", o.request.goal.density,
                 "Calibrate every layer to this density, and measure what it costs")
      ->type_name("SHARE")
      ->group("Goal");
}

void add_texts(CLI::App& sub, Options& o) {
  sub.add_option("-f,--file", o.texts, "Texts to tune on; documents are separated by <|endoftext|>")
      ->required()
      ->type_name("FILE")
      ->group("Text");
  sub.add_option("--validation", o.validation,
                 "Text to judge on (default: every third document of the others, which is then not tuned on)")
      ->type_name("FILE")
      ->group("Text");
  sub.add_option("--save-validation", o.save_validation, "Write the text that is judged on, for `hearth perplexity -f`")
      ->type_name("FILE")
      ->group("Text");
  sub.add_option("--tokens", o.fit_tokens, "Tokens to tune on, in windows spread over the text; 0: all")
      ->capture_default_str()
      ->group("Text");
  sub.add_option("--validation-tokens", o.validation_tokens, "Tokens to judge on; 0: all")
      ->capture_default_str()
      ->group("Text");
  sub.add_option("--window", o.request.window, "Tokens evaluated together")
      ->check(CLI::Range(int64_t{2}, int64_t{1} << 20))
      ->capture_default_str()
      ->group("Text");
}

}  // namespace

void register_tune(CLI::App& app) {
  const auto o = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("tune", "Choose thresholds: how much quality to give for how much speed");
  add_model_file_option(*sub, o->model);
  sub->add_option("--sidecar", o->sidecar, "Sidecar to write to (default: MODEL.sparse.gguf)")
      ->type_name("FILE")
      ->group("Model");
  sub->add_option("--activation", o->activation, "Take the FFN's activation to be this, whatever the file says")
      ->group("Model");
  add_transpose_down(*sub, o->transpose_down);
  add_goals(*sub, *o);
  add_texts(*sub, *o);
  sub->add_option("--vram-budget", o->vram_budget,
                  "GPU memory that the plan may use; 0: the CPU alone (default: what is free, where there is a GPU)")
      ->type_name("GiB")
      ->group("Machine");
  add_machine_options(*sub, o->machine);
  sub->add_option("--device", o->device, "Where texts are compared: cpu, cuda, or auto: the GPU when the model fits it")
      ->check(CLI::IsMember({"cpu", "cuda", "auto"}))
      ->capture_default_str()
      ->group("Machine");
  sub->add_flag("--no-measure", o->no_measure, "Do not measure decoding speed; print the plan's alone")
      ->group("Machine");
  sub->add_option("--state", o->state,
                  "Where measurements are kept, to go on from after Ctrl-C or with another goal (default: beside the "
                  "sidecar, .tune)")
      ->type_name("FILE")
      ->group("General");
  sub->add_flag("--json", o->json, "Print JSON")->group("General");
  add_logging_options(*sub, o->quiet, o->verbose);
  sub->footer(
      "Without a goal the knee of the curve of loss against speed is taken. Ctrl-C keeps what was measured; the same "
      "command goes on.\n"
      "Example: hearth tune -m model.gguf -f books.txt --max-ppl-increase 1%");
  sub->callback([o] { tune(*o); });
}

}  // namespace hearth::tools
