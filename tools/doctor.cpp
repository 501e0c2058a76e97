// `hearth doctor`: what this machine offers, measured.
#include <array>
#include <memory>

#include "core/log.h"
#include "core/thread_team.h"
#include "cpu/cpu.h"
#include "cpu/product_rate.h"
#include "cuda/cuda.h"
#include "offline/plan/cost_model.h"
#include "tools/commands.h"
#include "tools/common.h"
#include "tools/doctor_gpus.h"
#include "tools/figures.h"
#include "tools/output.h"
#include "tools/system.h"

namespace hearth::tools {
namespace {

struct DoctorOptions {
  int threads = 0;
  bool json = false;
  bool quiet = false, verbose = false;
};

constexpr std::array kTypes = {DType::f16, DType::q8_0, DType::q4_0};  // of weights, that are told apart below

struct Findings {
  Processor processor;
  CpuTopology topology;
  SystemMemory memory;
  int threads = 0;
  double memory_bandwidth = 0;                        // bytes/s
  std::array<double, kTypes.size()> product_rates{};  // of batches, operations/s, by kTypes
  std::vector<GpuFinding> gpus;
  std::string no_gpu;  // why there is none
};

Findings examine(const DoctorOptions& o) {
  Findings f;
  f.processor = processor();
  f.topology = cpu_topology();
  f.memory = system_memory();
  ThreadTeam team(o.threads);
  f.threads = team.size();
  log::debug("measuring memory bandwidth with {} threads", f.threads);
  f.memory_bandwidth = cpu::measure_read_bandwidth(team);
  for (size_t i = 0; i < kTypes.size(); ++i) f.product_rates[i] = cpu::measure_product_rate(team, kTypes[i]);
  f.gpus = examine_gpus(cuda::list_gpus(&f.no_gpu), cuda::measure_bandwidth);
  return f;
}

// From how many prompt tokens on weights of a type visit a GPU instead of being multiplied by the CPU.
int64_t stream_tokens(const Findings& f, const cuda::Bandwidth& gpu, size_t type) {
  offline::CostModel cost;
  cost.cpu_bandwidth = f.memory_bandwidth, cost.pcie_bandwidth = gpu.host_to_device;
  cost.cpu_flops = f.product_rates[type];
  const DTypeTraits& t = traits(kTypes[type]);
  return cost.stream_tokens(static_cast<double>(t.block_bytes) / static_cast<double>(t.block_size));
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& w : words) text += (text.empty() ? "" : " ") + w;
  return text.empty() ? "none that matter" : text;
}

std::string limits(const Processor& p) {
  std::string text = fmt::format("{} of {} logical CPUs by affinity", p.affinity, p.online);
  return text + (p.cgroup_cpus ? fmt::format(", {:.2f} CPUs by cgroup quota", *p.cgroup_cpus) : ", no cgroup quota");
}

void print_text(const Findings& f) {
  const auto line = [](const char* name, const std::string& text) {
    write_out(fmt::format("{:<18} {}\n", name, text));
  };
  line("hearth", HEARTH_VERSION);
  line("CPU", f.processor.model.empty() ? "unknown" : f.processor.model);
  line("CPU features", joined(f.processor.features));
  std::string isas;
  for (const cpu::Isa isa : cpu::available_isas())
    isas += (isas.empty() ? "" : ", ") + std::string(cpu::to_string(isa));
  line("kernels", fmt::format("{} (can run: {})", cpu::to_string(cpu::best_isa()), isas));
  line("usable", fmt::format("{} physical cores, {} hardware threads", f.topology.physical, f.topology.logical));
  line("limits", limits(f.processor));
  line("memory", fmt::format("{} total, {} available{}", human_bytes(f.memory.total), human_bytes(f.memory.available),
                             f.memory.cgroup_limit ? ", cgroup limit " + human_bytes(*f.memory.cgroup_limit) : ""));
  line("memory reads", fmt::format("{:.1f} GB/s with {} threads", f.memory_bandwidth / 1e9, f.threads));
  std::string rates;
  for (size_t i = 0; i < kTypes.size(); ++i)
    rates += fmt::format("{}{} {:.0f}", i > 0 ? ", " : "", traits(kTypes[i]).name, f.product_rates[i] / 1e9);
  line("batches", rates + " GFLOP/s");
  const std::string& thp = f.memory.transparent_huge_pages;
  line("huge pages", fmt::format("transparent: {}; reserved: {}, {} free", thp.empty() ? "unknown" : thp,
                                 f.memory.huge_pages, f.memory.huge_pages_free));
  if (f.gpus.empty()) line("GPU", "none: " + f.no_gpu);
  for (const GpuFinding& g : f.gpus) {
    std::string name = fmt::format("GPU {}", g.gpu.index);
    for (const std::string& text : describe(g)) line(name.c_str(), text), name.clear();
    if (!g.bandwidth) continue;
    const auto tokens = [&](size_t type) { return stream_tokens(f, *g.bandwidth, type); };
    line("",
         fmt::format("prompts of {} tokens ({}), {} ({}), {} ({}) or more stream the CPU's weights to it", tokens(0),
                     traits(kTypes[0]).name, tokens(1), traits(kTypes[1]).name, tokens(2), traits(kTypes[2]).name));
  }
}

void print_json(const Findings& f) {
  nlohmann::ordered_json j;
  j["version"] = HEARTH_VERSION;
  nlohmann::ordered_json isas = nlohmann::ordered_json::array();
  for (const cpu::Isa isa : cpu::available_isas()) isas.push_back(cpu::to_string(isa));
  j["cpu"] = {{"model", f.processor.model},
              {"features", f.processor.features},
              {"isa", cpu::to_string(cpu::best_isa())},
              {"available_isas", isas},
              {"online", f.processor.online},
              {"affinity", f.processor.affinity},
              {"physical_cores", f.topology.physical},
              {"hardware_threads", f.topology.logical}};
  if (f.processor.cgroup_cpus) j["cpu"]["cgroup_cpus"] = *f.processor.cgroup_cpus;
  j["memory"] = {{"total_bytes", f.memory.total},
                 {"available_bytes", f.memory.available},
                 {"read_bytes_per_second", f.memory_bandwidth},
                 {"read_threads", f.threads},
                 {"transparent_huge_pages", f.memory.transparent_huge_pages},
                 {"huge_pages", f.memory.huge_pages},
                 {"huge_pages_free", f.memory.huge_pages_free}};
  if (f.memory.cgroup_limit) j["memory"]["cgroup_limit_bytes"] = *f.memory.cgroup_limit;
  for (size_t i = 0; i < kTypes.size(); ++i)
    j["cpu"]["batch_operations_per_second"][traits(kTypes[i]).name] = f.product_rates[i];
  j["gpus"] = nlohmann::ordered_json::array();
  for (const GpuFinding& found : f.gpus) {
    const cuda::GpuInfo& g = found.gpu;
    auto& entry = j["gpus"].emplace_back();
    entry = {{"index", g.index},
             {"name", g.name},
             {"compute_capability", fmt::format("{}.{}", g.compute_major, g.compute_minor)},
             {"multiprocessors", g.multiprocessors},
             {"total_bytes", g.total_bytes},
             {"free_bytes", g.free_bytes},
             {"l2_bytes", g.l2_bytes}};
    if (!found.bandwidth) {
      entry["unusable"] = found.unusable;
      continue;
    }
    entry["read_bytes_per_second"] = found.bandwidth->memory_read;
    entry["host_to_device_bytes_per_second"] = found.bandwidth->host_to_device;
    entry["device_to_host_bytes_per_second"] = found.bandwidth->device_to_host;
    for (size_t t = 0; t < kTypes.size(); ++t)
      entry["stream_tokens"][traits(kTypes[t]).name] = stream_tokens(f, *found.bandwidth, t);
  }
  if (f.gpus.empty()) j["no_gpu"] = f.no_gpu;
  write_out(j.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

}  // namespace

void register_doctor(CLI::App& app) {
  auto o = std::make_shared<DoctorOptions>();
  CLI::App* sub = app.add_subcommand("doctor", "Show what this machine offers: processor, memory, GPUs, measured");
  add_thread_option(*sub, o->threads);
  sub->add_flag("--json", o->json, "Print JSON")->group("General");
  add_logging_options(*sub, o->quiet, o->verbose);
  sub->footer("Example: hearth doctor --json");
  sub->callback([o] {
    set_logging(o->quiet, o->verbose);
    const Findings findings = examine(*o);
    o->json ? print_json(findings) : print_text(findings);
  });
}

}  // namespace hearth::tools
