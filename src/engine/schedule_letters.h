#pragma once
// Shared by the letters of hand-offs. Part of schedule*.cpp.
#include "engine/schedule.h"

namespace hearth::engine {

inline bool brings_neurons(Letter letter) {
  return letter == Letter::x_and_neurons || letter == Letter::ffn_input_and_neurons;
}
inline bool brings_input(Letter letter) {
  return letter == Letter::ffn_input || letter == Letter::ffn_input_and_neurons ||
         letter == Letter::ffn_input_and_experts;
}

}  // namespace hearth::engine
