#include "engine/main_side.h"

#include <optional>
#include <utility>

#include "core/error.h"

namespace hearth::engine {

// Executes one layer's list.
class MainSide::Layer {
 public:
  Layer(MainSide& side, const Forward& forward, int64_t layer)
      : s_(side), f_(forward), l_(layer), rows_(side.rows_[static_cast<size_t>(layer)]), x_(side.c_.act.x) {}

  void operator()(const Norm& step) { f_.norm(l_, step.half, x_); }
  void operator()(const Attend& step) {
    const auto next = next_norm(step.next);
    f_.attend(l_, step.reads, x_, sum_, next ? &*next : nullptr);
  }
  void operator()(const Predict& step) {
    const Activations& a = s_.c_.act;
    PredictArgs args{rows_.n_hot, a.predicted, rows_.linked.n(), a.linked, {}};
    if (step.posts) {
      const bool input = *step.posts == Letter::ffn_input_and_neurons;
      args.hand_off = {s_.mailbox_, input ? a.ffn_input(l_, f_.T()).x : x_, f_.size() / f_.T()};
    }
    f_.predict(l_, step.reads, x_, args);
  }
  void operator()(const Ffn& step) {
    const Activations& a = s_.c_.act;
    const Input in = f_.ffn_input(l_, step.reads, x_);
    const Vector bias = f_.layer(l_).ffn_down_bias;
    const auto next = next_norm(step.next);
    const NextNorm* const prepares = next ? &*next : nullptr;
    if (step.neurons == Neurons::all) return f_.ffn_dense(l_, in, bias, sum_, prepares);
    SparseArgs sparse;
    if (step.neurons == Neurons::listed) sparse.candidates = a.predicted;
    const LinkedNeurons linked{rows_.linked, a.linked, a.n_linked_active + l_ * kFewTokens};
    if (step.linked) sparse.linked = &linked;
    if (step.hands_over) sparse.collect = s_.mailbox_, sparse.next = next_matrices();
    f_.ffn_sparse(l_, sparse, in, bias, sum_, prepares);
  }
  void operator()(const Route& step) { f_.route(l_, step.reads, x_); }
  void operator()(const Experts& step) {
    f_.ffn_experts(l_, s_.c_.act.choice(l_, f_.T()), f_.ffn_input(l_, step.reads, x_), step.skips, x_);
  }
  void operator()(const Post& step) {
    const Activations& a = s_.c_.act;
    if (step.letter != Letter::ffn_input_and_experts) return hand_offs().post(*s_.mailbox_, x_, f_.size());
    hand_offs().post(*s_.mailbox_, a.ffn_input(l_, f_.T()).x, a.handed_over(f_.T()));
  }
  void operator()(const Hint&) {
    const model::LayerPredictor& predictor = f_.layer(l_ + 1).predictor;
    const MainRows& next = s_.rows_[static_cast<size_t>(l_ + 1)];
    hand_offs().hint(predictor.weights, f_.predictor_input(predictor, l_, x_),
                     {s_.mailbox_, next.n_hot, next.linked.n()});
  }
  void operator()(const Fetch&) { s_.stream_->fetch(l_, s_.c_.act.choice(l_, f_.T()), f_.T()); }
  void operator()(const Stream& step) {
    if (f_.layer(l_).router) {
      return s_.stream_->ffn_experts(s_.c_.act.choice(l_, f_.T()), f_.ffn_input(l_, step.reads, x_), f_.T(), x_);
    }
    const Vector bias = rows_.n_hot > 0 ? Vector{} : f_.layer(l_).ffn_down_bias;  // once
    s_.stream_->ffn(l_, f_.ffn_input(l_, step.reads, x_), f_.T(), bias, sum_);
  }
  void operator()(const Collect&) { hand_offs().collect(*s_.mailbox_, sum_, f_.size()); }
  void operator()(const Branch&) {
    sum_ = s_.c_.act.branch;
    s_.c_.device.fill_zero(sum_, static_cast<size_t>(f_.size()) * sizeof(float));
  }
  void operator()(const Join& step) { f_.join(l_, step.half, std::exchange(sum_, x_), x_); }
  template <typename HostStep>
  void operator()(const HostStep&) {
    HEARTH_CHECK(false, "a step of the CPU's in the main device's list");
  }

 private:
  HandOffs& hand_offs() { return *s_.c_.device.hand_offs(); }

  std::optional<NextNorm> next_norm(NextReader reader) const {
    switch (reader) {
      case NextReader::nobody:
        return std::nullopt;
      case NextReader::predictor:
        return f_.next_ffn(l_, true);
      case NextReader::ffn:
        return f_.next_ffn(l_, false);
      case NextReader::attention:
        return f_.next_attention(l_ + 1);
      case NextReader::head:
        return s_.head_here_ ? std::optional(f_.next_head()) : std::nullopt;
    }
    return std::nullopt;
  }
  // The matrices that are multiplied when the CPU has answered: the next layer's first, or the head's; empty where the
  // CPU has them.
  std::array<Matrix, 3> next_matrices() const {
    if (l_ + 1 == s_.c_.config.n_layer) return {s_.c_.weights.output};
    const auto all = f_.layer(l_ + 1).attention();
    return {*all[0], *all[1], *all[2]};
  }

  MainSide& s_;
  const Forward& f_;
  const int64_t l_;
  const MainRows& rows_;
  float* const x_;
  float* sum_ = x_;  // what attention and FFN are added to
};

MainSide::MainSide(const ForwardContext& context, const Schedule& schedule, std::span<const MainRows> rows,
                   Mailbox* mailbox, ColdStream* stream, bool head_here)
    : c_(context), schedule_(schedule), rows_(rows), mailbox_(mailbox), stream_(stream), head_here_(head_here) {}

void MainSide::run(const PassShape& shape, BatchKind kind) {
  const Forward forward(c_, shape);
  for (int64_t l = 0; l < c_.config.n_layer; ++l) {
    Layer layer(*this, forward, l);
    for (const Step& step : schedule_.layer(kind, l).main) std::visit(layer, step);
  }
}

}  // namespace hearth::engine
