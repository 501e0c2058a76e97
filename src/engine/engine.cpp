#include "engine/engine.h"

#include <algorithm>
#include <bit>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>

#include "core/error.h"
#include "engine/forward.h"
#include "engine/place.h"
#include "model/predictors.h"

namespace hearth::engine {
namespace {

constexpr int64_t kDefaultContext = 4096;  // when the model allows more: a KV cache nobody asked for costs memory
constexpr int64_t kSmallestGraphContext = 256;
constexpr std::chrono::milliseconds kGrace{5000};  // for a failed pass to end by itself

int64_t choose_context(const model::Config& c, const EngineOptions& options) {
  const bool learned_positions = c.rope == RopeKind::none;
  if (options.n_ctx < 0) fail("the context length is {}, expected 1 or more (0 = the model's)", options.n_ctx);
  if (options.n_ctx == 0) return std::min(c.n_ctx_train, kDefaultContext);
  if (learned_positions && options.n_ctx > c.n_ctx_train) {
    fail("a context of {} was asked for, and this model has learned positions for {}; use -c {} or less", options.n_ctx,
         c.n_ctx_train, c.n_ctx_train);
  }
  return options.n_ctx;
}

void check_thresholds(const model::Config& c, const EngineOptions& options) {
  if (!(options.sparse_threshold >= 0))
    fail("the sparse threshold is {}, expected 0 or more", options.sparse_threshold);
  const std::vector<float>& by_layer = options.layer_thresholds;
  if (!by_layer.empty() && static_cast<int64_t>(by_layer.size()) != c.n_layer)
    fail("{} thresholds were given for {} layers; give one for each, or one for all", by_layer.size(), c.n_layer);
  for (const float t : by_layer) {
    if (!(t >= 0)) fail("a layer's sparse threshold is {}, expected 0 or more", t);
  }
}

bool approximates(const EngineOptions& options) {
  const std::vector<float>& by_layer = options.layer_thresholds;
  if (by_layer.empty()) return options.sparse_threshold > 0;
  return std::any_of(by_layer.begin(), by_layer.end(), [](float t) { return t > 0; });
}

// A layer that has none of its own, or whose predictor would read the layer before the first.
bool can_predict(const model::Model& m, size_t layer) {
  const model::LayerPredictor& p = m.weights().layers[layer].predictor;
  return p.weights && (layer > 0 || p.input != model::PredictorInput::previous_ffn_input);
}

bool has_predictors(const model::Model& m) {
  for (size_t l = 0; l < m.weights().layers.size(); ++l) {
    if (can_predict(m, l)) return true;
  }
  return false;
}

Sparsity choose_sparsity(model::Model& model, const EngineOptions& options) {
  const Sparsity asked = options.sparsity;
  const bool predictors = has_predictors(model);
  const bool lossless = model.config().ffn.sparse() || approximates(options);
  if (asked == Sparsity::predict && !predictors) {
    fail("--sparsity predict needs predictors, and this model has none; make them with `hearth predictor fit`");
  }
  if (asked == Sparsity::off) return Sparsity::off;
  if (asked == Sparsity::auto_ && !lossless && !predictors) return Sparsity::off;
  if (const auto reason = model.prepare_sparse()) {
    if (asked != Sparsity::auto_) fail("sparse execution is not possible with this file: {}", *reason);
    return Sparsity::off;
  }
  if (asked == Sparsity::auto_) return predictors ? Sparsity::predict : Sparsity::exact;
  return asked;
}

// How the layers of an undivided model find their neurons.
std::vector<LayerSplit> undivided(const model::Model& m, Sparsity sparsity) {
  std::vector<LayerSplit> layers(m.weights().layers.size());
  for (size_t l = 0; l < layers.size() && sparsity != Sparsity::off; ++l) {
    const bool predicts = sparsity == Sparsity::predict && can_predict(m, l);
    layers[l].selection = predicts ? Selection::predictor : Selection::gate;
  }
  return layers;
}

// What a plan's layers make of the asked mode: a plan may have found that a predictor does not pay anywhere.
Sparsity sparsity_of(const std::vector<LayerSplit>& layers, Sparsity asked) {
  if (asked == Sparsity::off) return Sparsity::off;
  const auto any = [&](Selection s) {
    return std::any_of(layers.begin(), layers.end(), [s](const LayerSplit& l) { return l.selection == s; });
  };
  if (any(Selection::predictor)) return Sparsity::predict;
  return any(Selection::gate) ? Sparsity::exact : Sparsity::off;
}

Limits limits_of(const model::Model& m, int64_t n_ctx, int64_t n_batch) {
  const model::Config& c = m.config();
  const int64_t n_q = c.n_head * c.head_dim;
  Limits l;
  l.max_tokens = n_batch;
  l.max_context = n_ctx;
  l.max_cols = std::max({c.n_embd, c.n_ff, n_q});
  l.max_rows = std::max({c.n_embd, c.n_ff, n_q});
  l.n_vocab = c.n_vocab;
  l.n_ff = c.n_ff;
  l.n_embd = c.n_embd;
  l.n_head = c.n_head, l.n_head_kv = c.n_head_kv, l.head_dim = c.head_dim;
  l.quantized_weights = m.quantized();
  return l;
}

}  // namespace

Sparsity parse_sparsity(std::string_view name) {
  if (name == "off") return Sparsity::off;
  if (name == "exact") return Sparsity::exact;
  if (name == "predict") return Sparsity::predict;
  if (name == "auto") return Sparsity::auto_;
  fail("unknown sparsity mode '{}'; expected off, exact, predict or auto", name);
}

const char* to_string(Sparsity sparsity) {
  switch (sparsity) {
    case Sparsity::off:
      return "off";
    case Sparsity::exact:
      return "exact";
    case Sparsity::predict:
      return "predict";
    case Sparsity::auto_:
      return "auto";
  }
  return "?";
}

Engine::Engine(model::Model& model, Device& device, const EngineOptions& options)
    : Engine(model, device, options, nullptr) {}
Engine::Engine(model::Model& model, Device& device, const EngineOptions& options, const Division& division)
    : Engine(model, device, options, &division) {}

Engine::Engine(model::Model& model, Device& device, const EngineOptions& options, const Division* division)
    : model_(model), device_(device), options_(options) {
  const model::Config& c = model_.config();
  if (options.n_batch < 1) fail("the batch size is {}, expected 1 or more", options.n_batch);
  check_thresholds(c, options);
  n_ctx_ = choose_context(c, options);
  sparsity_ = choose_sparsity(model_, options);
  const int64_t n_batch = std::min(options.n_batch, n_ctx_);
  const Limits limits = limits_of(model_, n_ctx_, n_batch);
  device_.reserve(limits);
  if (division != nullptr) {
    division->host.reserve(limits);
    split_ = split_weights(model_, division->placement, device_, division->host, division->team);
    if (options.copy_weights) {
      copied_weights_ = copy_from_file(model_, division->host, split_->arena.taken(), split_->host);
    }
    layers_ = split_->split;
    for (LayerSplit& layer : layers_) layer.hinted = layer.hinted && options.look_ahead;
    sparsity_ = sparsity_of(layers_, sparsity_);
    weights_ = split_->main;
    mailbox_ = device_.open_mailbox(n_batch * c.n_embd, c.n_ff);
    mailbox_->set_patience(options.patience);
    stream_ = std::make_unique<ColdStream>(device_, split_->host, options.stream_tokens);
    host_half_ =
        std::make_unique<HostHalf>(c, split_->host, layers_, division->host, *mailbox_, stream_.get(), n_ctx_, n_batch,
                                   model_.quantized(), options_.sparse_threshold, options_.layer_thresholds);
  } else {
    layers_ = undivided(model_, sparsity_);
    weights_ = place(model_, device_, sparsity_ == Sparsity::predict);
    if (options.copy_weights && device_.is_host()) copied_weights_ = copy_from_file(model_, device_, {}, weights_);
  }
  if (options.on_stall) {
    stall_watch_ = std::make_unique<StallWatch>(mailbox_ ? mailbox_->flags() : nullptr, options.patience,
                                                std::min(options.patience, kGrace), options.on_stall);
  }
  act_ = Activations(device_, c, n_batch, model_.quantized());
  kv_ = KvCache(device_, c, n_ctx_, attention_layers(layers_, false));
  host_logits_.resize(static_cast<size_t>(c.n_vocab));
  density_.active.assign(static_cast<size_t>(c.n_layer), 0.0);
  density_.active_on_host = density_.active_linked = density_.active;
  graphs_.assign(64, -1);
}

Engine::~Engine() {
  watch(StallWatch::Phase::hand_offs);  // freeing the device's memory waits for the device
}

void Engine::check_room(std::span<const int32_t> ids) const {
  HEARTH_CHECK(!ids.empty());
  const auto n = static_cast<int64_t>(ids.size());
  if (n_past_ + n > n_ctx_) {
    fail("the context is full: {} tokens are in it and {} more do not fit in {}; use a larger -c or a shorter text",
         n_past_, n, n_ctx_);
  }
  for (const int32_t id : ids) {
    if (id < 0 || id >= config().n_vocab)
      fail("token id {} is out of range, expected 0 to {}", id, config().n_vocab - 1);
  }
}

ForwardArgs Engine::forward_args(int64_t max_kv) {
  return {config(),
          weights_,
          device_,
          act_,
          kv_,
          n_ctx_,
          max_kv,
          sparsity_ != Sparsity::off,
          options_.sparse_threshold,
          layers_,
          mailbox_.get(),
          stream_.get(),
          options_.layer_thresholds};
}

void Engine::upload_tokens(std::span<const int32_t> ids) {
  // Ids and, behind the room for those of a batch, positions: one upload.
  const auto first_position = static_cast<size_t>(act_.pos - act_.ids);
  std::vector<int32_t> ids_and_positions(first_position + ids.size());
  std::copy(ids.begin(), ids.end(), ids_and_positions.begin());
  std::iota(ids_and_positions.begin() + static_cast<std::ptrdiff_t>(first_position), ids_and_positions.end(),
            static_cast<int32_t>(n_past_));
  watch(StallWatch::Phase::results);  // of the pass before: an upload waits for the device
  device_.upload(act_.ids, ids_and_positions.data(), ids_and_positions.size() * sizeof(int32_t));
  watch(StallWatch::Phase::idle);
  if (!split_) return;
  host_half_->set_tokens(ids, n_past_);
  if (embedding_on_host())
    device_.upload(act_.x, host_half_->embed(), ids.size() * static_cast<size_t>(config().n_embd) * 4);
}

void Engine::run_pass(FunctionRef<void()> device_part, bool recorded, int64_t T) {
  if (!split_) return device_part();
  if (mailbox_->failed())
    fail("an earlier hand-off between {} and the CPU failed; this run cannot go on", device_.name());
  watch(StallWatch::Phase::hand_offs);
  try {
    run_on_both(device_part, recorded, T);
  } catch (...) {
    watch(StallWatch::Phase::idle);
    throw;
  }
  watch(StallWatch::Phase::idle);
}

// Runs the device's part of a pass, and beside it the CPU's. A recorded part only starts the device; any other runs in
// a thread of its own, because a device waits for the CPU in the middle of it.
void Engine::run_on_both(FunctionRef<void()> device_part, bool recorded, int64_t T) {
  const bool sparse = sparsity_ != Sparsity::off && T == 1;
  if (recorded) {
    device_part();
    return host_half_->serve(T, sparse);
  }
  std::exception_ptr error, consequence;  // of a side that stopped because the other did
  std::mutex mutex;
  const auto guarded = [&](FunctionRef<void()> part) {
    try {
      return part();
    } catch (const MailboxAbandoned&) {
      const std::lock_guard lock(mutex);
      consequence = std::current_exception();
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
    mailbox_->abandon();
  };
  std::thread device_thread([&] {
    guarded([&] {
      device_.use_from_this_thread();
      device_part();
    });
  });
  guarded([&] { host_half_->serve(T, sparse); });
  device_thread.join();
  if (error) std::rethrow_exception(error);
  if (consequence) std::rethrow_exception(consequence);
}

void Engine::watch(StallWatch::Phase phase) {
  if (stall_watch_) stall_watch_->enter(phase);
}

// Waits for the device and brings results, or throws what went wrong between the devices on the way to them.
void Engine::fetch(void* host, const void* device, size_t bytes) {
  watch(StallWatch::Phase::results);
  device_.download(host, device, bytes);
  watch(StallWatch::Phase::idle);
  if (mailbox_) mailbox_->check();
}

void Engine::forward_chunk(std::span<const int32_t> ids) {
  const auto T = static_cast<int64_t>(ids.size());
  upload_tokens(ids);
  const ForwardArgs f = forward_args(n_past_ + T);
  run_pass(
      [&] {
        if (!embedding_on_host()) forward_embedding(f, T);
        forward_layers(f, T);
      },
      false, T);
  n_past_ += T;
}

void Engine::decode_step(int32_t id) {
  upload_tokens({&id, 1});
  const auto step = [&](int64_t max_kv) {
    const ForwardArgs f = forward_args(max_kv);
    if (!embedding_on_host()) forward_embedding(f, 1);
    forward_layers(f, 1);
    if (head_on_host()) return;
    forward_head(f, 0, 1);
    device_.argmax(act_.logits, config().n_vocab, act_.best);
  };
  if (options_.use_graph && device_.supports_graphs()) {
    // One graph per power-of-two bound of the context: the bound fixes the attention's grid, everything else is read
    // from device memory.
    const auto bound = std::bit_ceil(static_cast<uint64_t>(std::max(n_past_ + 1, kSmallestGraphContext)));
    int& graph = graphs_[static_cast<size_t>(std::countr_zero(bound))];
    if (graph < 0) {
      device_.begin_capture();
      step(std::min(static_cast<int64_t>(bound), n_ctx_));
      graph = device_.end_capture();
    }
    run_pass([&] { device_.launch(graph); }, true, 1);
  } else {
    run_pass([&] { step(n_past_ + 1); }, false, 1);
  }
  ++n_past_;
}

void Engine::head_rows(int64_t first, int64_t count, FunctionRef<void(int64_t, std::span<const float>)> visit) {
  const auto n_vocab = static_cast<size_t>(config().n_vocab);
  const auto n_embd = static_cast<size_t>(config().n_embd);
  std::vector<float> rows;
  for (int64_t row = 0; row < count; row += act_.logit_rows) {
    const int64_t n = std::min(act_.logit_rows, count - row);
    const size_t width = head_on_host() ? n_embd : n_vocab;
    rows.resize(static_cast<size_t>(n) * width);
    if (head_on_host()) {
      fetch(rows.data(), act_.x + static_cast<size_t>(first + row) * n_embd, rows.size() * sizeof(float));
    } else {
      forward_head(forward_args(n_past_), first + row, n);
      fetch(rows.data(), act_.logits, rows.size() * sizeof(float));
    }
    for (int64_t i = 0; i < n; ++i) {
      const std::span<const float> values{rows.data() + static_cast<size_t>(i) * width, width};
      visit(row + i, head_on_host() ? host_half_->head(values) : values);
    }
  }
}

int32_t Engine::finish_step() {
  const size_t n_layer = density_.active.size();
  std::vector<int32_t> results(2 * n_layer + 1);  // n_active, n_linked_active, then best
  fetch(results.data(), act_.n_active, results.size() * sizeof(int32_t));
  if (sparsity_ == Sparsity::off) return results.back();
  for (size_t l = 0; l < n_layer; ++l) {
    const double cold = layers_[l].has_cold ? host_half_->n_active()[l] : 0, linked = results[n_layer + l];
    density_.active_on_host[l] += cold;
    density_.active_linked[l] += linked;
    density_.active[l] += results[l] + cold + linked;
  }
  ++density_.steps;
  return results.back();
}

std::span<const float> Engine::keep_logits(int64_t row) {
  head_rows(row, 1, [&](int64_t, std::span<const float> logits) {
    std::copy(logits.begin(), logits.end(), host_logits_.begin());
  });
  return host_logits_;
}

std::span<const float> Engine::last_logits() {
  if (head_on_host()) return keep_logits(0);
  fetch(host_logits_.data(), act_.logits, host_logits_.size() * sizeof(float));
  return host_logits_;
}

std::span<const float> Engine::eval(std::span<const int32_t> ids) {
  check_room(ids);
  if (ids.size() == 1) {
    decode_step(ids[0]);
    if (sparsity_ != Sparsity::off) finish_step();
    return last_logits();
  }
  const auto n_batch = static_cast<size_t>(act_.n_batch);
  size_t count = 0;
  for (size_t first = 0; first < ids.size(); first += count) {
    count = std::min(n_batch, ids.size() - first);
    forward_chunk(ids.subspan(first, count));
  }
  return keep_logits(static_cast<int64_t>(count) - 1);
}

void Engine::eval_all(std::span<const int32_t> ids, FunctionRef<void(int64_t, std::span<const float>)> visit) {
  check_room(ids);
  const auto n_ids = static_cast<int64_t>(ids.size());
  for (int64_t first = 0; first < n_ids; first += act_.n_batch) {
    const int64_t count = std::min(act_.n_batch, n_ids - first);
    forward_chunk(ids.subspan(static_cast<size_t>(first), static_cast<size_t>(count)));
    head_rows(0, count, [&](int64_t i, std::span<const float> logits) { visit(first + i, logits); });
  }
}

int32_t Engine::eval_greedy(int32_t id) {
  if (head_on_host()) {
    const auto logits = eval({&id, 1});
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
  check_room({&id, 1});
  decode_step(id);
  return finish_step();
}

void Engine::truncate(int64_t n) {
  HEARTH_CHECK(n >= 0 && n <= n_past_, "n {} n_past {}", n, n_past_);
  n_past_ = n;
}

TokenTraffic Engine::traffic(const DensityStats& counted, int64_t n_kv) const {
  std::vector<int64_t> n_main;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const FfnShard& own = weights_.layers[i].ffn;
    n_main.push_back(!layers_[i].has_cold ? model_.weights().layers[i].ffn.n()
                     : layers_[i].has_hot ? own.n_whole()
                                          : 0);
  }
  return token_traffic({model_, layers_, n_main, sparsity_ != Sparsity::off, head_on_host()}, counted,
                       std::min(n_kv, n_ctx_));
}

}  // namespace hearth::engine
