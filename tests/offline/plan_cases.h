#pragma once
// Shapes and frequencies for tests of the planner, without any file.
#include <algorithm>
#include <cmath>
#include <random>

#include "engine/kv_cache.h"
#include "offline/plan/planner.h"
#include "support/random.h"

namespace hearth::test {

// Llama-2-7B in f16: 32 layers, width 4096, 11008 neurons, 32 heads.
inline offline::ModelShape llama_7b() {
  offline::ModelShape s;
  s.name = "llama-7b", s.fingerprint = "0123456789abcdef", s.type_name = "f16";
  s.config.n_layer = 32, s.config.n_embd = 4096, s.config.n_ff = 11008, s.config.n_vocab = 32000;
  s.config.n_head = s.config.n_head_kv = 32, s.config.head_dim = 128, s.config.n_ctx_train = 4096;
  s.embedding_bytes = s.output_bytes = 32000ull * 4096 * 2;
  s.small_bytes = 4096 * 4;
  offline::LayerShape l;
  l.n_ff = 11008;
  l.attention_bytes = 4ull * 4096 * 4096 * 2;
  l.kv_token_bytes = 2 * 4096 * 2;
  l.small_bytes = 2 * 4096 * 4;
  l.gate_bytes = 4096 * 2, l.up_down_bytes = 2 * 4096 * 2;
  s.layers.assign(32, l);
  return s;
}

// A small random model: layers of unequal size and density, GQA, sometimes without `up`, with a predictor, a tied head.
inline offline::ModelShape random_shape(std::mt19937& rng, int64_t n_layer, int64_t max_n_ff) {
  offline::ModelShape s;
  s.name = "random", s.fingerprint = "fedcba9876543210", s.type_name = "f32";
  s.config.n_layer = n_layer, s.config.n_embd = random_int(rng, 8, 64), s.config.n_ff = max_n_ff;
  s.config.n_vocab = 100, s.config.n_ctx_train = 64;
  s.config.n_head = s.config.n_head_kv = random_int(rng, 1, 4), s.config.head_dim = random_int(rng, 2, 40);
  s.tied_head = random_int(rng, 0, 1) == 0;
  s.embedding_bytes = s.output_bytes = static_cast<uint64_t>(random_int(rng, 1000, 60000));
  s.small_bytes = 100;
  const bool gated = random_int(rng, 0, 2) > 0;
  for (int64_t i = 0; i < n_layer; ++i) {
    offline::LayerShape l;
    l.n_ff = random_int(rng, 1, max_n_ff);
    l.attention_bytes = static_cast<uint64_t>(random_int(rng, 1000, 40000));
    l.kv_token_bytes = engine::KvCache::layer_page_bytes(s.config) / kPagePositions;
    l.small_bytes = 50;
    l.gate_bytes = static_cast<uint64_t>(random_int(rng, 500, 4000));
    l.up_down_bytes = l.gate_bytes * (gated ? 2 : 1);
    s.layers.push_back(l);
  }
  return s;
}

inline offline::Frequencies random_frequencies(std::mt19937& rng, const offline::ModelShape& s) {
  offline::Frequencies f;
  f.known = true, f.source = "random";
  std::uniform_real_distribution<double> u(0, 1);
  for (const auto& l : s.layers) {
    const double skew = 1 + 5 * u(rng);
    std::vector<double> p(static_cast<size_t>(l.n_ff));
    for (double& x : p) x = std::pow(u(rng), skew);
    f.p.push_back(std::move(p));
  }
  return f;
}

// Bandwidths at which the few kilobytes of a random model matter beside the fixed times.
inline offline::PlanRequest random_request(std::mt19937& rng) {
  std::uniform_real_distribution<double> u(0, 1);
  offline::PlanRequest r;
  r.n_batch = 1;
  r.cost.gpu_bandwidth = 1e9 * (1 + 9 * u(rng));
  r.cost.cpu_bandwidth = 1e8 * (0.5 + 9 * u(rng));
  r.cost.handoff_seconds = 2e-5 * u(rng);
  r.cost.overlap_loss = 0.3 * u(rng);
  r.reserve.context_bytes = 1000, r.reserve.margin_bytes = 100, r.reserve.staging_bytes = 200;
  r.reserve.alignment = 16;
  return r;
}

}  // namespace hearth::test
