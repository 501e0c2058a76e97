#pragma once
// From flags to a placement: the machine that is planned for, the GPU's budget, and the plan.
#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda/cuda.h"
#include "engine/placement.h"
#include "model/model.h"
#include "model/sidecar.h"
#include "offline/plan/planner.h"

namespace hearth::tools {

// The machine to plan for; what is not given is measured on this one.
struct MachineOptions {
  std::optional<double> gpu_bw, cpu_bw, pcie_bw;  // GB/s
  std::optional<double> cpu_gflops;               // 1e9 operations/s
  std::optional<double> host_memory;              // GiB
  std::optional<double> link_share;               // of the cold neurons, read by the GPU itself (CostModel::link_share)
  bool no_look_ahead = false;
  int gpu = 0, threads = 0;
};
void add_machine_options(CLI::App& sub, MachineOptions& options);

// Bytes of host memory that may be used: `gib` as given, or what is available.
uint64_t usable_host_memory(std::optional<double> gib);

// nullopt, with the reason in `why`, when there is no such GPU.
std::optional<cuda::GpuInfo> find_gpu(int index, std::string& why);

// Bytes of GPU memory that may be used: `gib` as given, or what the GPU has free. Throws Error when neither is known.
uint64_t choose_budget(std::optional<double> gib, const MachineOptions& machine,
                       const std::optional<cuda::GpuInfo>& gpu, const std::string& why);

// Fills in bandwidths, how fast kernels are with the FFN's type of weights (both measured once, then from the cache; of
// another machine, whose bandwidth is given, the cost model's figures), and host memory.
void set_machine(const MachineOptions& machine, const std::optional<cuda::GpuInfo>& gpu, const model::Model& model,
                 offline::PlanRequest& request);
// Fills in how fast the CPU multiplies batches with the FFN's type of weights (the same); of another machine, whose
// bandwidth is given, and without a GPU to stream to, the cost model's assumption stays.
void set_product_rate(const MachineOptions& machine, const std::optional<cuda::GpuInfo>& gpu, const model::Model& model,
                      offline::PlanRequest& request);

// A plan that the engine can load, and what it promises.
struct PlannedRun {
  engine::Placement placement;
  std::optional<double> tokens_per_second;  // expected; unknown for a plan from a file
  int64_t stream_tokens = 0;  // batches of at least this many stream what the CPU has to the GPU; 0: none do
  engine::ShareRates share_rates;
};

struct RunRequest {
  std::optional<double> vram_budget;     // GiB; default: what is free
  std::optional<std::string> plan_file;  // load this plan instead of making one
  std::optional<std::string> gpu_index;  // PowerInfer's choice of hot neurons
  std::vector<float> thresholds;         // of |act(gate)|, by layer; empty: none
  offline::PlanRequest request;          // context, batch and sparsity; the rest is filled in
  MachineOptions machine;
  std::optional<uint64_t> context_bytes;  // what the device's context takes, where it is known
  bool stand_in = false;                  // plan for a GPU of the cost model's figures: there need not be one
};
// `sidecar` null: there is none. Throws Error when there is no GPU, when it has less free than asked, and when the
// model does not fit the budget's plan.
PlannedRun plan_run(const model::Model& model, const model::Sidecar* sidecar, RunRequest run);

void add_link_share_option(CLI::App& sub, std::optional<double>& share, const char* group);
void add_look_ahead_option(CLI::App& sub, bool& no_look_ahead, const char* group);
CLI::Option* add_gpu_index_option(CLI::App& sub, std::optional<std::string>& path, const char* group);

// A plan is made for this, beside the model and its predictors.
struct PlanInputs {
  const model::Sidecar* sidecar = nullptr;  // null: there is none
  std::span<const float> thresholds = {};   // of |act(gate)|, by layer; empty: none
  std::optional<std::string> gpu_index = {};
};
// Throws Error when the GPU index is not the model's.
offline::Planner make_planner(const model::Model& model, const PlanInputs& inputs, offline::PlanRequest request);

}  // namespace hearth::tools
