#pragma once
// Random shards of an FFN and inputs for them, on the GPU device and on the reference.
#include <cstring>
#include <type_traits>

#include "core/buffer.h"
#include "twin.h"

namespace hearth::test {

// A random shard of n neurons on both devices.
struct TwinShard {
  TwinShard(Device& ref, Device& gpu, std::mt19937& rng, DType type, int64_t n, int64_t n_embd, bool gated,
            bool transposed)
      : gate(ref, gpu, rng, type, n, n_embd, 0.1f),
        up(ref, gpu, rng, type, n, n_embd, 0.1f),
        down(ref, gpu, rng, type, transposed ? n : n_embd, transposed ? n_embd : n, 0.1f),
        gate_bias(ref, gpu, random_normal(rng, static_cast<size_t>(n), 0.1f)),
        up_bias(ref, gpu, random_normal(rng, static_cast<size_t>(n), 0.1f)),
        is_gated(gated),
        is_transposed(transposed),
        ref_(ref),
        gpu_(gpu) {}
  FfnShard on(int s) const {
    FfnShard f;
    f.gate = gate.on(s);
    if (is_gated) f.up = up.on(s);
    (is_transposed ? f.down_t : f.down) = down.on(s);
    f.act = act, f.act_threshold = 0.05f, f.up_relu = up_relu;
    if (biased) f.gate_bias = {gate_bias.on(s), gate.on(s).rows}, f.up_bias = {up_bias.on(s), gate.on(s).rows};
    return f;
  }
  // Sets a bias that takes every gate of this input, on the reference, further from a threshold of 0.
  void keep_gates_from_zero(Act in) {
    std::vector<float> z(static_cast<size_t>(gate.on(kRef).rows));
    const MatmulPart part{.w = gate.on(kRef), .y = z.data()};
    ref_.matmul({&part, 1}, in, 1);
    for (float& v : z) v = v > 0 ? 0.02f : -0.02f;
    gate_bias = Twin<float>(ref_, gpu_, z);
  }
  TwinMatrix gate, up, down;
  Twin<float> gate_bias, up_bias;
  bool is_gated, is_transposed, biased = true, up_relu = false;
  Activation act = Activation::silu;

 private:
  Device &ref_, &gpu_;
};

// A copy of a shard in host memory that is page-locked for a device.
class HostShard {
 public:
  HostShard(Device& device, const FfnShard& from)
      : device_(*device.cold_rows()),
        memory_(kLinkAt * (bytes_of(from) / kLinkAt + 1) + device_.link_bytes(from)),
        shard_(from) {
    std::byte* at = memory_.data();
    const auto move = [&](auto*& data, size_t bytes) {
      if (data == nullptr) return;
      std::memcpy(at, data, bytes);
      data = reinterpret_cast<std::remove_reference_t<decltype(data)>>(at);
      at += (bytes + 63) / 64 * 64;
    };
    for (Matrix* m : {&shard_.gate, &shard_.up, &shard_.down_t}) move(m->data, m->bytes());
    for (Vector* v : {&shard_.gate_bias, &shard_.up_bias}) move(v->data, static_cast<size_t>(v->n) * sizeof(float));
    device_.pin(memory_.data(), memory_.bytes());
  }
  ~HostShard() { device_.unpin(memory_.data()); }
  HostShard(const HostShard&) = delete;
  HostShard& operator=(const HostShard&) = delete;
  const FfnShard& shard() const { return shard_; }
  // What ColdRows::link() needs.
  std::byte* link_memory() { return memory_.data() + kLinkAt * (bytes_of(shard_) / kLinkAt + 1); }

 private:
  static constexpr size_t kLinkAt = 256;
  static size_t bytes_of(const FfnShard& s) {
    return s.gate.bytes() + s.up.bytes() + s.down_t.bytes() + 8 * static_cast<size_t>(s.n()) + 5 * 64;
  }
  ColdRows& device_;
  HostBuffer memory_;
  FfnShard shard_;
};

class GpuFfnTest : public GpuTest {
 protected:
  // Normed random activations with their 8-bit form (of whole blocks only), made by each device.
  static TwinAct make_input(std::mt19937& rng, int64_t T, int64_t n) {
    const auto size = static_cast<size_t>(T * n);
    const Twin<float> raw(*ref_, *gpu_, random_normal(rng, size));
    const Twin<float> ones(*ref_, *gpu_, std::vector<float>(static_cast<size_t>(n), 1.0f));
    TwinAct in(*ref_, *gpu_, T, n, std::vector<float>(size, kNan));
    for (const int s : {kRef, kGpu})
      device(s).norm({NormKind::rms, {ones.on(s), n}, {}, 1e-5f, n}, raw.on(s), T, in.on(s));
    return in;
  }
  // ||error|| / ||result||. Quantised weights: the reference rounds activations to 8 bits (half a step of amax / 127,
  // about 0.6 % of a normal vector's norm); so do the GPU's matvecs, up to steps that fall the other way, and its
  // batches do not.
  static double bound(DType type, int64_t T) {
    const bool batch = T > kFewTokens;
    if (is_quantized(type)) return batch ? 2e-2 : 2e-3;
    if (!batch || type == DType::f32) return 2e-6;
    return type == DType::bf16 ? 3 * kEpsBf16 : 3 * kEpsF16;
  }
};

}  // namespace hearth::test
