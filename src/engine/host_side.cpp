#include "engine/host_side.h"

#include <algorithm>

#include "core/error.h"

namespace hearth::engine {

// Executes one layer's list.
class HostSide::Layer {
 public:
  Layer(HostSide& side, const Forward& forward, int64_t layer)
      : s_(side), f_(forward), l_(layer), b_(side.brought_), y_(side.mailbox_.answer_buffer()) {}

  void operator()(const Prefetch&) {
    const MainRows& rows = s_.rows_[static_cast<size_t>(l_)];
    const FfnShard& cold = f_.layer(l_).ffn;
    const auto n_hot = static_cast<int32_t>(rows.n_hot), n = n_hot + static_cast<int32_t>(cold.n());
    const auto marks = MailboxMarks::of(n, n_hot, n_hot + static_cast<int32_t>(rows.linked.n()));
    const std::span<const int32_t> told = s_.mailbox_.wait_hints(marks);
    // A hint that came a hand-off late names rows that this layer does not have.
    const auto begin = std::lower_bound(told.begin(), told.end(), 0);
    const std::span<const int32_t> ids(begin, std::lower_bound(begin, told.end(), cold.n()));
    if (!ids.empty()) prefetch().fetch(cold, ids, s_.mailbox_);
  }
  void operator()(const Foresee&) {
    const ExpertChoice choice = s_.c_.act.choice(l_, 1);
    s_.c_.device.expert_ffn()->route(f_.layer(l_).router, Act{s_.last_input_.data(), nullptr}, 1, choice);
    prefetch().fetch_experts({f_.layer(l_).experts, f_.layer(l_).router.shared}, choice, s_.mailbox_);
  }
  void operator()(const Take& step) {
    const float* const brought = s_.mailbox_.wait_input();
    s_.c_.device.fill_zero(y_, static_cast<size_t>(f_.size()) * sizeof(float));
    b_ = {};
    if (step.letter == Letter::x || step.letter == Letter::x_and_neurons) {
      b_.x = brought;
      b_.input = s_.c_.act.ffn_input(l_, f_.T());  // once a step has made it
      return;
    }
    b_.input = {const_cast<float*>(brought), s_.c_.act.ffn_input(l_, f_.T()).q8};  // inputs of operations are only read
    if (step.letter == Letter::ffn_input_and_experts) {
      b_.choice = s_.c_.act.choice_behind(b_.input.x, f_.T());
      if (f_.T() == 1) s_.last_input_.assign(brought, brought + f_.size());  // the next hand-off overwrites it
    }
    const FfnShard& shard = f_.layer(l_).some_ffn();
    if (is_quantized(shard.gate.type) || (shard.up && is_quantized(shard.up.type))) {
      s_.c_.device.quantize(b_.input, f_.T(), s_.c_.config.n_embd);
    }
  }
  void operator()(const TakeNeurons&) {
    if (f_.T() == 1) prefetch().fetch_input(f_.layer(l_).ffn, b_.input, s_.mailbox_);
    b_.neurons = s_.mailbox_.wait_neurons(f_.T());
  }
  void operator()(const Norm& step) { f_.norm(l_, step.half, b_.x); }
  void operator()(const Attend& step) { f_.attend(l_, step.reads, b_.x, y_, nullptr); }
  void operator()(const AddInput&) {
    float* const x = s_.c_.act.x;
    for (int64_t i = 0; i < f_.size(); ++i) x[i] = b_.x[i] + y_[i];
    b_.x = x;
  }
  void operator()(const Predict& step) {
    b_.neurons = s_.c_.act.predicted;
    PredictArgs args;
    args.n_own = f_.layer(l_).ffn.n(), args.own = b_.neurons;
    f_.predict(l_, step.reads, b_.x, args);
  }
  void operator()(const Ffn& step) {
    const Input in = step.reads == Reads::normed ? Input(b_.input) : f_.ffn_input(l_, step.reads, b_.x);
    const Vector bias = f_.layer(l_).ffn_down_bias;
    if (step.neurons == Neurons::all) return f_.ffn_dense(l_, in, bias, y_, nullptr);
    SparseArgs sparse;
    if (step.neurons == Neurons::listed) sparse.candidates = b_.neurons;
    if (step.hands_over && s_.mailbox_.can_publish(f_.size())) sparse.answer = &s_.mailbox_;
    f_.ffn_sparse(l_, sparse, in, bias, y_, nullptr);
  }
  void operator()(const Route& step) {
    f_.route(l_, step.reads, b_.x);
    b_.choice = s_.c_.act.choice(l_, f_.T());
  }
  void operator()(const Experts& step) {
    const Input in = step.reads == Reads::normed ? Input(b_.input) : f_.ffn_input(l_, step.reads, b_.x);
    const std::vector<Expert>& own = f_.layer(l_).experts;
    if (step.that_stay) {
      const size_t n_ids = static_cast<size_t>(f_.T() * b_.choice.n_named);
      const std::vector<bool> visits = visitors(own, {b_.choice.ids, n_ids}, s_.rates_);
      s_.staying_ = own;
      for (size_t id = 0; id < own.size(); ++id) {
        if (visits[id]) s_.staying_[id] = {};
      }
      const ExpertSet set(s_.staying_, f_.layer(l_).router.shared);
      return s_.c_.device.expert_ffn()->ffn_experts(set, b_.choice, in, f_.T(), y_);
    }
    f_.ffn_experts(l_, b_.choice, in, step.skips, y_);
    if (f_.T() > kFewTokens) return;  // the GPU waits, and nobody asks about prompts
    const model::ExpertsDescription& all = s_.c_.config.experts;
    Computed& computed = s_.computed_[static_cast<size_t>(l_)] = {};
    for (int64_t i = 0; i < f_.T() * b_.choice.n_named; ++i) {
      const int64_t id = b_.choice.ids[i], n = own[static_cast<size_t>(id)].ffn.n();
      computed.experts += static_cast<double>(n) / static_cast<double>(all.neurons_of(id)), computed.neurons += n;
    }
  }
  void operator()(const Answer&) { s_.mailbox_.answer(); }
  template <typename MainStep>
  void operator()(const MainStep&) {
    HEARTH_CHECK(false, "a step of the main device's in the CPU's list");
  }

 private:
  RowPrefetch& prefetch() { return *s_.c_.device.row_prefetch(); }

  HostSide& s_;
  const Forward& f_;
  const int64_t l_;
  Letters& b_;
  float* const y_;
};

HostSide::HostSide(const ForwardContext& context, const Schedule& schedule, std::span<const MainRows> rows,
                   Mailbox& mailbox, const ShareRates& rates)
    : c_(context),
      schedule_(schedule),
      rows_(rows),
      mailbox_(mailbox),
      rates_(rates),
      computed_(static_cast<size_t>(context.config.n_layer)) {}

void HostSide::serve(const PassShape& shape, BatchKind kind) {
  try {
    const Forward forward(c_, shape);
    for (int64_t l = 0; l < c_.config.n_layer; ++l) {
      Layer layer(*this, forward, l);
      for (const Step& step : schedule_.layer(kind, l).host) std::visit(layer, step);
    }
  } catch (...) {
    mailbox_.abandon();
    throw;
  }
}

}  // namespace hearth::engine
