// Importance matrices: the file, and what the profiler puts into it, against a computation from first principles.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <optional>

#include "core/error.h"
#include "cpu/cpu.h"
#include "gguf/gguf.h"
#include "model/model.h"
#include "model/sidecar.h"
#include "offline/profile/profile.h"
#include "offline/quantize/importance.h"
#include "support/paths.h"
#include "support/tiny_gguf.h"

namespace hearth::offline {
namespace {

Importance example() {
  Importance all;
  all.datasets = {"a.txt", "b.txt"};
  all.chunk_size = 512, all.chunk_count = 3;
  all.matrices["blk.0.attn_q.weight"] = {{2, 4, 8}, {4}};
  all.matrices["blk.0.ffn_up_exps.weight"] = {{1, 2, 3, 4}, {2, 0}};
  return all;
}

TEST(Importance, WrittenAndReadItIsTheSame) {
  test::TempDir dir;
  example().write(dir / "i.gguf");
  const Importance read = Importance::read(dir / "i.gguf");
  EXPECT_EQ(read.datasets, example().datasets);
  EXPECT_EQ(read.chunk_size, 512u);
  EXPECT_EQ(read.chunk_count, 3u);
  ASSERT_EQ(read.matrices.size(), 2u);
  for (const auto& [name, sums] : example().matrices) {
    EXPECT_EQ(read.matrices.at(name).squares, sums.squares);
    EXPECT_EQ(read.matrices.at(name).counts, sums.counts);
  }
  EXPECT_EQ(read.means("blk.0.attn_q.weight"), (std::vector<float>{0.5f, 1, 2}));
  EXPECT_EQ(read.means("blk.0.ffn_up_exps.weight"), (std::vector<float>{0.5f, 1, 1, 1}));
  EXPECT_TRUE(read.means("blk.0.attn_k.weight").empty());
}

// llama.cpp's names and shapes (tools/imatrix/imatrix.cpp, save_imatrix()).
TEST(Importance, TheFileIsLlamaCpps) {
  test::TempDir dir;
  example().write(dir / "i.gguf");
  const gguf::File file = gguf::File::open(dir / "i.gguf");
  EXPECT_EQ(file.require<std::string>("general.type"), "imatrix");
  EXPECT_EQ(file.require<std::vector<std::string>>("imatrix.datasets").size(), 2u);
  EXPECT_EQ(gguf::type_of(*file.find("imatrix.chunk_count")), gguf::ValueType::u32);
  EXPECT_EQ(gguf::type_of(*file.find("imatrix.chunk_size")), gguf::ValueType::u32);
  ASSERT_EQ(file.tensors().size(), 4u);
  EXPECT_EQ(file.find_tensor("blk.0.attn_q.weight.in_sum2")->ne, (std::vector<int64_t>{3, 1}));
  EXPECT_EQ(file.find_tensor("blk.0.attn_q.weight.counts")->ne, (std::vector<int64_t>{1, 1}));
  EXPECT_EQ(file.find_tensor("blk.0.ffn_up_exps.weight.in_sum2")->ne, (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(file.find_tensor("blk.0.ffn_up_exps.weight.counts")->ne, (std::vector<int64_t>{1, 2}));
}

struct Stored {
  std::string name;
  DType type;
  std::vector<int64_t> ne;
  std::vector<float> values;
};
std::string error_of(const std::string& kind, const std::vector<Stored>& tensors) {
  test::TempDir dir;
  gguf::Writer writer(dir / "i.gguf");
  if (!kind.empty()) writer.set("general.type", kind);
  for (const Stored& t : tensors) writer.add_tensor(t.name, t.type, t.ne);
  writer.begin();
  for (size_t i = 0; i < tensors.size(); ++i) {
    std::vector<std::byte> bytes(writer.tensor_bytes(i));
    traits(tensors[i].type)
        .from_float(tensors[i].values.data(), bytes.data(), static_cast<int64_t>(tensors[i].values.size()));
    writer.write(i, 0, bytes);
  }
  writer.finish();
  try {
    Importance::read(dir / "i.gguf");
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
    return e.what();
  }
  return "no error";
}

TEST(Importance, FilesThatAreNone) {
  const Stored sums{"m.in_sum2", DType::f32, {4, 1}, {1, 2, 3, 4}}, counts{"m.counts", DType::f32, {1, 1}, {2}};
  EXPECT_EQ(error_of("imatrix", {sums, counts}), "no error");
  const auto says = [](const std::string& error, const std::string& text) {
    EXPECT_NE(error.find(text), std::string::npos) << error;
  };
  says(error_of("", {sums, counts}), "of the kind 'model'");
  says(error_of("adapter", {sums, counts}), "of the kind 'adapter'");
  says(error_of("imatrix", {sums}), "'m.counts' is missing");
  says(error_of("imatrix", {counts}), "no matrix's importance");
  says(error_of("imatrix", {sums, {"m.counts", DType::f32, {1, 3}, {1, 1, 1}}}), "4 sums and 3 counts");
  says(error_of("imatrix", {{"m.in_sum2", DType::f16, {4, 1}, {1, 2, 3, 4}}, counts}), "is f16, expected f32");
  says(error_of("imatrix", {{"m.in_sum2", DType::f32, {4, 1}, {1, 2, -3, 4}}, counts}), "has the value -3");
  says(error_of("imatrix", {{"m.in_sum2", DType::f32, {4, 1}, {1, NAN, 3, 4}}, counts}), "has the value nan");
  says(error_of("imatrix", {sums, {"m.counts", DType::f32, {1, 1}, {INFINITY}}}), "has the value inf");
  test::TempDir dir;
  std::ofstream(dir / "imatrix.dat") << "0123456789abcdef0123456789";
  EXPECT_THROW(Importance::read(dir / "imatrix.dat"), Error);
}

class ImportanceOfModel : public testing::Test {
 protected:
  void load(const test::TinyGguf& shape) {
    test::write_tiny_gguf(path_, shape);
    model_ = model::Model::load(path_);
    sidecar_ = model::Sidecar::empty_for(model_->file(), model_->config());
  }
  static Corpus corpus(int64_t documents, const CorpusOptions& options) {
    std::mt19937 rng(7);
    Corpus c;
    std::vector<std::vector<int32_t>> ids(static_cast<size_t>(documents));
    for (auto& d : ids) {
      d.resize(static_cast<size_t>(test::random_int(rng, 1, 60)));
      for (int32_t& id : d) id = static_cast<int32_t>(test::random_int(rng, 0, 63));
    }
    c.sequences = make_sequences(std::move(ids), options);
    c.texts = {{"made.txt", "abc", 3}};
    return c;
  }
  void run(const Corpus& c, ProfileOptions options, Importance& importance, int threads = 2, int sequences = 1 << 30) {
    ThreadTeam team(threads);
    const auto device = cpu::make_reference_device(), host = cpu::make_reference_device();
    options.importance = &importance;
    profile(*model_, *device, *host, team, c, options, *sidecar_,
            [&](const ProfileProgress&) { return --sequences > 0; });
  }

  test::TempDir dir_;
  std::filesystem::path path_ = dir_ / "tiny.gguf";
  std::optional<model::Model> model_;
  std::optional<model::Sidecar> sidecar_;
};

using Row = std::vector<double>;
Row product(const Matrix& w, const Row& x) {
  const auto* m = static_cast<const float*>(w.data);
  Row y(static_cast<size_t>(w.rows));
  for (size_t r = 0; r < y.size(); ++r) {
    for (size_t c = 0; c < x.size(); ++c) y[r] += m[r * x.size() + c] * x[c];
  }
  return y;
}
Row normed(const Row& x, const Vector& weight) {
  double square = 0;
  for (const double v : x) square += v * v;
  Row y = x;
  const double scale = 1 / std::sqrt(square / static_cast<double>(x.size()) + 1e-5);
  for (size_t i = 0; i < y.size(); ++i) y[i] *= scale * weight.data[i];
  return y;
}
void add_squares(Row& sums, const Row& x) {
  sums.resize(x.size());
  for (size_t i = 0; i < x.size(); ++i) sums[i] += x[i] * x[i];
}

// In windows of one token the attention returns the token's own value, so that a layer can be computed by hand.
TEST_F(ImportanceOfModel, EqualsAComputationByHand) {
  for (const char* activation : {"relu", "silu", "drelu"}) {
    SCOPED_TRACE(activation);
    load({.n_layer = 1, .activation = activation});
    ProfileOptions options;
    options.corpus = {.window = 1, .heldout_every = 5};
    const Corpus c = corpus(6, options.corpus);
    Importance importance;
    run(c, options, importance);

    const model::Weights& w = model_->weights();
    const model::LayerWeights& l = w.layers[0];
    Row attention, output, ffn, down;
    uint64_t n = 0;
    for (const Sequence& s : c.sequences) {
      if (s.heldout) continue;
      ++n;
      const auto* embedding = static_cast<const float*>(w.tok_embd.data) + s.ids[0] * w.tok_embd.cols;
      Row x(embedding, embedding + w.tok_embd.cols);
      const Row a = normed(x, l.attn_norm.weight);
      Row v = product(l.wv, a);
      for (double& value : v) value = f16_to_f32(f32_to_f16(static_cast<float>(value)));  // as in the cache
      add_squares(attention, a);
      Row heads;  // two query heads share each of the two value heads of 8
      for (size_t h = 0; h < 4; ++h) heads.insert(heads.end(), v.begin() + 8 * (h / 2), v.begin() + 8 * (h / 2 + 1));
      add_squares(output, heads);
      const Row o = product(l.wo, heads);
      for (size_t i = 0; i < x.size(); ++i) x[i] += o[i];
      const Row f = normed(x, l.ffn_norm.weight), gate = product(l.ffn.gate, f), up = product(l.ffn.up, f);
      add_squares(ffn, f);
      Row values(gate.size());
      for (size_t i = 0; i < values.size(); ++i) {
        const bool silu = l.ffn.act == Activation::silu;
        values[i] = silu ? gate[i] / (1 + std::exp(-gate[i])) : std::max(0.0, gate[i]);
        values[i] *= l.ffn.up_relu ? std::max(0.0, up[i]) : up[i];
      }
      add_squares(down, values);
    }
    EXPECT_EQ(importance.matrices.size(), 7u);
    const auto expect = [&](const std::string& name, const Row& expected) {
      SCOPED_TRACE(name);
      const Importance::Sums& sums = importance.matrices.at("blk.0." + name + ".weight");
      EXPECT_EQ(sums.counts, std::vector<uint64_t>{n});
      ASSERT_EQ(sums.squares.size(), expected.size());
      // f32 against double, and now and then a value that is rounded to another f16: 2^-10 of one token's square.
      for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(sums.squares[i], expected[i], 1e-4 * expected[i] + 1e-6);
    };
    expect("attn_q", attention), expect("attn_k", attention), expect("attn_v", attention);
    expect("attn_output", output);
    expect("ffn_gate", ffn), expect("ffn_up", ffn);
    expect("ffn_down", down);  // by its name in the standard layout, though the file has ffn_down_t
    EXPECT_EQ(importance.datasets, std::vector<std::string>{"made.txt"});
    EXPECT_EQ(importance.chunk_size, 1u);
    EXPECT_EQ(importance.chunk_count, n);
  }
}

TEST_F(ImportanceOfModel, ThreadsAndInterruptionsDoNotMatter) {
  load({});
  ProfileOptions options;
  options.corpus = {.window = 30, .heldout_every = 4};
  const Corpus c = corpus(8, options.corpus);
  Importance one, five, parts;
  run(c, options, one, 1);
  sidecar_->statistics = model::Sidecar::empty_for(model_->file(), model_->config()).statistics;
  run(c, options, five, 5);
  sidecar_->statistics = model::Sidecar::empty_for(model_->file(), model_->config()).statistics;
  for (int rounds = 0; !sidecar_->statistics.complete; ++rounds) {
    ASSERT_LT(rounds, 20);
    run(c, options, parts, 2, 2);
    parts.write(dir_ / "i.gguf");
    parts = Importance::read(dir_ / "i.gguf");  // as f32
  }
  for (const auto& [name, sums] : one.matrices) {
    EXPECT_EQ(five.matrices.at(name).squares, sums.squares);
    EXPECT_EQ(parts.matrices.at(name).counts, sums.counts);
    for (size_t i = 0; i < sums.squares.size(); ++i) {
      EXPECT_NEAR(parts.matrices.at(name).squares[i], sums.squares[i], 1e-6 * sums.squares[i]);
    }
  }
  EXPECT_EQ(parts.chunk_count, one.chunk_count);
}

TEST_F(ImportanceOfModel, SumsOfDifferentTokensAreNotAdded) {
  load({});
  ProfileOptions options;
  options.corpus = {.window = 30, .heldout_every = 4};
  const Corpus c = corpus(8, options.corpus);
  Importance importance;
  run(c, options, importance, 2, 2);
  Importance none;
  EXPECT_THROW(run(c, options, none), Error);
  importance.matrices.begin()->second.counts[0] += 1;
  EXPECT_THROW(run(c, options, importance), Error);
}

}  // namespace
}  // namespace hearth::offline
