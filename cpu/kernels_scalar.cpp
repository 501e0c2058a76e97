// The kernels for scalar: see cpu/kernels.h.
#include "cpu/kernels.h"
#include "cpu/simd_scalar.h"

namespace hearth::cpu {
namespace {
#include "cpu/body_dot.h"
#include "cpu/body_gemm.h"
#include "cpu/body_rows.h"
#include "cpu/body_table.h"
}  // namespace

constinit const Kernels kernels_scalar = make_table("scalar");

}  // namespace hearth::cpu
