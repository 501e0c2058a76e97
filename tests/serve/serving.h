#pragma once
// The demo model behind a scheduler whose engine runs in a thread of its own: on the CPU, or divided between a stand-in for a
// GPU and the CPU.
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/thread_team.h"
#include "cpu/cpu.h"
#include "engine/engine.h"
#include "serve/scheduler.h"
#include "support/divisions.h"
#include "support/paths.h"
#include "text/tokenizer.h"

namespace hearth::test {

using namespace std::chrono_literals;

class Serving {
 public:
  explicit Serving(serve::SchedulerOptions options, const Division* division = nullptr)
      : model_(model::Model::load(source_dir() / "models" / "hearth-demo.gguf")),
        device_(cpu::make_device(team_)),
        engine_(make_engine(options, division)),
        tokenizer_(text::Tokenizer::load(model_.file())),
        scheduler_(*engine_, *tokenizer_, joining(options, division == nullptr)),
        thread_([this] { scheduler_.run(); }) {}
  ~Serving() {
    scheduler_.stop(0ms);
    thread_.join();
  }
  Serving(const Serving&) = delete;
  Serving& operator=(const Serving&) = delete;

  serve::Scheduler& scheduler() { return scheduler_; }
  const text::Tokenizer& tokenizer() const { return *tokenizer_; }
  int64_t n_pages() const { return scheduler_.stats().pages; }

  // A story of so many tokens, another for each seed.
  std::vector<int32_t> prompt(size_t n, uint32_t seed) const {
    std::vector<int32_t> ids = tokenizer_->encode("Once upon a time there was a little dog who ");
    while (ids.size() < n) ids.push_back(static_cast<int32_t>(500 + (seed * 7919 + ids.size() * 104729) % 5000));
    ids.resize(n);
    return ids;
  }
  // Whatever else is free soon: pages of ended texts, but for kept beginnings.
  bool settles() const {
    for (int i = 0; i < 400; ++i) {
      const serve::SchedulerStats s = scheduler_.stats();
      if (s.running.empty() && s.n_waiting == 0) return true;
      std::this_thread::sleep_for(10ms);
    }
    return false;
  }

 private:
  static serve::SchedulerOptions joining(serve::SchedulerOptions options, bool undivided) {
    options.join_prompts = undivided;  // the demo's matrices are quantised
    return options;
  }
  std::unique_ptr<engine::Engine> make_engine(const serve::SchedulerOptions& options, const Division* division) {
    const engine::EngineOptions o{.n_ctx = 512, .n_sequences = options.n_parallel};
    if (division == nullptr) return std::make_unique<engine::Engine>(model_, *device_, o);
    std::mt19937 rng(1);
    placement_ = placement_of(*division, model_, false, rng);
    stand_in_ = cpu::make_reference_device();
    return std::make_unique<engine::Engine>(model_, *stand_in_, o, engine::Division{*device_, placement_, team_});
  }

  ThreadTeam team_{2};
  model::Model model_;
  std::unique_ptr<Device> device_, stand_in_;  // the CPU's; the main device of a divided model
  engine::Placement placement_;
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<text::Tokenizer> tokenizer_;
  serve::Scheduler scheduler_;
  std::thread thread_;
};

struct Collected {
  std::vector<int32_t> ids;
  std::string text;
  serve::End end;
};
// All of a job's events; fails the test after a minute without one.
inline Collected collect(serve::Job& job) {
  Collected c;
  while (true) {
    const auto event = job.next(60s);
    if (!event) {
      ADD_FAILURE() << "nothing came for a minute";
      return c;
    }
    if (const auto* piece = std::get_if<serve::Piece>(&*event)) {
      c.text += piece->text;
      if (piece->id >= 0) c.ids.push_back(piece->id);
    } else {
      c.end = std::get<serve::End>(*event);
      return c;
    }
  }
}

}  // namespace hearth::test
