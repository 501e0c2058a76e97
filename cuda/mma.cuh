#pragma once
// Tensor-core fragments of f16 with f32 accumulation, as warp-wide instructions that sm_75 and later have.
// Layouts (PTX ISA, "Matrix fragments for mma.m16n8k16"): with g = lane / 4 and p = lane % 4, C holds rows g and g + 8,
// columns 2p and 2p + 1; A holds the same rows with columns 2p, 2p + 1 (and + 8); B holds column g, rows 2p, 2p + 1
// (and + 8).
#include <cuda_fp16.h>

#include <cstdint>

namespace hearth::cuda {

struct FragmentA {
  unsigned r[4];
};
struct FragmentC {
  float v[4];
};

__device__ __forceinline__ unsigned pack_half2(float low, float high) {
  const __half2 h = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&h);
}

// c += a b over k = 16.
__device__ __forceinline__ void mma(FragmentC& c, const FragmentA& a, unsigned b0, unsigned b1) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c.v[0]), "+f"(c.v[1]), "+f"(c.v[2]), "+f"(c.v[3])
      : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1));
#else
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(c.v[0]), "+f"(c.v[1]), "+f"(c.v[2]), "+f"(c.v[3])
               : "r"(a.r[0]), "r"(a.r[1]), "r"(b0));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(c.v[0]), "+f"(c.v[1]), "+f"(c.v[2]), "+f"(c.v[3])
               : "r"(a.r[2]), "r"(a.r[3]), "r"(b1));
#endif
}

// Four 8x8 matrices of f16 from shared memory; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const __half* row) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], const __half* row) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

}  // namespace hearth::cuda
