// Every schedule that facts about a layer can lead to is executed on sets instead of numbers (engine/schedule.h:
// check()), and every defect that is planted in one is found.
#include <gtest/gtest.h>

#include <random>

#include "core/error.h"
#include "engine/schedule.h"

namespace hearth::engine {
namespace {

constexpr BatchKind kKinds[] = {BatchKind::one, BatchKind::few, BatchKind::many, BatchKind::streamed};

LayerFacts facts_of(unsigned bits, Selection selection) {
  const auto bit = [&](int i) { return (bits >> i & 1) != 0; };
  return {.parallel = bit(0),
          .post_norms = bit(10),
          .host_attends = bit(1),
          .hot = bit(2),
          .cold = bit(3),
          .selection = selection,
          .main_predicts = bit(4),
          .reads_residual = bit(5),
          .linked = bit(6),
          .all_linked = bit(7),
          .hinted = bit(8),
          .streamable = bit(9),
          .experts = bit(11),
          .main_routes = bit(12),
          .early_router = bit(13),
          .foreseen = false};  // needs a mixture before: see AMixtureBehindAMixtureIsForeseen
}

// Whether a layer with these facts may follow one that a GPU predicts for both sides.
bool valid(const LayerFacts& layer) {
  LayerFacts before;
  before.cold = true, before.selection = Selection::predictor, before.parallel = layer.parallel;
  const LayerFacts layers[] = {before, layer};
  try {
    check_facts(layers);
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::vector<LayerFacts> all_facts() {
  std::vector<LayerFacts> all;
  for (unsigned bits = 0; bits < 1u << 14; ++bits) {
    for (const Selection s : {Selection::all, Selection::gate, Selection::predictor}) {
      if (const LayerFacts l = facts_of(bits, s); valid(l)) all.push_back(l);
    }
  }
  return all;
}

// Calls f(layer, kind, schedule) for every combination of facts, kind of batch and whether the next layer is hinted.
template <typename F>
void for_every_schedule(F&& f) {
  LayerFacts next;
  for (const LayerFacts& layer : all_facts()) {
    for (const bool hinted : {false, true}) {
      next.hinted = hinted;
      for (const BatchKind kind : kKinds) f(layer, kind, compile(layer, &next, kind));
    }
  }
}

TEST(Schedule, EveryCombinationOfFactsEndsAndAddsEveryPartOnce) {
  int n = 0;
  for_every_schedule([&](const LayerFacts& layer, BatchKind kind, const LayerSchedule& schedule) {
    const auto wrong = check(layer, kind, schedule);
    EXPECT_FALSE(wrong) << *wrong;
    ++n;
  });
  EXPECT_GT(n, 1000);
}

// A step that nobody would miss: it changes when rows are fetched, not what is computed.
bool is_hint(const Step& step) {
  return std::holds_alternative<Prefetch>(step) || std::holds_alternative<Hint>(step);
}

TEST(Schedule, EveryMissingStepIsFound) {
  int planted = 0;
  for_every_schedule([&](const LayerFacts& layer, BatchKind kind, const LayerSchedule& schedule) {
    for (const auto side : {&LayerSchedule::main, &LayerSchedule::host}) {
      for (size_t i = 0; i < (schedule.*side).size(); ++i) {
        const Step step = (schedule.*side)[i];
        LayerSchedule broken = schedule;
        (broken.*side).erase((broken.*side).begin() + static_cast<std::ptrdiff_t>(i));
        if (is_hint(step)) continue;
        // A norm may be there for a hint alone.
        if (std::holds_alternative<Norm>(step) && i + 1 < (schedule.*side).size() && is_hint((schedule.*side)[i + 1]))
          continue;
        ++planted;
        EXPECT_TRUE(check(layer, kind, broken)) << to_string(step) << " is missing";
      }
    }
  });
  EXPECT_GT(planted, 5000);
}

TEST(Schedule, EveryStepTwiceIsFound) {
  for_every_schedule([&](const LayerFacts& layer, BatchKind kind, const LayerSchedule& schedule) {
    for (const auto side : {&LayerSchedule::main, &LayerSchedule::host}) {
      for (size_t i = 0; i < (schedule.*side).size(); ++i) {
        const Step step = (schedule.*side)[i];
        // Harmless, only slow.
        const auto* p = std::get_if<Predict>(&step);
        if (is_hint(step) || std::holds_alternative<Norm>(step) || std::holds_alternative<AddInput>(step)) continue;
        if (p != nullptr && !p->posts) continue;
        if (std::holds_alternative<Route>(step)) continue;
        LayerSchedule broken = schedule;
        (broken.*side).insert((broken.*side).begin() + static_cast<std::ptrdiff_t>(i), step);
        EXPECT_TRUE(check(layer, kind, broken)) << to_string(step) << " is there twice";
      }
    }
  });
}

TEST(Schedule, WrongFlagsAndLettersAreFound) {
  int planted = 0;
  for_every_schedule([&](const LayerFacts& layer, BatchKind kind, const LayerSchedule& schedule) {
    const auto expect_found = [&](const LayerSchedule& broken, const char* what) {
      ++planted;
      EXPECT_TRUE(check(layer, kind, broken)) << what;
    };
    for (const auto side : {&LayerSchedule::main, &LayerSchedule::host}) {
      for (size_t i = 0; i < (schedule.*side).size(); ++i) {
        LayerSchedule broken = schedule;
        Step& step = (broken.*side)[i];
        if (auto* f = std::get_if<Ffn>(&step)) {
          f->hands_over = !f->hands_over;
          expect_found(broken, "an answer that one side alone publishes or awaits");
          f->hands_over = !f->hands_over;
          if (f->neurons != Neurons::all) {
            f->neurons = Neurons::all;
            expect_found(broken, "all neurons where few are asked for");
          }
        } else if (auto* t = std::get_if<Take>(&step)) {
          t->letter = t->letter == Letter::x ? Letter::ffn_input_and_neurons : Letter::x;
          expect_found(broken, "another letter than was posted");
        } else if (auto* a = std::get_if<Attend>(&step); a != nullptr && a->reads == Reads::norm_of_x) {
          a->reads = Reads::normed;
          expect_found(broken, "an input that nothing has written");
        } else if (auto* e = std::get_if<Experts>(&step)) {
          e->that_stay = !e->that_stay;
          expect_found(broken, "experts that nobody computes, or that two sides do");
        }
      }
    }
  });
  EXPECT_GT(planted, 1000);
}

TEST(Schedule, ReorderedHandOffsAreFound) {
  for_every_schedule([&](const LayerFacts& layer, BatchKind kind, const LayerSchedule& schedule) {
    for (size_t i = 0; i + 1 < schedule.host.size(); ++i) {
      if (is_hint(schedule.host[i]) || std::holds_alternative<Norm>(schedule.host[i])) continue;
      LayerSchedule broken = schedule;
      std::swap(broken.host[i], broken.host[i + 1]);
      // The host's attention leaves x as it is, which an early router reads.
      const bool independent = std::holds_alternative<Attend>(broken.host[i]) &&
                               (layer.parallel || std::holds_alternative<Route>(broken.host[i + 1]));
      if (independent) continue;
      EXPECT_TRUE(check(layer, kind, broken)) << to_string(schedule.host[i]) << " comes later";
    }
  });
}

TEST(Schedule, RandomPlacementsOfWholeModelsAreRun) {
  std::mt19937 random(7);
  const std::vector<LayerFacts> all = all_facts();
  std::vector<LayerFacts> sequential, parallel;
  for (const LayerFacts& l : all) (l.parallel ? parallel : sequential).push_back(l);
  int run = 0;
  for (int i = 0; i < 100000; ++i) {
    const auto& choices = i % 4 == 0 ? parallel : sequential;
    std::vector<LayerFacts> layers(1 + random() % 6);
    for (LayerFacts& l : layers) l = choices[random() % choices.size()];
    for (size_t l = 0; l < layers.size(); ++l) {
      const bool foreseen = l > 0 && layers[l - 1].selection == Selection::predictor && layers[l - 1].main_predicts;
      layers[l].hinted = layers[l].hinted && foreseen;
    }
    const Schedule schedule(layers);  // aborts where a list is wrong
    for (const BatchKind kind : kKinds) {
      size_t hints = 0, prefetches = 0;
      for (size_t l = 0; l < layers.size(); ++l) {
        for (const Step& s : schedule.layer(kind, static_cast<int64_t>(l)).main)
          hints += std::holds_alternative<Hint>(s);
        for (const Step& s : schedule.layer(kind, static_cast<int64_t>(l)).host)
          prefetches += std::holds_alternative<Prefetch>(s);
      }
      ASSERT_EQ(hints, prefetches);
    }
    ++run;
  }
  EXPECT_EQ(run, 100000);
}

TEST(Schedule, FactsThatContradictEachOtherAreRefused) {
  LayerFacts nobody;
  nobody.hot = false;
  LayerFacts unnamed;
  unnamed.cold = true, unnamed.linked = true;
  LayerFacts first;
  first.cold = true, first.selection = Selection::predictor, first.hinted = true;
  for (const LayerFacts& l : {nobody, unnamed, first}) {
    EXPECT_THROW(Schedule({l}), Error);
  }
}

TEST(Schedule, AMixtureBehindAMixtureIsForeseen) {
  LayerFacts first;
  first.cold = first.experts = first.main_routes = true;
  LayerFacts foreseen = first;
  foreseen.foreseen = true;
  LayerFacts early = foreseen;
  early.early_router = true;
  LayerFacts whole = first;
  whole.cold = false;
  EXPECT_THROW(Schedule({foreseen}), Error) << "no layer before";
  EXPECT_THROW(Schedule({first, early}), Error) << "its router reads what no hand-off brings";
  EXPECT_THROW(Schedule({whole, foreseen}), Error) << "the layer before hands nothing over";
  const Schedule schedule({first, foreseen});
  for (const BatchKind kind : kKinds) {
    const std::vector<Step>& host = schedule.layer(kind, 1).host;
    const bool foresees = !host.empty() && std::holds_alternative<Foresee>(host.front());
    EXPECT_EQ(foresees, kind == BatchKind::one) << to_string(kind);
  }
}

// Of a mixture's prompt the CPU computes beside the link; what is dense all visits.
TEST(Schedule, StreamedExpertsAreShared) {
  LayerFacts mixture;
  mixture.cold = mixture.streamable = mixture.experts = mixture.main_routes = true;
  LayerFacts dense = mixture, early = mixture;
  dense.experts = dense.main_routes = false;
  early.early_router = true, early.hot = false;
  EXPECT_EQ(Schedule({dense, mixture, early}).print(BatchKind::streamed),
            "layer 0\n"
            "  main: attend(norm of x), ffn(all, norm of x), stream(normed)\n"
            "  CPU:  -\n"
            "layer 1\n"
            "  main: attend(norm of x), route(norm of x), post(FFN input, experts), fetch, experts(normed), "
            "stream(normed), collect\n"
            "  CPU:  take(FFN input, experts), experts(normed, that stay), answer\n"
            "layer 2\n"
            "  main: route(x), attend(norm of x), norm(ffn), post(FFN input, experts), fetch, stream(normed), collect\n"
            "  CPU:  take(FFN input, experts), experts(normed, that stay), answer\n");
}

TEST(Schedule, ASchedulePrintsEqualLayersOnce) {
  LayerFacts hot;
  LayerFacts divided;
  divided.cold = true, divided.selection = Selection::predictor;
  const Schedule schedule({hot, hot, divided});
  EXPECT_EQ(schedule.print(BatchKind::one),
            "layers 0 to 1\n"
            "  main: attend(norm of x), ffn(all, norm of x)\n"
            "  CPU:  -\n"
            "layer 2\n"
            "  main: attend(norm of x), predict(norm of x) post(FFN input, neurons), ffn(listed, normed, answer)\n"
            "  CPU:  take(FFN input, neurons), take(neurons), ffn(listed, normed, answer), answer\n");
}

}  // namespace
}  // namespace hearth::engine
