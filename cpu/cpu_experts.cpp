// Mixtures of experts. Tokens are grouped by expert, and the rows of all chosen experts are one list of work for the
// team: gate and up by pieces of rows of any expert, then the 8-bit form of the neurons' values, then the down
// projections by pieces of the result, each of which takes the experts in ascending order. So every number has one order
// of sums, whatever the pieces are and whoever computes them, and an expert's rows are read once for all its tokens.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "cpu/cpu_device.h"
#include "cpu/tiling.h"

namespace hearth::cpu {

void CpuDevice::reserve_experts(const Limits& l) {
  const auto named = static_cast<size_t>(l.max_tokens * l.n_named), threads = static_cast<size_t>(team_.size());
  const auto few = static_cast<size_t>(std::min(l.max_tokens, kFewTokens) * l.n_named);
  const auto make = [&](size_t bytes) { return allocate(std::max<size_t>(bytes, 64), Purpose::scratch); };
  MixtureScratch& m = mixture_;
  m.logits = make(static_cast<size_t>(l.max_tokens * (l.n_experts + 1)) * sizeof(float));
  m.tokens = make(named * (sizeof(int32_t) + sizeof(float)));
  m.values = make(named * static_cast<size_t>(l.n_ff_expert) * sizeof(float));
  m.values_q8 = make(l.quantized_weights ? named * q8_bytes(l.n_ff_expert) : 0);
  const size_t gathered = l.max_tokens > 1 ? named : 0;
  m.in = make(gathered * static_cast<size_t>(l.n_embd) * sizeof(float));
  m.in_q8 = make(l.quantized_weights ? gathered * q8_bytes(l.n_embd) : 0);
  m.ids = make(few * static_cast<size_t>(l.n_ff_expert) * sizeof(int32_t));
  m.finds = make(few * static_cast<size_t>((l.n_ff_expert + kPanelRows - 1) / kPanelRows) * sizeof(ExpertFinds));
  m.sums = make(few * static_cast<size_t>(l.n_embd) * sizeof(float));
  m.thread_floats = static_cast<size_t>(l.n_named > 0 ? (l.max_tokens + 1) * kExpertRows : 0);
  m.threads = make(threads * m.thread_floats * sizeof(float));
  groups_.resize(static_cast<size_t>(l.n_experts));
}

void CpuDevice::route(const Router& r, const Input& input, int64_t T, const ExpertChoice& choice) {
  if (T == 0) return;
  const int64_t n = r.routing.n_expert;
  float* const logits = scratch(mixture_.logits, T * (n + 1));
  float* const shared = logits + T * n;
  const std::array parts = {MatmulPart{.w = r.w, .bias = r.bias, .y = logits},
                            MatmulPart{.w = r.shared_gate, .y = shared}};
  matmul(std::span(parts).first(r.shared_gate ? 2 : 1), input, T, nullptr);
  const auto choose_some = [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) choose(r, logits, r.shared_gate ? shared : nullptr, t, choice);
  };
  if (T <= kRowsPerPiece) return choose_some(0, T, 0);
  team_.for_chunks(T, kRowsPerPiece, choose_some);
}

std::span<CpuDevice::ExpertGroup> CpuDevice::group_tokens(std::span<const Expert> experts, const ExpertChoice& choice,
                                                          int64_t T) {
  HEARTH_CHECK(experts.size() <= groups_.size(), "{} experts, reserve() was told {}", experts.size(), groups_.size());
  const int64_t n_named = choice.n_named;
  auto* const tokens = reinterpret_cast<int32_t*>(scratch(mixture_.tokens, 2 * T * n_named));
  auto* const weights = reinterpret_cast<float*>(tokens + T * n_named);
  const std::span<ExpertGroup> all = std::span(groups_).first(experts.size());
  std::fill(all.begin(), all.end(), ExpertGroup{});
  for (int64_t i = 0; i < T * n_named; ++i) {
    const int32_t id = choice.ids[i];
    HEARTH_CHECK(id >= 0 && id < std::ssize(experts), "expert {} of {}", id, experts.size());
    HEARTH_CHECK(i % n_named == 0 || id > choice.ids[i - 1], "a token's experts are not ascending at {}", id);
    all[static_cast<size_t>(id)].count += experts[static_cast<size_t>(id)] ? 1 : 0;
  }
  int64_t first = 0;
  float* values = mixture_.values.as<float>();
  auto* q8 = mixture_.values_q8.as<std::byte>();
  for (size_t e = 0; e < all.size(); ++e) {
    ExpertGroup& g = all[e];
    if (g.count == 0) continue;
    const FfnShard& ffn = experts[e].ffn;
    g.expert = &experts[e], g.first = first, g.values = values;
    first += g.count, values += g.count * ffn.n();
    if (!ffn.down || !is_quantized(ffn.down.type)) continue;
    g.values_q8 = q8, q8 += static_cast<size_t>(g.count) * q8_bytes(ffn.n());
  }
  HEARTH_CHECK(static_cast<size_t>(values - mixture_.values.as<float>()) * sizeof(float) <= mixture_.values.bytes() &&
                   static_cast<size_t>(q8 - mixture_.values_q8.as<std::byte>()) <= mixture_.values_q8.bytes(),
               "reserve() was told of smaller experts");
  for (ExpertGroup& g : all) g.count = 0;
  for (int64_t i = 0; i < T * n_named; ++i) {
    ExpertGroup& g = all[static_cast<size_t>(choice.ids[i])];
    if (g.expert == nullptr) continue;
    tokens[g.first + g.count] = static_cast<int32_t>(i / n_named);
    weights[g.first + g.count++] = choice.weights[i];
  }
  const auto end = std::remove_if(all.begin(), all.end(), [](const ExpertGroup& g) { return g.count == 0; });
  return all.first(static_cast<size_t>(end - all.begin()));
}

// Where each group's rows of the input are one behind the other: as they are, or copied.
void CpuDevice::gather_input(std::span<ExpertGroup> groups, Act in, int64_t n_embd) {
  const auto* const tokens = mixture_.tokens.as<int32_t>();
  const size_t row = q8_bytes(n_embd);
  int64_t copied = 0;
  for (ExpertGroup& g : groups) {
    const int64_t t = tokens[g.first];
    g.copied = tokens[g.first + g.count - 1] - t + 1 != g.count;
    if (!g.copied) {
      g.in = row_of(in, t, n_embd);
    } else {
      copied += g.count;
      g.in = {scratch(mixture_.in, (g.first + g.count) * n_embd) + g.first * n_embd,
              in.q8 != nullptr ? mixture_.in_q8.as<std::byte>() + static_cast<size_t>(g.first) * row : nullptr};
    }
  }
  if (copied == 0) return;
  team_.for_chunks(std::ssize(groups), 1, [&](int64_t i, int64_t, int) {
    const ExpertGroup& g = groups[static_cast<size_t>(i)];
    if (!g.copied) return;
    const FfnShard& ffn = g.expert->ffn;
    const bool f32 = !is_quantized(ffn.gate.type) || (ffn.up && !is_quantized(ffn.up.type));
    const bool q8 = is_quantized(ffn.gate.type) || (ffn.up && is_quantized(ffn.up.type));
    for (int64_t k = 0; k < g.count; ++k) {
      const auto t = static_cast<size_t>(tokens[g.first + k]), at = static_cast<size_t>(k),
                 n = static_cast<size_t>(n_embd);
      if (f32) std::memcpy(g.in.x + at * n, in.x + t * n, n * sizeof(float));
      if (q8) std::memcpy(static_cast<std::byte*>(g.in.q8) + at * row, static_cast<std::byte*>(in.q8) + t * row, row);
    }
  });
}

// y[t][r] = rows [r0, r0 + n) of w times token t. Not by gemm_tile, whose packed inputs would be one for every group.
void CpuDevice::expert_product(const Matrix& w, int64_t r0, int64_t n, const Operand& in, float* y, int64_t ldy,
                               int thread) {
  if (method(w, in.T) == Method::panels) return product_panels(w, r0, n, in, y, ldy, false, thread);
  product_dot(w, r0, n, in, y, ldy, false, thread);
}

void CpuDevice::expert_values(const ExpertGroup& g, float threshold, int64_t r0, int64_t n, int thread) {
  const FfnShard& s = g.expert->ffn;
  const Operand in{g.in, g.count, nullptr};
  float* const up = expert_scratch(thread, g.count * n);
  expert_product(s.gate, r0, n, in, g.values + r0, s.n(), thread);
  if (s.up) expert_product(s.up, r0, n, in, up, n, thread);
  for (int64_t t = 0; t < g.count; ++t) {
    float* const value = g.values + t * s.n() + r0;
    float* const u = s.up ? up + t * n : nullptr;
    if (s.gate_bias) k_.add(s.gate_bias.data + r0, n, value);
    if (u != nullptr && s.up_bias) k_.add(s.up_bias.data + r0, n, u);
    if (threshold > 0) {
      values_above(s, threshold, value, u, n);
    } else {
      k_.activate(static_cast<int>(s.act), s.act_threshold, value, u, s.up_relu, n, value);
    }
  }
}

// From gates and ups (or null) to values, in place of the gates.
void CpuDevice::values_above(const FfnShard& s, float threshold, float* z, const float* up, int64_t n) const {
  constexpr int64_t kAtOnce = 256;
  std::array<float, kAtOnce> activation;
  for (int64_t first = 0; first < n; first += kAtOnce) {
    const int64_t count = std::min(kAtOnce, n - first);
    float* const value = z + first;
    const auto activate = [&](const float* u, float* to) {
      k_.activate(static_cast<int>(s.act), s.act_threshold, value, u, s.up_relu, count, to);
    };
    activate(nullptr, activation.data());
    activate(up != nullptr ? up + first : nullptr, value);
    for (int64_t i = 0; i < count; ++i) {
      if (std::fabs(activation[static_cast<size_t>(i)]) <= threshold) value[i] = 0.0f;
    }
  }
}

void CpuDevice::expert_down(const ExpertGroup& g, int64_t r0, int64_t n, float* y, int thread) {
  const FfnShard& s = g.expert->ffn;
  const auto* const tokens = mixture_.tokens.as<int32_t>();
  const float* const weights = expert_weights();
  float* const sums = expert_scratch(thread, g.count * n);
  if (s.down) {
    expert_product(s.down, r0, n, {{g.values, g.values_q8}, g.count, nullptr}, sums, n, thread);
  } else {
    expert_down_rows(g, r0, n, sums);
  }
  for (int64_t t = 0; t < g.count; ++t) {
    if (g.expert->down_bias) k_.add(g.expert->down_bias.data + r0, n, sums + t * n);
    k_.axpy(weights[g.first + t], sums + t * n, n, y + tokens[g.first + t] * s.gate.cols + r0);
  }
}

// sums[t] = columns [c0, c0 + n) of the sum of all rows of down_t, times the neurons' values.
void CpuDevice::expert_down_rows(const ExpertGroup& g, int64_t c0, int64_t n, float* sums) const {
  const Matrix& w = g.expert->ffn.down_t;
  const RowsView rows{w.row(0) + row_bytes(w.type, c0), w.row_size(), nullptr, w.rows};
  std::memset(sums, 0, static_cast<size_t>(g.count * n) * sizeof(float));
  for (int64_t t = 0; t < g.count; t += kFewTokens) {
    k_.axpy_tokens[index(w.type)](rows, n, g.values + t * w.rows, w.rows, std::min(kFewTokens, g.count - t),
                                  sums + t * n, n);
  }
}

CpuDevice::ExpertCuts CpuDevice::cut(std::span<const ExpertGroup> groups, int64_t T) const {
  int64_t rows = 0, most_rows = 0, unit = kPanelRows;
  for (const ExpertGroup& g : groups) {
    const FfnShard& s = g.expert->ffn;
    rows += s.n(), most_rows = std::max(most_rows, s.n());
    if (s.down_t) unit = std::max(unit, column_unit(s.down_t.type));
  }
  const int64_t pieces = kExpertPieces * team_.size(), most = T > kFewTokens ? kExpertBatchRows : kExpertRows;
  ExpertCuts cuts;
  cuts.rows = expert_piece_rows(rows, pieces, most);
  cuts.each = (most_rows + cuts.rows - 1) / cuts.rows;
  cuts.columns = whole_units(expert_piece_rows(groups.front().expert->ffn.gate.cols, pieces, kExpertRows), unit);
  return cuts;
}

// Thread t brings pieces t, t + threads, ...: the first of them are those that it computes first.
void CpuDevice::fetch_experts(const ExpertSet& set, const ExpertChoice& choice, const Mailbox& until) {
  const std::span<const ExpertGroup> groups = group_tokens(set.experts, choice, 1);
  if (groups.empty()) return;
  const ExpertCuts cuts = cut(groups, 1);
  const int64_t threads = team_.size(), n_values = std::ssize(groups) * cuts.each,
                n_embd = groups.front().expert->ffn.gate.cols;
  const auto bring = [&](const Matrix& m, int64_t first, int64_t n) {
    if (until.has_next()) return false;
    prefetch<For::soon>(m.row(first), static_cast<size_t>(n) * m.row_size());
    return true;
  };
  team_.for_chunks(threads, 1, [&](int64_t thread, int64_t, int) {
    for (int64_t piece = thread; piece < n_values; piece += threads) {
      const FfnShard& s = groups[static_cast<size_t>(piece / cuts.each)].expert->ffn;
      const int64_t r0 = piece % cuts.each * cuts.rows, n = std::min(cuts.rows, s.n() - r0);
      for (const Matrix* m : {&s.gate, &s.up}) {
        if (*m && n > 0 && !bring(*m, r0, n)) return;
      }
    }
    for (int64_t r0 = thread * cuts.columns; r0 < n_embd; r0 += threads * cuts.columns) {
      for (const ExpertGroup& g : groups) {
        const Matrix& down = g.expert->ffn.down;  // of transposed ones only the rows of active neurons are read
        if (down && !bring(down, r0, std::min(cuts.columns, n_embd - r0))) return;
      }
    }
  });
}

void CpuDevice::ffn_experts(const ExpertSet& set, const ExpertChoice& choice, const Input& input, int64_t T, float* y) {
  if (set.n_active != nullptr) std::fill_n(set.n_active, T, 0);
  if (T == 0 || set.experts.empty()) return;
  const Act in = rows_of(input, T);
  mixture_.n_listed = T * choice.n_named;
  const std::span<ExpertGroup> groups = group_tokens(set.experts, choice, T);
  if (groups.empty()) return;
  const int64_t n_embd = groups.front().expert->ffn.gate.cols;
  gather_input(groups, in, n_embd);
  int64_t n_quantized = 0, n_skipping = 0;
  for (const ExpertGroup& g : groups) {
    const FfnShard& s = g.expert->ffn;
    HEARTH_CHECK(static_cast<bool>(s.down) != static_cast<bool>(s.down_t), "exactly one of down and down_t");
    HEARTH_CHECK(g.in.q8 != nullptr || !(is_quantized(s.gate.type) || (s.up && is_quantized(s.up.type))),
                 "quantised weights need the 8-bit form of their input");
    n_quantized += g.values_q8 != nullptr ? 1 : 0;
    n_skipping += set.n_active != nullptr && s.down_t ? 1 : 0;
  }
  if (n_skipping > 0) {
    HEARTH_CHECK(n_skipping == std::ssize(groups), "some experts have down, others down_t");
    return ffn_experts_sparse(groups, set, T, y);
  }
  const ExpertCuts cuts = cut(groups, T);
  const auto values = [&](int64_t piece, int64_t, int thread) {
    const ExpertGroup& g = groups[static_cast<size_t>(piece / cuts.each)];
    const int64_t r0 = piece % cuts.each * cuts.rows, n = std::min(cuts.rows, g.expert->ffn.n() - r0);
    if (n > 0) expert_values(g, set.threshold, r0, n, thread);
  };
  const auto quantize = [&](int64_t group, int64_t, int) {
    const ExpertGroup& g = groups[static_cast<size_t>(group)];
    const int64_t n = g.expert->ffn.n();
    for (int64_t t = 0; t < g.count && g.values_q8 != nullptr; ++t) {
      k_.quantize(g.values + t * n, n, g.values_q8 + static_cast<size_t>(t) * q8_bytes(n));
    }
  };
  const auto down = [&](int64_t begin, int64_t end, int thread) {
    for (const ExpertGroup& g : groups) expert_down(g, begin, end - begin, y, thread);
  };
  const std::array<ThreadTeam::Round, 3> rounds = {{
      {.n = std::ssize(groups) * cuts.each, .grain = 1, .work = values},
      {.n = n_quantized > 0 ? std::ssize(groups) : 0, .grain = 1, .work = quantize},
      {.n = n_embd, .grain = cuts.columns, .work = down},
  }};
  team_.for_rounds(rounds, [](size_t) {});
}

}  // namespace hearth::cpu
