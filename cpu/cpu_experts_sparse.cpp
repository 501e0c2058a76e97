// Mixtures of up to kFewTokens tokens whose experts have transposed down projections: gates of all neurons, then up and
// down of the active ones. Tokens are grouped by expert as in cpu_experts.cpp, and the neurons of all chosen experts are
// one list of pieces for the team; each expert's result is a sum of its own, and a token's sums are added in ascending
// order. A neuron's and a sum's kernels are those of the sparse FFN, so that no bit depends on threads or other tokens.
#include <algorithm>
#include <array>
#include <cstring>

#include "cpu/cpu_device.h"
#include "cpu/tiling.h"

namespace hearth::cpu {

// Several tokens take their rows of up from a block at a time, which stays in a core's cache.
void CpuDevice::find_in_expert(const ExpertGroup& g, float threshold, const ExpertPieces& pieces, int64_t piece,
                               int thread) const {
  const FfnShard& s = g.expert->ffn;
  const int64_t first = pieces.begin(piece, g), last = std::min(first + pieces.rows, s.n());
  const int64_t block = g.count > 1 ? kFewRows : pieces.rows;
  float* const z = expert_scratch(thread, (g.count + 1) * block);
  float* const up = z + g.count * block;
  for (int64_t t = 0; t < g.count; ++t) expert_finds(g, t, piece, pieces) = {};
  for (int64_t begin = first; begin < last; begin += block) {
    const int64_t n = std::min(block, last - begin);
    consecutive_gates(s, g.in, g.count, begin, n, z, block);
    for (int64_t t = 0; t < g.count; ++t) {
      ExpertFinds& finds = expert_finds(g, t, piece, pieces);
      int32_t* const ids = g.ids + t * s.n() + first + finds.n;
      float* const values = g.values + t * s.n() + first + finds.n;
      const int64_t found =
          find_few(s, threshold, row_of(g.in, t, s.gate.cols), begin, {}, n, z + t * block, ids, values, up);
      int32_t kept = 0;
      for (int64_t i = 0; i < found; ++i) {
        ids[kept] = ids[i], values[kept] = values[i];
        kept += values[i] != 0.0f ? 1 : 0;
      }
      finds.n += kept, finds.n_active += static_cast<int32_t>(found);
    }
  }
}

// Columns [begin, end) of the down bias and of the active rows of down_t, for each token of the group.
void CpuDevice::sum_expert(const ExpertGroup& g, const ExpertPieces& pieces, int64_t begin, int64_t end) const {
  const FfnShard& s = g.expert->ffn;
  const Matrix& w = s.down_t;
  const auto sum = [&](int64_t t) { return mixture_.sums.as<float>() + (g.first + t) * w.cols + begin; };
  const auto rows = [&](int64_t t, int64_t piece) {
    const int32_t* const ids = g.ids + t * s.n() + pieces.begin(piece, g);
    const int64_t n = piece < pieces.each ? expert_finds(g, t, piece, pieces).n : 0;
    return RowsView{w.row(0) + row_bytes(w.type, begin), w.row_size(), ids, n};
  };
  for (int64_t t = 0; t < g.count; ++t) {
    std::memset(sum(t), 0, static_cast<size_t>(end - begin) * sizeof(float));
    if (g.expert->down_bias) k_.add(g.expert->down_bias.data + begin, end - begin, sum(t));
  }
  for (int64_t piece = 0; piece < pieces.each; ++piece) {
    for (int64_t t = 0; t < g.count; ++t) {
      const RowsView own = rows(t, piece);
      const RowsView then = t + 1 < g.count           ? rows(t + 1, piece)
                            : piece + 1 < pieces.each ? rows(0, piece + 1)
                                                      : RowsView{};
      const float* const values = g.values + t * s.n() + pieces.begin(piece, g);
      if (own.n > 0) k_.axpy_rows[index(w.type)](own, then.n > 0 ? &then : nullptr, end - begin, values, sum(t));
    }
  }
}

void CpuDevice::ffn_experts_sparse(std::span<ExpertGroup> groups, const ExpertSet& set, int64_t T, float* y) {
  HEARTH_CHECK(T <= kFewTokens, "{} tokens are not few", T);
  const int64_t n_embd = groups.front().expert->ffn.gate.cols, threads = team_.size(), n_groups = std::ssize(groups);
  auto* ids = mixture_.ids.as<int32_t>();
  int64_t unit = kBlock;
  for (ExpertGroup& g : groups) {
    const FfnShard& s = g.expert->ffn;
    g.ids = ids, ids += g.count * s.n();
    unit = std::max(unit, column_unit(s.down_t.type));
  }
  const ExpertCuts cuts = cut(groups, T);
  const ExpertPieces pieces{.rows = cuts.rows, .each = cuts.each};
  const int64_t columns =
      whole_units((n_embd * n_groups + kExpertPieces * threads - 1) / (kExpertPieces * threads), unit);
  const int64_t parts = (n_embd + columns - 1) / columns;
  const auto* const tokens = mixture_.tokens.as<int32_t>();
  const float* const weights = expert_weights();

  const auto find = [&](int64_t piece, int64_t, int thread) {
    find_in_expert(groups[static_cast<size_t>(piece / pieces.each)], set.threshold, pieces, piece, thread);
  };
  const auto down = [&](int64_t part, int64_t, int) {
    const int64_t begin = part % parts * columns;
    sum_expert(groups[static_cast<size_t>(part / parts)], pieces, begin, std::min(begin + columns, n_embd));
  };
  const auto add = [&](int64_t begin, int64_t end, int) {
    for (const ExpertGroup& g : groups) {
      for (int64_t i = g.first; i < g.first + g.count; ++i) {
        k_.axpy(weights[i], mixture_.sums.as<float>() + i * n_embd + begin, end - begin,
                y + tokens[i] * n_embd + begin);
      }
    }
  };
  const std::array<ThreadTeam::Round, 3> rounds = {{
      {.n = n_groups * pieces.each, .grain = 1, .work = find},
      {.n = n_groups * parts, .grain = 1, .work = down},
      {.n = n_embd, .grain = columns_of_part(DType::f32, n_embd, threads), .work = add},
  }};
  team_.for_rounds(rounds, [](size_t) {});
  for (const ExpertGroup& g : groups) {
    for (int64_t t = 0; t < g.count; ++t) {
      for (int64_t piece = 0; piece < pieces.each; ++piece) {
        set.n_active[tokens[g.first + t]] += expert_finds(g, t, piece, pieces).n_active;
      }
    }
  }
}

}  // namespace hearth::cpu
