#include "engine/schedule.h"

#include <fmt/format.h>

#include <utility>

#include "core/error.h"
#include "engine/schedule_letters.h"

namespace hearth::engine {
namespace {

// Compiles one layer. The members are what follows from the facts and the kind of batch.
class Compiler {
 public:
  Compiler(const LayerFacts& layer, const LayerFacts* next, BatchKind kind)
      : l_(layer),
        skips_(skips_neurons(kind) && layer.selection != Selection::all),
        main_names_(skips_ && layer.selection == Selection::predictor && layer.main_predicts),
        whole_on_host_(layer.host_attends && !layer.hot && !main_names_ && !layer.post_norms),
        streams_(kind == BatchKind::streamed && layer.cold && layer.streamable && !whole_on_host_),
        asks_(layer.cold && (!streams_ || layer.experts) && !(skips_ && layer.all_linked)),
        publishes_(asks_ && skips_ && layer.hot && !layer.parallel),
        prefetches_(kind == BatchKind::one && layer.hinted && asks_),
        foresees_(kind == BatchKind::one && layer.foreseen && asks_),
        hints_next_(kind == BatchKind::one && next != nullptr && next->hinted),
        after_(next == nullptr                        ? NextReader::head
               : next->parallel || next->host_attends ? NextReader::nobody
                                                      : NextReader::attention) {}

  LayerSchedule compile() && {
    if (l_.parallel) {
      parallel();
    } else if (whole_on_host_) {
      whole_on_host();
    } else {
      attention_first();
      ffn_second();
    }
    for (size_t i = 0; i < s_.main.size(); ++i) {
      if (auto* a = std::get_if<Attend>(&s_.main[i])) a->next = reader_after(i);
      if (auto* f = std::get_if<Ffn>(&s_.main[i])) f->next = reader_after(i);
    }
    return std::move(s_);
  }

 private:
  void main(Step step) { s_.main.push_back(step); }
  void host(Step step) { s_.host.push_back(step); }

  // Who reads x through a norm after step i of the main device, with nothing added to it in between.
  NextReader reader_after(size_t i) const {
    if (l_.parallel) return NextReader::nobody;  // attention and FFN have a norm each
    for (++i; i < s_.main.size(); ++i) {
      if (std::holds_alternative<Post>(s_.main[i])) continue;  // only reads x
      if (const auto* p = std::get_if<Predict>(&s_.main[i]))
        return p->reads == Reads::norm_of_x ? NextReader::predictor : NextReader::nobody;
      const auto* f = std::get_if<Ffn>(&s_.main[i]);
      return f != nullptr && f->reads == Reads::norm_of_x ? NextReader::ffn : NextReader::nobody;
    }
    return after_;
  }

  // The first reader of the FFN's input on the main device does the norm.
  Reads ffn_input() { return std::exchange(made_, true) ? Reads::normed : Reads::norm_of_x; }

  void whole_on_host() {
    main(Post{Letter::x}), main(Collect{});
    host(Take{Letter::x});
    if (l_.early_router) host(Route{Reads::residual});
    host(Attend{Reads::norm_of_x}), host(AddInput{});
    l_.experts ? host_experts() : host_ffn(Letter::x);
    host(Answer{});
  }

  void attention_first() {
    if (l_.early_router && l_.main_routes) main(Route{Reads::residual});
    if (l_.host_attends) main(Post{Letter::x});
    branch();
    if (!l_.host_attends) {
      main(Attend{Reads::norm_of_x});
    } else {
      main(Collect{});
      host(Take{Letter::x}), host(Attend{Reads::norm_of_x}), host(Answer{});
    }
    join(Half::attention);
  }

  void branch() {
    if (l_.post_norms) main(Branch{});
  }
  void join(Half half) {
    if (l_.post_norms) main(Join{half});
  }

  // The host's part of a layer whose experts it chooses itself, from x.
  void host_experts() {
    if (!l_.early_router) host(Route{Reads::norm_of_x});
    host(Experts{l_.early_router ? Reads::norm_of_x : Reads::normed, skips_});
  }

  // The side that chooses tells the other: a choice made twice might differ by a rounding.
  void experts_second() {
    if (!l_.main_routes) {
      main(Post{Letter::x}), main(Collect{});
      host(Take{Letter::x});
      host_experts();
      return host(Answer{});
    }
    if (!l_.early_router) {
      main(Route{ffn_input()});
    } else if (asks_) {
      main(Norm{Half::ffn}), made_ = true;
    }
    if (asks_) main(Post{Letter::ffn_input_and_experts});
    if (streams_) main(Fetch{});
    if (l_.hot) main(Experts{ffn_input(), skips_});
    if (streams_) main(Stream{ffn_input()});
    if (!asks_) return;
    main(Collect{});
    if (foresees_) host(Foresee{});
    host(Take{Letter::ffn_input_and_experts}), host(Experts{Reads::normed, skips_, streams_}), host(Answer{});
  }

  void ffn_second() {
    if (l_.experts) return experts_second();
    const Letter letter = begin_hand_off(asks_);
    branch();
    main_ffn();
    if (asks_ && !publishes_) main(Collect{});
    join(Half::ffn);
    if (!asks_) return;
    if (prefetches_) host(Prefetch{});
    host(Take{letter});
    host_ffn(letter);
    host(Answer{});
  }

  // Attention and FFN read the same x: both norms come before anything is added to it, and one hand-off has both parts
  // of the host.
  void parallel() {
    const bool asks = asks_ || l_.host_attends;
    const Letter letter = begin_hand_off(asks);
    if (!l_.host_attends) main(Norm{Half::attention});
    main_ffn();
    if (!l_.host_attends) main(Attend{Reads::normed});
    if (!asks) return;
    main(Collect{});
    if (prefetches_) host(Prefetch{});
    host(Take{letter});
    if (asks_) host_ffn(letter);
    if (l_.host_attends) host(Attend{Reads::norm_of_x});
    host(Answer{});
  }

  // Posts as early as can be: at once, or with the neurons that the main device names for the host.
  Letter begin_hand_off(bool asks) {
    Letter letter = Letter::x;
    if (main_names_ && asks_) {
      letter = l_.parallel && l_.host_attends ? Letter::x_and_neurons : Letter::ffn_input_and_neurons;
    } else if (asks) {
      main(Post{letter});
    }
    if (main_names_) {
      if (l_.reads_residual && brings_input(letter)) main(Norm{Half::ffn}), made_ = true;
      const Reads reads = l_.reads_residual ? Reads::residual : ffn_input();
      main(Predict{reads, asks_ ? std::optional(letter) : std::nullopt});
    }
    if (hints_next_) {
      if (!made_) main(Norm{Half::ffn}), made_ = true;
      main(Hint{});
    }
    return letter;
  }

  void main_ffn() {
    if (l_.hot) main(Ffn{neurons(), ffn_input(), publishes_, skips_ && l_.linked});
    if (streams_) main(Stream{ffn_input()});
  }

  void host_ffn(Letter letter) {
    Reads reads = brings_input(letter) ? Reads::normed : Reads::norm_of_x;
    if (main_names_) {  // the norm is done while the neurons are awaited
      if (reads == Reads::norm_of_x) host(Norm{Half::ffn});
      host(TakeNeurons{});
      reads = Reads::normed;
    } else if (skips_ && l_.selection == Selection::predictor) {
      host(Predict{l_.reads_residual ? Reads::residual : reads, std::nullopt});
      if (!l_.reads_residual) reads = Reads::normed;
    }
    host(Ffn{neurons(), reads, publishes_});
  }

  Neurons neurons() const {
    if (!skips_) return Neurons::all;
    return l_.selection == Selection::gate ? Neurons::by_gates : Neurons::listed;
  }

  const LayerFacts& l_;
  const bool skips_;          // neurons
  const bool main_names_;     // the main device's predictor names both sides' neurons
  const bool whole_on_host_;  // the main device has no part but one hand-off
  const bool streams_, asks_, publishes_, prefetches_, foresees_, hints_next_;
  const NextReader after_;  // the layer
  bool made_ = false;       // the FFN's input, on the main device
  LayerSchedule s_;
};

const char* to_string(Letter letter) {
  switch (letter) {
    case Letter::x:
      return "x";
    case Letter::ffn_input:
      return "FFN input";
    case Letter::x_and_neurons:
      return "x, neurons";
    case Letter::ffn_input_and_neurons:
      return "FFN input, neurons";
    case Letter::ffn_input_and_experts:
      return "FFN input, experts";
  }
  return "?";
}

const char* to_string(Reads reads) {
  switch (reads) {
    case Reads::norm_of_x:
      return "norm of x";
    case Reads::normed:
      return "normed";
    case Reads::residual:
      return "x";
  }
  return "?";
}

std::string describe(const Ffn& f) {
  const char* neurons = f.neurons == Neurons::all ? "all" : f.neurons == Neurons::by_gates ? "by gates" : "listed";
  return fmt::format("ffn({}, {}{}{})", neurons, to_string(f.reads), f.linked ? ", linked" : "",
                     f.hands_over ? ", answer" : "");
}

}  // namespace

const char* to_string(BatchKind kind) {
  switch (kind) {
    case BatchKind::one:
      return "one token";
    case BatchKind::few:
      return "few tokens";
    case BatchKind::many:
      return "many tokens";
    case BatchKind::streamed:
      return "many tokens, streamed";
  }
  return "?";
}

std::string to_string(const Step& step) {
  struct Describe {
    std::string operator()(const Norm& n) const { return n.half == Half::ffn ? "norm(ffn)" : "norm(attention)"; }
    std::string operator()(const Attend& a) const { return fmt::format("attend({})", to_string(a.reads)); }
    std::string operator()(const Predict& p) const {
      return p.posts ? fmt::format("predict({}) post({})", to_string(p.reads), to_string(*p.posts))
                     : fmt::format("predict({})", to_string(p.reads));
    }
    std::string operator()(const Ffn& f) const { return describe(f); }
    std::string operator()(const Route& r) const { return fmt::format("route({})", to_string(r.reads)); }
    std::string operator()(const Experts& e) const {
      return fmt::format("experts({}{}{})", to_string(e.reads), e.skips ? ", active neurons" : "",
                         e.that_stay ? ", that stay" : "");
    }
    std::string operator()(const Post& p) const { return fmt::format("post({})", to_string(p.letter)); }
    std::string operator()(const Hint&) const { return "hint"; }
    std::string operator()(const Fetch&) const { return "fetch"; }
    std::string operator()(const Stream& s) const { return fmt::format("stream({})", to_string(s.reads)); }
    std::string operator()(const Collect&) const { return "collect"; }
    std::string operator()(const Branch&) const { return "branch"; }
    std::string operator()(const Join& j) const { return j.half == Half::ffn ? "join(ffn)" : "join(attention)"; }
    std::string operator()(const Prefetch&) const { return "prefetch"; }
    std::string operator()(const Foresee&) const { return "foresee"; }
    std::string operator()(const Take& t) const { return fmt::format("take({})", to_string(t.letter)); }
    std::string operator()(const TakeNeurons&) const { return "take(neurons)"; }
    std::string operator()(const AddInput&) const { return "add input"; }
    std::string operator()(const Answer&) const { return "answer"; }
  };
  return std::visit(Describe{}, step);
}

LayerSchedule compile(const LayerFacts& layer, const LayerFacts* next, BatchKind kind) {
  return Compiler(layer, next, kind).compile();
}

void check_facts(std::span<const LayerFacts> layers) {
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerFacts& l = layers[i];
    const auto require = [&](bool holds, const char* what) {
      if (!holds) fail("the placement of layer {} cannot be run: {}; plan again", i, what);
    };
    const bool predicts = l.selection == Selection::predictor;
    require(l.hot || l.cold, "no device has its neurons");
    require(!l.parallel || !l.post_norms, "attention and FFN are computed together, and normed each on its own");
    require(l.experts || (!l.main_routes && !l.early_router), "a router without experts");
    require(!l.experts || (!l.parallel && !l.post_norms && !predicts),
            "a mixture of experts beside the attention, normed after it, or with predictors");
    require(!l.experts || !l.streamable || l.main_routes, "experts are streamed that the CPU chooses");
    require(!l.experts || l.main_routes || !l.hot, "the CPU chooses the experts, and some of them are on the GPU");
    require(!l.main_routes || l.hot || !l.host_attends,
            "the GPU chooses the experts of a layer of which it has nothing");
    require(!l.early_router || l.main_routes || l.host_attends,
            "the router reads what is before the attention, which is on the GPU, and the CPU chooses");
    require(!predicts || l.main_predicts || !l.hot, "its predictor is on the CPU, and some of its neurons on the GPU");
    require(!l.linked || (l.hot && l.cold && predicts && l.main_predicts),
            "rows are read over the link, and no predictor on the GPU names them beside others");
    require(!l.all_linked || l.linked, "all its cold rows are read over the link, and none is");
    const auto named_by_main = [](const LayerFacts& f) {
      return f.selection == Selection::predictor && f.main_predicts;
    };
    require(!l.hinted || (i > 0 && named_by_main(l) && named_by_main(layers[i - 1])),
            "its rows are to be prefetched, and no predictor on the GPU names them a layer ahead");
    require(!l.hinted || (l.cold && !l.all_linked && !l.host_attends),
            "its rows are to be prefetched, and the CPU is not asked for them alone");
    require(!l.foreseen || (i > 0 && l.brings_experts() && !l.early_router && layers[i - 1].brings_experts()),
            "its experts are to be prefetched, and no hand-off brings what the CPU would name them by");
  }
}

Schedule::Schedule(std::vector<LayerFacts> layers) : facts_(std::move(layers)) {
  check_facts(facts_);
  for (const BatchKind kind : kBatchKindList) {
    auto& lists = by_kind_[static_cast<size_t>(kind)];
    for (size_t i = 0; i < facts_.size(); ++i) {
      lists.push_back(compile(facts_[i], i + 1 < facts_.size() ? &facts_[i + 1] : nullptr, kind));
      const auto wrong = check(facts_[i], kind, lists.back());
      HEARTH_CHECK(!wrong, "layer {}, {}: {}", i, to_string(kind), wrong.value_or(""));
    }
  }
}

std::string Schedule::print(BatchKind kind) const {
  const auto& lists = by_kind_[static_cast<size_t>(kind)];
  const auto line = [](const std::vector<Step>& steps) {
    std::string text;
    for (const Step& step : steps) text += (text.empty() ? "" : ", ") + to_string(step);
    return text.empty() ? std::string("-") : text;
  };
  std::string text;
  for (size_t begin = 0, end = 0; begin < lists.size(); begin = end) {
    const std::string main = line(lists[begin].main), host = line(lists[begin].host);
    while (end < lists.size() && line(lists[end].main) == main && line(lists[end].host) == host) ++end;
    text += end - begin == 1 ? fmt::format("layer {}\n", begin) : fmt::format("layers {} to {}\n", begin, end - 1);
    text += fmt::format("  main: {}\n  CPU:  {}\n", main, host);
  }
  return text;
}

}  // namespace hearth::engine
