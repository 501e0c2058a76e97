#include "cpu/cpu_device.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/isa.h"
#include "cpu/tiling.h"

namespace hearth::cpu {

WeightType weight_type(DType type) {
  switch (type) {
    case DType::f32:
      return WeightType::f32;
    case DType::f16:
      return WeightType::f16;
    case DType::bf16:
      return WeightType::bf16;
    case DType::q8_0:
      return WeightType::q8_0;
    case DType::q4_0:
      return WeightType::q4_0;
    case DType::q4_1:
      return WeightType::q4_1;
    case DType::q5_0:
      return WeightType::q5_0;
    case DType::q5_1:
      return WeightType::q5_1;
    case DType::q2_k:
      return WeightType::q2_k;
    case DType::q3_k:
      return WeightType::q3_k;
    case DType::q4_k:
      return WeightType::q4_k;
    case DType::q5_k:
      return WeightType::q5_k;
    case DType::q6_k:
      return WeightType::q6_k;
    case DType::iq4_nl:
      return WeightType::iq4_nl;
    case DType::iq4_xs:
      return WeightType::iq4_xs;
    case DType::mxfp4:
      return WeightType::mxfp4;
    default:
      HEARTH_CHECK(false, "no kernels for {}", traits(type).name);
  }
  return WeightType::f32;
}

CpuDevice::CpuDevice(ThreadTeam& team, Isa isa)
    : team_(team), isa_(isa), k_(kernels(isa)), paces_(static_cast<size_t>(team.size())) {
  for (int t = 1; t <= team.size(); ++t) ends_.push_back(static_cast<double>(t) / team.size());
}

std::string CpuDevice::name() const {
  return fmt::format("cpu ({}, {} thread{})", to_string(isa_), team_.size(), team_.size() == 1 ? "" : "s");
}

void CpuDevice::reserve(const Limits& l) {
  const int64_t K = std::max(l.max_cols, l.n_ff), T = l.max_tokens;
  const int64_t mr = k_.mr, nr = k_.nr, few = kFewTokens;
  const auto floats = [](int64_t n) { return static_cast<size_t>(n) * sizeof(float); };
  const auto make = [&](size_t bytes) { return allocate(std::max<size_t>(bytes, 64), Purpose::scratch); };
  packed_ = make(T > 1 ? floats((T + mr - 1) / mr * mr * K) : 0);
  const size_t panel = floats(kPanelK * std::max<int64_t>(kStripColumns, nr));
  const size_t quantized_panel = l.quantized_weights ? kPanelRows * row_bytes(DType::q8_0, n_blocks(K) * kBlock) : 0;
  const size_t tile = floats(std::max(T * kGemmRows, kFewTokens * kMaxDotRows));
  const int64_t group = std::max<int64_t>(1, l.n_head / std::max<int64_t>(1, l.n_head_kv));
  const size_t attend = std::max(floats(attend_block_floats(l.head_dim, group, k_)), floats(group * kPagePositions));
  thread_floats_ = (std::max(std::max(panel, quantized_panel) + tile, attend) / sizeof(float) + 63) / 64 * 64;
  thread_ = make(thread_floats_ * sizeof(float) * static_cast<size_t>(team_.size()));
  const int64_t slots = Candidates::slots(l.n_ff, most_pieces(l.n_ff));
  values_ = make(floats(std::max(T * l.n_ff, slots)));
  // A predictor may be quantised where the model is not.
  values_q8_ = make(static_cast<size_t>(l.quantized_weights ? T : 1) * q8_bytes(l.n_ff));
  lanes_ = make(floats(kLanes * std::min(T, few) * l.n_embd));
  ids_ = make(floats(std::max((few + 1) * l.n_ff + few, slots)));
  partial_ = make(floats((l.max_context / kPagePositions + 2) * l.n_head * (l.head_dim + 2)));
  angles_ = make(floats(T * l.head_dim));
  reserve_experts(l);
}

float* CpuDevice::scratch(const DeviceBuffer& buffer, int64_t floats) const {
  HEARTH_CHECK(buffer.bytes() >= static_cast<size_t>(floats) * sizeof(float),
               "an operation needs {} floats of scratch, reserve() was told {} would do", floats,
               buffer.bytes() / sizeof(float));
  return buffer.as<float>();
}

void CpuDevice::embed(const Matrix& table, const int32_t* ids, const Matrix& positions, const int32_t* pos,
                      int64_t position_offset, int64_t T, float* x) {
  team_.for_chunks(T, kRowsPerPiece, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      HEARTH_CHECK(ids[t] >= 0 && ids[t] < table.rows, "token {} of {}", ids[t], table.rows);
      float* row = x + t * table.cols;
      if (table.layout == Layout::panels) {
        const auto in_panel = static_cast<int>(ids[t] % kPanelRows);
        k_.panel_row[index(table.type)](panel_of(table, ids[t] - in_panel), in_panel, table.cols, row);
      } else {
        k_.to_float[index(table.type)](table.row(ids[t]), row, table.cols);
      }
      if (!positions) continue;
      const int64_t p = pos[t] + position_offset;
      HEARTH_CHECK(p >= 0 && p < positions.rows, "position {} of {}", p, positions.rows);
      const float one = 1.0f;
      const RowsView view{positions.row(p), positions.row_size(), nullptr, 1};
      k_.axpy_rows[index(positions.type)](view, nullptr, positions.cols, &one, row);
    }
  });
}

// By the team: a prompt's hand-off is answered in megabytes.
void CpuDevice::fill_zero(void* device, size_t bytes) {
  constexpr int64_t kPiece = int64_t{1} << 16;
  const auto n = static_cast<int64_t>(bytes);
  if (n <= kPiece) return HostDevice::fill_zero(device, bytes);
  auto* const to = static_cast<std::byte*>(device);
  team_.for_chunks(n, kPiece, [&](int64_t begin, int64_t end, int) {
    std::memset(to + begin, 0, static_cast<size_t>(end - begin));
  });
}

void CpuDevice::norm(const NormArgs& a, const float* x, int64_t T, Act out) {
  const auto normalize = a.kind == NormKind::rms ? k_.rms_norm : k_.layer_norm;
  team_.for_chunks(T, kRowsPerPiece, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      float* y = out.x + t * a.n;
      normalize(x + t * a.n, a.weight.data, a.bias.data, a.eps, a.n, y);
      if (out.q8 != nullptr)
        k_.quantize(y, a.n, static_cast<std::byte*>(out.q8) + static_cast<size_t>(t) * q8_bytes(a.n));
    }
  });
}

void CpuDevice::add_norm(const NormArgs& a, float* x, int64_t T, float* y) {
  const auto normalize = a.kind == NormKind::rms ? k_.rms_norm : k_.layer_norm;
  team_.for_chunks(T, kRowsPerPiece, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      float* row = x + t * a.n;
      normalize(row, a.weight.data, a.bias.data, a.eps, a.n, row);
      k_.add(row, a.n, y + t * a.n);
    }
  });
}

void CpuDevice::scale(float factor, int64_t n, float* x) {
  constexpr int64_t kPiece = 1 << 14;
  team_.for_chunks(n, kPiece, [&](int64_t begin, int64_t end, int) { k_.scale(factor, end - begin, x + begin); });
}

void CpuDevice::soft_cap(float cap, int64_t n, float* x) {
  team_.for_chunks(n, 1024, [&](int64_t begin, int64_t end, int) { k_.soft_cap(cap, end - begin, x + begin); });
}

void CpuDevice::quantize_rows(Act a, int64_t T, int64_t n) {
  if (a.q8 == nullptr) return;
  team_.for_chunks(T, kRowsPerPiece, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      k_.quantize(a.x + t * n, n, static_cast<std::byte*>(a.q8) + static_cast<size_t>(t) * q8_bytes(n));
    }
  });
}

void CpuDevice::add_bias(Vector bias, int64_t T, float* y) {
  if (!bias) return;
  for (int64_t t = 0; t < T; ++t) k_.add(bias.data, bias.n, y + t * bias.n);
}

void CpuDevice::argmax(const float* logits, int64_t n, int64_t T, int32_t* ids) {
  for (int64_t t = 0; t < T; ++t, logits += n) {
    // NaN compares false with everything, so it never replaces; it only has to be kept from being the first.
    int64_t best = 0;
    while (best < n && std::isnan(logits[best])) ++best;
    if (best == n) best = 0;
    for (int64_t i = best + 1; i < n; ++i) {
      if (logits[i] > logits[best]) best = i;
    }
    ids[t] = static_cast<int32_t>(best);
  }
}

std::unique_ptr<Device> make_device(ThreadTeam& team, std::optional<Isa> isa) {
  return std::make_unique<CpuDevice>(team, isa.value_or(best_isa()));
}

}  // namespace hearth::cpu
