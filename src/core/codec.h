#pragma once
// Row conversions of the quantised types in core/blocks.h, behind the trait table (core/dtype.cpp). n is a multiple of
// the type's block size everywhere.
//
// Decoders do the arithmetic of ggml's reference, in its order and in f32, so their results are equal to it bit for bit.
// A scale that is infinite or NaN gives what that arithmetic gives: infinities, and NaN where a level is zero.
//
// Encoders make the squared error of each block small, weighted by `importance` (n values, finite and not negative) if
// that is not null. They depend on nothing but their arguments. Finite input of magnitude up to 65504 gives finite
// weights; a block that holds an infinity or NaN decodes to no finite weight, so that a check of the result finds it.
#include <cstdint>

namespace hearth::codec {

void q4_1_to_float(const void* row, float* out, int64_t n);
void q5_0_to_float(const void* row, float* out, int64_t n);
void q5_1_to_float(const void* row, float* out, int64_t n);
void mxfp4_to_float(const void* row, float* out, int64_t n);
void iq4_nl_to_float(const void* row, float* out, int64_t n);
void iq4_xs_to_float(const void* row, float* out, int64_t n);
void q2_k_to_float(const void* row, float* out, int64_t n);
void q3_k_to_float(const void* row, float* out, int64_t n);
void q4_k_to_float(const void* row, float* out, int64_t n);
void q5_k_to_float(const void* row, float* out, int64_t n);
void q6_k_to_float(const void* row, float* out, int64_t n);

// Q4_0 is for importance only: core/dtype.cpp has its plain rounding.
void q4_0_encode(const float* row, const float* importance, void* out, int64_t n);
void q4_1_encode(const float* row, const float* importance, void* out, int64_t n);
void q5_0_encode(const float* row, const float* importance, void* out, int64_t n);
void q5_1_encode(const float* row, const float* importance, void* out, int64_t n);
void mxfp4_encode(const float* row, const float* importance, void* out, int64_t n);
void iq4_nl_encode(const float* row, const float* importance, void* out, int64_t n);
void iq4_xs_encode(const float* row, const float* importance, void* out, int64_t n);
void q2_k_encode(const float* row, const float* importance, void* out, int64_t n);
void q3_k_encode(const float* row, const float* importance, void* out, int64_t n);
void q4_k_encode(const float* row, const float* importance, void* out, int64_t n);
void q5_k_encode(const float* row, const float* importance, void* out, int64_t n);
void q6_k_encode(const float* row, const float* importance, void* out, int64_t n);

}  // namespace hearth::codec
