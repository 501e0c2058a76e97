// Predictors: those of PowerInfer's files are bound, those of a sidecar are written, read back and attached, and what
// is wrong is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <limits>

#include "core/error.h"
#include "model/attach_predictors.h"
#include "model/model.h"
#include "model/predictors.h"
#include "model/sidecar.h"
#include "support/errors.h"
#include "support/paths.h"
#include "support/random.h"
#include "support/tiny_gguf.h"

namespace hearth::model {
namespace {

using test::message_of;

void expect_part(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

// The same file with PowerInfer's magic number.
void make_powerinfer(const std::filesystem::path& path) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.write("PWRI", 4);
}

// Copies a GGUF file with one more key.
template <typename T>
void add_key(const std::filesystem::path& path, const std::string& key, T value) {
  const gguf::File file = gguf::File::open(path);
  gguf::Writer out(path);
  for (const auto& kv : file.metadata()) out.set(kv.key, kv.value);
  out.set(key, value);
  std::vector<std::pair<size_t, std::span<const std::byte>>> tensors;
  for (const auto& t : file.tensors()) tensors.push_back({out.add_tensor(t.name, t.traits->type, t.ne), file.data(t)});
  out.begin();
  for (const auto& [index, data] : tensors) out.write(index, 0, data);
  out.finish();
}

class PredictorsTest : public testing::Test {
 protected:
  void SetUp() override { write_model({}); }

  void write_model(const test::TinyGguf& m) {
    test::write_tiny_gguf(model_path_, m);
    model_ = Model::load(model_path_);
  }

  // Every method, and both inputs of gate-bits.
  std::vector<PredictorData> four_kinds() const {
    const Config& c = model_->config();
    const int64_t rank = 32;
    std::mt19937 rng(5);
    const auto matrix = [&](int64_t rows, int64_t cols, DType type) {
      return OwnedMatrix::from(test::random_normal(rng, static_cast<size_t>(rows * cols)).data(), rows, cols, type);
    };
    std::vector<PredictorData> layers(4);
    for (PredictorData& p : layers) p.threshold = test::random_normal(rng, static_cast<size_t>(c.n_ff));
    layers[0].method = "svd", layers[0].fc1 = matrix(rank, c.n_embd, DType::f16);
    layers[0].fc2 = matrix(c.n_ff, rank, DType::q8_0);
    layers[1].method = "mlp", layers[1].relu = true, layers[1].input = PredictorInput::residual;
    layers[1].fc1 = matrix(rank, c.n_embd, DType::q4_0), layers[1].fc2 = matrix(c.n_ff, rank, DType::q4_0);
    layers[1].fc1_bias = test::random_normal(rng, static_cast<size_t>(rank));
    layers[2].method = "gate-bits", layers[2].fc2 = matrix(c.n_ff, c.n_embd, DType::q8_0);
    layers[3].method = "gate-bits", layers[3].fc2 = matrix(c.n_ff, c.n_embd, DType::q4_0);
    layers[3].input = PredictorInput::residual;
    layers[0].figures = {0.99f, 0.9f, 0.991f, 0.6f, 0.1f, 0.15f, 4096};
    return layers;
  }

  Sidecar sidecar_with(std::vector<PredictorData> layers) const {
    Sidecar s = Sidecar::empty_for(model_->file(), model_->config());
    s.new_predictors = std::move(layers);
    return s;
  }

  test::TempDir dir_;
  std::filesystem::path model_path_ = dir_ / "tiny.gguf", path_ = dir_ / "tiny.sparse.gguf";
  std::optional<Model> model_;
};

void expect_same(const Matrix& a, const Matrix& b) {
  ASSERT_EQ(static_cast<bool>(a), static_cast<bool>(b));
  if (!a) return;
  EXPECT_EQ(a.type, b.type);
  EXPECT_EQ(a.rows, b.rows);
  EXPECT_EQ(a.cols, b.cols);
  EXPECT_EQ(std::memcmp(a.data, b.data, a.bytes()), 0);
}
void expect_same(const Vector& a, const Vector& b) {
  ASSERT_EQ(a.n, b.n);
  for (int64_t i = 0; i < a.n; ++i) EXPECT_EQ(a.data[i], b.data[i]);
}
void expect_same(const LayerPredictor& a, const LayerPredictor& b) {
  EXPECT_EQ(a.method, b.method);
  EXPECT_EQ(a.input, b.input);
  EXPECT_EQ(a.weights.relu, b.weights.relu);
  expect_same(a.weights.fc1, b.weights.fc1);
  expect_same(a.weights.fc1_bias, b.weights.fc1_bias);
  expect_same(a.weights.fc2, b.weights.fc2);
  expect_same(a.weights.threshold, b.weights.threshold);
}

TEST_F(PredictorsTest, SidecarHoldsEveryKind) {
  write_model({.n_layer = 5});
  std::vector<PredictorData> layers = four_kinds();
  layers.emplace_back();  // the fifth layer has none
  sidecar_with(layers).write(path_);
  const Sidecar read = *Sidecar::find(model_->file(), model_->config());
  const auto stored = read_predictors(*read.file, read.n_embd, read.n_ff);
  ASSERT_EQ(stored.size(), 5u);
  for (size_t l = 0; l < 4; ++l) {
    SCOPED_TRACE(layers[l].method);
    expect_same(stored[l].predictor, layers[l].view());
    EXPECT_EQ(predictor_bytes(stored[l].predictor), predictor_bytes(layers[l].view()));
  }
  EXPECT_FALSE(stored[4].predictor.weights);
  EXPECT_EQ(stored[0].figures.loss_recall, 0.991f);
  EXPECT_EQ(stored[0].figures.tokens, 4096u);
  // fc1 f16 [32, 32], fc2 q8_0 [32, 96], 96 thresholds
  EXPECT_EQ(predictor_bytes(stored[0].predictor), 32u * 32 * 2 + 96 * 34 + 96 * 4);
  // fc2 q8_0 [96, 32], 96 thresholds
  EXPECT_EQ(predictor_bytes(stored[2].predictor), 96u * 34 + 96 * 4);
}

TEST_F(PredictorsTest, AreCarriedOverAndReplaced) {
  write_model({.n_layer = 4});
  sidecar_with(four_kinds()).write(path_);
  Sidecar s = Sidecar::read(path_);
  s.statistics.tokens = 7;  // a profile
  s.write(path_);
  s = Sidecar::read(path_);
  expect_same(read_predictors(*s.file, s.n_embd, s.n_ff)[1].predictor, four_kinds()[1].view());
  s.new_predictors = four_kinds();
  std::swap(s.new_predictors[0], s.new_predictors[2]);
  s.write(path_);
  s = Sidecar::read(path_);
  const auto stored = read_predictors(*s.file, s.n_embd, s.n_ff);
  EXPECT_EQ(stored[0].predictor.method, "gate-bits");
  EXPECT_EQ(stored[2].predictor.method, "svd");
  EXPECT_EQ(s.statistics.tokens, 7u);
  EXPECT_EQ(s.file->find_tensor("blk.0.fc1.weight"), nullptr);
}

TEST_F(PredictorsTest, AttachedOnesOutliveTheSidecar) {
  write_model({.n_layer = 4, .predictor_rank = 8});
  EXPECT_EQ(model_->weights().layers[3].predictor.method, "powerinfer");
  std::vector<PredictorData> layers = four_kinds();
  layers[3] = {};
  sidecar_with(layers).write(path_);
  EXPECT_TRUE(attach_predictors(*model_, Sidecar::read(path_)));
  std::filesystem::remove(path_);
  for (size_t l = 0; l < 3; ++l) expect_same(model_->weights().layers[l].predictor, layers[l].view());
  EXPECT_EQ(model_->weights().layers[3].predictor.method, "powerinfer");  // none in the sidecar: the file's own stays
  EXPECT_FALSE(attach_predictors(*model_, Sidecar::empty_for(model_->file(), model_->config())));
}

TEST_F(PredictorsTest, OfAnotherModelAreRefused) {
  sidecar_with({four_kinds()[0], four_kinds()[1]}).write(path_);
  test::TinyGguf other;
  other.seed = 2;
  write_model(other);
  expect_part(message_of([&] { attach_predictors(*model_, Sidecar::read(path_)); }), "made for another model");
}

TEST_F(PredictorsTest, RefusesContradictions) {
  write_model({.n_layer = 4});
  const auto damaged = [&](const std::function<void(std::vector<PredictorData>&)>& damage) {
    std::vector<PredictorData> layers = four_kinds();
    damage(layers);
    sidecar_with(layers).write(path_);
    return message_of([&] { attach_predictors(*model_, Sidecar::read(path_)); });
  };
  using Layers = std::vector<PredictorData>&;
  const std::vector<float> values(64 * 96);
  EXPECT_EQ(damaged([](Layers) {}), "no error");
  expect_part(damaged([](Layers l) { l[0].threshold[3] = NAN; }), "threshold 3 of layer 0 is NaN");
  expect_part(damaged([](Layers l) { l[0].threshold.pop_back(); }), "expected f32 [96, 1]");
  expect_part(damaged([](Layers l) { l[0].threshold.clear(); }), "blk.0.predictor_threshold is missing");
  expect_part(damaged([&](Layers l) { l[0].fc2 = OwnedMatrix::from(values.data(), 95, 32, DType::f16); }),
              "blk.0.fc2.weight is f16 [32, 95], expected f16 [32, 96]");
  expect_part(damaged([&](Layers l) { l[0].fc1 = OwnedMatrix::from(values.data(), 16, 32, DType::f16); }),
              "blk.0.fc2.weight");
  expect_part(damaged([&](Layers l) { l[1].fc1 = OwnedMatrix::from(values.data(), 32, 64, DType::f16); }),
              "blk.1.fc1.weight is f16 [64, 32], expected f16 [32, 32]");
  expect_part(damaged([](Layers l) { l[1].fc1 = {}; }), "blk.1.fc1.weight is missing");
  expect_part(damaged([](Layers l) { l[1].fc1_bias.push_back(0); }), "blk.1.fc1.bias");
  expect_part(damaged([](Layers l) { l[2].fc2 = {}; }), "blk.2.fc2.weight is missing");
  expect_part(damaged([](Layers l) { l[2].method = "oracle"; }), "method 'oracle'");
  expect_part(damaged([](Layers l) { l[0].figures.recall = 1.5f; }), "recall of layer 0 is 1.5");
  expect_part(damaged([](Layers l) { l[0].figures.precision = NAN; }), "precision of layer 0");
  // Thresholds without bounds are meant: never and always.
  EXPECT_EQ(damaged([](Layers l) { l[0].threshold[0] = INFINITY, l[0].threshold[1] = -INFINITY; }), "no error");
  add_key(path_, "hearth-sparse.predictor.version", uint32_t{2});
  expect_part(message_of([&] { attach_predictors(*model_, Sidecar::read(path_)); }), "predictors of version 2");
  sidecar_with(four_kinds()).write(path_);
  add_key(path_, "hearth-sparse.predictor.inputs", gguf::Array(std::vector<std::string>(4, "logits")));
  expect_part(message_of([&] { attach_predictors(*model_, Sidecar::read(path_)); }),
              "the predictor of layer 0 reads 'logits', expected ffn_input or residual");
  sidecar_with(four_kinds()).write(path_);
  add_key(path_, "hearth-sparse.predictor.relu", gguf::Array(std::vector<bool>{true}));
  expect_part(message_of([&] { attach_predictors(*model_, Sidecar::read(path_)); }), "one entry for each of 4 layers");
  add_key(path_, "hearth-sparse.predictor.methods", std::string("svd"));
  expect_part(message_of([&] { attach_predictors(*model_, Sidecar::read(path_)); }), "predictor.methods");
}

// Sidecars of before hold kinds that are gone: one line says so, and a new fit replaces all that is there.
TEST_F(PredictorsTest, KindsThatAreGoneAreToBeFittedAgain) {
  write_model({.n_layer = 4});
  const std::string again = "; fit again with `hearth predictor fit`";
  std::vector<PredictorData> layers = four_kinds();
  layers[1].method = "sign";
  sidecar_with(layers).write(path_);
  expect_part(message_of([&] { attach_predictors(*model_, Sidecar::read(path_)); }),
              "the predictor of layer 1 is of a kind that hearth no longer runs (method 'sign')" + again);
  sidecar_with(four_kinds()).write(path_);
  add_key(path_, "hearth-sparse.predictor.inputs",
          gguf::Array(std::vector<std::string>{"ffn_input", "residual", "previous_ffn_input", "ffn_input"}));
  Sidecar old = Sidecar::read(path_);
  expect_part(message_of([&] { attach_predictors(*model_, old); }),
              "the predictor of layer 2 is of a kind that hearth no longer runs (input 'previous_ffn_input')" + again);
  old.new_predictors = four_kinds();
  old.write(path_);
  EXPECT_TRUE(attach_predictors(*model_, Sidecar::read(path_)));
}

TEST_F(PredictorsTest, PowerInferFile) {
  test::TinyGguf m;
  m.predictor_rank = 8;
  test::write_tiny_gguf(model_path_, m);
  add_key(model_path_, "powerinfer.sparse_threshold", 0.25f);
  make_powerinfer(model_path_);
  const Model model = Model::load(model_path_);
  for (const LayerWeights& l : model.weights().layers) {
    const LayerPredictor& p = l.predictor;
    ASSERT_TRUE(p.weights);
    EXPECT_EQ(p.method, "powerinfer");
    EXPECT_EQ(p.input, PredictorInput::residual);
    EXPECT_TRUE(p.weights.relu);
    EXPECT_EQ(p.weights.fc1.rows, 8);
    EXPECT_EQ(p.weights.fc1.cols, m.n_embd);
    EXPECT_EQ(p.weights.fc2.rows, m.n_ff);
    EXPECT_EQ(p.weights.fc2.cols, 8);
    ASSERT_EQ(p.weights.n(), m.n_ff);
    // A score of exactly the key's value is computed there: `score > threshold` must hold.
    EXPECT_GT(0.25f, p.weights.threshold.data[0]);
    EXPECT_LE(std::nextafter(0.25f, 0.0f), p.weights.threshold.data[m.n_ff - 1]);
  }
  Model other = Model::load(model_path_);
  EXPECT_TRUE(set_score_threshold(other, 0.5f));
  for (const LayerWeights& l : other.weights().layers) {
    EXPECT_EQ(l.predictor.weights.threshold.data[m.n_ff - 1], std::nextafter(0.5f, 0.0f));
    EXPECT_EQ(l.predictor.weights.fc2.rows, m.n_ff) << "the rest stays";
  }
  EXPECT_THROW(set_score_threshold(other, NAN), Error);
}

TEST_F(PredictorsTest, OfAFileWithGgufsMagicReadTheNormedInput) {
  write_model({.predictor_rank = 8});
  EXPECT_EQ(model_->weights().layers[0].predictor.input, PredictorInput::ffn_input);
  add_key(model_path_, "hearth.predictor.input", std::string("residual"));
  EXPECT_EQ(Model::load(model_path_).weights().layers[0].predictor.input, PredictorInput::residual);
  add_key(model_path_, "hearth.predictor.input", std::string("logits"));
  expect_part(message_of([&] { Model::load(model_path_); }), "expected ffn_input or residual");
  EXPECT_FALSE(model_->weights().layers[0].predictor.weights.threshold.data[0] > 0);
}

TEST_F(PredictorsTest, HalfAPredictorIsRefused) {
  write_model({.predictor_rank = 8});
  for (const std::string removed : {"blk.1.fc1.weight", "blk.1.fc2.weight"}) {
    const gguf::File& file = model_->file();
    const auto path = dir_ / "half.gguf";
    gguf::Writer out(path);
    for (const auto& kv : file.metadata()) out.set(kv.key, kv.value);
    std::vector<std::pair<size_t, std::span<const std::byte>>> tensors;
    for (const auto& t : file.tensors()) {
      if (t.name != removed) tensors.push_back({out.add_tensor(t.name, t.traits->type, t.ne), file.data(t)});
    }
    out.begin();
    for (const auto& [index, data] : tensors) out.write(index, 0, data);
    out.finish();
    expect_part(message_of([&] { Model::load(path); }), removed + " is missing");
  }
}

}  // namespace
}  // namespace hearth::model
