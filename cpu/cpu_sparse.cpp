// The gate-first sparse feed-forward network of one token, in one dispatch of the team: the neurons (rows of gate and
// up), then the down projection by parts of its columns, of a long list in a few partial sums of neurons, then those
// sums. In a short list the down projection begins while others are at their neurons. What is summed in which order
// depends on the list of active neurons alone, so the rest is cut as the threads' number and speeds suggest.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "cpu/cpu_device.h"
#include "cpu/tiling.h"

namespace hearth::cpu {

CpuDevice::Candidates CpuDevice::candidates(const FfnShard& s, int64_t n, const int32_t* listed, Dealt dealt) const {
  const int64_t threads = team_.size();
  Candidates c{.n = n, .listed = listed, .begins = dealt.begins, .near = dealt.near};
  if (s.gate.layout == Layout::panels) c.unit = kPanelRows;
  c.n_pieces = dealt.begins != nullptr ? threads : n < threads ? n : most_pieces(n);
  const int64_t slots = Candidates::slots(n, c.n_pieces);
  c.ids = reinterpret_cast<int32_t*>(scratch(ids_, slots));
  c.values = scratch(values_, slots);
  return c;
}

// As many pieces for every thread.
int64_t CpuDevice::most_pieces(int64_t n) const {
  const int64_t threads = team_.size(), most = kSelectRows * threads;
  return threads * std::max(kSelectPieces, (n + most - 1) / most);
}

void CpuDevice::consecutive_gates(const FfnShard& s, Act in, int64_t T, int64_t begin, int64_t n, float* z,
                                  int64_t z_stride) const {
  const bool quantized = is_quantized(s.gate.type);
  const void* const x = quantized ? in.q8 : in.x;
  const size_t x_stride = quantized ? q8_bytes(s.gate.cols) : static_cast<size_t>(s.gate.cols) * sizeof(float);
  if (s.gate.layout == Layout::rows) {
    const RowsView rows{s.gate.row(begin), s.gate.row_size(), nullptr, n};
    return k_.dot_rows[index(s.gate.type)](rows, nullptr, s.gate.cols, x, x_stride, T, z, z_stride);
  }
  for (int64_t r = 0; r < n; r += kPanelRows) {
    k_.panel_dot[index(s.gate.type)](panel_of(s.gate, begin + r), s.gate.cols, x, x_stride, T, z + r, z_stride,
                                     static_cast<int>(std::min(kPanelRows, n - r)), false,
                                     r + kPanelRows < n ? PanelIn::memory_with_next : PanelIn::memory);
  }
}

void CpuDevice::select_piece(const FfnShard& s, const SparseArgs& sparse, Act in, const Candidates& c,
                             int64_t piece) const {
  const int64_t begin = c.begin(piece), n = c.begin(piece + 1) - begin;
  int32_t* ids = c.ids + c.slot(piece);
  float* z = c.values + c.slot(piece);
  int32_t& found = *ids++ = 0;
  const auto listed_rows = [&](const Matrix& w) { return RowsView{w.data, w.row_size(), c.listed + begin, n, c.near}; };
  if (c.listed != nullptr) {
    // Most of the listed neurons are active: their rows of up are asked for while the last gates are read.
    const RowsView next = listed_rows(s.up ? s.up : s.gate);
    k_.dot_rows[index(s.gate.type)](listed_rows(s.gate), &next, s.gate.cols, is_quantized(s.gate.type) ? in.q8 : in.x,
                                    0, 1, z, 0);
  } else {
    consecutive_gates(s, in, 1, begin, n, z, 0);
  }
  if (s.gate_bias) {
    for (int64_t i = 0; i < n; ++i) z[i] += s.gate_bias.data[c.id(begin + i)];
  }
  k_.activate(static_cast<int>(s.act), s.act_threshold, z, nullptr, false, n, z);
  for (int64_t i = 0; i < n; ++i) {
    if (!(std::fabs(z[i]) > sparse.threshold)) continue;
    ids[found] = c.id(begin + i);
    z[found++] = z[i];
  }
}

void CpuDevice::multiply_up(const FfnShard& s, Act in, const Candidates& c, int64_t piece, int thread) const {
  const int32_t* ids = c.ids + c.slot(piece);
  const int64_t n = *ids++;
  float* values = c.values + c.slot(piece);
  float* up = thread_scratch(thread);
  HEARTH_CHECK(n <= static_cast<int64_t>(thread_floats_), "{} neurons in a piece", n);
  k_.dot_rows[index(s.up.type)]({s.up.data, s.up.row_size(), ids, n, c.near}, nullptr, s.up.cols,
                                is_quantized(s.up.type) ? in.q8 : in.x, 0, 1, up, 0);
  for (int64_t i = 0; i < n; ++i) {
    values[i] *= up_factor(s, up[i] + (s.up_bias ? s.up_bias.data[ids[i]] : 0.0f));
  }
}

CpuDevice::Found CpuDevice::join_pieces(const Candidates& c, int64_t first, int64_t last, int32_t* ids, float* values) {
  Found found{.ids = ids, .values = values, .near = c.near};
  for (int64_t piece = first; piece < last; ++piece) {  // from other cores, at the same time
    prefetch<For::soon>(c.ids + c.slot(piece), sizeof(int32_t));
    prefetch<For::soon>(c.values + c.slot(piece), sizeof(float));
  }
  for (int64_t piece = first; piece < last; ++piece) {
    const int32_t* from = c.ids + c.slot(piece);
    const float* z = c.values + c.slot(piece);
    const int64_t n = *from++;
    found.n_active += n;
    for (int64_t i = 0; i < n; ++i) {
      ids[found.n] = from[i], values[found.n] = z[i];
      found.n += z[i] != 0.0f ? 1 : 0;
    }
  }
  return found;
}

void CpuDevice::add_down(const FfnShard& s, const Found& found, int64_t n_lanes, int64_t begin, int64_t end,
                         float* sums) const {
  const Matrix& w = s.down_t;
  each_lane(
      w.cols, found.n, n_lanes, begin, end,
      [&](int64_t column, int64_t n_columns, int64_t first, int64_t n_rows, int64_t at) {
        const RowsView view{w.row(0) + row_bytes(w.type, column), w.row_size(), found.ids + first, n_rows, found.near};
        k_.axpy_rows[index(w.type)](view, nullptr, n_columns, found.values + first, sums + at);
      });
}

void CpuDevice::fetch(const FfnShard& s, std::span<const int32_t> ids, const Mailbox& until) {
  const int64_t threads = team_.size();
  fetched_ = s.down_t.data;
  foreseen_.assign(ids.begin(), ids.end());
  fetched_ids_.assign(static_cast<size_t>(threads), 0);
  for (int64_t t = 1; t < threads && !ids.empty(); ++t) {
    const auto begin = static_cast<size_t>(part_begin(ends_, std::ssize(ids), t));
    fetched_ids_[static_cast<size_t>(t)] = ids[std::min(begin, ids.size() - 1)];
  }
  for (Pace& pace : paces_) pace.n_fetched = 0;
  team_.for_chunks(threads, 1,
                   [&](int64_t thread, int64_t, int) { fetch_part(s, thread, [&] { return until.has_next(); }); });
}

void CpuDevice::fetch_part(const FfnShard& s, int64_t thread, FunctionRef<bool()> stop) {
  const std::span<const int32_t> ids = foreseen_;
  const auto n = std::ssize(ids), n_lanes = sparse_lanes(n);
  int64_t& done = paces_[static_cast<size_t>(thread)].n_fetched;
  int64_t at = 0;
  const auto bring = [&](const std::byte* begin, size_t bytes) {
    if (at++ < done) return true;
    if (stop()) return false;
    // Not with requests for the second-level cache alone: where it has too many of them, it drops some.
    prefetch<For::soon>(begin, bytes);
    ++done;
    return true;
  };
  for (int64_t i = part_begin(ends_, n, thread); i < part_begin(ends_, n, thread + 1); ++i) {
    for (const Matrix* m : {&s.gate, &s.up}) {
      if (*m && !bring(m->row(ids[static_cast<size_t>(i)]), m->row_size())) return;
    }
  }
  const DownShares shares{s.down_t.cols, column_unit(s.down_t.type), ends_};
  each_lane(s.down_t.cols, n, n_lanes, shares.begin(n_lanes, thread), shares.begin(n_lanes, thread + 1),
            [&](int64_t column, int64_t n_columns, int64_t first, int64_t n_rows, int64_t) {
              const size_t begin = row_bytes(s.down_t.type, column), bytes = row_bytes(s.down_t.type, n_columns);
              for (const int32_t id : ids.subspan(static_cast<size_t>(first), static_cast<size_t>(n_rows))) {
                if (!bring(s.down_t.row(id) + begin, bytes)) return;
              }
            });
}

CpuDevice::Dealt CpuDevice::deal(const FfnShard& s, int64_t n, const int32_t* listed) {
  const int64_t threads = team_.size();
  const bool fetched = listed != nullptr && std::exchange(fetched_, nullptr) == s.down_t.data;
  if (n < threads || (!fetched && n > kDealtRows * threads) || s.gate.layout == Layout::panels) return {};
  learn_parts();
  begins_.assign(static_cast<size_t>(threads) + 1, n);
  bool fits = fetched;
  begins_[0] = 0;
  for (int64_t t = 1; fits && t <= threads; ++t) {
    const auto i = static_cast<size_t>(t);
    if (t < threads) begins_[i] = std::lower_bound(listed, listed + n, fetched_ids_[i]) - listed;
    // Not where one thread would have much more than its part: then rows of another core's cache cost less. Nor more
    // than its scratch holds.
    const int64_t part = part_begin(ends_, n, t) - part_begin(ends_, n, t - 1);
    fits = begins_[i] - begins_[i - 1] <= std::min(part * 5 / 4 + 1, static_cast<int64_t>(thread_floats_));
  }
  if (!fits && n > kDealtRows * threads) return {};
  for (int64_t t = 0; !fits && t < threads; ++t) begins_[static_cast<size_t>(t)] = part_begin(ends_, n, t);
  return {begins_.data(), fits};
}

void CpuDevice::fetch_input(const FfnShard& s, Act in, const Mailbox& hand_off) {
  const int64_t n = s.gate.cols;
  const auto of_type = [&](bool quantized) {
    return (s.gate && is_quantized(s.gate.type) == quantized) || (s.up && is_quantized(s.up.type) == quantized);
  };
  const bool goes_on = fetched_ == s.down_t.data;
  team_.for_chunks(team_.size(), 1, [&](int64_t thread, int64_t, int) {
    if (of_type(false)) prefetch<For::soon>(in.x, static_cast<size_t>(n) * sizeof(float));
    if (of_type(true)) prefetch<For::soon>(in.q8, q8_bytes(n));
    if (goes_on) fetch_part(s, thread, [&] { return hand_off.has_neurons(); });
  });
  learn_parts();
}

void CpuDevice::learn_parts() {
  using Time = std::chrono::duration<double>;
  if (!std::exchange(timed_, false)) return;
  Time total{0};
  for (const Pace& pace : paces_) total += pace.busy;
  if (total.count() == 0) return;  // the clock is too coarse to tell
  const Time mean = total / static_cast<double>(paces_.size());
  double begin = 0, sum = 0;
  for (size_t t = 0; t < paces_.size(); ++t) {
    const double part = ends_[t] - begin, speed = mean / Time(paces_[t].busy);
    begin = ends_[t];
    sum += part * (1 + kLearningRate * (std::clamp(speed, 0.5, 2.0) - 1));
    ends_[t] = sum;
  }
  for (double& end : ends_) end /= sum;
}

void CpuDevice::ffn_sparse(const FfnShard& s, const SparseArgs& sparse, const Input& input, int64_t T, Vector y_bias,
                           float* y, const NextNorm*) {
  HEARTH_CHECK(s.down_t && !s.down, "the sparse FFN needs down_t");
  const Act in = rows_of(input, T);
  HEARTH_CHECK(in.q8 != nullptr || !((s.up && is_quantized(s.up.type)) || is_quantized(s.gate.type)),
               "quantised weights need the 8-bit form of their input");
  HEARTH_CHECK(sparse.answer == nullptr || sparse.linked == nullptr, "an answer that is not complete yet");
  if (T == 1) {
    sparse_one(s, sparse, in, y_bias, y);
  } else {
    sparse_few(s, sparse, in, T, y_bias, y);
  }
  if (sparse.linked != nullptr) add_linked(sparse, in, T, y);
  if (sparse.collect != nullptr) add_answer(*sparse.collect, y, T * s.down_t.cols);
}

void CpuDevice::sparse_one(const FfnShard& s, const SparseArgs& sparse, Act in, Vector y_bias, float* y) {
  const auto* lists = std::get_if<NeuronLists>(&sparse.candidates);
  const int32_t* listed = lists != nullptr ? lists->ids : nullptr;
  const int64_t n = lists != nullptr ? lists->count[0] : s.n();
  HEARTH_CHECK(n >= 0 && n <= s.n(), "{} neurons are listed of {}", n, s.n());
  HEARTH_CHECK(listed == nullptr || s.gate.layout == Layout::rows, "rows of a list are not in panels");
  int64_t n_active = 0;
  if (n > 0) {
    n_active = ffn_candidates(s, sparse, in, candidates(s, n, listed, deal(s, n, listed)), y_bias, y);
  } else {
    add_bias(y_bias, 1, y);
    if (sparse.answer != nullptr) sparse.answer->publish(0, s.down_t.cols);
  }
  if (sparse.n_active != nullptr) *sparse.n_active = static_cast<int32_t>(n_active);
}

int64_t CpuDevice::ffn_candidates(const FfnShard& s, const SparseArgs& sparse, Act in, const Candidates& c,
                                  Vector y_bias, float* y) {
  const int64_t n_embd = s.down_t.cols, threads = team_.size(), most_lanes = sparse_lanes(c.n);
  float* sums = scratch(lanes_, kSparseLanes * n_embd);
  const DownShares shares{n_embd, column_unit(s.down_t.type), ends_};
  // Every thread puts the finds of a short list together for itself.
  const bool direct = c.n_pieces <= threads && 2 * static_cast<size_t>(c.n) <= thread_floats_;
  timed_ = c.begins != nullptr && c.n >= kLearntRows * threads;
  const auto now = [&] { return timed_ ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point{}; };
  const auto publish = [&](int64_t begin, int64_t end) {
    if (sparse.answer != nullptr) sparse.answer->publish(begin, end);
  };
  Found all;
  const auto find = [&](int64_t piece, int64_t, int thread) {
    const auto start = now();
    if (piece == thread) {  // what this thread will add to was last written by another one
      const int64_t begin = shares.begin(most_lanes, thread), end = shares.begin(most_lanes, thread + 1);
      prefetch<For::writing>((most_lanes == 1 ? y : sums) + begin, static_cast<size_t>(end - begin) * sizeof(float));
    }
    select_piece(s, sparse, in, c, piece);
    if (s.up) multiply_up(s, in, c, piece, thread);
    if (timed_) paces_[static_cast<size_t>(piece)].busy = now() - start;
  };
  // Most of the listed neurons are active. With one lane it is known which part of their rows a thread reads next.
  const bool knows_down = c.listed != nullptr && most_lanes == 1;
  const auto fetch_down = [&](int64_t share, int64_t step) {
    const size_t begin = row_bytes(s.down_t.type, shares.begin(1, share));
    const size_t end = row_bytes(s.down_t.type, shares.begin(1, share + 1));
    // A thread that has nothing to publish must not look at the list, either: nobody waits for it to be done with that.
    if (!knows_down || step >= c.n || begin == end) return false;
    prefetch(s.down_t.row(c.listed[step]) + begin, end - begin);
    return true;
  };
  // One lane of a short list: rows are added piece by piece, while slower threads are at theirs.
  const auto add_found = [&](int64_t share, int64_t, int thread) {
    const int64_t begin = shares.begin(1, share), end = shares.begin(1, share + 1);
    float* own = thread_scratch(thread);
    int64_t step = 0, n_active = 0;
    const auto fetch_next = [&] { step += fetch_down(share, step) ? 1 : 0; };
    if (y_bias) k_.add(y_bias.data + begin, end - begin, y + begin);
    for (int64_t piece = 0; piece < c.n_pieces;) {
      const int64_t done = team_.wait_pieces(0, piece, c.n_pieces, fetch_next);
      const auto start = now();
      const Found found = join_pieces(c, piece, done, reinterpret_cast<int32_t*>(own), own + c.n);
      add_down(s, found, 1, begin, end, y);
      n_active += found.n_active;
      if (timed_) paces_[static_cast<size_t>(share)].busy += now() - start;
      piece = done;
    }
    publish(begin, end);
    if (share == 0) all.n_active = n_active;
  };
  const auto down = [&](int64_t share, int64_t, int thread) {
    float* own = thread_scratch(thread);
    Found found;
    if (direct) {
      for (int64_t piece = 0; piece < c.n_pieces;) piece = team_.wait_pieces(0, piece, c.n_pieces, [] {});
      found = join_pieces(c, 0, c.n_pieces, reinterpret_cast<int32_t*>(own), own + c.n);
      if (share == 0) all = found;
    } else {
      found = all;
    }
    const int64_t n_lanes = sparse_lanes(found.n);
    const auto start = now();
    const int64_t begin = shares.begin(n_lanes, share), end = shares.begin(n_lanes, share + 1);
    if (n_lanes > 1) {
      std::memset(sums + begin, 0, static_cast<size_t>(end - begin) * sizeof(float));
      add_down(s, found, n_lanes, begin, end, sums);
    } else {
      if (y_bias) k_.add(y_bias.data + begin, end - begin, y + begin);
      add_down(s, found, 1, begin, end, y);
      publish(begin, end);
    }
    if (timed_) paces_[static_cast<size_t>(share)].busy += now() - start;
  };
  const auto sum = [&](int64_t begin, int64_t end, int) {
    if (y_bias) k_.add(y_bias.data + begin, end - begin, y + begin);
    for (int64_t lane = 0; lane < kSparseLanes; ++lane) k_.add(sums + lane * n_embd + begin, end - begin, y + begin);
    publish(begin, end);
  };
  const int64_t columns = columns_of_part(s.down_t.type, n_embd, threads);
  ThreadTeam::Round rounds[] = {{c.n_pieces, 1, find, fetch_down, direct}, {threads, 1, down}, {n_embd, columns, sum}};
  if (direct && most_lanes == 1) rounds[1].work = add_found;
  team_.for_rounds(std::span(rounds).first(most_lanes == 1 ? 2 : 3), [&](size_t finished) {
    if (finished == 0) {
      all = join_pieces(c, 0, c.n_pieces, c.ids, c.values);
    }
    if (sparse_lanes(all.n) == 1) rounds[2].n = 0;
  });
  return all.n_active;
}

}  // namespace hearth::cpu
