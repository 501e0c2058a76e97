// hearth plan: what would live on the GPU under a budget, and how fast that would be. Loads no weights.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/log.h"
#include "engine/schedule.h"
#include "engine/split_weights.h"
#include "model/model.h"
#include "model/sidecar.h"
#include "offline/plan/explain.h"
#include "offline/plan/plan_file.h"
#include "offline/plan/planner.h"
#include "tools/choose_placement.h"
#include "tools/commands.h"
#include "tools/common.h"
#include "tools/output.h"

namespace hearth::tools {
namespace {

struct Options {
  std::string model, save, sparsity = "auto", predictor = "auto";
  std::optional<std::string> sidecar, activation, gpu_index;
  TransposeDownOptions transpose_down;
  SparseThreshold sparse_threshold;
  std::optional<double> vram_budget;  // GiB
  offline::PlanRequest request;
  MachineOptions machine;
  bool schedule = false, json = false, quiet = false, verbose = false;
};

// The steps of each side, layer after layer.
std::string schedule_text(const model::Model& m, const engine::Placement& placement, bool thresholds) {
  std::vector<engine::LayerFacts> facts = engine::layer_facts(m, placement);
  for (engine::LayerFacts& f : facts) {
    if (f.experts && thresholds) f.selection = engine::Selection::gate;  // as the engine does
  }
  const engine::Schedule schedule(facts);
  std::string text;
  for (const engine::BatchKind kind : engine::kBatchKindList) {
    text += fmt::format("{}:\n{}\n", engine::to_string(kind), schedule.print(kind));
  }
  return text;
}

void plan(Options o) {
  set_logging(o.quiet, o.verbose);
  std::string why;
  const std::optional<cuda::GpuInfo> gpu = find_gpu(o.machine.gpu, why);
  o.request.vram_budget = choose_budget(o.vram_budget, o.machine, gpu, why);
  o.request.sparsity = engine::parse_sparsity(o.sparsity);
  model::Model m = model::Model::load(o.model, {o.activation, o.transpose_down.chosen()});
  const auto sidecar = model::Sidecar::find(m.file(), m.config(), o.sidecar);
  const model::Sidecar* statistics = sidecar ? &*sidecar : nullptr;
  choose_predictors(m, statistics, o.predictor);
  const bool predicts = o.sparsity == "auto" || o.sparsity == "predict";
  const ChosenThresholds thresholds = choose_thresholds(m, statistics, o.sparse_threshold, predicts);
  // As a run does: rows of another type have another size, and neurons of experts are to be told apart.
  const bool inside_experts =
      m.config().experts && !thresholds.by_layer.empty() && o.request.sparsity != engine::Sparsity::off;
  std::optional<std::string> reason;
  if (!o.transpose_down.type.empty() || inside_experts) reason = m.prepare_sparse(inside_experts);
  if (!reason && inside_experts) reason = m.why_experts_are_whole();
  if (reason && inside_experts) fail("a threshold cannot leave out neurons of these experts: {}", *reason);
  set_machine(o.machine, gpu, m, o.request);
  set_product_rate(o.machine, gpu, m, o.request);
  const offline::Planner planner = make_planner(m, {statistics, thresholds.by_layer, o.gpu_index}, o.request);
  const offline::Plan result = planner.plan();
  const offline::Explanation explanation = offline::explain(planner, result);
  if (o.schedule) {
    if (m.config().ffn.sparse()) m.prepare_sparse();  // as a run does
    write_out(schedule_text(m, result.placement, inside_experts));
  } else if (o.json) {
    write_json(offline::plan_json(planner, result, explanation));
  } else {
    write_out(offline::plan_table(planner, result, explanation));
  }
  if (!o.save.empty()) {
    offline::save_placement(result.placement, o.save);
    log::info("plan saved as '{}'", o.save);
  }
}

}  // namespace

void register_plan(CLI::App& app) {
  const auto o = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("plan", "Show what would live on the GPU under a budget, and how fast that is");
  add_model_file_option(*sub, o->model);
  sub->add_option("--sidecar", o->sidecar, "Activation statistics (default: MODEL.sparse.gguf, where there is one)")
      ->type_name("FILE")
      ->group("Model");
  sub->add_option("--activation", o->activation, "Take the FFN's activation to be this, whatever the file says")
      ->group("Model");
  add_transpose_down(*sub, o->transpose_down);
  sub->add_option("--vram-budget", o->vram_budget,
                  "GPU memory that may be used in all; 0: the CPU alone (default: what is free)")
      ->type_name("GiB")
      ->group("Plan");
  sub->add_option("-c,--ctx-size,--context", o->request.n_ctx, "Context length (default: the model's, at most 4096)")
      ->check(CLI::NonNegativeNumber)
      ->group("Plan");
  sub->add_option("-b,--batch-size,--batch", o->request.n_batch, "Prompt tokens evaluated at once")
      ->check(CLI::PositiveNumber)
      ->capture_default_str()
      ->group("Plan");
  sub->add_option("--expected-context", o->request.expected_context,
                  "Positions that an average token attends to (default: half of the context)")
      ->check(CLI::NonNegativeNumber)
      ->group("Plan");
  sub->add_option("--sparsity", o->sparsity, "off, exact, predict, or auto: the fastest of them, layer by layer")
      ->check(CLI::IsMember({"off", "exact", "predict", "auto"}))
      ->capture_default_str()
      ->group("Plan");
  add_predictor_option(*sub, o->predictor);
  add_threshold_option(*sub, o->sparse_threshold);
  add_gpu_index_option(*sub, o->gpu_index, "Plan");
  sub->add_option("--save", o->save, "Write the plan, to be given back when running")->type_name("FILE")->group("Plan");
  add_machine_options(*sub, o->machine);
  sub->add_flag("--schedule", o->schedule, "Print what GPU and CPU do for each layer, step by step, instead")
      ->excludes(sub->add_flag("--json", o->json, "Print JSON")->group("General"))
      ->group("General");
  add_logging_options(*sub, o->quiet, o->verbose);
  sub->footer(
      "With all three bandwidths any machine can be planned for.\n"
      "Example: hearth plan -m model.gguf --vram-budget 8 --gpu-bw 1008 --cpu-bw 70 --pcie-bw 25");
  sub->callback([o] { plan(*o); });
}

}  // namespace hearth::tools
