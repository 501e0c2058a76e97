#include "engine/schedule.h"

#include <fmt/format.h>

#include <utility>

#include "core/error.h"

namespace hearth::engine {
namespace {

bool brings_neurons(Letter letter) {
  return letter == Letter::x_and_neurons || letter == Letter::ffn_input_and_neurons;
}
bool brings_input(Letter letter) {
  return letter == Letter::ffn_input || letter == Letter::ffn_input_and_neurons ||
         letter == Letter::ffn_input_and_experts;
}

// Compiles one layer. The members are what follows from the facts and the kind of batch.
class Compiler {
 public:
  Compiler(const LayerFacts& layer, const LayerFacts* next, BatchKind kind)
      : l_(layer),
        skips_(skips_neurons(kind) && layer.selection != Selection::all),
        main_names_(skips_ && layer.selection == Selection::predictor && layer.main_predicts),
        whole_on_host_(layer.host_attends && !layer.hot && !main_names_),
        streams_(kind == BatchKind::streamed && layer.cold && layer.streamable && !whole_on_host_),
        asks_(layer.cold && !streams_ && !(skips_ && layer.all_linked)),
        publishes_(asks_ && skips_ && layer.hot && !layer.parallel),
        prefetches_(kind == BatchKind::one && layer.hinted && asks_),
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
    if (!l_.host_attends) return main(Attend{Reads::norm_of_x});
    main(Post{Letter::x}), main(Collect{});
    host(Take{Letter::x}), host(Attend{Reads::norm_of_x}), host(Answer{});
  }

  // The host's part of a layer whose experts it chooses itself, from x.
  void host_experts() {
    if (!l_.early_router) host(Route{Reads::norm_of_x});
    host(Experts{l_.early_router ? Reads::norm_of_x : Reads::normed});
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
    if (l_.hot) main(Experts{ffn_input()});
    if (!asks_) return;
    main(Collect{});
    host(Take{Letter::ffn_input_and_experts}), host(Experts{Reads::normed}), host(Answer{});
  }

  void ffn_second() {
    if (l_.experts) return experts_second();
    const Letter letter = begin_hand_off(asks_);
    main_ffn();
    if (!asks_) return;
    if (!publishes_) main(Collect{});
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
  const bool streams_, asks_, publishes_, prefetches_, hints_next_;
  const NextReader after_;  // the layer
  bool made_ = false;       // the FFN's input, on the main device
  LayerSchedule s_;
};

// Executes both lists on sets instead of numbers. x is the set of parts that have been added to it in this layer; an
// input is the set that x was when it was normed.
class Simulation {
 public:
  Simulation(const LayerFacts& layer, BatchKind kind, const LayerSchedule& schedule)
      : l_(layer), skips_(skips_neurons(kind) && layer.selection != Selection::all), s_(schedule) {}

  std::optional<std::string> run() {
    size_t i = 0, j = 0;
    for (bool moved = true; moved && (i < s_.main.size() || j < s_.host.size());) {
      moved = false;
      for (; i < s_.main.size() && execute_main(s_.main[i]); ++i) moved = true;
      for (; j < s_.host.size() && execute_host(s_.host[j]); ++j) moved = true;
      if (!error_.empty()) return error_;
    }
    if (i < s_.main.size() || j < s_.host.size()) {
      return fmt::format("both sides wait: main at {}, host at {}", i < s_.main.size() ? to_string(s_.main[i]) : "end",
                         j < s_.host.size() ? to_string(s_.host[j]) : "end");
    }
    if (posted_ || outstanding_ || answered_ || taken_) return "a hand-off is left behind";
    Parts wanted = kAttention;
    if (l_.hot) wanted |= kHot;
    if (skips_ && l_.linked) wanted |= kLinked;
    if (l_.cold && !(skips_ && l_.all_linked)) wanted |= kCold;
    if (main_.x != wanted) return fmt::format("the layer's parts are {:#x}, expected {:#x}", main_.x, wanted);
    return std::nullopt;
  }

 private:
  using Parts = unsigned;
  static constexpr Parts kAttention = 1, kHot = 2, kCold = 4, kLinked = 8;

  struct Side {
    Parts x = 0;
    std::optional<Parts> attention_in, ffn_in;
    bool has_neurons = false, has_experts = false;
  };

  bool fail(std::string why) {
    error_ = std::move(why);
    return false;
  }
  bool add(Parts& to, Parts parts) {
    if ((to & parts) != 0) return fail("a part of the layer is added twice");
    to |= parts;
    return true;
  }
  // The input of a step, which must be as the layer's form wants it.
  bool reads(const char* step, Side& side, std::optional<Parts>& kept, Reads how, Parts wanted) {
    if (how == Reads::norm_of_x) kept = side.x;
    const std::optional<Parts> in = how == Reads::residual ? std::optional(side.x) : kept;
    if (!in) return fail(fmt::format("{} reads what nothing has written", step));
    if (*in != wanted) return fail(fmt::format("{} reads x too early or too late", step));
    return true;
  }
  bool reads_ffn(const char* step, Side& side, Reads how) {
    return reads(step, side, side.ffn_in, how, l_.parallel ? 0 : kAttention);
  }
  bool reads_attention(Side& side, Reads how) { return reads("attention", side, side.attention_in, how, 0); }
  bool norm(Side& side, Half half) {
    (half == Half::ffn ? side.ffn_in : side.attention_in) = side.x;
    return true;
  }
  bool has_neurons(const Side& side, const Ffn& f) {
    if (f.neurons == Neurons::listed && !side.has_neurons) return fail("an FFN reads a list that nobody has made");
    if ((f.neurons != Neurons::all) != skips_) return fail("an FFN computes other neurons than the batch asks for");
    return true;
  }

  bool route(Side& side, Reads how) {
    const bool early = how == Reads::residual;
    if (early != l_.early_router) return fail("the router reads x at the wrong end of the attention");
    if (early ? !reads("the router", side, side.ffn_in, how, 0) : !reads_ffn("the router", side, how)) return false;
    return side.has_experts = true;
  }
  bool experts(Side& side, Reads how) {
    if (!side.has_experts) return fail("experts are computed that nobody chose");
    return reads_ffn("the experts", side, how);
  }

  bool post(Letter letter) {
    if (outstanding_) return fail("a second hand-off begins before the first is answered");
    if (letter == Letter::ffn_input_and_experts && !main_.has_experts) return fail("experts are posted that nobody chose");
    if (brings_neurons(letter) && !main_.has_neurons) return fail("neurons are posted that nobody has found");
    if (brings_input(letter) && !main_.ffn_in) return fail("an input is posted that nobody has made");
    posted_ = letter, outstanding_ = true;
    posted_parts_ = brings_input(letter) ? *main_.ffn_in : main_.x;
    return true;
  }
  bool collect() {
    if (!answered_) return false;  // waits
    answered_ = outstanding_ = false;
    return add(main_.x, answer_);
  }

  bool execute_main(const Step& step) {
    if (const auto* n = std::get_if<Norm>(&step)) return norm(main_, n->half);
    if (const auto* a = std::get_if<Attend>(&step)) return reads_attention(main_, a->reads) && add(main_.x, kAttention);
    if (const auto* p = std::get_if<Predict>(&step)) {
      if (!reads_ffn("the predictor", main_, p->reads)) return false;
      main_.has_neurons = true;
      return !p->posts || post(*p->posts);
    }
    if (const auto* f = std::get_if<Ffn>(&step)) {
      if (f->hands_over && !answered_) {
        if (!outstanding_) return fail("an answer is added that nobody was asked for");
        return false;  // waits
      }
      if (f->hands_over && !published_) return fail("an answer is awaited part by part that is not published");
      if (!reads_ffn("the main device's FFN", main_, f->reads) || !has_neurons(main_, *f)) return false;
      return add(main_.x, f->linked ? kHot | kLinked : kHot) && (!f->hands_over || collect());
    }
    if (const auto* r = std::get_if<Route>(&step)) return route(main_, r->reads);
    if (const auto* e = std::get_if<Experts>(&step)) return experts(main_, e->reads) && add(main_.x, kHot);
    if (const auto* p = std::get_if<Post>(&step)) {
      return brings_neurons(p->letter) ? fail("a plain hand-off brings no neurons") : post(p->letter);
    }
    if (std::holds_alternative<Hint>(step)) return main_.ffn_in ? true : fail("a hint reads what nothing has written");
    if (const auto* s = std::get_if<Stream>(&step)) {
      return reads_ffn("the stream", main_, s->reads) && add(main_.x, kCold);
    }
    if (std::holds_alternative<Collect>(step)) {
      if (!outstanding_) return fail("an answer is collected that nobody was asked for");
      if (answered_ && published_) return fail("an answer is published that nobody awaits part by part");
      return collect();
    }
    return fail(fmt::format("the main device cannot execute {}", to_string(step)));
  }

  bool execute_host(const Step& step) {
    if (const auto* t = std::get_if<Take>(&step)) {
      if (taken_) return fail("a hand-off is taken before the last one is answered");
      if (!posted_) return false;  // waits
      if (*posted_ != t->letter) return fail("a hand-off brings something else than is taken");
      host_ = {};
      if (brings_input(t->letter)) {
        host_.ffn_in = posted_parts_;
      } else {
        host_.x = posted_parts_;
      }
      host_.has_experts = t->letter == Letter::ffn_input_and_experts;
      brought_ = posted_parts_, neurons_left_ = brings_neurons(t->letter);
      taken_ = true, posted_.reset(), answer_ = 0, published_ = false;
      return true;
    }
    if (std::holds_alternative<Prefetch>(step)) return taken_ ? fail("a prefetch comes after its hand-off") : true;
    if (!taken_) return fail(fmt::format("the host executes {} without a hand-off", to_string(step)));
    if (std::holds_alternative<TakeNeurons>(step)) {
      if (!std::exchange(neurons_left_, false)) return fail("neurons are awaited that the hand-off does not bring");
      return host_.has_neurons = true;
    }
    if (const auto* n = std::get_if<Norm>(&step)) return norm(host_, n->half);
    if (const auto* a = std::get_if<Attend>(&step)) return reads_attention(host_, a->reads) && add(answer_, kAttention);
    if (const auto* p = std::get_if<Predict>(&step)) {
      if (p->posts) return fail("the host posts nothing");
      return reads_ffn("the predictor", host_, p->reads) && (host_.has_neurons = true);
    }
    if (const auto* f = std::get_if<Ffn>(&step)) {
      published_ = f->hands_over;
      return reads_ffn("the host's FFN", host_, f->reads) && has_neurons(host_, *f) && add(answer_, kCold);
    }
    if (const auto* r = std::get_if<Route>(&step)) return route(host_, r->reads);
    if (const auto* e = std::get_if<Experts>(&step)) return experts(host_, e->reads) && add(answer_, kCold);
    if (std::holds_alternative<AddInput>(step)) {
      host_.x = brought_ | answer_;
      return true;
    }
    if (std::holds_alternative<Answer>(step)) {
      if (neurons_left_) return fail("a hand-off's neurons are left behind");
      taken_ = false;
      return answered_ = true;
    }
    return fail(fmt::format("the host cannot execute {}", to_string(step)));
  }

  const LayerFacts& l_;
  const bool skips_;
  const LayerSchedule& s_;
  Side main_, host_;
  std::optional<Letter> posted_;  // not taken yet
  Parts posted_parts_ = 0, brought_ = 0, answer_ = 0;
  bool outstanding_ = false, answered_ = false, taken_ = false, neurons_left_ = false, published_ = false;
  std::string error_;
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
    std::string operator()(const Experts& e) const { return fmt::format("experts({})", to_string(e.reads)); }
    std::string operator()(const Post& p) const { return fmt::format("post({})", to_string(p.letter)); }
    std::string operator()(const Hint&) const { return "hint"; }
    std::string operator()(const Stream& s) const { return fmt::format("stream({})", to_string(s.reads)); }
    std::string operator()(const Collect&) const { return "collect"; }
    std::string operator()(const Prefetch&) const { return "prefetch"; }
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

std::optional<std::string> check(const LayerFacts& layer, BatchKind kind, const LayerSchedule& schedule) {
  return Simulation(layer, kind, schedule).run();
}

void check_facts(std::span<const LayerFacts> layers) {
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerFacts& l = layers[i];
    const auto require = [&](bool holds, const char* what) {
      if (!holds) fail("the placement of layer {} cannot be run: {}; plan again", i, what);
    };
    const bool predicts = l.selection == Selection::predictor;
    require(l.hot || l.cold, "no device has its neurons");
    require(l.experts || (!l.main_routes && !l.early_router), "a router without experts");
    require(!l.experts || (!l.parallel && l.selection == Selection::all && !l.streamable),
            "a mixture of experts beside the attention, with predictors or streamed");
    require(!l.experts || l.main_routes || !l.hot, "the CPU chooses the experts, and some of them are on the GPU");
    require(!l.main_routes || l.hot || !l.host_attends, "the GPU chooses the experts of a layer of which it has nothing");
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
