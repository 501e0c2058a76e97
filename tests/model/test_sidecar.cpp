// The sidecar: what is written is read back, what others keep in it survives, and what is wrong is refused.
#include <gtest/gtest.h>

#include <fstream>

#include "core/error.h"
#include "model/model.h"
#include "model/sidecar.h"
#include "support/errors.h"
#include "support/paths.h"
#include "support/tiny_gguf.h"

namespace hearth::model {
namespace {

using test::message_of;

class SidecarTest : public testing::Test {
 protected:
  void SetUp() override {
    test::write_tiny_gguf(model_path_, {});
    model_ = Model::load(model_path_);
  }

  // Statistics with something in every field.
  Sidecar filled() const {
    Sidecar s = Sidecar::empty_for(model_->file(), model_->config());
    Statistics& p = s.statistics;
    p.source = "test", p.tokens = 1000, p.tokens_heldout = 100, p.threshold = 0.25f;
    p.texts = {{"a.txt", "00ff", 12}, {"b.txt", "11ee", 1u << 30}};
    p.window = 512, p.heldout_every = 8, p.sequences_done = 17, p.complete = true;
    std::mt19937 rng(3);
    for (LayerStatistics& l : p.layers) {
      for (uint64_t& a : l.active) a = static_cast<uint64_t>(test::random_int(rng, 0, 1000));
      for (size_t i = 0; i < l.active.size(); ++i) {
        l.active_heldout.push_back(static_cast<uint64_t>(test::random_int(rng, 0, 100)));
        l.impact.push_back(static_cast<double>(i) * 0.1);
      }
      l.previous = {400.5, 999};
      l.recent = {800.25, 900};
      l.named = {33, 22};
      l.unions = {{{20000, 990}, {30000, 950}, {40000, 900}}};
      l.moments = test::random_normal(rng, static_cast<size_t>(s.n_embd * s.n_embd));
    }
    return s;
  }

  test::TempDir dir_;
  std::filesystem::path model_path_ = dir_ / "tiny.gguf", path_ = dir_ / "tiny.sparse.gguf";
  std::optional<Model> model_;
};

TEST_F(SidecarTest, IsReadBackAsWritten) {
  const Sidecar written = filled();
  written.write(path_);
  const auto read = Sidecar::find(model_->file(), model_->config());
  ASSERT_TRUE(read.has_value());
  const Statistics &a = written.statistics, &b = read->statistics;
  EXPECT_EQ(read->model_name, "tiny");
  EXPECT_EQ(b.source, a.source);
  EXPECT_EQ(b.tokens, a.tokens);
  EXPECT_EQ(b.tokens_heldout, a.tokens_heldout);
  EXPECT_EQ(b.threshold, a.threshold);
  EXPECT_EQ(b.texts, a.texts);
  EXPECT_EQ(b.texts[1].name, "b.txt");
  EXPECT_EQ(b.window, a.window);
  EXPECT_EQ(b.heldout_every, a.heldout_every);
  EXPECT_EQ(b.sequences_done, a.sequences_done);
  EXPECT_TRUE(b.complete);
  ASSERT_EQ(b.layers.size(), a.layers.size());
  for (size_t l = 0; l < a.layers.size(); ++l) {
    EXPECT_EQ(b.layers[l].active, a.layers[l].active);
    EXPECT_EQ(b.layers[l].active_heldout, a.layers[l].active_heldout);
    EXPECT_EQ(b.layers[l].impact, a.layers[l].impact);
    EXPECT_EQ(b.layers[l].moments, a.layers[l].moments);
    EXPECT_EQ(b.layers[l].previous.sum, 400.5);
    EXPECT_EQ(b.layers[l].recent.tokens, 900u);
    EXPECT_EQ(b.layers[l].named.per_active(), 1.5);
    EXPECT_EQ(b.layers[l].unions, a.layers[l].unions);
  }
}

// As they were written before unions were counted.
TEST_F(SidecarTest, UnionsAreOptional) {
  filled().write(path_);
  {
    const gguf::File file = gguf::File::open(path_);
    gguf::Writer out(path_);
    for (const auto& kv : file.metadata()) {
      if (!kv.key.starts_with("hearth-sparse.profile.union_")) out.set(kv.key, kv.value);
    }
    std::vector<std::pair<size_t, std::span<const std::byte>>> tensors;
    for (const auto& t : file.tensors()) {
      tensors.push_back({out.add_tensor(t.name, t.traits->type, t.ne), file.data(t)});
    }
    out.begin();
    for (const auto& [index, data] : tensors) out.write(index, 0, data);
    out.finish();
  }
  const Sidecar old = Sidecar::read(path_);
  EXPECT_EQ(old.statistics.tokens, 1000u);
  for (const NeuronUnion& u : old.statistics.layers[1].unions) EXPECT_FALSE(u.share(96).has_value());
}

TEST_F(SidecarTest, CarriesOverWhatItDoesNotKnow) {
  filled().write(path_);
  {  // somebody adds a predictor
    const gguf::File file = gguf::File::open(path_);
    gguf::Writer out(path_);
    for (const auto& kv : file.metadata()) out.set(kv.key, kv.value);
    std::vector<std::pair<size_t, std::span<const std::byte>>> tensors;
    for (const auto& t : file.tensors())
      tensors.push_back({out.add_tensor(t.name, t.traits->type, t.ne), file.data(t)});
    out.set("hearth-sparse.predictor.method", std::string("svd"));
    const std::vector<float> fc1 = {1, 2, 3, 4};
    tensors.push_back({out.add_tensor("blk.0.fc1.weight", DType::f32, {2, 2}), std::as_bytes(std::span(fc1))});
    out.begin();
    for (const auto& [index, data] : tensors) out.write(index, 0, data);
    out.finish();
  }
  Sidecar s = Sidecar::read(path_);
  s.statistics.tokens = 2000;
  s.write(path_);  // onto the very file it was read from
  const Sidecar again = Sidecar::read(path_);
  EXPECT_EQ(again.statistics.tokens, 2000u);
  EXPECT_EQ(again.file->require<std::string>("hearth-sparse.predictor.method"), "svd");
  const auto* fc1 = again.file->find_tensor("blk.0.fc1.weight");
  ASSERT_NE(fc1, nullptr);
  EXPECT_EQ(reinterpret_cast<const float*>(again.file->data(*fc1).data())[3], 4.0f);
}

TEST_F(SidecarTest, BelongsToOneModel) {
  filled().write(path_);
  test::TinyGguf other;
  other.seed = 2;  // the same shapes, other weights
  test::write_tiny_gguf(model_path_, other);
  const Model same_shape = Model::load(model_path_);
  EXPECT_NE(message_of([&] { Sidecar::find(same_shape.file(), same_shape.config()); }).find("made for another model"),
            std::string::npos);
  other.n_ff = 128;
  test::write_tiny_gguf(model_path_, other);
  const Model other_shape = Model::load(model_path_);
  EXPECT_NE(message_of([&] { Sidecar::find(other_shape.file(), other_shape.config()); }).find("2 layers of 96 neurons"),
            std::string::npos);
  EXPECT_NE(message_of([&] { Sidecar::read(model_path_); }).find("is no sidecar"), std::string::npos);
}

TEST_F(SidecarTest, AbsenceIsNoErrorUnlessItWasNamed) {
  EXPECT_FALSE(Sidecar::find(model_->file(), model_->config()).has_value());
  EXPECT_THROW(Sidecar::find(model_->file(), model_->config(), dir_ / "absent.gguf"), Error);
}

TEST_F(SidecarTest, RefusesContradictions) {
  const auto damaged = [&](const std::function<void(Sidecar&)>& damage) {
    Sidecar s = filled();
    damage(s);
    s.write(path_);
    return message_of([&] { Sidecar::read(path_); });
  };
  EXPECT_EQ(damaged([](Sidecar&) {}), "no error");
  EXPECT_NE(damaged([](Sidecar& s) { s.statistics.layers[1].active[5] = 1001; }).find("1001 of 1000"),
            std::string::npos);
  EXPECT_NE(damaged([](Sidecar& s) { s.statistics.layers[0].active_heldout[5] = 101; }).find("101 of 100"),
            std::string::npos);
  EXPECT_NE(damaged([](Sidecar& s) { s.statistics.layers[0].impact[0] = -1; }).find("impact"), std::string::npos);
  EXPECT_NE(damaged([](Sidecar& s) { s.statistics.layers[0].impact[0] = NAN; }).find("impact"), std::string::npos);
  EXPECT_NE(damaged([](Sidecar& s) { s.statistics.layers[0].moments[9] = INFINITY; }).find("moments"),
            std::string::npos);
  EXPECT_NE(damaged([](Sidecar& s) { s.statistics.layers[0].previous.sum = 1000; }).find("coactive_previous"),
            std::string::npos);
  EXPECT_NE(damaged([](Sidecar& s) { s.statistics.layers[1].unions[2].neurons = 900 * 96 + 1; }).find("unions of 8"),
            std::string::npos);
  EXPECT_NE(damaged([](Sidecar& s) { s.statistics.layers[1].unions[0].windows = 1001; }).find("unions of 2"),
            std::string::npos);
  EXPECT_NE(damaged([](Sidecar& s) { s.statistics.threshold = NAN; }).find("threshold"), std::string::npos);
}

TEST_F(SidecarTest, KeepsThresholdsAndWhatTheyLeaveActive) {
  Sidecar written = filled();
  written.thresholds = TunedThresholds{{0.5f, 0.25f}, "{}", {}, 60};
  for (const int64_t n : written.n_ff) written.thresholds->active.emplace_back(static_cast<size_t>(n), 7u);
  written.thresholds->active[1][3] = 60;
  written.write(path_);
  Sidecar read = Sidecar::read(path_);
  ASSERT_TRUE(read.thresholds.has_value());
  EXPECT_EQ(read.thresholds->by_layer, written.thresholds->by_layer);
  EXPECT_EQ(read.thresholds->tokens, 60u);
  EXPECT_EQ(read.thresholds->active, written.thresholds->active);
  EXPECT_TRUE(read.thresholds->inside.empty());
  read.thresholds->inside = {{}, {12.5, 60}};  // of a mixture's layer
  read.write(path_);
  read = Sidecar::read(path_);
  ASSERT_EQ(read.thresholds->inside.size(), 2u);
  EXPECT_FALSE(read.thresholds->inside[0].mean());
  EXPECT_EQ(read.thresholds->inside[1].mean(), 12.5 / 60);
  read.thresholds->inside[1].sum = 61;
  read.write(path_);
  EXPECT_NE(message_of([&] { Sidecar::read(path_); }).find("inside of layer 1 is 61 over 60 tokens"),
            std::string::npos);
  read.thresholds->inside.clear();
  read.thresholds->active[0][0] = 61;
  read.write(path_);
  EXPECT_NE(message_of([&] { Sidecar::read(path_); }).find("61 of 60"), std::string::npos);
  read.thresholds->active.clear(), read.thresholds->tokens = 0;  // not counted
  read.write(path_);
  EXPECT_TRUE(Sidecar::read(path_).thresholds->active.empty());
}

// Cut anywhere, the file is refused and never crashes the reader.
TEST_F(SidecarTest, RefusesEveryTruncation) {
  filled().write(path_);
  std::ifstream in(path_, std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(in)), {});
  const auto cut = dir_ / "cut.gguf";
  for (size_t size = 1; size < whole.size(); size += 1 + size / 16) {
    std::ofstream(cut, std::ios::binary) << whole.substr(0, size);
    EXPECT_THROW(Sidecar::read(cut), Error) << size;
  }
}

TEST_F(SidecarTest, LiesBesideTheModel) {
  EXPECT_EQ(sidecar_path("/m/llama.gguf"), "/m/llama.sparse.gguf");
  EXPECT_EQ(sidecar_path("/m/llama-00001-of-00003.gguf"), "/m/llama.sparse.gguf");
  EXPECT_EQ(sidecar_path("llama"), "llama.sparse.gguf");
}

TEST_F(SidecarTest, FingerprintSeesWeightsTypesAndActivation) {
  const std::string original = fingerprint(model_->file());
  EXPECT_EQ(original.size(), 16u);
  EXPECT_EQ(fingerprint(gguf::File::open(model_path_)), original);
  for (const auto& change : {+[](test::TinyGguf& m) { m.seed = 9; }, +[](test::TinyGguf& m) { m.type = DType::f16; },
                             +[](test::TinyGguf& m) { m.activation = "silu"; }}) {
    test::TinyGguf m;
    change(m);
    test::write_tiny_gguf(dir_ / "changed.gguf", m);
    EXPECT_NE(fingerprint(gguf::File::open(dir_ / "changed.gguf")), original);
  }
}

}  // namespace
}  // namespace hearth::model
