#include "tools/system.h"

#include <gtest/gtest.h>

#include <fstream>

#include "support/paths.h"

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

TEST(SystemMemory, MemoryThatACgroupHasInUseCannotBeTakenAgain) {
  SystemMemory m;
  m.total = 100, m.available = 60, m.cgroup_limit = 40, m.cgroup_used = 15;
  EXPECT_EQ(m.usable(), 25u);
  m.cgroup_used = 50;
  EXPECT_EQ(m.usable(), 0u);
}

TEST(SystemMemory, TheTightestCgroupOnTheWayUpCounts) {
  const test::TempDir dir;
  const auto put = [&](const std::string& file, const std::string& text) {
    std::filesystem::create_directories((dir / file).parent_path());
    std::ofstream(dir / file) << text;
  };
  put("two/a/b/memory.max", "max\n"), put("two/a/memory.max", "4000\n"), put("two/memory.max", "9000\n");
  put("two/a/memory.stat", "file 7\nanon 300\n");
  const auto two = cgroup_memory("0::/a/b\n", dir / "two");
  ASSERT_TRUE(two);
  EXPECT_EQ(two->limit, 4000u);
  EXPECT_EQ(two->used, 300u);
  put("one/memory/x/memory.limit_in_bytes", "5000\n"), put("one/memory/x/memory.stat", "total_rss 12\n");
  put("one/memory/memory.limit_in_bytes", "9223372036854771712\n");
  const auto one = cgroup_memory("9:cpu:/y\n4:memory:/x\n", dir / "one");
  ASSERT_TRUE(one);
  EXPECT_EQ(one->limit, 5000u);
  EXPECT_EQ(one->used, 12u);
  EXPECT_FALSE(cgroup_memory("4:memory:/\n", dir / "one"));
  const auto inside = cgroup_memory("0::/not/seen/from/here\n", dir / "two");  // of a container
  ASSERT_TRUE(inside);
  EXPECT_EQ(inside->limit, 9000u);
}

TEST(SystemMemory, OfThisMachine) {
  const SystemMemory m = system_memory();
  EXPECT_GT(m.usable(), 0u);
  EXPECT_LE(m.usable(), m.available);
  EXPECT_LE(m.available, m.total);
}

}  // namespace
}  // namespace hearth::tools
