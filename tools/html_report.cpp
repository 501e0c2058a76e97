// hearth report: what is known about a model, as one HTML page.
#include <memory>
#include <optional>
#include <string>

#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "model/attach_predictors.h"
#include "model/model.h"
#include "model/predictors.h"
#include "model/sidecar.h"
#include "offline/report/report.h"
#include "tools/choose_placement.h"
#include "tools/commands.h"
#include "tools/common.h"

namespace hearth::tools {
namespace {

struct Options {
  std::string model, output;
  std::optional<std::string> sidecar, activation;
  std::optional<double> vram_budget;  // GiB
  offline::PlanRequest request;
  MachineOptions machine;
  bool quiet = false, verbose = false;
};

void report(Options o) {
  set_logging(o.quiet, o.verbose);
  model::Model m = model::Model::load(o.model, {o.activation});
  const auto sidecar = model::Sidecar::find(m.file(), m.config(), o.sidecar);
  if (!sidecar) fail("'{}' has no sidecar to report on; `hearth profile -m MODEL -f TEXT` makes one", o.model);
  model::attach_predictors(m, *sidecar);
  std::string why;
  const std::optional<cuda::GpuInfo> gpu = find_gpu(o.machine.gpu, why);
  o.request.vram_budget = o.vram_budget || gpu ? choose_budget(o.vram_budget, o.machine, gpu, why) : 0;
  set_machine(o.machine, gpu, m, o.request);
  const offline::Planner planner = make_planner(m, {.sidecar = &*sidecar}, o.request);
  std::optional<offline::Planner> with_thresholds;
  if (sidecar->thresholds && o.request.sparsity != engine::Sparsity::off)
    with_thresholds = make_planner(m, {&*sidecar, sidecar->thresholds->by_layer}, o.request);
  const std::string page =
      offline::html_report(*sidecar, planner, planner.plan(), with_thresholds ? &*with_thresholds : nullptr);
  AtomicFile file(o.output);
  file.write(page.data(), page.size());
  file.commit();
  log::info("report written to '{}'", o.output);
}

}  // namespace

void register_report(CLI::App& app) {
  const auto o = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("report", "Write what is known about a model as one HTML page");
  add_model_file_option(*sub, o->model);
  sub->add_option("-o,--output", o->output, "Page to write")->required()->type_name("FILE")->group("General");
  sub->add_option("--sidecar", o->sidecar, "Statistics, predictors and thresholds (default: MODEL.sparse.gguf)")
      ->type_name("FILE")
      ->group("Model");
  sub->add_option("--activation", o->activation, "Take the FFN's activation to be this, whatever the file says")
      ->group("Model");
  sub->add_option(
         "--vram-budget", o->vram_budget,
         "GPU memory of the plan that is drawn; 0: the CPU alone (default: what is free, where there is a GPU)")
      ->type_name("GiB")
      ->group("Machine");
  add_machine_options(*sub, o->machine);
  add_logging_options(*sub, o->quiet, o->verbose);
  sub->footer(
      "The page needs no network and follows the reader's light or dark scheme. What the sidecar does not hold yet is "
      "said in a sentence.\n"
      "Example: hearth report -m model.gguf -o report.html --vram-budget 8 --gpu-bw 1008 --cpu-bw 70 --pcie-bw 25");
  sub->callback([o] { report(*o); });
}

}  // namespace hearth::tools
