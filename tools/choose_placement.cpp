#include "tools/choose_placement.h"

#include "core/error.h"
#include "core/log.h"
#include "core/thread_team.h"
#include "cpu/cpu.h"
#include "cpu/product_rate.h"
#include "cuda/layout.h"
#include "model/sidecar.h"
#include "offline/plan/gpu_index.h"
#include "offline/plan/machine.h"
#include "offline/plan/plan_file.h"
#include "offline/plan/rates.h"
#include "tools/common.h"
#include "tools/figures.h"
#include "tools/system.h"

namespace hearth::tools {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

uint64_t bytes_of_gib(double gib, const char* flag) {
  if (!(gib >= 0) || gib > 1e6) fail("{} is {}, expected GiB, 0 or more", flag, gib);
  return static_cast<uint64_t>(gib * kGiB);
}

}  // namespace

uint64_t usable_host_memory(std::optional<double> gib) {
  return gib ? bytes_of_gib(*gib, "--host-memory") : system_memory().usable();
}

namespace {

// Bandwidths: as given, the others as measured on this machine (once; then from the cache).
void set_bandwidths(const MachineOptions& o, const std::optional<cuda::GpuInfo>& gpu, offline::PlanRequest& request) {
  for (const auto& bw : {o.gpu_bw, o.cpu_bw, o.pcie_bw}) {
    if (bw && (!(*bw > 0) || *bw > 1e6)) fail("a bandwidth of {} was given, expected GB/s above 0", *bw);
  }
  offline::CostModel& cost = request.cost;
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
  } else if (request.vram_budget > 0) {
    log::info("--pcie-bw was not given and there is no GPU to measure: {:.0f} GB/s are assumed",
              cost.pcie_bandwidth / 1e9);
  }
}

DType ffn_type(const model::Model& model) {
  return model.weights().layers.back().some_ffn().gate.type;  // the first layers of a mixture may be dense
}

// The file's for a type that GPUs have no kernels for, whose weights no plan can put there.
uint64_t gpu_bytes(const Matrix& m) {
  const bool has_kernels = !is_quantized(m.type) || cuda::is_packed(m.type);
  return has_kernels ? cuda::adopted_bytes(m.type, m.rows, m.cols) : m.bytes();
}

void measure_gpu(int index, DType type, offline::KernelRates& rates) {
  try {
    const offline::DeviceRates gpu = offline::measure_rates(*cuda::make_device(index), type);
    rates.gpu_dense = gpu.dense, rates.gpu_sparse = gpu.sparse;
    rates.handoff_seconds = offline::measure_hand_off(*cuda::make_device(index));
  } catch (const Error& e) {  // no memory left, most likely: plans do without
    log::warn("how fast the GPU's kernels are was not measured: {}", e.what());
  }
}

// How fast kernels are, as set_bandwidths() does.
void set_rates(const MachineOptions& o, const std::optional<cuda::GpuInfo>& gpu, DType type,
               offline::PlanRequest& request) {
  request.cost.set_weights(type);
  if (o.cpu_bw) return;
  const bool with_gpu = gpu && !o.gpu_bw && request.vram_budget > 0;
  ThreadTeam team(o.threads);
  const std::string key = offline::machine_key(team.size(), gpu ? gpu->name : "");
  request.cost.set_rates(offline::cached_rates(offline::machine_cache_path(), key, traits(type).name, with_gpu, [&] {
    log::info("measuring how fast this machine is with {} weights, once", traits(type).name);
    const offline::DeviceRates cpu = offline::measure_rates(*cpu::make_device(team), type);
    offline::KernelRates rates{
        .cpu_dense = cpu.dense, .cpu_sparse = cpu.sparse, .fetched_speedup = cpu.fetched_speedup};
    if (with_gpu) measure_gpu(gpu->index, type, rates);
    return rates;
  }));
}

}  // namespace

std::optional<cuda::GpuInfo> find_gpu(int index, std::string& why) {
  for (cuda::GpuInfo& gpu : cuda::list_gpus(&why)) {
    if (gpu.index == index) return gpu;
  }
  if (why.empty()) why = fmt::format("there is no GPU {}", index);
  return std::nullopt;
}

uint64_t choose_budget(std::optional<double> gib, const MachineOptions& o, const std::optional<cuda::GpuInfo>& gpu,
                       const std::string& why) {
  if (!gib) {
    if (!gpu) fail("no GPU to plan for: {}; give --vram-budget GiB and --gpu-bw GB/s to plan for another machine", why);
    return gpu->free_bytes;
  }
  const uint64_t budget = bytes_of_gib(*gib, "--vram-budget");
  if (budget > 0 && !gpu && !o.gpu_bw) {
    fail("no GPU to measure: {}; give --gpu-bw GB/s to plan for another machine, or --vram-budget 0 for the CPU alone",
         why);
  }
  if (gpu && !o.gpu_bw && budget > gpu->free_bytes) {
    log::warn("{} has {:.2f} GiB free, less than the budget of {:.2f} GiB", gpu->name,
              static_cast<double>(gpu->free_bytes) / kGiB, *gib);
  }
  return budget;
}

void set_machine(const MachineOptions& o, const std::optional<cuda::GpuInfo>& gpu, const model::Model& model,
                 offline::PlanRequest& request) {
  set_bandwidths(o, gpu, request);
  set_rates(o, gpu, ffn_type(model), request);
  if (gpu) {
    request.reserve.scratch_bytes = [info = *gpu](const Limits& limits) { return cuda::scratch_bytes(info, limits); };
    request.reserve.q8_bytes = [](int64_t n) { return cuda::q8_bytes(n); };
  }
  request.reserve.matrix_bytes = gpu_bytes;  // of this program's kernels, whichever machine is planned for
  request.cost.link_share = o.link_share;
  request.cost.look_ahead = !o.no_look_ahead;
  // Without it and with a bandwidth it is another machine that is planned for.
  if (o.host_memory || !o.cpu_bw) request.host_memory = usable_host_memory(o.host_memory);
}

void set_product_rate(const MachineOptions& o, const std::optional<cuda::GpuInfo>& gpu, const model::Model& model,
                      offline::PlanRequest& request) {
  if (o.cpu_gflops && (!(*o.cpu_gflops > 0) || *o.cpu_gflops > 1e9))
    fail("--cpu-gflops is {}, expected a number above 0", *o.cpu_gflops);
  double& rate = request.cost.cpu_flops;
  if (o.cpu_gflops) rate = *o.cpu_gflops * 1e9;
  if (o.cpu_gflops || o.cpu_bw || request.vram_budget == 0) return;
  const DType type = ffn_type(model);
  ThreadTeam team(o.threads);
  const std::string key = offline::machine_key(team.size(), gpu ? gpu->name : "");
  rate = offline::cached_product_rate(offline::machine_cache_path(), key, traits(type).name,
                                      [&] { return cpu::measure_product_rate(team, type); });
}

void add_machine_options(CLI::App& sub, MachineOptions& o) {
  const auto bandwidth = [&sub](const char* name, std::optional<double>& value, const char* help) {
    sub.add_option(name, value, help)->type_name("GB/s")->group("Machine");
  };
  bandwidth("--gpu-bw", o.gpu_bw, "GPU memory's read bandwidth (default: measured)");
  bandwidth("--cpu-bw", o.cpu_bw, "Host memory's read bandwidth (default: measured)");
  bandwidth("--pcie-bw", o.pcie_bw, "Bandwidth from host to GPU (default: measured)");
  sub.add_option(
         "--cpu-gflops", o.cpu_gflops,
         "How fast the CPU multiplies batches of tokens: it decides from how many on its weights are streamed to "
         "the GPU instead (default: measured; 500 where --cpu-bw is given)")
      ->type_name("GFLOP/s")
      ->group("Machine");
  sub.add_option("--host-memory", o.host_memory, "Host memory that may be used (default: what is available)")
      ->type_name("GiB")
      ->group("Machine");
  sub.add_option("--gpu,--main-gpu", o.gpu, "Number of the GPU")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->group("Machine");
  add_link_share_option(sub, o.link_share, "Machine");
  add_look_ahead_option(sub, o.no_look_ahead, "Machine");
  add_thread_option(sub, o.threads);
}

void add_link_share_option(CLI::App& sub, std::optional<double>& share, const char* group) {
  sub.add_option(
         "--link-share", share,
         "Share of the cold neurons, 0 to 1, that the GPU reads from host memory itself while the CPU reads the "
         "others, where a predictor names them; quantised ones take host memory for a copy (default: as the bandwidths "
         "balance)")
      ->check(CLI::Range(0.0, 1.0))
      ->type_name("X")
      ->group(group);
}

void add_look_ahead_option(CLI::App& sub, bool& no_look_ahead, const char* group) {
  sub.add_flag(
         "--no-look-ahead", no_look_ahead,
         "Of a divided model with predictors, or of a mixture: never evaluate a layer's predictor or router on the "
         "layer before, which tells the CPU what rows to fetch while the GPU is at the attention")
      ->group(group);
}

CLI::Option* add_gpu_index_option(CLI::App& sub, std::optional<std::string>& path, const char* group) {
  return sub
      .add_option(
          "--gpu-index", path,
          "The neurons on the GPU are those of this index that PowerInfer made, MODEL.generated.gpuidx, and not "
          "the planner's choice")
      ->type_name("FILE")
      ->group(group);
}

offline::Planner make_planner(const model::Model& model, const PlanInputs& inputs, offline::PlanRequest request) {
  offline::ModelShape shape = offline::shape_of(model, request.reserve.matrix_bytes);
  offline::Frequencies frequencies = offline::frequencies_of(shape, inputs.sidecar, inputs.thresholds);
  request.thresholds = !inputs.thresholds.empty();
  if (inputs.sidecar != nullptr && !request.thresholds) offline::set_named_per_active(shape, *inputs.sidecar);
  if (inputs.sidecar != nullptr && request.sparsity != engine::Sparsity::off) {
    offline::set_active_inside(shape, *inputs.sidecar, inputs.thresholds);
  }
  const model::Config& c = model.config();
  if (inputs.gpu_index) request.gpu_buckets = offline::read_gpu_index(*inputs.gpu_index, c.n_layer, c.n_ff);
  return {std::move(shape), std::move(frequencies), request};
}

PlannedRun plan_run(const model::Model& model, const model::Sidecar* sidecar, RunRequest r) {
  std::string why;
  const std::optional<cuda::GpuInfo> gpu = r.stand_in ? std::nullopt : find_gpu(r.machine.gpu, why);
  if (!gpu && !r.stand_in)
    fail("no GPU to place a part of the model on: {}; without --vram-budget, --plan and --gpu-index the CPU is used",
         why);
  if (r.stand_in) {
    r.machine.gpu_bw = r.request.cost.gpu_bandwidth / 1e9;
    r.machine.pcie_bw = r.request.cost.pcie_bandwidth / 1e9;
  }
  PlannedRun run;
  if (r.plan_file) {
    run.placement = offline::load_placement(*r.plan_file);
    engine::check_placement(run.placement, model.config(), model::fingerprint(model.file()));
    r.request.vram_budget = run.placement.vram_budget;
    set_machine(r.machine, gpu, model, r.request);
  } else {
    r.request.vram_budget = choose_budget(r.vram_budget, r.machine, gpu, why);
    if (!r.vram_budget) r.request.vram_budget += r.context_bytes.value_or(0);  // taken already, and counted by the plan
    set_machine(r.machine, gpu, model, r.request);
    if (r.stand_in) r.request.reserve.matrix_bytes = offline::bytes_in_file;
    if (r.context_bytes) r.request.reserve.context_bytes = *r.context_bytes;
    offline::Plan plan = make_planner(model, {sidecar, r.thresholds, r.gpu_index}, r.request).plan();
    run.tokens_per_second = plan.tokens_per_second();
    run.placement = std::move(plan.placement);
  }
  set_product_rate(r.machine, gpu, model, r.request);
  const offline::ModelShape shape = offline::shape_of(model, r.request.reserve.matrix_bytes);
  const offline::Frequencies frequencies = offline::frequencies_of(shape, sidecar, r.thresholds);
  run.share_rates = r.request.cost.share_rates();
  run.stream_tokens = offline::Streaming(shape, frequencies, run.placement, r.request.cost).tokens();
  if (gpu && run.placement.planned_bytes() > gpu->free_bytes + r.context_bytes.value_or(0)) {
    fail("the plan needs {} of GPU memory and {} has {} free; use a smaller --vram-budget",
         human_bytes(run.placement.planned_bytes()), gpu->name, human_bytes(gpu->free_bytes));
  }
  return run;
}

}  // namespace hearth::tools
