// The kernels for avx512: see cpu/kernels.h.
#if defined(__x86_64__)
#include "cpu/kernels.h"
#include "cpu/simd_avx512.h"

namespace hearth::cpu {
namespace {
// Each needs those before it.
// clang-format off
#include "cpu/body_weights.h"
#include "cpu/body_formats.h"
#include "cpu/body_formats_rows.h"
#include "cpu/body_formats_quads.h"
#include "cpu/body_dot.h"
#include "cpu/body_axpy.h"
#include "cpu/body_gemm.h"
#include "cpu/body_rows.h"
#include "cpu/body_panel.h"
#include "cpu/body_formats_panel.h"
#include "cpu/body_formats_batch.h"
#define HEARTH_PANELS
#include "cpu/body_table.h"
// clang-format on
}  // namespace

constinit const Kernels kernels_avx512 = make_table("avx512");

}  // namespace hearth::cpu
#endif
