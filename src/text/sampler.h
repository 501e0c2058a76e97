#pragma once
// Chooses the next token from logits with llama.cpp's chain and defaults: penalties, top-k, top-p, min-p, temperature,
// draw.
#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace hearth::text {

struct SamplerParams {
  float temp = 0.8f;              // 0: greedy, the smallest id among equals
  int32_t top_k = 40;             // 0: off
  float top_p = 0.95f;            // 1: off
  float min_p = 0.05f;            // 0: off; drops tokens less likely than min_p times the likeliest one
  float repeat_penalty = 1.0f;    // 1: off; divides positive and multiplies negative logits of recent tokens
  int32_t repeat_last_n = 64;     // how many recent tokens; 0: off, -1: all
  // OpenAI's: taken from the logits of recent tokens, once for each time they occurred, and once. 0: off.
  float frequency_penalty = 0.0f, presence_penalty = 0.0f;
  std::vector<std::pair<int32_t, float>> logit_bias;  // added to the logits of these ids
  std::optional<uint64_t> seed;                       // absent: random
  std::vector<int32_t> suppress;                      // never drawn (--ignore-eos)
};

// xoshiro256++ (Blackman and Vigna, 2019), seeded through splitmix64. Unlike std distributions, the mapping to numbers
// is the same on every platform.
class Random {
 public:
  explicit Random(uint64_t seed);
  uint64_t next();
  double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }  // [0, 1)

 private:
  std::array<uint64_t, 4> state_;
};

class Sampler {
 public:
  struct Candidate {
    float logit;
    int32_t id;
  };

  // Throws Error on a parameter out of range.
  explicit Sampler(SamplerParams params);

  // Draws from logits [n_vocab] and remembers the result for the penalties. Throws Error when a logit is NaN or
  // +infinity, or when no token is left to choose from.
  int32_t sample(std::span<const float> logits);
  // Remembers a token that was not drawn here: the prompt.
  void accept(int32_t id);
  // The seed in use, also when it was chosen at random: printing it makes a run repeatable.
  uint64_t seed() const { return seed_; }
  // The likeliest token is drawn whatever came before: Engine::best() is as good.
  bool is_plain_argmax() const { return params_.temp == 0 && !penalises() && params_.logit_bias.empty(); }
  const SamplerParams& params() const { return params_; }

 private:
  bool penalises() const;
  std::span<const float> adjusted(std::span<const float> logits);
  // Each narrows candidates_, the tokens that may be drawn.
  void keep_top_k(std::span<const float> logits);
  void keep_top_p(float max_logit);
  void keep_min_p(float max_logit);
  int32_t draw(float max_logit);

  SamplerParams params_;
  uint64_t seed_;
  Random random_;
  std::deque<int32_t> recent_;
  std::vector<float> logits_;          // a copy, where penalties or suppression change it
  std::vector<Candidate> candidates_;  // reused between tokens
  std::vector<double> weights_;
};

}  // namespace hearth::text
