#pragma once
// Devices that record the operations between begin and end once, and launch them many times.

namespace hearth {

class Recording {
 public:
  virtual void begin() = 0;
  virtual int end() = 0;  // the id of what was recorded
  virtual void launch(int id) = 0;

 protected:
  ~Recording() = default;
};

}  // namespace hearth
