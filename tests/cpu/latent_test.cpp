// Multi-head latent attention of the SIMD device, on every instruction set of this machine, against the reference device.
#include <gtest/gtest.h>

#include <random>

#include "cpu/check_case.h"
#include "cpu/device_case.h"

namespace hearth::test {
namespace {

// All heads share one key, whose end is the value. More heads than a thread takes at once.
TEST(Latents, Attention) {
  std::mt19937 rng(24);
  for (const int64_t T : {1, 2, 8, 9, 33, 130}) {
    for (const int64_t first : {0, 300}) {
      const AttentionShape s{.runs = {{T, first}}, .n_head = 19, .n_head_kv = 1, .head_dim = 52};
      AttentionShape latent = s;
      latent.rope = RopeKind::interleaved, latent.n_rot = 12, latent.latent = true;
      check(attention_case(rng(), latent));
    }
  }
}

TEST(Latents, ProductsByHead) {
  std::mt19937 rng(23);
  for (const DTypeTraits& t : all_traits()) {
    if (!t.computable()) continue;
    for (const int64_t T : {1, 2, 8, 9, 33}) {
      const int64_t cols = t.block_size == 1 ? 40 : t.block_size;
      check(head_products_case(rng(), t.type, T, {.cols = cols}));
      check(head_products_case(rng(), t.type, T, {.n_head = 2, .rows = 300, .cols = 2 * cols, .n_tail = 0}));
    }
  }
}

}  // namespace
}  // namespace hearth::test
