// Several sequences in one engine: its pages are accounted for, and who shares them, or a batch, never changes a text.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <utility>

#include "core/error.h"
#include "engine/engine.h"
#include "support/conditioning.h"
#include "support/divisions.h"
#include "support/errors.h"
#include "support/paths.h"
#include "support/tiny_model.h"
#include "support/zoo.h"

namespace hearth {
namespace {

using engine::Batch;
using engine::Engine;
using engine::EngineOptions;
using engine::Sequence;
using test::copy_of;
using test::message_of;
using test::random_ids;
using test::random_int;

// A model small enough for a hundred thousand tokens, with contexts of three pages.
class Sequences : public testing::Test {
 protected:
  static constexpr int64_t kContext = 300;  // the third page is never full
  static constexpr int64_t kPages = 3;

  static test::TinyModelOptions shape() {
    return {.n_layer = 1, .n_embd = 32, .n_ff = 48, .n_head = 2, .n_head_kv = 1, .n_ctx = kContext};
  }
  Engine engine(int64_t n_sequences, int64_t n_batch = 64) {
    return Engine(model_, *device_, {.n_ctx = kContext, .n_batch = n_batch, .n_sequences = n_sequences});
  }
  // So many tokens, of which no two are alike in two texts.
  std::vector<int32_t> text(int64_t n, uint32_t seed = 1) const {
    return random_ids(model_.config(), static_cast<size_t>(n), seed);
  }

  test::TempDir dir_;
  std::filesystem::path path_ = test::write_tiny_model(dir_ / "m.gguf", shape());
  model::Model model_ = model::Model::load(path_);
  std::unique_ptr<Device> device_ = cpu::make_reference_device();
};

// What there is to see of sequences and pool.
struct Seen {
  std::vector<std::vector<int32_t>> pages;
  std::vector<int64_t> n_past;
  std::vector<int32_t> uses;
  int64_t n_free;
  bool operator==(const Seen&) const = default;
};
Seen see(const Engine& e, std::initializer_list<const Sequence*> sequences) {
  Seen s;
  for (const Sequence* q : sequences) {
    s.pages.emplace_back(q->pages().begin(), q->pages().end());
    s.n_past.push_back(q->n_past());
  }
  for (int32_t p = 0; p < e.pages().n_pages(); ++p) s.uses.push_back(e.pages().uses(p));
  s.n_free = e.pages().n_free();
  return s;
}

TEST_F(Sequences, AFullPoolSaysWhoHoldsWhatAndChangesNothing) {
  Engine e = engine(2);
  ASSERT_EQ(e.pages().n_pages(), 2 * kPages);
  const Sequence empty = e.sequence("empty");
  Sequence first = e.sequence("first"), second = e.sequence("second"), third = e.sequence("third");
  const auto ids = text(kContext);
  e.eval(first, ids);                         // 3 pages
  e.eval(second, std::span(ids).first(129));  // 2 pages
  e.eval(third, std::span(ids).first(128));   // 1 page, full
  const Seen before = see(e, {&first, &second, &third});
  ASSERT_EQ(before.n_free, 0);
  const std::string expected =
      "the KV cache is full: 0 of 6 pages of 128 positions are free and 1 are needed; pages held: 'first' 3, 'second' "
      "2, 'third' 1; end a sequence, or use a larger -c";
  EXPECT_EQ(message_of([&] { e.eval(third, std::span(ids).first(1)); }), expected);
  EXPECT_EQ(see(e, {&first, &second, &third}), before);
  // In a batch with one that has room, neither changes.
  Batch both;
  both.add(second, std::span(ids).subspan(129, 2)), both.add(third, std::span(ids).subspan(128, 2));
  EXPECT_EQ(message_of([&] { e.eval(both); }), expected);
  EXPECT_EQ(see(e, {&first, &second, &third}), before);
  // A prompt of several batches fails before the first of them.
  EXPECT_NE(message_of([&] { e.eval(second, std::span(ids).first(171)); }), "no error");
  EXPECT_EQ(see(e, {&first, &second, &third}), before);
  // A copy of a shared page needs a page, too.
  Sequence fourth = second.fork("fourth");
  EXPECT_NE(message_of([&] { e.eval(fourth, std::span(ids).first(1)); }).find("'fourth' 2"), std::string::npos);
  EXPECT_EQ(fourth.n_past(), 129);
  fourth = e.sequence("nothing");
  EXPECT_EQ(see(e, {&first, &second, &third}), before);
  // All go on as if nothing had been.
  const auto logits = copy_of(e.eval(second, std::span(ids).subspan(129, 1)));
  first = e.sequence("first");
  EXPECT_EQ(e.pages().n_free(), 3);
  Sequence again = e.sequence();
  e.eval(again, std::span(ids).first(129));
  EXPECT_EQ(copy_of(e.eval(again, std::span(ids).subspan(129, 1))), logits);
}

TEST_F(Sequences, WrongIdsAndFullContextsChangeNothing) {
  Engine e = engine(2);
  Sequence one = e.sequence("one"), two = e.sequence("two");
  const auto ids = text(kContext);
  e.eval(one, std::span(ids).first(20)), e.eval(two, std::span(ids).first(kContext - 1));
  const Seen before = see(e, {&one, &two});
  for (const int32_t bad : {-1, test::kTinyVocab}) {
    const std::vector<int32_t> with_bad = {1, 2, bad};
    EXPECT_EQ(message_of([&] { e.eval(one, with_bad); }),
              fmt::format("token id {} is out of range, expected 0 to {}", bad, test::kTinyVocab - 1));
    Batch batch;
    batch.add(one, std::span(ids).first(200)), batch.add(two, {&bad, 1});
    EXPECT_NE(message_of([&] { e.eval(batch); }).find("out of range"), std::string::npos);
  }
  EXPECT_EQ(see(e, {&one, &two}), before);
  const auto full = [&](auto&& action) {
    const std::string message = message_of(action);
    EXPECT_EQ(message,
              "the context is full: 299 tokens are in it and 2 more do not fit in 300; use a larger -c or a "
              "shorter text");
    EXPECT_EQ(see(e, {&one, &two}), before);
  };
  full([&] { e.eval(two, std::span(ids).first(2)); });
  full([&] {
    Batch batch;
    batch.add(one, std::span(ids).first(40)), batch.add(two, std::span(ids).first(2));
    e.eval(batch);
  });
  e.eval(two, std::span(ids).first(1));
  EXPECT_EQ(two.n_past(), kContext);
}

TEST_F(Sequences, AForkSharesPagesUntilItsFirstWrite) {
  Engine e = engine(4);
  const engine::PagePool& pool = e.pages();
  const auto ids = text(kContext, 1), other = text(kContext, 2);
  const auto alone = [&](int64_t n_common, std::span<const int32_t> rest) {
    Sequence s = e.sequence();
    for (int64_t i = 0; i < n_common; i += 60) {  // as below
      e.eval(s,
             std::span(ids).subspan(static_cast<size_t>(i), static_cast<size_t>(std::min<int64_t>(60, n_common - i))));
    }
    return copy_of(e.eval(s, rest));
  };
  const auto uses = [&](const Sequence& s) {
    std::vector<int32_t> all;
    for (const int32_t p : s.pages()) all.push_back(pool.uses(p));
    return all;
  };
  using Uses = std::vector<int32_t>;
  Sequence trunk = e.sequence("trunk");
  for (int64_t i = 0; i < 180; i += 60) e.eval(trunk, std::span(ids).subspan(static_cast<size_t>(i), 60));
  const int64_t n_free = pool.n_free();
  {
    Sequence fork = trunk.fork("fork"), twig = fork.fork("twig");
    EXPECT_EQ(fork.n_past(), 180);
    EXPECT_EQ(pool.n_free(), n_free) << "a fork takes no page";
    EXPECT_EQ(uses(trunk), (Uses{3, 3}));
    const auto written = copy_of(e.eval(fork, std::span(other).first(1)));
    EXPECT_EQ(uses(trunk), (Uses{3, 2})) << "the page that is written is the fork's own, the one before is not";
    EXPECT_EQ(uses(fork), (Uses{3, 1}));
    EXPECT_EQ(pool.n_free(), n_free - 1);
    EXPECT_EQ(written, alone(180, std::span(other).first(1)));
    e.eval(fork, std::span(other).subspan(1, 3));
    EXPECT_EQ(pool.n_free(), n_free - 1) << "it is copied once";
    // Both holders of a page write in one batch: one of them needs no copy.
    Batch both;
    both.add(trunk, std::span(ids).subspan(180, 2)), both.add(twig, std::span(other).first(2));
    e.eval(both);
    const auto of_trunk = copy_of(e.logits(1)), of_twig = copy_of(e.logits(3));
    EXPECT_EQ(of_trunk, alone(180, std::span(ids).subspan(180, 2)));
    EXPECT_EQ(of_twig, alone(180, std::span(other).first(2)));
    EXPECT_EQ(pool.n_free(), n_free - 2);
    for (const Sequence* s : {&trunk, &fork, &twig}) EXPECT_EQ(uses(*s), (Uses{3, 1}));
    // Cut back into the page that all hold, each continues in a copy; the last one in the page itself.
    for (Sequence* s : {&trunk, &fork, &twig}) s->truncate(100);
    EXPECT_EQ(pool.n_free(), n_free + 1);
    for (Sequence* s : {&fork, &trunk, &twig}) {
      const auto cut = std::span(other).subspan(s == &fork ? 0 : s == &trunk ? 1 : 2, 2);
      const int32_t page = s->pages()[0];
      const auto logits = copy_of(e.eval(*s, cut));
      EXPECT_EQ(s->pages()[0] == page, s == &twig);
      Sequence fresh = e.sequence();
      e.eval(fresh, std::span(ids).first(60)), e.eval(fresh, std::span(ids).subspan(60, 40));
      // Positions 60 to 99 came in another batch before: the same up to rounding.
      EXPECT_LT(test::worst_difference(copy_of(e.eval(fresh, cut)), logits), 1e-3 * test::rms(logits));
    }
    EXPECT_EQ(pool.n_free(), n_free - 1);
  }
  EXPECT_EQ(pool.n_free(), n_free + 1);
  // At the end of a page nothing is copied.
  e.eval(trunk, std::span(ids).first(26));
  ASSERT_EQ(trunk.n_past(), 128);
  Sequence next = trunk.fork("next");
  e.eval(next, std::span(other).first(1));
  EXPECT_EQ(uses(next), (Uses{2, 1}));
  EXPECT_EQ(uses(trunk), (Uses{2}));
  trunk = e.sequence();
  EXPECT_EQ(uses(next), (Uses{1, 1})) << "what one holder gives back the other still has";
  e.eval(next, std::span(other).subspan(1, 10));
}

// --- at random ---

// One text of a run, as it ought to be.
struct Text {
  Sequence sequence;
  std::vector<int32_t> ids;
  int64_t n_few = 0;          // so many of the first tokens came in batches of a few, and have the same bits everywhere
  std::vector<float> logits;  // of the last token; empty after a cut
};

struct Run {
  const char* device;
  int n_steps;
  friend void PrintTo(const Run& r, std::ostream* out) { *out << r.device; }
};

class RandomSequences : public Sequences, public testing::WithParamInterface<Run> {
 protected:
  static constexpr size_t kMostTexts = 64;
  static constexpr int64_t kRoom = 12;  // contexts; 64 sequences fit because they share pages, or do not

  std::unique_ptr<Engine> make(int64_t n_sequences) {
    const EngineOptions options{.n_ctx = kContext, .n_batch = 64, .n_sequences = n_sequences};
    const std::string_view kind = GetParam().device;
    Device& main = *devices_.emplace_back(kind == "simd" ? cpu::make_device(team_) : cpu::make_reference_device());
    if (kind != "divided") return std::make_unique<Engine>(model_, main, options);
    EXPECT_FALSE(model_.prepare_sparse());
    Device& host = *devices_.emplace_back(cpu::make_device(team_));
    std::mt19937 rng(3);
    const engine::Placement placement = test::placement_of({"third", {0.37}}, model_, false, rng);
    return std::make_unique<Engine>(model_, main, options, engine::Division{host, placement, team_});
  }

  // How far two right results may be apart, as a share of the logits' rms: from texts as long as the context.
  double tolerance() const {
    double largest = 0;
    for (const uint32_t seed : {1u, 2u}) {
      test::Script script{text(kContext, seed), {}};
      for (int64_t left = kContext; left > 0; left -= 30) script.calls.push_back(30);
      const test::ErrorLimits limits(path_, script, test::kCpuArithmetic, {.n_ctx = kContext, .n_batch = 64});
      limits.expect_not_vacuous();
      for (size_t s = 0; s < script.calls.size(); ++s)
        largest = std::max(largest, limits.worst(s) / test::rms(limits.expected()));
    }
    return largest;
  }

  // Every page is held by those who list it, and nobody else.
  void expect_accounted(const Engine& e) const {
    const engine::PagePool& pool = e.pages();
    std::vector<int32_t> holders(static_cast<size_t>(pool.n_pages()));
    for (const auto& t : texts_) {
      ASSERT_EQ(t->sequence.n_past(), std::ssize(t->ids));
      ASSERT_EQ(std::ssize(t->sequence.pages()), engine::pages_of(std::ssize(t->ids)));
      for (const int32_t p : t->sequence.pages()) ++holders[static_cast<size_t>(p)];
    }
    for (int32_t p = 0; p < pool.n_pages(); ++p)
      ASSERT_EQ(pool.uses(p), holders[static_cast<size_t>(p)]) << "page " << p;
    ASSERT_EQ(pool.n_free(), std::count(holders.begin(), holders.end(), 0));
  }

  // The same text in an engine of its own.
  void expect_as_alone(Engine& other, const Text& t, double tolerance) {
    if (t.logits.empty()) return;
    const bool same_bits = t.n_few == std::ssize(t.ids);
    Sequence text = other.sequence();
    std::vector<float> expected;
    const size_t step = same_bits ? kFewTokens : t.ids.size();
    for (size_t i = 0; i < t.ids.size(); i += step) {
      expected = copy_of(other.eval(text, std::span(t.ids).subspan(i, std::min(step, t.ids.size() - i))));
    }
    ++(same_bits ? n_same_bits_ : n_near_);
    if (same_bits) {
      ASSERT_TRUE(t.logits == expected) << t.ids.size() << " tokens of '" << t.sequence.name() << "': differs by up to "
                                        << test::worst_difference(t.logits, expected);
    } else {
      ASSERT_LE(test::worst_difference(t.logits, expected), tolerance * test::rms(expected))
          << t.ids.size() << " tokens of '" << t.sequence.name() << "'";
    }
  }

  Text& any() { return *texts_[static_cast<size_t>(random_int(rng_, 0, std::ssize(texts_) - 1))]; }

  void begin(Engine& e) {
    texts_.push_back(std::make_unique<Text>(Text{e.sequence(fmt::format("text {}", ++n_begun_)), {}, 0, {}}));
  }
  void fork() {
    const Text& t = any();
    texts_.push_back(std::make_unique<Text>(
        Text{t.sequence.fork(fmt::format("{}, fork {}", t.sequence.name(), ++n_begun_)), t.ids, t.n_few, t.logits}));
  }
  void cut() {
    Text& t = any();
    const int64_t n = random_int(rng_, 0, std::ssize(t.ids));
    if (n == std::ssize(t.ids)) return;
    t.sequence.truncate(n);
    t.ids.resize(static_cast<size_t>(n)), t.logits.clear();
    t.n_few = std::min(t.n_few, n);
  }
  void end() {
    std::swap(texts_[static_cast<size_t>(random_int(rng_, 0, std::ssize(texts_) - 1))], texts_.back());
    texts_.pop_back();
  }

  // Appends to one text or several, mostly a token each. Where the pool or a context is full, nothing may change.
  void append(Engine& e) {
    std::vector<Text*> chosen;  // in the order of the draws: that of addresses differs from run to run
    const int64_t n_texts = random_int(rng_, 0, 2) == 0 ? random_int(rng_, 2, 12) : 1;
    for (int64_t i = 0; i < n_texts; ++i) {
      Text* const t = &any();
      if (std::find(chosen.begin(), chosen.end(), t) == chosen.end()) chosen.push_back(t);
    }
    std::vector<std::pair<Text*, std::vector<int32_t>>> parts;
    int64_t T = 0;
    for (Text* t : chosen) {
      const int64_t n = random_int(rng_, 0, 11) == 0 ? random_int(rng_, 1, 40) : random_int(rng_, 1, 2);
      if (T + n > 64) break;
      std::vector<int32_t>& ids = parts.emplace_back(t, std::vector<int32_t>{}).second;
      for (int64_t i = 0; i < n; ++i) ids.push_back(static_cast<int32_t>(random_int(rng_, 0, test::kTinyVocab - 1)));
      T += n;
    }
    Batch batch;
    for (auto& [t, ids] : parts) batch.add(t->sequence, ids);
    try {
      e.eval(batch);
    } catch (const Error& error) {
      ++n_refused_;
      EXPECT_NE(std::string(error.what()).find(" is full: "), std::string::npos) << error.what();
      return end();  // makes room
    }
    int64_t row = -1;
    for (auto& [t, ids] : parts) {
      if (T <= kFewTokens && t->n_few == std::ssize(t->ids)) t->n_few += std::ssize(ids);
      t->ids.insert(t->ids.end(), ids.begin(), ids.end());
      row += std::ssize(ids);
      t->logits = copy_of(e.logits(row));
    }
  }

  ThreadTeam team_{1};
  std::vector<std::unique_ptr<Device>> devices_;
  std::mt19937 rng_{11};
  std::vector<std::unique_ptr<Text>> texts_;
  int n_begun_ = 0, n_refused_ = 0, n_same_bits_ = 0, n_near_ = 0;
};

TEST_P(RandomSequences, EveryPageIsAccountedForAndEveryTextIsAsAlone) {
  const double tolerance = this->tolerance();
  const auto e = make(kRoom), other = make(1);
  size_t most = 0;
  for (int step = 0; step < GetParam().n_steps; ++step) {
    SCOPED_TRACE(fmt::format("step {}", step));
    const int64_t what = random_int(rng_, 0, 99);
    if (texts_.empty() || (what < 10 && texts_.size() < kMostTexts)) {
      begin(*e);
    } else if (what < 25 && texts_.size() < kMostTexts) {
      fork();
    } else if (what < 32) {
      cut();
    } else if (what < 36 || texts_.size() == kMostTexts) {
      end();
    } else {
      append(*e);
    }
    most = std::max(most, texts_.size());
    expect_accounted(*e);
    if (step % 8 == 0 && !texts_.empty()) expect_as_alone(*other, any(), tolerance);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(most, 3 * kMostTexts / 4);
  for (const auto& t : texts_) {
    expect_as_alone(*other, *t, tolerance);
    if (HasFatalFailure()) return;
  }
  texts_.clear();
  EXPECT_EQ(e->pages().n_free(), e->pages().n_pages());
  EXPECT_GT(n_refused_, GetParam().n_steps / 200);
  EXPECT_GT(n_same_bits_, GetParam().n_steps / 50);
  EXPECT_GT(n_near_, GetParam().n_steps / 50);
  std::printf("    %d texts begun, %d batches refused; %d compared to the bit, %d within %.2g of the rms\n", n_begun_,
              n_refused_, n_same_bits_, n_near_, tolerance);
}

INSTANTIATE_TEST_SUITE_P(Devices, RandomSequences,
                         testing::Values(Run{"simd", 10'000}, Run{"reference", 2'000}, Run{"divided", 1'000}),
                         [](const auto& p) { return std::string(p.param.device); });

}  // namespace
}  // namespace hearth
