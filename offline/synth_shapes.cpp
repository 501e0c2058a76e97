// Shapes of published models, and what a shape must satisfy.
#include <algorithm>
#include <array>
#include <string>

#include "core/error.h"
#include "core/experts.h"
#include "offline/synth.h"
#include "offline/synth_random.h"
#include "offline/synth_vocab.h"

namespace hearth::offline {
namespace {

const std::array<SynthShape, 11>& shapes() {
  // name, arch, layers, n_embd, n_ff, heads, kv heads, vocabulary, context, RoPE base; head, experts, used ones, window,
  // their skew and persistence: of Qwen3-30B the hottest 10, 20 and 40 % of the experts take 49, 70 and 89 % of the
  // choices, and 2, 3, 4 and 8 tokens use 1.62, 2.15, 2.59 and 3.93 times one token's experts
  static const std::array<SynthShape, 11> table = {{
      {"llama-7b", "llama", 32, 4096, 11008, 32, 32, 32000, 4096, 10000.0f},
      {"llama-13b", "llama", 40, 5120, 13824, 40, 40, 32000, 4096, 10000.0f},
      {"llama-70b", "llama", 80, 8192, 28672, 64, 8, 32000, 4096, 10000.0f},
      {"mistral-7b", "llama", 32, 4096, 14336, 32, 8, 32000, 32768, 1e6f},  // v0.2: no sliding window
      {"opt-30b", "opt", 48, 7168, 28672, 56, 56, 50272, 2048, 10000.0f},
      {"falcon-40b", "falcon", 60, 8192, 32768, 128, 8, 65024, 2048, 10000.0f},
      {"mixtral-8x7b", "llama", 32, 4096, 14336, 32, 8, 32000, 32768, 1e6f, 128, 8, 2},
      {"qwen3-30b-a3b", "qwen3moe", 48, 2048, 768, 32, 4, 151936, 40960, 1e6f, 128, 128, 8, 0, 0.8, 0.3},
      {"gpt-oss-20b", "gpt-oss", 24, 2880, 2880, 64, 8, 201088, 131072, 150000.0f, 64, 32, 4, 128},
      {"smallthinker-21b", "smallthinker", 52, 2560, 768, 28, 4, 151936, 16384, 1.5e6f, 128, 64, 6, 4096},
      {"tiny", "llama", 4, 256, 1024, 8, 4, 1024, 512, 10000.0f},
  }};
  return table;
}

void check_positive(const char* flag, int64_t value, int64_t limit) {
  if (value < 1 || value > limit) fail("{} is {}, expected 1 to {}", flag, value, limit);
}
void check_multiple(const char* flag, int64_t value, int64_t of) {
  if (value % of != 0) fail("{} is {}, expected a multiple of {}", flag, value, of);
}

void check_shape(const SynthShape& s) {
  if (s.arch != "llama" && !s.layer_norm() && !s.mixture()) {
    fail("unknown architecture '{}'; expected llama, opt, falcon, qwen3moe, gpt-oss or smallthinker", s.arch);
  }
  if ((s.n_expert == 0) != (s.n_expert_used == 0)) fail("give both of --experts and --experts-used, or neither");
  if (s.n_expert > 0) {
    if (s.layer_norm()) {
      fail("--experts {} takes --arch llama, qwen3moe, gpt-oss or smallthinker, and it is {}", s.n_expert, s.arch);
    }
    check_positive("--experts", s.n_expert, kMostExperts);
    check_positive("--experts-used", s.n_expert_used, s.n_expert);
  } else if (s.mixture()) {
    fail("--arch {} is a mixture of experts; give --experts and --experts-used", s.arch);
  }
  check_positive("--layers", s.n_layer, 4096);
  check_positive("--n-embd", s.n_embd, int64_t{1} << 20);
  check_positive("--n-ff", s.n_ff, int64_t{1} << 20);
  check_positive("--n-head", s.n_head, 4096);
  check_positive("--n-head-kv", s.n_head_kv, 4096);
  check_positive("--n-ctx", s.n_ctx, int64_t{1} << 24);
  check_positive("--n-vocab", s.n_vocab, int64_t{1} << 24);
  check_multiple("--n-embd", s.n_embd, kSynthBlock);
  check_multiple("--n-ff", s.n_ff, kSynthBlock);
  if (s.n_vocab <= kFirstWord) {
    fail("--n-vocab is {}, expected at least {}: bytes and letters come before the first word", s.n_vocab,
         kFirstWord + 1);
  }
  if (s.n_embd_head == 0 && s.n_embd % s.n_head != 0)
    fail("--n-embd {} does not divide by --n-head {}", s.n_embd, s.n_head);
  if (s.n_head % s.n_head_kv != 0) fail("--n-head {} does not divide by --n-head-kv {}", s.n_head, s.n_head_kv);
  if (s.head_dim() % 2 != 0) fail("a head has {} elements, expected an even number for RoPE", s.head_dim());
  check_multiple("--n-head times the elements of a head", s.n_head * s.head_dim(), kSynthBlock);
}

void check_predictor(const SynthOptions& o) {
  if (o.predictor_rank == 0) return;
  const int64_t r = o.predictor_rank, rank = (r - 2) / 2;
  if (o.dense)
    fail("--dense leaves the gate's rank alone, so there is no exact predictor; drop --predictor-rank or --dense");
  if (r < 4) fail("--predictor-rank is {}, expected 4 or more (0 = none)", r);
  // The basis is orthogonal to the constant component in every block of 32, and has both signs in fc1.
  const int64_t most = o.shape.n_embd / kSynthBlock * (kSynthBlock - 1);
  if (rank > most) {
    fail("--predictor-rank {} asks for a gate of rank {}, and --n-embd {} allows {}; use {} or less", r, rank,
         o.shape.n_embd, most, 2 * most + 2);
  }
  if (const int block = traits(o.predictor_type).block_size; r % block != 0) {
    fail("--predictor-rank is {}, expected a multiple of {} for --predictor-type {}", r, block,
         traits(o.predictor_type).name);
  }
}

}  // namespace

SynthShape find_synth_shape(std::string_view name) {
  std::string known;
  for (const SynthShape& s : shapes()) {
    if (s.name == name) return s;
    known += (known.empty() ? "" : ", ") + s.name;
  }
  fail("unknown shape '{}'; expected one of {}", name, known);
}

void check_synth_options(const SynthOptions& o) {
  check_shape(o.shape);
  check_predictor(o);
  if (!(o.drift >= 0) || !(o.drift <= 0.9)) fail("--drift is {}, expected 0 to 0.9", o.drift);
  if (!(o.expert_persistence >= 0) || !(o.expert_persistence <= 0.9))
    fail("--expert-persistence is {}, expected 0 to 0.9", o.expert_persistence);
  if (o.expert_persistence > 0 && o.shape.n_expert == 0)
    fail("--expert-persistence {} is for mixtures; give --experts and --experts-used", o.expert_persistence);
  if ((o.drift > 0 || o.expert_persistence > 0) && topic_count(o.shape.n_vocab) == 1) {
    fail("{} needs at least {} tokens in the vocabulary, --n-vocab is {}",
         o.drift > 0 ? "--drift" : "--expert-persistence", kFirstWord + 2 * kMaxTopics, o.shape.n_vocab);
  }
  if (o.shape.gpt_oss() || o.shape.arch == "smallthinker") {
    if (o.activation != o.shape.default_activation())
      fail("--arch {} has the activation {}, not {}", o.shape.arch, o.shape.default_activation(), o.activation);
  } else if (o.activation != "relu" && o.activation != "silu") {
    fail("unknown activation '{}'; expected relu or silu", o.activation);
  }
  if (o.shape.n_expert > 0 && o.shape.arch != "smallthinker" && !o.dense)
    fail("a density is prescribed inside experts of --arch smallthinker alone, and it is {}; add --dense",
         o.shape.arch);
  if (!(o.expert_skew >= 0) || !(o.expert_skew <= 10)) fail("--expert-skew is {}, expected 0 to 10", o.expert_skew);
  if (o.activation == "silu" && !o.dense) fail("silu is never zero, so no density can be prescribed; add --dense");
}

}  // namespace hearth::offline
