#include "offline/synth_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "core/error.h"
#include "offline/synth_vocab.h"

namespace hearth::offline {
namespace {

// Ids of random streams: one for every tensor of the model, and one more for the choice of a gate row's basis vectors.
enum LayerStream : uint64_t {
  kQ,
  kK,
  kV,
  kO,
  kGate,
  kBasis,
  kTerms_,
  kUp,
  kDown,
  kRouter,
  kLiking,
  kTopicLiking,
  kStreamsPerLayer = 16
};
enum ModelStream : uint64_t { kEmbedding = uint64_t{1} << 32, kPositions, kHead, kTopics };

constexpr double kTopicCorrelation = 0.7;  // of neighbouring topics
constexpr double kPositionShare = 0.05;    // of the noise at the first layer, where positions are learned
constexpr double kTopicLogit = 8;          // how much the head prefers a word of the current topic

uint64_t layer_stream(int64_t layer, LayerStream which) {
  return static_cast<uint64_t>(layer) * kStreamsPerLayer + which;
}

// out[n] = scale * centred numbers of variance 1: row `row` of a matrix with n columns.
void random_row(const RandomStream& random, int64_t row, int64_t n, float scale, float* out) {
  const int64_t blocks = n / kSynthBlock;
  for (int64_t b = 0; b < blocks; ++b) {
    random.block(static_cast<uint64_t>(row * blocks + b), scale, out + b * kSynthBlock);
  }
}

float inverse_length(const float* x, int64_t n) {
  // Eight partial sums in a fixed order: vectorised, and the same bits everywhere.
  std::array<float, 8> sums{};
  for (int64_t j = 0; j < n; j += 8) {
    for (size_t k = 0; k < 8; ++k) sums[k] += x[static_cast<size_t>(j) + k] * x[static_cast<size_t>(j) + k];
  }
  double total = 0;
  for (const float s : sums) total += static_cast<double>(s);
  return static_cast<float>(1.0 / std::sqrt(total));
}

// x = scale * x + along_e * e
void scale_and_offset(float* x, int64_t n, float scale, float along_e) {
  for (int64_t j = 0; j < n; j += 2) {
    x[j] = x[j] * scale + along_e;
    x[j + 1] = x[j + 1] * scale - along_e;
  }
}

void add_scaled(const float* from, int64_t n, float scale, float* to) {
  for (int64_t j = 0; j < n; ++j) to[j] += scale * from[j];
}

}  // namespace

SynthWeights::SynthWeights(const SynthOptions& options, ThreadTeam& team)
    : options_(options), team_(team), drift_(std::max(options.drift, options.expert_persistence)) {
  const SynthShape& s = options_.shape;
  if (options_.dense) {
    law_.assign(static_cast<size_t>(s.n_ff), 0.5);
  } else {
    law_ = activation_law(s.n_ff, options_.density, options_.hot_share);
  }
  calibration_ = calibrate(law_, {s.n_embd, s.n_layer, s.gated(), s.parallel_block(), drift_});
  // A token's experts share the FFN's part of the growth: sigmoid gates of the chosen ones are nearly equal weights.
  if (s.n_expert > 0 && !options_.dense) {
    for (Calibration::Layer& l : calibration_.layers) l.down_std *= std::sqrt(static_cast<double>(s.n_expert_used));
  }
  if (options_.predictor_rank > 0) basis_rank_ = (options_.predictor_rank - 2) / 2;
  if (drift_ > 0) make_topics();
}

void SynthWeights::make_topics() {
  const int64_t n = options_.shape.n_embd, count = topic_count(options_.shape.n_vocab);
  topics_.resize(static_cast<size_t>(count * n));
  const RandomStream random = stream(kTopics);
  const auto keep = static_cast<float>(kTopicCorrelation);
  const auto fresh = static_cast<float>(std::sqrt(1 - kTopicCorrelation * kTopicCorrelation));
  for (int64_t t = 0; t < count; ++t) {
    float* topic = topics_.data() + t * n;
    random_row(random, t, n, t == 0 ? 1.0f : fresh, topic);
    if (t > 0) add_scaled(topic - n, n, keep, topic);
  }
}

std::vector<SynthTensor> SynthWeights::tensors() const {
  const SynthShape& s = options_.shape;
  std::vector<SynthTensor> list;
  list.push_back(
      {"token_embd.weight", options_.type, s.n_embd, s.n_vocab, false, SynthFill::embedding, -1, kEmbedding});
  if (s.learned_positions()) {  // OPT's table begins with two rows that no position uses
    list.push_back(
        {"position_embd.weight", DType::f32, s.n_embd, s.n_ctx + 2, false, SynthFill::positions, -1, kPositions});
  }
  list.push_back({"output_norm.weight", DType::f32, s.n_embd, 1, true, SynthFill::ones});
  if (s.layer_norm()) list.push_back({"output_norm.bias", DType::f32, s.n_embd, 1, true, SynthFill::zeros});
  list.push_back({"output.weight", options_.type, s.n_embd, s.n_vocab, false, SynthFill::head, -1, kHead});
  for (int64_t l = 0; l < s.n_layer; ++l) add_layer_tensors(l, list);
  return list;
}

void SynthWeights::add_layer_tensors(int64_t l, std::vector<SynthTensor>& list) const {
  const SynthShape& s = options_.shape;
  const int64_t n_kv = s.head_dim() * s.n_head_kv, n_q = s.head_dim() * s.n_head;
  const auto matrix = [&](const char* name, int64_t cols, int64_t rows, SynthFill fill, LayerStream which) {
    list.push_back(
        {fmt::format("blk.{}.{}.weight", l, name), options_.type, cols, rows, false, fill, l, layer_stream(l, which)});
  };
  const auto vector = [&](const char* name, int64_t n, SynthFill fill) {
    list.push_back({fmt::format("blk.{}.{}", l, name), DType::f32, n, 1, true, fill, l});
  };
  const auto norm = [&](const std::string& name) {
    vector((name + ".weight").c_str(), s.n_embd, SynthFill::ones);
    if (s.layer_norm()) vector((name + ".bias").c_str(), s.n_embd, SynthFill::zeros);
  };
  norm("attn_norm");
  norm(s.parallel_block() ? "attn_norm_2" : s.gpt_oss() ? "post_attention_norm" : "ffn_norm");
  if (s.arch == "falcon") {
    matrix("attn_qkv", s.n_embd, s.n_embd + 2 * n_kv, SynthFill::inputs, kQ);
  } else {
    matrix("attn_q", s.n_embd, n_q, SynthFill::inputs, kQ);
    matrix("attn_k", s.n_embd, n_kv, SynthFill::inputs, kK);
    matrix("attn_v", s.n_embd, n_kv, SynthFill::inputs, kV);
  }
  matrix("attn_output", n_q, s.n_embd, SynthFill::outputs, kO);
  if (s.qk_norm()) {
    for (const char* name : {"attn_q_norm.weight", "attn_k_norm.weight"}) vector(name, s.head_dim(), SynthFill::ones);
  }
  if (s.n_expert > 0) {
    matrix("ffn_gate_inp", s.n_embd, s.n_expert, SynthFill::router, kRouter);
    list.back().type = DType::f32;
    const auto experts = [&](const char* name, int64_t cols, int64_t rows, SynthFill fill, LayerStream which) {
      matrix(name, cols, s.n_expert * rows, fill, which);
      list.back().n_expert = s.n_expert;
    };
    experts("ffn_gate_exps", s.n_embd, s.n_ff, options_.dense ? SynthFill::inputs : SynthFill::gate, kGate);
    experts("ffn_up_exps", s.n_embd, s.n_ff, SynthFill::inputs, kUp);
    if (options_.transposed_down) {
      experts("ffn_down_t_exps", s.n_embd, s.n_ff, SynthFill::down_t, kDown);
    } else {
      experts("ffn_down_exps", s.n_ff, s.n_embd, SynthFill::down, kDown);
    }
    if (!s.gpt_oss()) return;
    vector("attn_q.bias", n_q, SynthFill::zeros), vector("attn_k.bias", n_kv, SynthFill::zeros);
    vector("attn_v.bias", n_kv, SynthFill::zeros), vector("attn_output.bias", s.n_embd, SynthFill::zeros);
    vector("attn_sinks.weight", s.n_head, SynthFill::zeros);
    vector("ffn_gate_inp.bias", s.n_expert, SynthFill::zeros);
    for (const char* name : {"ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias"}) {
      const int64_t n = name[4] == 'd' ? s.n_embd : s.n_ff;
      list.push_back({fmt::format("blk.{}.{}", l, name), DType::f32, n, s.n_expert, false, SynthFill::zeros, l});
    }
    return;
  }
  matrix(s.gated() ? "ffn_gate" : "ffn_up", s.n_embd, s.n_ff, SynthFill::gate, kGate);
  if (s.gated()) matrix("ffn_up", s.n_embd, s.n_ff, SynthFill::inputs, kUp);
  const char* down = options_.transposed_down ? "ffn_down_t" : "ffn_down";
  if (options_.transposed_down) {
    matrix(down, s.n_embd, s.n_ff, SynthFill::down_t, kDown);
  } else {
    matrix(down, s.n_ff, s.n_embd, SynthFill::down, kDown);
  }
  if (s.arch ==
      "opt") {  // OPT has biases everywhere; the offsets of the neurons are in the weights, for the predictor's sake
    for (const char* name : {"attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"}) {
      vector(name, name[5] == 'k' || name[5] == 'v' ? n_kv : s.n_embd, SynthFill::zeros);
    }
    vector("ffn_up.bias", s.n_ff, SynthFill::zeros);
    vector((std::string(down) + ".bias").c_str(), s.n_embd, SynthFill::zeros);
  }
  if (options_.predictor_rank > 0) {
    const int64_t r = options_.predictor_rank;
    const DType type = options_.predictor_type;
    const std::string p = fmt::format("blk.{}.", l);
    list.push_back({p + "fc1.weight", type, s.n_embd, r, false, SynthFill::predictor_in, l, layer_stream(l, kBasis)});
    list.push_back({p + "fc2.weight", type, r, s.n_ff, false, SynthFill::predictor_out, l, layer_stream(l, kGate)});
  }
}

void SynthWeights::prepare_layer(int64_t layer) {
  if (layer < 0 || layer == layer_) return;
  layer_ = layer;
  const int64_t n = options_.shape.n_embd;
  ranks_ = neuron_ranks(options_.seed, layer, options_.shape.n_ff);
  basis_.resize(static_cast<size_t>(basis_rank_ * n));
  const RandomStream random = stream(layer_stream(layer, kBasis));
  team_.for_chunks(basis_rank_, 8, [&](int64_t begin, int64_t end, int) {
    for (int64_t j = begin; j < end; ++j) {
      float* row = basis_.data() + j * n;
      random_row(random, j, n, 1.0f, row);
      scale_and_offset(row, n, inverse_length(row, n), 0.0f);
    }
  });
}

double SynthWeights::offset(int64_t neuron) const {
  const auto rank = static_cast<size_t>(ranks_[static_cast<size_t>(neuron)]);
  return calibration_.layers[static_cast<size_t>(layer_)].noise * calibration_.threshold[rank];
}

void SynthWeights::gate_row(const SynthTensor& t, int64_t neuron, float* out, Combination* used) const {
  const int64_t n = options_.shape.n_embd;
  Combination c;
  if (basis_rank_ == 0) {
    random_row(stream(t.stream), neuron, n, 1.0f, out);
  } else {
    // One basis vector of each of kTerms equal ranges, with a random sign.
    const RandomStream random = stream(layer_stream(t.layer, kTerms_));
    c.count = static_cast<int>(std::min<int64_t>(kTerms, basis_rank_));
    std::fill_n(out, n, 0.0f);
    for (int k = 0; k < c.count; ++k) {
      const int64_t begin = k * basis_rank_ / c.count, end = (k + 1) * basis_rank_ / c.count;
      const auto index = static_cast<uint64_t>(neuron * kTerms + k);
      c.index[k] = static_cast<int32_t>(begin + random.below(index, static_cast<uint32_t>(end - begin)));
      c.coefficient[k] = (random.bits(index) & 1) != 0 ? 1.0f : -1.0f;
      add_scaled(basis_.data() + c.index[k] * n, n, c.coefficient[k], out);
    }
  }
  const float scale = inverse_length(out, n);
  const double along_e = -offset(neuron % options_.shape.n_ff) / (Calibration::kConstant * static_cast<double>(n));
  scale_and_offset(out, n, scale, static_cast<float>(along_e));
  if (used != nullptr) {
    for (int k = 0; k < c.count; ++k) c.coefficient[k] *= scale;
    *used = c;
  }
}

void SynthWeights::embedding_row(const SynthTensor& t, int64_t token, float* out) const {
  const SynthShape& s = options_.shape;
  const double noise = Calibration::kConstant * std::sqrt(s.learned_positions() ? 1 - kPositionShare : 1.0);
  const int64_t topic = topics_.empty() ? -1 : topic_of(token, s.n_vocab);
  const double shared = topic < 0 ? 0.0 : drift_;
  random_row(stream(t.stream), token, s.n_embd, static_cast<float>(noise * std::sqrt(1 - shared)), out);
  if (topic >= 0)
    add_scaled(topics_.data() + topic * s.n_embd, s.n_embd, static_cast<float>(noise * std::sqrt(shared)), out);
  scale_and_offset(out, s.n_embd, 1.0f, static_cast<float>(Calibration::kConstant));
}

void SynthWeights::head_row(const SynthTensor& t, int64_t token, float* out) const {
  const SynthShape& s = options_.shape;
  const auto n = static_cast<double>(s.n_embd);
  random_row(stream(t.stream), token, s.n_embd, static_cast<float>(1 / std::sqrt(n)), out);
  const int64_t topic = topics_.empty() ? -1 : topic_of(token, s.n_vocab);
  if (topic < 0) return;
  // After the last norm the topic's coefficient is sqrt(drift / (2 + kFfnGrowth)), and a topic has length sqrt(n).
  const double along = kTopicLogit / (n * std::sqrt(drift_ / (2 + Calibration::kFfnGrowth)));
  add_scaled(topics_.data() + topic * s.n_embd, s.n_embd, static_cast<float>(along), out);
}

// Of a unit row v: a v + b sum of c_i topic_i with random c_i, so that the token's topic makes a share P of the variance
// s^2 of what it reads. An embedding's topic has the variance x = m^2 drift along v, and the other words and all that
// layers add have s^2 - x. Along the sum it has n^2 `spread` x, as neighbouring topics are correlated, and they n `count`
// (s^2 - x).
void SynthWeights::read_topics(const SynthTensor& t, int64_t expert, float* row) const {
  const int64_t n = options_.shape.n_embd, count = topic_count(options_.shape.n_vocab);
  const double x = Calibration::kConstant * Calibration::kConstant * drift_, share = options_.expert_persistence;
  const double noise = calibration_.layers[static_cast<size_t>(t.layer)].noise, s2 = noise * noise;
  const double r2 = kTopicCorrelation * kTopicCorrelation, spread = (1 + r2) / (1 - r2);
  const double length = static_cast<double>(n) * std::sqrt(spread * x);
  const double others = static_cast<double>(n * count) * (s2 - x) / (length * length);  // read with the topics
  const double left = s2 - x * (1 + others);
  const double a2 = left > 0 ? std::clamp(s2 * (1 - share * (1 + others)) / left, 0.0, 1.0) : 1.0;
  const double b2 = std::max(0.0, share * s2 - a2 * x);
  const double scale = std::sqrt(s2 / (a2 * s2 + b2 * (1 + others)));  // not 1 where there are too few dimensions
  scale_and_offset(row, n, static_cast<float>(scale * std::sqrt(a2)), 0.0f);
  std::vector<float> liking(static_cast<size_t>(kMaxTopics));
  random_row(stream(layer_stream(t.layer, kTopicLiking)), expert, std::ssize(liking), 1.0f, liking.data());
  const double along = scale * std::sqrt(b2) / length;
  for (int64_t i = 0; i < count; ++i) {
    add_scaled(topics_.data() + i * n, n, static_cast<float>(along) * liking[static_cast<size_t>(i)], row);
  }
}

// Logits with a standard deviation of kLogits over tokens, and expert_skew times that over experts.
void SynthWeights::router_row(const SynthTensor& t, int64_t expert, float* out) const {
  constexpr double kLogits = 1.5;
  const int64_t n = options_.shape.n_embd;
  random_row(stream(t.stream), expert, n, 1.0f, out);
  const double noise = calibration_.layers[static_cast<size_t>(t.layer)].noise;
  float liking[kSynthBlock];
  stream(layer_stream(t.layer, kLiking)).block(static_cast<uint64_t>(expert), 1.0f, liking);
  const double offset = kLogits * options_.expert_skew * static_cast<double>(liking[0]);
  scale_and_offset(out, n, inverse_length(out, n), 0.0f);
  if (options_.expert_persistence > 0) read_topics(t, expert, out);
  scale_and_offset(out, n, static_cast<float>(kLogits / noise),
                   static_cast<float>(offset / (Calibration::kConstant * static_cast<double>(n))));
}

void SynthWeights::predictor_in_row(int64_t row, float* out) const {
  const int64_t n = options_.shape.n_embd;
  std::fill_n(out, n, 0.0f);
  if (row < 2 * basis_rank_) {
    add_scaled(basis_.data() + row % basis_rank_ * n, n, row < basis_rank_ ? 1.0f : -1.0f, out);
  } else if (row == 2 * basis_rank_) {
    scale_and_offset(out, n, 1.0f, static_cast<float>(1.0 / (Calibration::kConstant * static_cast<double>(n))));
  }
}

void SynthWeights::predictor_out_row(const SynthTensor& t, int64_t neuron, float* out) const {
  thread_local std::vector<float> gate;
  gate.resize(static_cast<size_t>(options_.shape.n_embd));
  Combination c;
  gate_row(t, neuron, gate.data(), &c);
  std::fill_n(out, options_.predictor_rank, 0.0f);
  for (int k = 0; k < c.count; ++k) {
    out[c.index[k]] = c.coefficient[k];
    out[basis_rank_ + c.index[k]] = -c.coefficient[k];
  }
  out[2 * basis_rank_] = static_cast<float>(-offset(neuron));
}

// Elements [32 block, 32 block + 32) of a column: 32 outputs of one input. Without `up` a neuron's contribution is
// never negative, and its mean would add a constant to the residual: neurons of neighbouring ranks therefore share a
// column with opposite signs.
void SynthWeights::column_block(const SynthTensor& t, int64_t column, int64_t block, float* out) const {
  const Calibration::Layer& layer = calibration_.layers[static_cast<size_t>(t.layer)];
  // Outputs of one input; of stacked experts, which share their inputs' numbers, all of them.
  const int64_t outputs = t.fill == SynthFill::down_t ? t.cols * std::max<int64_t>(1, t.n_expert) : t.rows;
  const int64_t blocks = outputs / kSynthBlock;
  double std = layer.attn_out_std;
  if (t.fill != SynthFill::outputs) {
    std = layer.down_std;
    if (!options_.shape.gated()) {
      const int32_t rank = ranks_[static_cast<size_t>(column)];
      column = rank / 2;
      if (rank % 2 != 0) std = -std;
    }
  }
  stream(t.stream).block(static_cast<uint64_t>(column * blocks + block), static_cast<float>(std), out);
}

void SynthWeights::down_row(const SynthTensor& t, int64_t neuron, float* out) const {
  const int64_t blocks = t.cols / kSynthBlock, n_ff = options_.shape.n_ff, expert = neuron / n_ff;
  for (int64_t b = 0; b < blocks; ++b) {
    column_block(t, neuron % n_ff, expert * blocks + b, out + b * kSynthBlock);
  }
}

void SynthWeights::columns(const SynthTensor& t, int64_t first, int64_t count, float* out) const {
  HEARTH_CHECK(first % kSynthBlock == 0 && count % kSynthBlock == 0);
  float tile[kSynthBlock][kSynthBlock];  // [column][row]
  for (int64_t row = 0; row < count; row += kSynthBlock) {
    for (int64_t column = 0; column < t.cols; column += kSynthBlock) {
      for (int64_t c = 0; c < kSynthBlock; ++c) column_block(t, column + c, (first + row) / kSynthBlock, tile[c]);
      for (int64_t r = 0; r < kSynthBlock; ++r) {
        float* to = out + (row + r) * t.cols + column;
        for (int64_t c = 0; c < kSynthBlock; ++c) to[c] = tile[c][r];
      }
    }
  }
}

void SynthWeights::fill(const SynthTensor& t, int64_t first, int64_t count, float* out) const {
  HEARTH_CHECK(t.layer < 0 || t.layer == layer_);
  const auto each_row = [&](auto&& row) {
    for (int64_t i = 0; i < count; ++i) row(first + i, out + i * t.cols);
  };
  const auto n = static_cast<double>(t.cols);
  switch (t.fill) {
    case SynthFill::zeros:
      std::fill_n(out, count * t.cols, 0.0f);
      return;
    case SynthFill::ones:
      std::fill_n(out, count * t.cols, 1.0f);
      return;
    case SynthFill::embedding:
      return each_row([&](int64_t i, float* row) { embedding_row(t, i, row); });
    case SynthFill::positions: {
      const auto scale = static_cast<float>(Calibration::kConstant * std::sqrt(kPositionShare));
      return each_row([&](int64_t i, float* row) { random_row(stream(t.stream), i, t.cols, scale, row); });
    }
    case SynthFill::head:
      return each_row([&](int64_t i, float* row) { head_row(t, i, row); });
    case SynthFill::inputs: {
      const auto scale = static_cast<float>(1 / std::sqrt(n));
      return each_row([&](int64_t i, float* row) { random_row(stream(t.stream), i, t.cols, scale, row); });
    }
    case SynthFill::outputs:
    case SynthFill::down:
      return columns(t, first, count, out);
    case SynthFill::down_t:
      return each_row([&](int64_t i, float* row) { down_row(t, i, row); });
    case SynthFill::gate:
      return each_row([&](int64_t i, float* row) { gate_row(t, i, row, nullptr); });
    case SynthFill::router:
      return each_row([&](int64_t i, float* row) { router_row(t, i, row); });
    case SynthFill::predictor_in:
      return each_row([&](int64_t i, float* row) { predictor_in_row(i, row); });
    case SynthFill::predictor_out:
      return each_row([&](int64_t i, float* row) { predictor_out_row(t, i, row); });
  }
}

}  // namespace hearth::offline
