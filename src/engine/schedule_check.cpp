// The proof of a layer's schedule: both lists are executed on paper.
#include <fmt/format.h>

#include <utility>

#include "engine/schedule_letters.h"

namespace hearth::engine {
namespace {

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
    if (fetched_) return "experts are fetched that nobody computes";
    if (main_.branch) return "a sum is left behind that nothing joins";
    if (joined_ != (l_.post_norms ? wanted : 0)) return "a half of the layer is added without its own norm";
    if (main_.x != wanted) return fmt::format("the layer's parts are {:#x}, expected {:#x}", main_.x, wanted);
    return std::nullopt;
  }

 private:
  using Parts = unsigned;
  // Of a mixture's cold part some may visit the main device, and the others stay.
  static constexpr Parts kAttention = 1, kHot = 2, kStays = 4, kVisits = 8, kCold = kStays | kVisits, kLinked = 16;

  struct Side {
    Parts x = 0;
    std::optional<Parts> branch;  // what is being added besides
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
  // To x, or beside it.
  bool add_to(Side& side, Parts parts) { return add(side.branch ? *side.branch : side.x, parts); }
  bool join(Half half) {
    const std::optional<Parts> sum = std::exchange(main_.branch, std::nullopt);
    if (!sum) return fail("a sum is joined that nothing has begun");
    if ((half == Half::attention) != (*sum == kAttention)) return fail("a sum is joined as another half's");
    joined_ |= *sum;
    return add(main_.x, *sum);
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
    if (letter == Letter::ffn_input_and_experts && !main_.has_experts)
      return fail("experts are posted that nobody chose");
    if (brings_neurons(letter) && !main_.has_neurons) return fail("neurons are posted that nobody has found");
    if (brings_input(letter) && !main_.ffn_in) return fail("an input is posted that nobody has made");
    posted_ = letter, outstanding_ = true;
    posted_parts_ = brings_input(letter) ? *main_.ffn_in : main_.x;
    return true;
  }
  bool collect() {
    if (!answered_) return false;  // waits
    answered_ = outstanding_ = false;
    return add_to(main_, answer_);
  }

  bool execute_main(const Step& step) {
    if (const auto* n = std::get_if<Norm>(&step)) return norm(main_, n->half);
    if (const auto* a = std::get_if<Attend>(&step))
      return reads_attention(main_, a->reads) && add_to(main_, kAttention);
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
      return add_to(main_, f->linked ? kHot | kLinked : kHot) && (!f->hands_over || collect());
    }
    if (const auto* r = std::get_if<Route>(&step)) return route(main_, r->reads);
    if (const auto* e = std::get_if<Experts>(&step)) {
      if (e->that_stay) return fail("the main device's experts stay where they are");
      return experts(main_, e->reads) && add_to(main_, kHot);
    }
    if (const auto* p = std::get_if<Post>(&step)) {
      return brings_neurons(p->letter) ? fail("a plain hand-off brings no neurons") : post(p->letter);
    }
    if (std::holds_alternative<Hint>(step)) return main_.ffn_in ? true : fail("a hint reads what nothing has written");
    if (std::holds_alternative<Fetch>(step)) {
      if (!main_.has_experts) return fail("experts are fetched that nobody chose");
      return std::exchange(fetched_, true) ? fail("experts are fetched twice") : true;
    }
    if (const auto* s = std::get_if<Stream>(&step)) {
      if (std::exchange(fetched_, false) != l_.experts) return fail("experts are streamed that nobody fetched");
      return reads_ffn("the stream", main_, s->reads) && add_to(main_, l_.experts ? kVisits : kCold);
    }
    if (std::holds_alternative<Branch>(step)) {
      if (std::exchange(main_.branch, 0)) return fail("a second sum begins before the first is joined");
      return true;
    }
    if (const auto* j = std::get_if<Join>(&step)) return join(j->half);
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
    if (std::holds_alternative<Prefetch>(step) || std::holds_alternative<Foresee>(step))
      return taken_ ? fail("a prefetch comes after its hand-off") : true;
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
    if (const auto* e = std::get_if<Experts>(&step))
      return experts(host_, e->reads) && add(answer_, e->that_stay ? kStays : kCold);
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
  Parts posted_parts_ = 0, brought_ = 0, answer_ = 0, joined_ = 0;
  bool outstanding_ = false, answered_ = false, taken_ = false, neurons_left_ = false, published_ = false,
       fetched_ = false;
  std::string error_;
};

}  // namespace

std::optional<std::string> check(const LayerFacts& layer, BatchKind kind, const LayerSchedule& schedule) {
  return Simulation(layer, kind, schedule).run();
}

}  // namespace hearth::engine
