#pragma once
// A device that refuses what the GPU refuses, for builds and machines without one: it offers the interfaces that
// cuda/device.cuh declares, and takes the types that cuda/layout.h has kernels for.
#include <fstream>
#include <iterator>
#include <set>
#include <string>

#include "core/forwarding_device.h"
#include "cuda/layout.h"
#include "support/paths.h"

namespace hearth::test {

class GpuStandIn final : public ForwardingDevice {
 public:
  explicit GpuStandIn(Device& inner) : ForwardingDevice(inner), offers_(declared()) {}

  std::string name() const override { return "the GPU"; }
  SparseFfn* sparse_ffn() override { return offer("SparseFfn", ForwardingDevice::sparse_ffn()); }
  ExpertFfn* expert_ffn() override { return offer("ExpertFfn", ForwardingDevice::expert_ffn()); }
  LatentAttention* latent_attention() override {
    return offer("LatentAttention", ForwardingDevice::latent_attention());
  }
  HandOffs* hand_offs() override { return offer("HandOffs", ForwardingDevice::hand_offs()); }
  ColdRows* cold_rows() override { return offer("ColdRows", ForwardingDevice::cold_rows()); }
  Matrix adopt(const Matrix& host) override {
    if (host) cuda::adopted_bytes(host.type, host.rows, host.cols);  // throws for types without kernels
    return ForwardingDevice::adopt(host);
  }
  Vector adopt(const Vector& host) override { return ForwardingDevice::adopt(host); }

  // Base classes of CudaDevice; empty when the declaration was not found.
  static std::set<std::string> declared() {
    std::ifstream in(source_dir() / "cuda" / "device.cuh");
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    const size_t begin = text.find("class CudaDevice final :"), end = text.find('{', begin);
    std::set<std::string> names;
    if (begin == std::string::npos) return names;
    for (size_t at = text.find("public ", begin); at < end; at = text.find("public ", at + 1)) {
      const size_t name = at + 7;
      names.insert(text.substr(name, text.find_first_of(", \n{", name) - name));
    }
    return names;
  }

 private:
  template <typename T>
  T* offer(const char* name, T* interface) const {
    return offers_.contains(name) ? interface : nullptr;
  }
  std::set<std::string> offers_;
};

}  // namespace hearth::test
