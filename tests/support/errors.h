#pragma once
// What an action that ought to fail says.
#include <string>

#include "core/error.h"

namespace hearth::test {

// The message of the Error that `action` throws, or "no error".
template <typename F>
std::string message_of(F&& action) {
  try {
    action();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

}  // namespace hearth::test
