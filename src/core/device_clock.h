#pragma once
// A clock, for devices that work beside the thread that issues their operations: time stamps in
// the order of the operations, so that these can be timed without waiting for each.
#include <vector>

namespace hearth {

class DeviceClock {
 public:
  virtual ~DeviceClock() = default;
  // Marks the moment when every operation issued so far is done and none that follows has begun. Not while a graph is
  // recorded.
  virtual void stamp() = 0;
  // Waits for the device. The seconds between consecutive stamps, one fewer than there are; then forgets them.
  virtual std::vector<double> read_stamps() = 0;
};

}  // namespace hearth
