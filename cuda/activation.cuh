#pragma once
// The FFN's non-linearities (core/device.h, Activation).
#include "core/device.h"

namespace hearth::cuda {

__device__ __forceinline__ float activate(Activation act, float threshold, float z) {
  switch (act) {
    case Activation::relu:
      return fmaxf(z, 0.0f);
    case Activation::fat_relu:
      return z > threshold ? z : 0.0f;
    case Activation::relu2:
      return z > 0.0f ? z * z : 0.0f;
    case Activation::silu:
      return z / (1.0f + expf(-z));
    case Activation::gelu:
      return 0.5f * z * (1.0f + erff(z * 0.70710678f));
    case Activation::gelu_tanh:
      return z / (1.0f + expf(z * fmaf(z * z, -0.071354816f, -1.5957691f)));  // 1 + tanh(u) = 2 / (1 + e^-2u)
    case Activation::clamped_silu: {
      const float x = z > threshold ? threshold : z;
      return x / (1.0f + expf(-kClampedSiluAlpha * x));
    }
  }
  return 0.0f;
}

// Turns the two pre-activations of a neuron into its value.
struct NeuronArgs {
  const float* gate_bias;
  const float* up_bias;
  Activation act;
  float threshold;
  bool up_relu;

  __device__ __forceinline__ float gate(float z, int64_t k) const {
    return activate(act, threshold, gate_bias != nullptr ? z + gate_bias[k] : z);
  }
  __device__ __forceinline__ float up(float z, int64_t k) const {
    const float u = up_bias != nullptr ? z + up_bias[k] : z;
    if (act == Activation::clamped_silu) return (u > threshold ? threshold : u < -threshold ? -threshold : u) + 1.0f;
    return up_relu ? fmaxf(u, 0.0f) : u;
  }
};
inline NeuronArgs neuron_args(const FfnShard& s) {
  return {s.gate_bias.data, s.up_bias.data, s.act, s.act_threshold, s.up_relu};
}

}  // namespace hearth::cuda
