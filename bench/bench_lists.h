#pragma once
#include <benchmark/benchmark.h>

#include "cpu/cpu.h"

namespace hearth::bench {

// Registers the benchmarks of bench_lists.cpp. `bandwidth`: bytes/s that the team reads.
void add_lists(ThreadTeam& team, cpu::Isa isa, double bandwidth);

}  // namespace hearth::bench
