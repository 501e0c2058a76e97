#pragma once
// Runs a case on the SIMD device, with every instruction set of this machine, and compares it with the reference device,
// and bit for bit with itself with other numbers of threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/cpu.h"
#include "cpu/device_case.h"

namespace hearth::test {

using Results = std::vector<std::pair<std::string, std::vector<double>>>;

inline Results run_case(const Case& c, Device& device) {
  device.reserve(c.limits);
  Bound bound(device);
  const auto run = c.bind(bound);
  bound.reset();
  run();
  return bound.read();
}

inline bool same_bits(double a, double b) {
  return a == b || (std::isnan(a) && std::isnan(b));
}

// Elements that an operation leaves alone (NaN in both, behind a stride) agree; all others within the tolerance.
inline void compare(const Case& c, const Results& expected, const Results& got, const std::string& device) {
  ASSERT_EQ(expected.size(), got.size());
  ASSERT_EQ(expected.size(), c.tolerance.size());
  for (size_t o = 0; o < expected.size(); ++o) {
    const auto& [name, want] = expected[o];
    const std::vector<double>& have = got[o].second;
    ASSERT_EQ(want.size(), have.size());
    ASSERT_EQ(want.size(), c.tolerance[o].size());
    double squares = 0, largest_tolerance = 0, worst = 0;
    size_t n = 0, worst_at = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(std::isnan(want[i]), std::isnan(have[i]))
          << c.name << " on " << device << ": " << name << "[" << i << "]";
      if (std::isnan(want[i])) continue;
      ASSERT_TRUE(std::isfinite(want[i]) && std::isfinite(have[i])) << c.name << ": " << name << "[" << i << "]";
      squares += want[i] * want[i];
      ++n;
      largest_tolerance = std::max(largest_tolerance, c.tolerance[o][i]);
      const double excess = std::fabs(want[i] - have[i]) - c.tolerance[o][i];
      if (excess > worst) {
        worst = excess;
        worst_at = i;
      }
    }
    EXPECT_LE(worst, 0.0) << c.name << " on " << device << ": " << name << "[" << worst_at << "] is " << have[worst_at]
                          << ", expected " << want[worst_at] << " within " << c.tolerance[o][worst_at];
    if (largest_tolerance == 0) continue;  // exact, or empty
    EXPECT_LE(largest_tolerance, c.vacuous * std::sqrt(squares / static_cast<double>(n)))
        << c.name << ": the bound on " << name << " says nothing";
  }
}

inline void check(const Case& c) {
  SCOPED_TRACE(c.name);
  const auto reference = cpu::make_reference_device();
  const Results expected = run_case(c, *reference);
  for (const cpu::Isa isa : cpu::available_isas()) {
    Results one;
    for (const int threads : {1, 2, 3, 5}) {
      static std::map<int, std::unique_ptr<ThreadTeam>> teams;
      auto& team = teams[threads];
      if (!team) team = std::make_unique<ThreadTeam>(threads);
      const auto device = cpu::make_device(*team, isa);
      const Results got = run_case(c, *device);
      if (threads == 1) {
        compare(c, expected, got, device->name());
        one = got;
        continue;
      }
      for (size_t o = 0; o < one.size(); ++o) {
        for (size_t i = 0; i < one[o].second.size(); ++i) {
          ASSERT_TRUE(same_bits(one[o].second[i], got[o].second[i]))
              << device->name() << ": " << one[o].first << "[" << i << "] is " << got[o].second[i]
              << ", with one thread " << one[o].second[i];
        }
      }
    }
  }
}

}  // namespace hearth::test
