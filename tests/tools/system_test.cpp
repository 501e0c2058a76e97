#include "tools/system.h"

#include <gtest/gtest.h>

namespace hearth::tools {
namespace {

TEST(SystemMemory, WhatMayBeTakenIsTheLesserOfWhatIsThereAndTheCgroupsLimit) {
  SystemMemory m;
  m.total = 100, m.available = 60;
  EXPECT_EQ(m.usable(), 60u);
  m.cgroup_limit = 40;
  EXPECT_EQ(m.usable(), 40u);
  m.cgroup_limit = 80;
  EXPECT_EQ(m.usable(), 60u);
}

TEST(SystemMemory, OfThisMachine) {
  const SystemMemory m = system_memory();
  EXPECT_GT(m.usable(), 0u);
  EXPECT_LE(m.usable(), m.available);
  EXPECT_LE(m.available, m.total);
}

}  // namespace
}  // namespace hearth::tools
