#include "offline/predictor/samples.h"

#include <algorithm>
#include <chrono>
#include <unordered_map>

#include "core/error.h"
#include "engine/engine.h"
#include "offline/profile/ffn_probe.h"

namespace hearth::offline {
namespace {

using model::PredictorInput;

// A layer's samples of one part while they are gathered.
struct Room {
  std::span<f16_t> ffn, predictor;
};

// Notes the input of every FFN, and what its predictor is to read.
class SamplingDevice final : public ForwardingDevice {
 public:
  SamplingDevice(Device& inner, int64_t n_embd, size_t n_layer, PredictorInput input, size_t first_layer)
      : ForwardingDevice(inner), n_embd_(n_embd), n_layer_(n_layer), input_(input), first_layer_(first_layer) {}

  // The next sequence goes to `rooms` (by layer from first_layer on), from the token `at` on.
  void begin_sequence(const std::vector<Room>& rooms, int64_t at) { rooms_ = &rooms, at_ = at, written_ = 0; }

  void ffn_dense(const FfnShard& shard, const Input& in, int64_t T, Vector y_bias, float* y,
                 const NextNorm* next) override {
    HEARTH_CHECK(in.normed(), "an FFN whose residual stream is not known");
    const size_t layer = layers_.try_emplace(shard.gate.data, layers_.size()).first->second;
    HEARTH_CHECK(layer < n_layer_, "more FFNs than layers");
    const bool wanted = layer >= first_layer_ && layer < first_layer_ + rooms_->size();
    if (wanted) {
      inner_.norm(in.norm, in.x, T, in.act);
      keep((*rooms_)[layer - first_layer_], in, T);
    }
    if (layer + 1 == n_layer_) written_ += T;  // the engine may pass over the layers several times for one sequence
    ForwardingDevice::ffn_dense(shard, wanted ? Input(in.act) : in, T, y_bias, y, next);
  }

 private:
  void download(const float* x, int64_t T, std::vector<float>& to) {
    to.resize(static_cast<size_t>(T * n_embd_));
    inner_.download(to.data(), x, to.size() * sizeof(float));
  }
  void keep(const Room& room, const Input& in, int64_t T) {
    download(in.act.x, T, current_);
    put(current_, room.ffn);
    if (input_ != PredictorInput::residual) return;
    download(in.x, T, current_);
    put(current_, room.predictor);
  }
  void put(const std::vector<float>& values, std::span<f16_t> room) const {
    const auto first = static_cast<size_t>((at_ + written_) * n_embd_);
    HEARTH_CHECK(first + values.size() <= room.size(), "a sequence is longer than it was said to be");
    traits(DType::f16).from_float(values.data(), room.data() + first, static_cast<int64_t>(values.size()));
  }

  int64_t n_embd_;
  size_t n_layer_;
  PredictorInput input_;
  size_t first_layer_;
  const std::vector<Room>* rooms_ = nullptr;
  int64_t at_ = 0, written_ = 0;                    // tokens
  std::unordered_map<const void*, size_t> layers_;  // by the gate's address, in order of first use
  std::vector<float> current_;
};

// Documents come as one or more sequences; those of one document must share a part.
Part part_of(size_t sequence, bool only_validate) {
  if (only_validate) return Part::validate;
  constexpr Part parts[] = {Part::fit, Part::calibrate, Part::fit, Part::validate};
  return parts[sequence % 4];
}

// Sequences taken evenly from the corpus, in its order, until they have the tokens that are wanted.
std::vector<const Sequence*> choose(const Corpus& corpus, int64_t max_tokens) {
  const auto all = static_cast<int64_t>(corpus.tokens());
  std::vector<const Sequence*> chosen;
  int64_t seen = 0, taken = 0;
  for (const Sequence& s : corpus.sequences) {
    const auto n = static_cast<int64_t>(s.ids.size());
    seen += n;
    // Taken whenever the share taken so far lags behind the share passed so far.
    const bool take = max_tokens <= 0 || max_tokens >= all ||
                      static_cast<double>(taken) * static_cast<double>(all) <=
                          static_cast<double>(max_tokens) * static_cast<double>(seen - n);
    if (!take) continue;
    chosen.push_back(&s);
    taken += n;
    if (max_tokens > 0 && taken >= max_tokens) break;
  }
  return chosen;
}

// The samples to be gathered, known beforehand to the byte.
struct Order {
  std::vector<const Sequence*> sequences;
  int64_t tokens[kParts] = {};
  size_t first_layer = 0, n_layers = 0;
  int64_t arrays = 1;  // of a layer and part: what the FFN reads, and what the predictor reads where that differs
  int64_t all_tokens() const { return tokens[0] + tokens[1] + tokens[2]; }
  uint64_t values_per_layer(int64_t n_embd) const { return static_cast<uint64_t>(all_tokens() * arrays * n_embd); }
};

Order order_for(const model::Model& model, const Corpus& corpus, const SampleOptions& o) {
  Order order;
  order.sequences = choose(corpus, o.max_tokens);
  for (size_t i = 0; i < order.sequences.size(); ++i) {
    order.tokens[static_cast<int>(part_of(i, o.only_validate))] += static_cast<int64_t>(order.sequences[i]->ids.size());
  }
  for (const Part part : {Part::fit, Part::calibrate, Part::validate}) {
    if (o.only_validate && part != Part::validate) continue;
    if (order.tokens[static_cast<int>(part)] < 2) {
      fail("the texts have {} documents or pieces of one, and fitting a predictor needs 4 or more; give more text",
           order.sequences.size());
    }
  }
  const auto n_layer = static_cast<size_t>(model.config().n_layer);
  order.first_layer = o.first_layer;
  order.n_layers = o.n_layers == 0 ? n_layer - o.first_layer : o.n_layers;
  HEARTH_CHECK(order.first_layer + order.n_layers <= n_layer);
  order.arrays = o.input == PredictorInput::ffn_input ? 1 : 2;
  return order;
}

// Divides the store among parts and layers. `rooms`: by part and layer, to write to.
Samples lay_out(const Order& order, int64_t n_embd, std::shared_ptr<SampleStore> store,
                std::vector<Room> (&rooms)[kParts]) {
  Samples s;
  s.n_embd = n_embd, s.first_layer = order.first_layer, s.store = std::move(store);
  std::span<f16_t> rest = s.store->values();
  const auto take = [&](int64_t tokens) {
    const std::span<f16_t> taken = rest.first(static_cast<size_t>(tokens * n_embd));
    rest = rest.subspan(taken.size());
    return taken;
  };
  for (int part = 0; part < kParts; ++part) {
    for (size_t l = 0; l < order.n_layers; ++l) {
      Room room;
      room.ffn = take(order.tokens[part]);
      if (order.arrays == 2) room.predictor = take(order.tokens[part]);
      rooms[part].push_back(room);
      s.layers[part].push_back({room.ffn, room.predictor});
    }
  }
  return s;
}

}  // namespace

int64_t Samples::tokens(Part part) const {
  const auto& l = layers[static_cast<int>(part)];
  return l.empty() || n_embd == 0 ? 0 : static_cast<int64_t>(l.front().ffn.size()) / n_embd;
}

uint64_t sample_bytes_per_layer(const model::Model& model, const Corpus& corpus, const SampleOptions& options) {
  return order_for(model, corpus, options).values_per_layer(model.config().n_embd) * sizeof(f16_t);
}

std::optional<Samples> gather_samples(model::Model& model, Device& device, const Corpus& corpus,
                                      const SampleOptions& options,
                                      FunctionRef<bool(const SampleProgress&)> keep_going) {
  const model::Config& c = model.config();
  const Order order = order_for(model, corpus, options);
  const uint64_t values = order.values_per_layer(c.n_embd) * order.n_layers;
  auto store = options.file.empty()
                   ? std::make_shared<SampleStore>(values)
                   : std::make_shared<SampleStore>(options.file,
                                                   fmt::format("layers {} to {}: {}", order.first_layer,
                                                               order.first_layer + order.n_layers, options.identity),
                                                   values);
  std::vector<Room> rooms[kParts];
  Samples samples = lay_out(order, c.n_embd, store, rooms);
  samples.input = options.input;
  const uint64_t begin = store->progress();  // sequences that are there already
  if (begin >= order.sequences.size()) return samples;

  SamplingDevice sampling(device, c.n_embd, static_cast<size_t>(c.n_layer), options.input, order.first_layer);
  engine::EngineOptions engine_options;
  engine_options.n_ctx = options.window;
  engine_options.sparsity = engine::Sparsity::off;
  engine_options.use_graph = false;
  engine::Engine engine(model, sampling, engine_options);
  engine::Sequence text = engine.sequence();
  SampleProgress progress;
  progress.tokens_total = order.all_tokens();
  int64_t done[kParts] = {};
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < order.sequences.size(); ++i) {
    const auto part = static_cast<int>(part_of(i, options.only_validate));
    const auto length = static_cast<int64_t>(order.sequences[i]->ids.size());
    if (i >= begin) {
      text.truncate(0);
      sampling.begin_sequence(rooms[part], done[part]);
      engine.eval(text, order.sequences[i]->ids);
      store->set_progress(i + 1);
    } else {
      progress.tokens_before += length;
    }
    done[part] += length;
    progress.tokens_done += length;
    progress.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (i >= begin && !keep_going(progress)) return std::nullopt;
  }
  return samples;
}

}  // namespace hearth::offline
