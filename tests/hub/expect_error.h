#pragma once
#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include "support/errors.h"

namespace hearth::test {

// `action` throws an Error of one line that holds all of `parts`.
template <typename F>
void expect_error(F&& action, std::initializer_list<std::string> parts) {
  const std::string said = message_of(action);
  EXPECT_NE(said, "no error");
  EXPECT_EQ(said.find('\n') == std::string::npos || parts.size() == 0, true) << said;
  for (const std::string& part : parts)
    EXPECT_NE(said.find(part), std::string::npos) << "'" << part << "' in: " << said;
}

}  // namespace hearth::test
