// Plan files: read back as written, checked against the model, refused when they are none.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "offline/plan/plan_file.h"
#include "offline/plan/planner.h"
#include "plan_cases.h"
#include "support/errors.h"
#include "support/paths.h"

namespace hearth::offline {
namespace {

using engine::Selection;
using engine::Where;
using test::message_of;

class PlanFile : public testing::Test {
 protected:
  PlanFile() {
    ModelShape shape = test::llama_7b();
    shape.layers.resize(3);
    for (LayerShape& l : shape.layers) l.n_ff = 40;
    const Planner planner(shape, typical_frequencies(shape, 0.11), {.n_ctx = 2048});
    placement_ = planner.plan(planner.smallest_budget() + 700'000'000).placement;
    config_.n_layer = 3, config_.n_ff = 40;
  }
  engine::Placement placement_;
  model::Config config_;
  test::TempDir dir_;
};

TEST_F(PlanFile, IsReadBackAsWritten) {
  placement_.layers[0].selection = Selection::predictor, placement_.layers[0].predictor = Where::gpu;
  placement_.layers[0].gpu_bucket = {1, 3}, placement_.layers[0].gpu_linked = {2, 30};
  placement_.layers[1].look_ahead = true;
  save_placement(placement_, dir_ / "p.json");
  const engine::Placement p = load_placement(dir_ / "p.json");
  EXPECT_EQ(p.layers, placement_.layers);
  EXPECT_EQ(p.layers[0].gpu_linked, (std::vector<int32_t>{2, 30}));
  EXPECT_EQ(p.model_fingerprint, placement_.model_fingerprint);
  EXPECT_EQ(p.n_ctx, placement_.n_ctx);
  EXPECT_EQ(p.n_batch, placement_.n_batch);
  EXPECT_EQ(p.vram_budget, placement_.vram_budget);
  EXPECT_EQ(p.embedding, placement_.embedding);
  EXPECT_EQ(p.output, placement_.output);
  EXPECT_EQ(p.planned_bytes(), placement_.planned_bytes());
  EXPECT_NO_THROW(engine::check_placement(p, config_, "0123456789abcdef"));
}

TEST_F(PlanFile, IsCheckedAgainstTheModel) {
  const auto message = [&](const std::function<void(engine::Placement&)>& damage) {
    engine::Placement p = placement_;
    damage(p);
    return message_of([&] { engine::check_placement(p, config_, "0123456789abcdef"); });
  };
  const auto has = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  EXPECT_EQ(message([](auto&) {}), "no error");
  has(message([](auto& p) { p.model_fingerprint = std::string(16, 'f'); }), "another model");
  has(message([](auto& p) { p.layers.pop_back(); }), "2 layers and the model 3");
  has(message([](auto& p) { p.layers[1].gpu_bucket = {3, 40}; }), "neuron 40");
  has(message([](auto& p) { p.layers[1].gpu_bucket = {-1}; }), "neuron -1");
  has(message([](auto& p) { p.layers[1].gpu_bucket = {3, 3}; }), "not ascending");
  const auto link = [](auto& p, std::vector<int32_t> hot) {
    p.layers[2].selection = Selection::predictor, p.layers[2].predictor = Where::gpu;
    p.layers[2].gpu_bucket = std::move(hot), p.layers[2].gpu_linked = {5};
  };
  EXPECT_EQ(message([&](auto& p) { link(p, {3}); }), "no error");
  has(message([&](auto& p) { link(p, {3, 5}); }), "neuron 5 of layer 2 in gpu_bucket and in gpu_linked");
  has(message([&](auto& p) { link(p, {}); }), "over the link");
  has(message([&](auto& p) { link(p, {3}), p.layers[2].selection = Selection::gate; }), "over the link");
  has(message([](auto& p) { p.vram_budget = 10; }), "its budget is 10");
  has(message([](auto& p) { p.n_ctx = 0; }), "context of 0");
}

TEST_F(PlanFile, RefusesWhatIsNoPlan) {
  const nlohmann::json good = placement_json(placement_);
  const auto refused = [&](const std::function<void(nlohmann::json&)>& damage) {
    nlohmann::json j = good;
    damage(j);
    EXPECT_THROW(parse_placement(j.dump(), "p.json"), Error) << j.dump().substr(0, 200);
  };
  EXPECT_NO_THROW(parse_placement(good.dump(), "p.json"));
  for (const auto& [key, value] : good.items()) {
    refused([&](auto& j) { j.erase(key); });
    refused([&](auto& j) { j[key] = nullptr; });
    refused([&](auto& j) { j[key] = -1.5; });
  }
  nlohmann::json old = good;
  old["version"] = 2, old["layers"][0]["gpu_gates"] = {5};
  EXPECT_EQ(message_of([&] { parse_placement(old.dump(), "p.json"); }),
            "'p.json' is a plan of version 2, this hearth reads version 5; plan again");
  refused([](auto& j) { j["layers"][0]["look_ahead"] = 1; });
  refused([](auto& j) { j["format"] = "other"; });
  refused([](auto& j) { j["output"] = "tpu"; });
  refused([](auto& j) { j["layers"][0] = 7; });
  refused([](auto& j) { j["layers"][0]["selection"] = "guess"; });
  refused([](auto& j) { j["layers"][0]["gpu_bucket"] = {1, "2"}; });
  refused([](auto& j) { j["layers"][0]["gpu_bucket"] = {-1}; });
  refused([](auto& j) { j["layers"][0]["gpu_bucket"] = {4294967296}; });
  refused([](auto& j) { j["layers"][0]["gpu_expert_neurons"] = {1, 2}; });
  refused([](auto& j) { j["layers"][0]["gpu_expert_neurons"] = {{1, "2"}}; });
  refused([](auto& j) { j["layers"][0].erase("gpu_expert_neurons"); });
  const std::string text = good.dump();
  for (size_t n = 0; n < text.size(); n += 1 + n / 8) {
    EXPECT_THROW(parse_placement(text.substr(0, n), "p.json"), Error) << n;
  }
  EXPECT_THROW(load_placement(dir_ / "absent.json"), Error);
  EXPECT_THROW(parse_placement("[1,2]", "p.json"), Error);
}

}  // namespace
}  // namespace hearth::offline
