#pragma once
// How fast kernels are on this machine, measured through the devices themselves, with layers of a 7B's size. About a
// second.
#include "core/device.h"

namespace hearth::offline {

struct DeviceRates {
  double dense = 0, sparse = 0;  // bytes/s of one token: whole matrices; rows of a list of neurons
  double fetched_speedup = 1;    // how much faster a list is used whose rows Device::fetch() has brought
};
// Weights of this type. Throws Error where there is no room for them.
DeviceRates measure_rates(Device& device, DType weights);

// Seconds that a hand-off to the CPU takes which answers at once: Device::post() and collect() inside a recorded step,
// where the device records any. Calls Device::reserve(), which nobody else may.
double measure_hand_off(Device& main);

}  // namespace hearth::offline
