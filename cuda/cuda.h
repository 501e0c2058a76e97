#pragma once
// The CUDA backend, without CUDA types: safe to include anywhere. Built without a toolkit, stub.cpp answers "no
// device".
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

struct Bandwidth {
  double memory_read = 0;  // bytes/s
  double host_to_device = 0, device_to_host = 0;
};
// Measured on the spot, a fraction of a second.
Bandwidth measure_bandwidth(int gpu);

// Throws Error when there is no such GPU.
std::unique_ptr<Device> make_device(int gpu);

// Products of matrices on a GPU; 64 MiB of scratch beside what is allocated from them. Throws as make_device() does.
std::unique_ptr<Products> make_products(int gpu);

}  // namespace hearth::cuda
