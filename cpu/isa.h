#pragma once
#include "cpu/cpu.h"
#include "cpu/kernels.h"

namespace hearth::cpu {

// The kernels of one instruction set. Throws Error when this processor cannot run them.
const Kernels& kernels(Isa isa);

}  // namespace hearth::cpu
