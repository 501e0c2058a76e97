#include "text/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "core/error.h"

namespace hearth::text {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

void check(const SamplerParams& p) {
  // Written so that NaN fails too.
  if (!(p.temp >= 0 && std::isfinite(p.temp))) fail("temperature is {}; 0 (greedy) or more was expected", p.temp);
  if (p.top_k < 0) fail("top-k is {}; 0 (off) or more was expected", p.top_k);
  if (!(p.top_p > 0 && p.top_p <= 1)) fail("top-p is {}; more than 0 and at most 1 (off) was expected", p.top_p);
  if (!(p.min_p >= 0 && p.min_p <= 1)) fail("min-p is {}; 0 (off) to 1 was expected", p.min_p);
  if (!(p.repeat_penalty > 0 && std::isfinite(p.repeat_penalty))) {
    fail("repeat penalty is {}; more than 0 was expected (1 is off)", p.repeat_penalty);
  }
  if (!std::isfinite(p.frequency_penalty)) fail("frequency penalty is {}; a number was expected", p.frequency_penalty);
  if (!std::isfinite(p.presence_penalty)) fail("presence penalty is {}; a number was expected", p.presence_penalty);
  for (const auto& [id, bias] : p.logit_bias) {
    if (!std::isfinite(bias)) fail("the logit bias of token {} is {}; a number was expected", id, bias);
  }
  if (p.repeat_last_n < -1) fail("repeat-last-n is {}; -1 (all), 0 (off) or more was expected", p.repeat_last_n);
}

void check_usable(std::span<const float> logits) {
  bool usable = true;  // no early exit, so that the loop runs in SIMD
  for (const float logit : logits) usable &= logit < std::numeric_limits<float>::infinity();
  if (usable) return;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!(logits[i] < std::numeric_limits<float>::infinity())) {
      fail("the logit of token {} is {}: the model computed no usable result", i, logits[i]);
    }
  }
}

}  // namespace

Random::Random(uint64_t seed) {
  for (uint64_t& word : state_) {  // splitmix64
    seed += 0x9E3779B97F4A7C15u;
    uint64_t z = seed;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    word = z ^ z >> 31;
  }
}

uint64_t Random::next() {
  const uint64_t result = std::rotl(state_[0] + state_[3], 23) + state_[0];
  const uint64_t shifted = state_[1] << 17;
  state_[2] ^= state_[0];
  state_[3] ^= state_[1];
  state_[1] ^= state_[2];
  state_[0] ^= state_[3];
  state_[2] ^= shifted;
  state_[3] = std::rotl(state_[3], 45);
  return result;
}

Sampler::Sampler(SamplerParams params)
    : params_((check(params), std::move(params))),
      seed_(params_.seed ? *params_.seed : std::random_device()()),
      random_(seed_) {}

bool Sampler::penalises() const {
  return params_.repeat_last_n != 0 &&
         (params_.repeat_penalty != 1.0f || params_.frequency_penalty != 0 || params_.presence_penalty != 0);
}

void Sampler::accept(int32_t id) {
  if (!penalises()) return;
  recent_.push_back(id);
  if (params_.repeat_last_n > 0 && recent_.size() > static_cast<size_t>(params_.repeat_last_n)) recent_.pop_front();
}

// The logits after penalties and suppression; the same memory where neither applies.
std::span<const float> Sampler::adjusted(std::span<const float> logits) {
  if (recent_.empty() && params_.suppress.empty() && params_.logit_bias.empty()) return logits;
  logits_.assign(logits.begin(), logits.end());
  const auto slot = [&](int32_t id) -> float* {
    return id >= 0 && static_cast<size_t>(id) < logits_.size() ? &logits_[id] : nullptr;
  };
  for (const int32_t id : recent_) {
    // From the original: the factor and the presence count once, however often a token occurred.
    if (float* logit = slot(id)) {
      const float original = logits[id];
      const float scaled = original > 0 ? original / params_.repeat_penalty : original * params_.repeat_penalty;
      *logit = scaled - params_.presence_penalty;
    }
  }
  if (params_.frequency_penalty != 0) {
    for (const int32_t id : recent_) {
      if (float* logit = slot(id)) *logit -= params_.frequency_penalty;
    }
  }
  for (const auto& [id, bias] : params_.logit_bias) {
    if (float* logit = slot(id)) *logit += bias;
  }
  for (const int32_t id : params_.suppress) {
    if (float* logit = slot(id)) *logit = kNever;
  }
  return logits_;
}

int32_t Sampler::sample(std::span<const float> original) {
  if (original.empty()) fail("there are no logits to sample from");
  check_usable(original);
  const std::span<const float> logits = adjusted(original);
  if (params_.temp > 0) {
    keep_top_k(logits);
  } else {
    const auto best = std::max_element(logits.begin(), logits.end());  // the first among equals
    candidates_.assign(1, {*best, static_cast<int32_t>(best - logits.begin())});
  }
  float max_logit = kNever;
  for (const Candidate& c : candidates_) max_logit = std::max(max_logit, c.logit);
  if (max_logit == kNever) fail("every one of the {} tokens is excluded; none is left to sample", logits.size());
  if (params_.temp > 0) {
    keep_top_p(max_logit);
    keep_min_p(max_logit);
  }
  const int32_t id = candidates_.size() == 1 ? candidates_[0].id : draw(max_logit);
  accept(id);
  return id;
}

namespace {

bool better(const Sampler::Candidate& a, const Sampler::Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}
bool worse(const Sampler::Candidate& a, const Sampler::Candidate& b) {
  return better(b, a);
}

}  // namespace

void Sampler::keep_top_k(std::span<const float> logits) {
  const size_t k = params_.top_k > 0 ? std::min<size_t>(params_.top_k, logits.size()) : logits.size();
  candidates_.clear();
  for (size_t i = 0; i < k; ++i) candidates_.push_back({logits[i], static_cast<int32_t>(i)});
  if (k == logits.size()) return;
  // The k best so far in a heap with the worst on top: most logits cost one comparison.
  std::make_heap(candidates_.begin(), candidates_.end(), better);
  for (size_t i = k; i < logits.size(); ++i) {
    if (logits[i] <= candidates_.front().logit) continue;  // among equals the earlier stays
    std::pop_heap(candidates_.begin(), candidates_.end(), better);
    candidates_.back() = {logits[i], static_cast<int32_t>(i)};
    std::push_heap(candidates_.begin(), candidates_.end(), better);
  }
}

void Sampler::keep_top_p(float max_logit) {
  if (params_.top_p >= 1) return;
  const auto weight = [&](const Candidate& c) { return std::exp(static_cast<double>(c.logit) - max_logit); };
  double total = 0;
  for (const Candidate& c : candidates_) total += weight(c);
  // Takes the best one by one until their share is top-p. No full sort: few are taken.
  std::make_heap(candidates_.begin(), candidates_.end(), worse);
  auto heap_end = candidates_.end();
  for (double taken = 0; heap_end != candidates_.begin() && taken < params_.top_p * total;) {
    std::pop_heap(candidates_.begin(), heap_end, worse);
    --heap_end;
    taken += weight(*heap_end);
  }
  candidates_.erase(candidates_.begin(), heap_end);
}

void Sampler::keep_min_p(float max_logit) {
  if (params_.min_p <= 0) return;
  const float least = max_logit + std::log(params_.min_p);
  std::erase_if(candidates_, [&](const Candidate& c) { return c.logit < least; });
}

// Draws from softmax(logit / temp) over candidates_.
int32_t Sampler::draw(float max_logit) {
  weights_.clear();
  double total = 0;
  for (const Candidate& c : candidates_) {
    weights_.push_back(std::exp((static_cast<double>(c.logit) - max_logit) / params_.temp));
    total += weights_.back();
  }
  double rest = random_.uniform() * total;
  size_t chosen = 0;
  for (size_t i = 0; i < weights_.size(); ++i) {
    if (weights_[i] > 0) chosen = i;  // the last possible one, should rounding leave a rest
    rest -= weights_[i];
    if (rest < 0) break;
  }
  return candidates_[chosen].id;
}

}  // namespace hearth::text
