// A side of a divided model that falls silent ends the run with one line, after a stated time: never a hang, and never
// a result that is missing a part. The oracle stands in for the GPU, with a patience of a fraction of a second.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "core/error.h"
#include "cpu/cpu.h"
#include "engine/engine.h"
#include "support/halves.h"
#include "support/paths.h"
#include "support/stalling_device.h"
#include "support/tiny_model.h"

namespace hearth {
namespace {

using engine::Engine;
using engine::EngineOptions;
using namespace std::chrono_literals;

constexpr auto kPatience = 200ms;

struct Divided {
  explicit Divided(EngineOptions options = {}) {
    options.patience = kPatience;
    EXPECT_FALSE(model.prepare_sparse().has_value());
    engine.emplace(model, main, options, engine::Division{host, test::halves(model.config()), team});
  }
  test::TempDir dir;
  model::Model model = model::Model::load(test::write_tiny_model(dir / "m.gguf"));
  ThreadTeam team{1};
  std::unique_ptr<Device> main_device = cpu::make_reference_device(), host_device = cpu::make_device(team);
  test::StallingDevice main{*main_device}, host{*host_device};
  std::optional<Engine> engine;
};

std::string error_of(Engine& e, std::vector<int32_t> ids) {
  try {
    engine::Sequence text = e.sequence();
    e.eval(text, ids);
  } catch (const Error& error) {
    return error.what();
  }
  return "none";
}

TEST(Stall, ACpuThatFallsSilentIsAnError) {
  Divided d;
  EXPECT_EQ(error_of(*d.engine, {1}), "none");
  d.host.stall_for(3 * kPatience);
  EXPECT_EQ(error_of(*d.engine, {2}), "the CPU has not answered a layer in 0.2 s; it may have stopped");
  const std::string again = error_of(*d.engine, {3});
  EXPECT_NE(again.find("this run cannot go on"), std::string::npos) << again;
}

TEST(Stall, ADeviceThatFallsSilentIsAnError) {
  Divided d;
  EXPECT_EQ(error_of(*d.engine, {1, 2, 3}), "none");
  d.main.stall_for(3 * kPatience);
  EXPECT_EQ(error_of(*d.engine, {4, 5}), "the device has not asked for its next layer in 0.2 s; it may have stopped");
}

TEST(Stall, SlowerThanUsualIsNoError) {
  Divided d;
  d.host.stall_for(kPatience / 4), d.main.stall_for(kPatience / 4);
  EXPECT_EQ(error_of(*d.engine, {1}), "none");
}

// The error of the side that had one is told, not that the other one was left alone.
TEST(Stall, TheCauseIsReportedAndNotTheConsequence) {
  class Failing final : public ForwardingDevice {
   public:
    using ForwardingDevice::ForwardingDevice;
    void ffn_sparse(const FfnShard&, const SparseArgs&, const Input&, int64_t, Vector, float*,
                    const NextNorm*) override {
      fail("no such FFN");
    }
  };
  for (const bool on_host : {true, false}) {
    Divided d;
    Failing failing(on_host ? *d.host_device : *d.main_device);
    Device& main = on_host ? *d.main_device : failing;
    Device& host = on_host ? failing : *d.host_device;
    d.engine.reset();
    const auto fresh_main = cpu::make_reference_device();
    Engine e(d.model, main, {.patience = kPatience}, {host, test::halves(d.model.config()), d.team});
    EXPECT_EQ(error_of(e, {1}), "no such FFN") << (on_host ? "on the host" : "on the main device");
  }
}

// A thread that never comes back cannot be stopped: the process is ended, by the handler, with the same line.
TEST(StallDeathTest, WhatIsStuckForEverEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto end = [](const std::string& why) {
    std::fprintf(stderr, "error: %s\n", why.c_str());
    std::_Exit(1);
  };
  for (const bool on_host : {true, false}) {
    const char* line = on_host ? "error: the CPU has not answered a layer in 0.2 s"
                               : "error: the device has not asked for its next layer in 0.2 s";
    EXPECT_EXIT(
        {
          Divided d({.on_stall = end});
          (on_host ? d.host : d.main).stall_for(1h);
          error_of(*d.engine, {1});
        },
        testing::ExitedWithCode(1), line);
  }
}

// Results that the device alone works at, after the last hand-off.
TEST(StallDeathTest, ADeviceThatNeverFinishesEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  HostMailbox box(1, 1);
  EXPECT_EXIT(
      {
        engine::StallWatch watch(box.flags(), 50ms, 50ms, [](const std::string& why) {
          std::fprintf(stderr, "error: %s\n", why.c_str());
          std::_Exit(1);
        });
        watch.enter(engine::StallWatch::Phase::results);
        std::this_thread::sleep_for(1h);
      },
      testing::ExitedWithCode(1), "error: the device has not finished in 0.1 s; it may have stopped");
}

// The same of a model that is not divided.
TEST(StallDeathTest, AnUndividedModelOnAStuckDeviceEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  class Stuck final : public ForwardingDevice {
   public:
    using ForwardingDevice::ForwardingDevice;
    void download(void*, const void*, size_t) override { std::this_thread::sleep_for(1h); }
  };
  EXPECT_EXIT(
      {
        Divided d;
        Stuck device(*d.main_device);
        const auto end = [](const std::string& why) {
          std::fprintf(stderr, "error: %s\n", why.c_str());
          std::_Exit(1);
        };
        Engine e(d.model, device, {.patience = kPatience, .on_stall = end});
        error_of(e, {1});
      },
      testing::ExitedWithCode(1), "error: the device has not finished in 0.4 s; it may have stopped");
}

TEST(Stall, TheWatchLeavesAloneWhatEnds) {
  HostMailbox box(1, 1);
  std::atomic<int> calls{0};
  engine::StallWatch watch(box.flags(), 200ms, 200ms, [&](const std::string&) { ++calls; });
  for (int i = 0; i < 20; ++i) {  // longer than patience and grace, taken together
    watch.enter(engine::StallWatch::Phase::results);
    std::this_thread::sleep_for(30ms);
    watch.enter(engine::StallWatch::Phase::idle);
    std::this_thread::sleep_for(30ms);  // more than the watch's step: it sees the end
  }
  box.abandon();  // a failed pass that came to its end
  std::this_thread::sleep_for(400ms);
  EXPECT_EQ(calls, 0);
  watch.enter(engine::StallWatch::Phase::hand_offs);
  for (int i = 0; i < 1000 && calls == 0; ++i) std::this_thread::sleep_for(10ms);
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace hearth
