// The kernels for avx2: see cpu/kernels.h.
#if defined(__x86_64__)
#include "cpu/kernels.h"
#include "cpu/simd_avx2.h"

namespace hearth::cpu {
namespace {
#include "cpu/body_dot.h"
#include "cpu/body_gemm.h"
#include "cpu/body_rows.h"
#include "cpu/body_table.h"
}  // namespace

constinit const Kernels kernels_avx2 = make_table("avx2");

}  // namespace hearth::cpu
#endif
