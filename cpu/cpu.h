#pragma once
// The CPU devices: the SIMD one that runs models, and the naive one that every other implementation is compared with.
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "core/device.h"
#include "core/thread_team.h"

namespace hearth::cpu {

enum class Isa { scalar, avx2, avx512 };  // avx512: F, BW, VL, DQ and VNNI
const char* to_string(Isa isa);
// The best one that this build has and this processor supports.
Isa best_isa();
// All that can run here, slowest first.
std::vector<Isa> available_isas();

// `team` must outlive the device.
std::unique_ptr<Device> make_device(ThreadTeam& team, std::optional<Isa> isa = std::nullopt);

// The oracle: plain loops in double precision where the sum matters, written for obviousness. Also stands in for a GPU
// in tests.
std::unique_ptr<Device> make_reference_device();

// Sequential read bandwidth of memory in bytes/s with this team (best of a few passes over a buffer far larger than the
// caches).
double measure_read_bandwidth(ThreadTeam& team);

}  // namespace hearth::cpu
