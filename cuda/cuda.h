#pragma once
// The CUDA backend, without CUDA types: safe to include anywhere. Built without a toolkit, stub.cpp answers "no
// device".
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/products.h"

namespace hearth::cuda {

struct GpuInfo {
  int index = 0;
  std::string name;
  int compute_major = 0, compute_minor = 0;
  int multiprocessors = 0;
  size_t total_bytes = 0, free_bytes = 0, l2_bytes = 0;
};

// Empty when there is no usable GPU; `why` (optional) then says so in one line: built without CUDA, no driver, no
// device.
std::vector<GpuInfo> list_gpus(std::string* why = nullptr);

// Throws Error, which says what to install, where a library of NVIDIA's that a GPU needs cannot be loaded. Making a
// device does this, too.
void require_libraries();

struct Bandwidth {
  double memory_read = 0;  // bytes/s
  double host_to_device = 0, device_to_host = 0;
};
// Measured on the spot, a fraction of a second.
Bandwidth measure_bandwidth(int gpu);

// The most that a device uses of a GPU, so that in tests a GPU stands in for smaller and older ones: kernels are chosen
// and divided as they would be there.
struct GpuShape {
  int multiprocessors = std::numeric_limits<int>::max();
  size_t shared_per_block = std::numeric_limits<size_t>::max();  // bytes
  bool overlap = true;  // launches that overlap the kernel before (9.0 and later)
};
// Bytes that such a device takes in all for Device::reserve(limits), and Device::q8_bytes(n): without making one.
size_t scratch_bytes(const GpuInfo& gpu, const Limits& limits);
size_t q8_bytes(int64_t n);
// Throws Error when there is no such GPU.
std::unique_ptr<Device> make_device(int gpu, const GpuShape& at_most = {});

// Products of matrices on a GPU; 64 MiB of scratch beside what is allocated from them. Throws as make_device() does.
std::unique_ptr<Products> make_products(int gpu);

}  // namespace hearth::cuda
