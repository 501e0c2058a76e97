// hearth plan: what would live on the GPU under a budget, and how fast that would be. Loads no weights.
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>

#include "core/error.h"
#include "core/log.h"
#include "core/thread_team.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "model/model.h"
#include "model/sidecar.h"
#include "offline/plan/explain.h"
#include "offline/plan/machine.h"
#include "offline/plan/plan_file.h"
#include "offline/plan/planner.h"
#include "tools/commands.h"
#include "tools/common.h"
#include "tools/output.h"
#include "tools/system.h"

namespace hearth::tools {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

struct Options {
  std::string model, save, sparsity = "auto";
  std::optional<std::string> sidecar, activation;
  std::optional<double> vram_budget, gpu_bw, cpu_bw, pcie_bw, host_memory;  // GiB; GB/s; GiB
  offline::PlanRequest request;
  int gpu = 0, threads = 0;
  bool json = false, quiet = false, verbose = false;
};

uint64_t bytes_of_gib(double gib, const char* flag) {
  if (!(gib >= 0) || gib > 1e6) fail("{} is {}, expected GiB, 0 or more", flag, gib);
  return static_cast<uint64_t>(gib * kGiB);
}

std::optional<cuda::GpuInfo> find_gpu(int index, std::string& why) {
  for (cuda::GpuInfo& gpu : cuda::list_gpus(&why)) {
    if (gpu.index == index) return gpu;
  }
  if (why.empty()) why = fmt::format("there is no GPU {}", index);
  return std::nullopt;
}

// Bandwidths: as given, the others as measured on this machine (once; then from the cache).
void set_bandwidths(const Options& o, const std::optional<cuda::GpuInfo>& gpu, offline::CostModel& cost) {
  const bool all_given = o.cpu_bw && o.gpu_bw && o.pcie_bw;
  offline::MachineBandwidth here;
  if (!all_given) {
    ThreadTeam team(o.threads);
    const std::string key = offline::machine_key(team.size(), gpu ? gpu->name : "");
    here = offline::cached_bandwidth(offline::machine_cache_path(), key, [&] {
      log::info("measuring this machine's bandwidths, once");
      offline::MachineBandwidth b;
      b.cpu = cpu::measure_read_bandwidth(team);
      if (gpu) {
        const cuda::Bandwidth g = cuda::measure_bandwidth(gpu->index);
        b.gpu = g.memory_read, b.pcie = g.host_to_device;
      }
      return b;
    });
  }
  cost.cpu_bandwidth = o.cpu_bw ? *o.cpu_bw * 1e9 : here.cpu;
  if (o.gpu_bw || here.gpu > 0) cost.gpu_bandwidth = o.gpu_bw ? *o.gpu_bw * 1e9 : here.gpu;
  if (o.pcie_bw || here.pcie > 0) {
    cost.pcie_bandwidth = o.pcie_bw ? *o.pcie_bw * 1e9 : here.pcie;
  } else if (o.request.vram_budget > 0) {
    log::info("--pcie-bw was not given and there is no GPU to measure: {:.0f} GB/s are assumed",
              cost.pcie_bandwidth / 1e9);
  }
}

// The budget: as given, or what the GPU has free.
uint64_t choose_budget(const Options& o, const std::optional<cuda::GpuInfo>& gpu, const std::string& why) {
  if (!o.vram_budget) {
    if (!gpu) fail("no GPU to plan for: {}; give --vram-budget GiB and --gpu-bw GB/s to plan for another machine", why);
    return gpu->free_bytes;
  }
  const uint64_t budget = bytes_of_gib(*o.vram_budget, "--vram-budget");
  if (budget > 0 && !gpu && !o.gpu_bw) {
    fail("no GPU to measure: {}; give --gpu-bw GB/s to plan for another machine, or --vram-budget 0 for the CPU alone",
         why);
  }
  if (gpu && !o.gpu_bw && budget > gpu->free_bytes) {
    log::warn("{} has {:.2f} GiB free, less than the budget of {:.2f} GiB", gpu->name,
              static_cast<double>(gpu->free_bytes) / kGiB, *o.vram_budget);
  }
  return budget;
}

void plan(Options o) {
  set_logging(o.quiet, o.verbose);
  for (const auto& bw : {o.gpu_bw, o.cpu_bw, o.pcie_bw}) {
    if (bw && (!(*bw > 0) || *bw > 1e6)) fail("a bandwidth of {} was given, expected GB/s above 0", *bw);
  }
  std::string why;
  const std::optional<cuda::GpuInfo> gpu = find_gpu(o.gpu, why);
  o.request.vram_budget = choose_budget(o, gpu, why);
  o.request.sparsity = offline::parse_sparsity_rule(o.sparsity);
  const model::Model m = model::Model::load(o.model, {o.activation});
  const auto sidecar = model::Sidecar::find(m.file(), m.config(), o.sidecar);
  const model::Sidecar* statistics = sidecar ? &*sidecar : nullptr;
  set_bandwidths(o, gpu, o.request.cost);
  if (o.host_memory) {
    o.request.host_memory = bytes_of_gib(*o.host_memory, "--host-memory");
  } else if (!o.cpu_bw) {  // it is this machine that is planned for
    o.request.host_memory = system_memory().available;
  }
  offline::ModelShape shape = offline::shape_of(m, statistics);
  offline::Frequencies frequencies = offline::frequencies_of(shape, statistics);
  const offline::Planner planner(std::move(shape), std::move(frequencies), o.request);
  const offline::Plan result = planner.plan();
  const offline::Explanation explanation = offline::explain(planner, result);
  if (o.json) {
    write_json(offline::plan_json(planner, result, explanation));
  } else {
    write_out(offline::plan_table(planner, result, explanation));
  }
  if (!o.save.empty()) {
    offline::save_placement(result.placement, o.save);
    log::info("plan saved as '{}'", o.save);
  }
}

void add_machine_options(CLI::App& sub, Options& o) {
  const auto bandwidth = [&sub](const char* name, std::optional<double>& value, const char* help) {
    sub.add_option(name, value, help)->type_name("GB/s")->group("Machine");
  };
  bandwidth("--gpu-bw", o.gpu_bw, "GPU memory's read bandwidth (default: measured)");
  bandwidth("--cpu-bw", o.cpu_bw, "Host memory's read bandwidth (default: measured)");
  bandwidth("--pcie-bw", o.pcie_bw, "Bandwidth from host to GPU (default: measured)");
  sub.add_option("--host-memory", o.host_memory, "Host memory that may be used (default: what is available)")
      ->type_name("GiB")
      ->group("Machine");
  sub.add_option("--gpu,--main-gpu", o.gpu, "Number of the GPU")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->group("Machine");
  add_thread_option(sub, o.threads);
}

}  // namespace

void register_plan(CLI::App& app) {
  const auto o = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("plan", "Show what would live on the GPU under a budget, and how fast that is");
  sub->add_option("-m,--model", o->model, "Model file, GGUF (of a split model: any part)")
      ->required()
      ->type_name("FILE")
      ->group("Model");
  sub->add_option("--sidecar", o->sidecar, "Activation statistics (default: MODEL.sparse.gguf, where there is one)")
      ->type_name("FILE")
      ->group("Model");
  sub->add_option("--activation", o->activation, "Take the FFN's activation to be this, whatever the file says")
      ->group("Model");
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
  sub->add_option("--sparsity", o->sparsity, "off, exact, predict, or auto: the fastest that loses nothing")
      ->check(CLI::IsMember({"off", "exact", "predict", "auto"}))
      ->capture_default_str()
      ->group("Plan");
  sub->add_option("--save", o->save, "Write the plan, to be given back when running")->type_name("FILE")->group("Plan");
  add_machine_options(*sub, *o);
  sub->add_flag("--json", o->json, "Print JSON")->group("General");
  add_logging_options(*sub, o->quiet, o->verbose);
  sub->footer(
      "With all three bandwidths any machine can be planned for.\n"
      "Example: hearth plan -m model.gguf --vram-budget 8 --gpu-bw 1008 --cpu-bw 70 --pcie-bw 25");
  sub->callback([o] { plan(*o); });
}

}  // namespace hearth::tools
