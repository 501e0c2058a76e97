#pragma once
// PowerInfer's own choice of hot neurons, `MODEL.generated.gpuidx`: a GGUF file (magic PWRI) with, per layer,
// `blk.N.gpu_idx` i32 [n_ff], 1 where the neuron is hot, and `blk.N.gpu_bucket` i32 [k], the hot neurons' ids
// (SJTU-IPADS/PowerInfer, powerinfer-py/powerinfer/export_split.py). Newer versions leave gpu_bucket out.
#include <cstdint>
#include <filesystem>
#include <vector>

namespace hearth::offline {

// gpu_bucket by layer, ascending, as LayerPlacement::gpu_bucket wants it. Throws Error naming the tensor when the file
// is for a model of another shape, an id is out of range or comes twice, or the two tensors contradict each other.
std::vector<std::vector<int32_t>> read_gpu_index(const std::filesystem::path& path, int64_t n_layer, int64_t n_ff);

}  // namespace hearth::offline
