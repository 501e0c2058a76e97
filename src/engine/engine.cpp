#include "engine/engine.h"

#include <algorithm>
#include <bit>
#include <exception>
#include <mutex>
#include <thread>

#include "core/error.h"
#include "core/recording.h"
#include "engine/adopt_weights.h"
#include "model/predictors.h"

namespace hearth::engine {
namespace {

constexpr int64_t kSmallestRecordedContext = 256;
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

bool can_predict(const model::LayerWeights& layer) {
  return static_cast<bool>(layer.predictor.weights);
}

bool has_predictors(const model::Model& m) {
  const auto& layers = m.weights().layers;
  return std::any_of(layers.begin(), layers.end(), can_predict);
}

bool computes_down_t(Device& device) {
  return device.expert_ffn() != nullptr && device.expert_ffn()->takes_down_t();
}

// Why neurons inside experts cannot be left out; nothing where they can, and the model is ready for it then.
std::optional<std::string> why_experts_are_whole(model::Model& model, Device& main, bool divided, bool thresholds) {
  const model::FfnDescription& ffn = model.config().ffn;
  const bool whole = !divided && !computes_down_t(main);
  if (!ffn.sparse() && !thresholds) return fmt::format("{} is never exactly zero", ffn.activation);
  if (whole && !thresholds) return fmt::format("{} computes every neuron of an expert", main.name());
  if (auto reason = model.prepare_sparse(thresholds && !whole)) return reason;
  // A device that computes whole experts takes neurons below a threshold as zero.
  return whole ? std::nullopt : model.why_experts_are_whole();
}

Sparsity choose_sparsity(model::Model& model, const EngineOptions& options, Device& main, bool divided) {
  const Sparsity asked = options.sparsity;
  const bool predictors = has_predictors(model);
  const bool thresholds = approximates(options), lossless = model.config().ffn.sparse() || thresholds;
  if (asked == Sparsity::predict && !predictors) {
    fail("--sparsity predict needs predictors, and this model has none; make them with `hearth predictor fit`");
  }
  if (asked == Sparsity::off) return Sparsity::off;
  if (model.config().experts) {
    const auto reason = why_experts_are_whole(model, main, divided, thresholds);
    if (!reason) return Sparsity::exact;
    if (thresholds) fail("a threshold cannot leave out neurons of these experts: {}", *reason);
    if (asked == Sparsity::auto_) return Sparsity::off;
    fail("neurons inside experts cannot be left out: {}; run with --sparsity off or auto", *reason);
  }
  if (asked == Sparsity::auto_ && !lossless && !predictors) return Sparsity::off;
  if (const auto reason = model.prepare_sparse()) {
    if (asked != Sparsity::auto_) fail("sparse execution is not possible with this file: {}", *reason);
    return Sparsity::off;
  }
  if (asked == Sparsity::auto_) return predictors ? Sparsity::predict : Sparsity::exact;
  return asked;
}

// How the layers of an undivided model find their neurons.
std::vector<LayerFacts> undivided(const model::Model& m, Sparsity sparsity) {
  std::vector<LayerFacts> layers(m.weights().layers.size());
  for (size_t l = 0; l < layers.size(); ++l) {
    layers[l].parallel = m.config().parallel_block, layers[l].post_norms = m.config().post_norms;
    layers[l].reads_residual = m.weights().layers[l].predictor.input == model::PredictorInput::residual;
    layers[l].experts = layers[l].main_routes = static_cast<bool>(m.weights().layers[l].router);
    layers[l].early_router = layers[l].experts && m.config().early_router;
    if (sparsity == Sparsity::off) continue;
    const bool predicts = sparsity == Sparsity::predict && can_predict(m.weights().layers[l]);
    layers[l].selection = predicts ? Selection::predictor : Selection::gate;
  }
  return layers;
}

// The mode that a plan's layers make of the asked one: a plan may have found that a predictor does not pay anywhere.
Sparsity sparsity_of(std::span<const LayerFacts> layers) {
  const auto any = [&](Selection s) {
    return std::any_of(layers.begin(), layers.end(), [s](const LayerFacts& l) { return l.selection == s; });
  };
  if (any(Selection::predictor)) return Sparsity::predict;
  return any(Selection::gate) ? Sparsity::exact : Sparsity::off;
}

}  // namespace

Engine::Engine(model::Model& model, Device& device, const EngineOptions& options)
    : Engine(model, device, options, nullptr) {}
Engine::Engine(model::Model& model, Device& device, const EngineOptions& options, const Division& division)
    : Engine(model, device, options, &division) {}

Engine::Engine(model::Model& model, Device& device, const EngineOptions& options, const Division* division)
    : model_(model), device_(device), options_(options) {
  const model::Config& c = model_.config();
  if (options.n_batch < 1) fail("the batch size is {}, expected 1 or more", options.n_batch);
  if (options.n_sequences < 1) fail("the number of sequences is {}, expected 1 or more", options.n_sequences);
  check_thresholds(c, options);
  n_ctx_ = choose_context(c, options);
  sparsity_ = choose_sparsity(model_, options, device_, division != nullptr);
  if (c.latent && device_.latent_attention() == nullptr) {
    fail("{} cannot compute the latent attention of '{}' models yet; run them on the CPU: --device cpu", device_.name(),
         c.arch);
  }
  const auto shape = ActivationShape::of(n_ctx_, options.n_sequences, options.n_batch, model_.quantized());
  const Thresholds thresholds{options_.sparse_threshold, options_.layer_thresholds};
  device_.reserve(limits_of(c, n_ctx_, shape.n_batch, model_.quantized()));
  pool_ = std::make_shared<PagePool>(options.n_sequences * pages_of(n_ctx_));
  if (division != nullptr) {
    divide(*division, shape.n_batch);
  } else {
    if (c.experts && device_.expert_ffn() == nullptr) {
      fail("{} cannot compute experts yet; leave them to the CPU: give a --vram-budget", device_.name());
    }
    schedule_ = Schedule(undivided(model_, sparsity_));
    for (const model::LayerWeights& l : model_.weights().layers) {
      MainRows& rows = rows_.emplace_back();
      rows.n_hot = l.ffn.n();
      for (const Expert& e : l.experts) rows.n_hot += e.ffn.n();
    }
    weights_ = adopt_weights(model_, device_, sparsity_ == Sparsity::predict);
    if (options.copy_weights && device_.is_host()) {
      const SingleRows rows = sparsity_ == Sparsity::off     ? SingleRows::none
                              : sparsity_ == Sparsity::exact ? SingleRows::active
                                                             : SingleRows::named;
      copied_weights_ = copy_from_file(model_, device_, {}, rows, weights_);
    }
  }
  if (options.on_stall) {
    stall_watch_ = std::make_unique<StallWatch>(mailbox_ ? mailbox_->flags() : nullptr, options.patience,
                                                std::min(options.patience, kGrace), options.on_stall);
  }
  act_ = Activations(device_, c, shape);
  const bool long_context = c.long_rope_context > 0 && n_ctx_ > c.long_rope_context;
  kv_ = KvCache(device_, c, pool_->n_pages(), attention_layers(false));
  context_ =
      std::make_unique<ForwardContext>(ForwardContext{c, weights_, device_, act_, kv_, thresholds, long_context});
  main_side_ = std::make_unique<MainSide>(*context_, schedule_, rows_, mailbox_.get(), stream_.get(), !head_on_host());
  if (division != nullptr) {
    Device& host = division->host;
    host_act_ = Activations(host, c, shape);
    host_kv_ = KvCache(host, c, pool_->n_pages(), attention_layers(true));
    host_context_ = std::make_unique<ForwardContext>(
        ForwardContext{c, split_->host, host, host_act_, host_kv_, thresholds, long_context});
    host_side_ = std::make_unique<HostSide>(*host_context_, schedule_, rows_, *mailbox_, options_.share_rates);
  }
  logits_.resize(static_cast<size_t>(c.n_vocab));
  reset_density();
  for (auto& by_bound : recorded_) by_bound.fill(-1);
}

void Engine::reset_density() {
  density_ = {};
  density_.active.assign(static_cast<size_t>(config().n_layer), 0.0);
  density_.active_on_host = density_.active_linked = density_.active;
  density_.experts = density_.experts_on_host = density_.neurons = density_.neurons_on_host = density_.active;
}

void Engine::divide(const Division& division, int64_t n_batch) {
  const model::Config& c = model_.config();
  division.host.reserve(limits_of(c, n_ctx_, n_batch, model_.quantized()));
  split_ = split_weights(model_, division.placement, device_, division.host, division.team);
  if (options_.copy_weights) {
    copied_weights_ = copy_from_file(model_, division.host, split_->arena.taken(), SingleRows::named, split_->host);
  }
  std::vector<LayerFacts> facts = split_->facts;
  for (LayerFacts& f : facts) {
    f.hinted = f.hinted && options_.look_ahead;
    if (f.experts) f.streamable = f.streamable && options_.copy_weights;
    if (f.experts && approximates(options_)) f.selection = Selection::gate;  // on either side
    f.foreseen = f.foreseen && options_.look_ahead;
    if (sparsity_ == Sparsity::off) f.selection = Selection::all, f.hinted = f.linked = f.all_linked = false;
  }
  schedule_ = Schedule(facts);
  rows_ = split_->rows;
  sparsity_ = sparsity_of(facts);
  weights_ = split_->main;
  HandOffs* const hand_offs = device_.hand_offs();
  if (hand_offs == nullptr) fail("{} cannot hand work to the CPU in the middle of a pass", device_.name());
  mailbox_ = hand_offs->open_mailbox(n_batch * (c.n_embd + 2 * c.experts.n_named()), c.n_ff);
  mailbox_->set_patience(options_.patience);
  if (options_.stream_tokens == 0) return;
  const bool experts = std::ranges::any_of(facts, [](const LayerFacts& f) { return f.experts && f.streamable; });
  if (experts) page_lock_.emplace(*device_.cold_rows(), copied_weights_.as<void>(), copied_weights_.bytes());
  stream_ = std::make_unique<ColdStream>(device_, split_->host, schedule_.facts(), options_.share_rates);
}

Engine::~Engine() {
  watch(StallWatch::Phase::hand_offs);  // freeing the device's memory waits for the device
}

std::vector<bool> Engine::attention_layers(bool on_host) const {
  std::vector<bool> layers;
  for (const LayerFacts& f : schedule_.facts()) layers.push_back(f.host_attends == on_host);
  return layers;
}

BatchKind Engine::kind(const Batch& batch) const {
  const int64_t T = batch.size();
  if (T <= kFewTokens && !batch.computes_every_neuron()) return T == 1 ? BatchKind::one : BatchKind::few;
  return options_.stream_tokens > 0 && T >= options_.stream_tokens ? BatchKind::streamed : BatchKind::many;
}

void Engine::check(std::span<const int32_t> ids) const {
  HEARTH_CHECK(!ids.empty());
  for (const int32_t id : ids) {
    if (id < 0 || id >= config().n_vocab)
      fail("token id {} is out of range, expected 0 to {}", id, config().n_vocab - 1);
  }
}

// One upload: ids, positions and slots of a batch, each with room for the largest one, then the table of pages.
void Engine::upload(const PagedBatch& paged) {
  const auto n_batch = static_cast<size_t>(act_.n_batch), stride = static_cast<size_t>(act_.pages_stride);
  const std::span<const Batch::Part> parts = paged.batch().parts();
  inputs_.assign(3 * n_batch + parts.size() * stride, 0);
  std::copy(paged.batch().ids().begin(), paged.batch().ids().end(), inputs_.begin());
  for (size_t slot = 0; slot < parts.size(); ++slot) {
    const Batch::Part& p = parts[slot];
    for (int64_t i = 0; i < p.n_rows; ++i) {
      const auto row = static_cast<size_t>(p.first_row + i);
      inputs_[n_batch + row] = static_cast<int32_t>(p.sequence->n_past() + i);
      inputs_[2 * n_batch + row] = static_cast<int32_t>(slot);
    }
    const std::span<const int32_t> pages = p.sequence->pages();
    std::copy(pages.begin(), pages.end(), inputs_.begin() + static_cast<std::ptrdiff_t>(3 * n_batch + slot * stride));
  }
  watch(StallWatch::Phase::results);  // of the pass before: an upload waits for the device
  device_.upload(act_.ids, inputs_.data(), inputs_.size() * sizeof(int32_t));
  watch(StallWatch::Phase::idle);
  if (!split_) return;
  std::copy(inputs_.begin(), inputs_.end(), host_act_.ids);
  if (!embedding_on_host()) return;
  Forward(*host_context_, {paged.size(), paged.max_kv(), paged.runs()}).embed(host_act_.x);
  device_.upload(act_.x, host_act_.x, static_cast<size_t>(paged.size() * config().n_embd) * sizeof(float));
}

// Runs the device's part of a pass, and beside it the CPU's. A recorded part only starts the device; any other runs in
// a thread of its own, because a device waits for the CPU in the middle of it.
void Engine::run_on_both(FunctionRef<void()> device_part, bool recorded, const PassShape& shape, BatchKind kind) {
  if (!split_) return device_part();
  if (mailbox_->failed())
    fail("an earlier hand-off between {} and the CPU failed; this run cannot go on", device_.name());
  struct Watched {
    Engine& engine;
    explicit Watched(Engine& e) : engine(e) { engine.watch(StallWatch::Phase::hand_offs); }
    ~Watched() { engine.watch(StallWatch::Phase::idle); }
  } const watched(*this);
  if (recorded) {
    device_part();
    return host_side_->serve(shape, kind);
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
  guarded([&] { host_side_->serve(shape, kind); });
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

// Everything that the main device does of a pass. Logits of a few tokens are a part of it.
void Engine::main_part(const PassShape& shape, BatchKind kind) {
  const Forward forward(*context_, shape);
  if (!embedding_on_host()) forward.embed(act_.x);
  main_side_->run(shape, kind);
  if (shape.T > kFewTokens || head_on_host()) return;
  forward.head(act_.x, 0, shape.T);
  device_.argmax(act_.logits, config().n_vocab, shape.T, act_.best);
}

// Records a step of few tokens for a power-of-two bound of the context, once: the bound fixes the attention's grid,
// everything else is read from device memory.
int Engine::record(int64_t T, int64_t max_kv, BatchKind kind) {
  const auto bound = std::bit_ceil(static_cast<uint64_t>(std::max(max_kv, kSmallestRecordedContext)));
  int& id = recorded_[static_cast<size_t>(T)][static_cast<size_t>(std::countr_zero(bound))];
  if (id < 0) {
    device_.recording()->begin();
    main_part({T, std::min(static_cast<int64_t>(bound), n_ctx_), {}}, kind);
    id = device_.recording()->end();
  }
  return id;
}

void Engine::eval(const Batch& batch) {
  const int64_t T = batch.size();
  check(batch.ids());
  HEARTH_CHECK(T <= act_.n_batch && std::ssize(batch.parts()) <= std::max(options_.n_sequences, kFewTokens),
               "a batch of {} tokens of {} sequences", T, batch.parts().size());
  PagedBatch paged(batch, *pool_, n_ctx_, [&](int32_t from, int32_t to) {
    kv_.copy_page(from, to);
    if (split_) host_kv_.copy_page(from, to);
  });
  results_ = {};
  upload(paged);
  const PassShape shape{T, paged.max_kv(), paged.runs()};
  const BatchKind kind = this->kind(batch);
  if (skips_neurons(kind) && options_.use_graph && device_.recording() != nullptr) {
    const int id = record(T, shape.max_kv, kind);
    run_on_both([&] { device_.recording()->launch(id); }, true, shape, kind);
  } else {
    run_on_both([&] { main_part(shape, kind); }, false, shape, kind);
  }
  paged.commit();
  results_.n_rows = T;
  results_.wanted = batch.wanted();
  if (T > kFewTokens) return;
  if (!head_on_host()) results_.count = T;
  if (sparsity_ != Sparsity::off && skips_neurons(kind)) count_active(T);
  if (config().experts && host_side_ != nullptr && kind != BatchKind::streamed) count_experts(T);
}

void Engine::count_experts(int64_t T) {
  const auto n_named = static_cast<double>(config().experts.n_named());
  for (size_t l = 0; l < density_.experts.size(); ++l) {
    if (!schedule_.facts()[l].experts) continue;
    density_.experts[l] += n_named * static_cast<double>(T);
    density_.experts_on_host[l] += host_side_->computed(static_cast<int64_t>(l)).experts;
  }
}

// The neurons among which the active ones of T tokens are counted.
void Engine::count_neurons(size_t layer, int64_t T, bool main_skips) {
  double& neurons = density_.neurons[layer];
  if (!schedule_.facts()[layer].experts) {
    neurons += static_cast<double>(T * config().n_ff);
    return;
  }
  const model::ExpertsDescription& e = config().experts;
  const int64_t all = T * (e.routing.n_used * e.n_ff + e.n_ff_shared);
  const int64_t host = host_side_ ? host_side_->computed(static_cast<int64_t>(layer)).neurons : 0;
  density_.neurons_on_host[layer] += static_cast<double>(host);
  neurons += static_cast<double>(main_skips ? all : host);
}

void Engine::fetch_counts() {
  results_.counts.resize(static_cast<size_t>((2 * config().n_layer + 1) * kFewTokens));
  fetch(results_.counts.data(), act_.n_active, results_.counts.size() * sizeof(int32_t));
}

void Engine::count_active(int64_t T) {
  fetch_counts();
  const size_t n_layer = density_.active.size(), few = kFewTokens;
  for (size_t l = 0; l < n_layer; ++l) {
    const LayerFacts& facts = schedule_.facts()[l];
    const bool cold = facts.cold;
    if (facts.experts && facts.selection == Selection::all) continue;
    const bool main_skips = !facts.experts || computes_down_t(device_);
    count_neurons(l, T, main_skips);
    for (size_t t = 0; t < static_cast<size_t>(T); ++t) {
      const double host = cold ? host_act_.n_active[l * few + t] : 0;
      const double linked = results_.counts[(n_layer + l) * few + t];
      density_.active_on_host[l] += host;
      density_.active_linked[l] += linked;
      density_.active[l] += (main_skips ? results_.counts[l * few + t] : 0) + host + linked;
    }
  }
  density_.steps += T;
}

std::span<const float> Engine::logits(int64_t row) {
  HEARTH_CHECK(row >= 0 && row < results_.n_rows && results_.wanted[static_cast<size_t>(row)],
               "logits of row {}, which nobody wanted", row);
  const int64_t n_vocab = config().n_vocab, n_embd = config().n_embd;
  const bool on_host = head_on_host();
  if (row < results_.first || row >= results_.first + results_.count) {
    int64_t n = 1;  // with the wanted rows behind it
    while (n < act_.logit_rows && row + n < results_.n_rows && results_.wanted[static_cast<size_t>(row + n)]) ++n;
    if (on_host) fetch(host_act_.x, act_.x + row * n_embd, static_cast<size_t>(n * n_embd) * sizeof(float));
    const ForwardContext& context = on_host ? *host_context_ : *context_;
    Forward(context, {n, 1, {}}).head(on_host ? host_act_.x : act_.x, on_host ? 0 : row, n);
    results_.first = row, results_.count = n;
  }
  const float* const from = (on_host ? host_act_ : act_).logits + (row - results_.first) * n_vocab;
  if (on_host) return {from, static_cast<size_t>(n_vocab)};
  fetch(logits_.data(), from, logits_.size() * sizeof(float));
  return logits_;
}

int32_t Engine::best(int64_t row) {
  if (results_.n_rows > kFewTokens || head_on_host()) {
    const auto values = logits(row);
    return static_cast<int32_t>(std::max_element(values.begin(), values.end()) - values.begin());
  }
  if (results_.counts.empty()) fetch_counts();
  return results_.counts[static_cast<size_t>(2 * config().n_layer * kFewTokens + row)];
}

// Evaluates any number of tokens in batches; visit(first) after each. Throws before anything has changed when they do
// not fit.
void Engine::eval_in_batches(Sequence& sequence, std::span<const int32_t> ids, Logits wanted, bool every_neuron,
                             FunctionRef<void(int64_t first, int64_t count)> visit) {
  check(ids);
  require_room(sequence, std::ssize(ids), *pool_, n_ctx_);
  for (int64_t first = 0; first < std::ssize(ids); first += act_.n_batch) {
    const int64_t count = std::min(act_.n_batch, std::ssize(ids) - first);
    const bool is_last = first + count == std::ssize(ids);
    Batch batch;
    batch.add(sequence, ids.subspan(static_cast<size_t>(first), static_cast<size_t>(count)),
              wanted == Logits::last && !is_last ? Logits::none : wanted);
    if (every_neuron) batch.compute_every_neuron();
    eval(batch);
    visit(first, count);
  }
}

std::span<const float> Engine::eval(Sequence& sequence, std::span<const int32_t> ids) {
  int64_t last = 0;
  eval_in_batches(sequence, ids, Logits::last, false, [&](int64_t, int64_t count) { last = count - 1; });
  return logits(last);
}

void Engine::eval_all(Sequence& sequence, std::span<const int32_t> ids,
                      FunctionRef<void(int64_t, std::span<const float>)> visit, bool every_neuron) {
  eval_in_batches(sequence, ids, Logits::all, every_neuron, [&](int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) visit(first + i, logits(i));
  });
}

int32_t Engine::eval_greedy(Sequence& sequence, int32_t id) {
  Batch batch;
  batch.add(sequence, {&id, 1});
  eval(batch);
  return best(0);
}

TokenTraffic Engine::traffic(const DensityStats& counted, int64_t n_kv) const {
  return token_traffic({model_, schedule_.facts(), rows_, sparsity_ != Sparsity::off, head_on_host()}, counted,
                       std::min(n_kv, n_ctx_));
}

}  // namespace hearth::engine
