#pragma once
// This machine's figures, measured once and kept in $XDG_CACHE_HOME/hearth/machine.json.
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "offline/plan/cost_model.h"

namespace hearth::offline {

// Bytes/s; 0 = there is no GPU.
struct MachineBandwidth {
  double cpu = 0;   // host memory, read
  double gpu = 0;   // GPU memory, read
  double pcie = 0;  // host to device
};

// $XDG_CACHE_HOME/hearth/machine.json, or ~/.cache/hearth/machine.json; nullopt when there is no home directory either.
std::optional<std::filesystem::path> machine_cache_path();

// "model name of the processor, N threads | name of the GPU": what the figures are valid for.
std::string machine_key(int n_threads, const std::string& gpu_name);

// The figures kept under `key`, or those of measure(), which are then kept. A cache that cannot be read or written is
// measured again, with a warning: it costs a second, not the result.
MachineBandwidth cached_bandwidth(const std::optional<std::filesystem::path>& cache, const std::string& key,
                                  const std::function<MachineBandwidth()>& measure);

// The same for the speed of batches of products on the CPU, operations/s with weights of a type.
double cached_product_rate(const std::optional<std::filesystem::path>& cache, const std::string& key,
                           const std::string& type, const std::function<double()>& measure);

// The same for the speed of kernels with weights of a type; with_gpu: those of the GPU are wanted, too. What measure()
// could not measure (0) is not kept.
KernelRates cached_rates(const std::optional<std::filesystem::path>& cache, const std::string& key,
                         const std::string& type, bool with_gpu, const std::function<KernelRates()>& measure);

// Tokens/s of the ways to run one model, by name ("exact"; 0: that cannot be), kept under `key` and the model's; empty where none are. What
// is kept replaces what was.
using Speeds = std::map<std::string, double>;
Speeds kept_speeds(const std::optional<std::filesystem::path>& cache, const std::string& key, const std::string& model);
void keep_speeds(const std::optional<std::filesystem::path>& cache, const std::string& key, const std::string& model,
                 const Speeds& speeds);

}  // namespace hearth::offline
