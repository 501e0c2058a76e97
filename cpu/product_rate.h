#pragma once
#include "core/dtype.h"
#include "core/thread_team.h"

namespace hearth::cpu {

// Arithmetic operations per second of a batch of tokens times a matrix of this type , two
// for each weight and token; measured on the spot, a fraction of a second.
double measure_product_rate(ThreadTeam& team, DType weights);

}  // namespace hearth::cpu
