// The words of a session whose model and cache do not fit the host's memory.
#include <algorithm>

#include "core/log.h"
#include "engine/kv_cache.h"
#include "tools/choose_placement.h"
#include "tools/common.h"
#include "tools/fit_memory.h"
#include "tools/system.h"

namespace hearth::tools {

// For models that the CPU runs alone; the plan knows about divided ones.
void Session::check_host_memory(const ModelOptions& options) const {
  const model::Config& c = model_->config();
  const int64_t n_ctx = options.n_ctx > 0 ? options.n_ctx : std::min(c.n_ctx_train, engine::kDefaultContext);
  const uint64_t page = static_cast<uint64_t>(c.n_layer) * engine::KvCache::layer_page_bytes(c);
  check_cache_fits(n_ctx, page / kPagePositions * static_cast<uint64_t>(options.n_sequences),
                   usable_host_memory(options.host_memory));
}

namespace {

// Bytes of the experts that a plan leaves to the CPU, which are used where the file is mapped. All other cold rows are in
// memory of their own.
uint64_t cold_experts(const model::Model& model, const engine::Placement& placement) {
  uint64_t sum = 0;
  for (size_t l = 0; l < placement.layers.size(); ++l) {
    const std::vector<Expert>& experts = model.weights().layers[l].experts;
    const std::vector<int32_t>& hot = placement.layers[l].gpu_experts;
    for (size_t id = 0; id < experts.size(); ++id) {
      if (std::binary_search(hot.begin(), hot.end(), static_cast<int32_t>(id))) continue;
      sum += experts[id].bytes();
    }
  }
  return sum;
}

}  // namespace

// After everything but the weights has its memory. Weights are mapped then, as copies are made only where there is room.
void Session::warn_of_disk(const ModelOptions& options) {
  if (!planned_ && on_gpu()) return;
  HostNeed need;
  need.weights = planned_ ? cold_experts(*model_, planned_->placement) : model_->weight_bytes();
  need.available = usable_host_memory(options.host_memory);
  for (const Device* d : {device_.get(), host_device_.get()}) {
    if (options.host_memory) break;  // what is available now is less by what they took; what was given is not
    if (d == nullptr || !d->is_host()) continue;
    for (const MemoryUse& use : d->memory()) need.available += use.purpose == Purpose::weights ? use.bytes : 0;
  }
  if (need.weights <= need.available) return;
  const engine::SideBytes bytes = engine_->traffic({}, 1).total();
  need.token_bytes = planned_ ? bytes.host : bytes.total();
  need.experts = static_cast<bool>(model_->config().experts);
  need.smaller = smaller_types(*model_);
  need.disk_rate = measure_disk(model_->file().path());
  if (const auto warning = disk_warning(need)) log::warn("{}", *warning);
}

}  // namespace hearth::tools
