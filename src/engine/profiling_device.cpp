#include "engine/profiling_device.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/error.h"
#include "core/mailbox.h"
#include "core/recording.h"

namespace hearth::engine {
namespace {

constexpr size_t kUnreadStamps = 4096;  // of a few tokens: a device keeps an object for each

std::string shape(const Matrix& m) {
  return fmt::format("{}x{} {}", m.rows, m.cols, traits(m.type).name);
}

size_t bytes_of(const FfnShard& s) {
  size_t bytes = 0;
  for (const Matrix* m : {&s.gate, &s.up, &s.down, &s.down_t}) bytes += *m ? m->bytes() : 0;
  return bytes;
}

// The head's product stands alone; the attention's are several, or added to the residual stream.
Part part_of(std::span<const MatmulPart> parts) {
  return parts.size() == 1 && !parts.front().accumulate ? Part::head : Part::attention;
}

}  // namespace

const char* to_string(Part part) {
  switch (part) {
    case Part::attention:
      return "attention";
    case Part::predictor:
      return "predictor";
    case Part::hand_over:
      return "hand-over";
    case Part::ffn:
      return "ffn";
    case Part::wait:
      return "wait";
    case Part::merge:
      return "merge";
    case Part::head:
      return "head";
    case Part::other:
      return "other";
  }
  return "?";
}

std::vector<ProfilingDevice::Row> ProfilingDevice::rows() {
  read_clock();
  std::vector<Row> result;
  for (const auto& [name, row] : rows_) result.push_back(row);
  std::stable_sort(result.begin(), result.end(), [](const Row& a, const Row& b) { return a.seconds > b.seconds; });
  return result;
}

std::array<double, kParts> ProfilingDevice::parts() {
  read_clock();
  return parts_;
}

double ProfilingDevice::ffn_beside_hand_offs() {
  read_clock();
  return ffn_beside_;
}

void ProfilingDevice::reset() {
  read_clock();
  rows_.clear();
  parts_ = {};
  norm_seconds_ = ffn_seconds_ = ffn_beside_ = 0;
}

void ProfilingDevice::record(const Interval& what, double seconds) {
  Row& row = rows_[what.operation];
  row.operation = what.operation;
  row.seconds += seconds;
  row.weight_bytes += what.weight_bytes;
  ++row.calls;
  if (what.operation == "norm") {
    norm_seconds_ += seconds;
    return;
  }
  const double whole = seconds + std::exchange(norm_seconds_, 0.0);
  parts_[static_cast<size_t>(what.part)] += whole;
  if (what.part == Part::wait) ffn_beside_ += ffn_seconds_;
  ffn_seconds_ = what.part == Part::ffn ? ffn_seconds_ + whole : 0;
}

void ProfilingDevice::read_clock() {
  if (clock_ == nullptr || intervals_.empty()) return;
  const std::vector<double> seconds = clock_->read_stamps();
  HEARTH_CHECK(seconds.size() == intervals_.size(), "{} times of {} operations", seconds.size(), intervals_.size());
  for (size_t i = 0; i < seconds.size(); ++i) record(intervals_[i], seconds[i]);
  intervals_.clear();
}

void ProfilingDevice::begin_interval() {
  if (intervals_.size() >= kUnreadStamps) read_clock();
  if (intervals_.empty()) clock_->stamp();
}

template <typename F>
void ProfilingDevice::timed(std::string operation, Part part, size_t weight_bytes, F&& work) {
  if (!enabled_) return work();
  if (clock_ != nullptr) {
    begin_interval();
    work();
    clock_->stamp();
    intervals_.push_back({std::move(operation), part, weight_bytes});
    return;
  }
  inner_.synchronize();
  const auto begin = std::chrono::steady_clock::now();
  work();
  inner_.synchronize();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  record({std::move(operation), part, weight_bytes}, seconds.count());
}

void ProfilingDevice::upload(void* device, const void* host, size_t bytes) {
  timed("upload", Part::other, 0, [&] { inner_.upload(device, host, bytes); });
}
void ProfilingDevice::download(void* host, const void* device, size_t bytes) {
  timed("download", Part::other, 0, [&] { inner_.download(host, device, bytes); });
}

void ProfilingDevice::embed(const Matrix& table, const int32_t* ids, const Matrix& positions, const int32_t* pos,
                            int64_t position_offset, int64_t T, float* x) {
  timed("embed", Part::other, 0, [&] { inner_.embed(table, ids, positions, pos, position_offset, T, x); });
}

void ProfilingDevice::norm(const NormArgs& args, const float* x, int64_t T, Act out) {
  timed("norm", Part::other, 0, [&] { inner_.norm(args, x, T, out); });
}

void ProfilingDevice::quantize(Act a, int64_t T, int64_t n) {
  timed("quantize", Part::predictor, 0, [&] { inner_.quantize(a, T, n); });
}
void ProfilingDevice::matmul(std::span<const MatmulPart> parts, const Input& in, int64_t T, const NextNorm* next) {
  Matrix all = parts.front().w;  // the parts of a group share their input, so one shape tells it
  size_t bytes = 0;
  all.rows = 0;
  for (const MatmulPart& p : parts) {
    all.rows += p.w.rows;
    bytes += p.w.bytes();
  }
  timed("matmul " + shape(all), part_of(parts), bytes, [&] { inner_.matmul(parts, in, T, next); });
}

void ProfilingDevice::attention(const AttentionArgs& args, int64_t T, Act out) {
  timed("attention", Part::attention, 0, [&] { inner_.attention(args, T, out); });
}
void ProfilingDevice::ffn_dense(const FfnShard& shard, const Input& in, int64_t T, Vector y_bias, float* y,
                                const NextNorm* next) {
  timed("ffn_dense " + shape(shard.gate), Part::ffn, bytes_of(shard),
        [&] { inner_.ffn_dense(shard, in, T, y_bias, y, next); });
}
void ProfilingDevice::predict(const Predictor& predictor, const Input& in, int64_t T, const PredictArgs& args) {
  const size_t bytes = predictor.fc1.bytes() + predictor.fc2.bytes();
  timed("predict " + shape(predictor.fc2), Part::predictor, bytes,
        [&] { inner_.sparse_ffn()->predict(predictor, in, T, args); });
}
void ProfilingDevice::ffn_sparse(const FfnShard& shard, const SparseArgs& sparse, const Input& in, int64_t T,
                                 Vector y_bias, float* y, const NextNorm* next) {
  SparseArgs own = sparse;
  if (enabled_) own.collect = nullptr;
  const bool is_last = own.collect == sparse.collect;
  timed("ffn_sparse " + shape(shard.gate), Part::ffn, 0,
        [&] { inner_.sparse_ffn()->ffn_sparse(shard, own, in, T, y_bias, y, is_last ? next : nullptr); });
  if (!is_last) collect(*sparse.collect, y, T * shard.gate.cols);
}
void ProfilingDevice::route(const Router& router, const Input& in, int64_t T, const ExpertChoice& choice) {
  timed("route " + shape(router.w), Part::predictor, router.w.bytes() + router.shared_gate.bytes(),
        [&] { inner_.expert_ffn()->route(router, in, T, choice); });
}
void ProfilingDevice::ffn_experts(const ExpertSet& set, const ExpertChoice& choice, const Input& in, int64_t T,
                                  float* y) {
  const FfnShard* first = nullptr;
  size_t bytes = 0;
  for (const Expert& e : set.experts) {
    if (!e) continue;
    if (first == nullptr) first = &e.ffn;
    bytes = std::max(bytes, e.bytes());
  }
  // Depends on how many tokens chose the same, and on the active neurons.
  if (T > 1 || set.n_active != nullptr) bytes = 0;
  timed(first != nullptr ? "ffn_experts " + shape(first->gate) : "ffn_experts", Part::ffn,
        bytes * static_cast<size_t>(choice.n_named), [&] { inner_.expert_ffn()->ffn_experts(set, choice, in, T, y); });
}
void ProfilingDevice::head_products(const HeadProducts& products, int64_t T) {
  timed("head_products " + shape(products.w), Part::attention, products.w.bytes(),
        [&] { inner_.latent_attention()->head_products(products, T); });
}
void ProfilingDevice::argmax(const float* logits, int64_t n, int64_t T, int32_t* ids) {
  timed("argmax", Part::other, 0, [&] { inner_.argmax(logits, n, T, ids); });
}

std::unique_ptr<Mailbox> ProfilingDevice::open_mailbox(int64_t capacity, int64_t max_ids) {
  unused_sum_ = inner_.allocate(sizeof(float), Purpose::scratch);
  return inner_.hand_offs()->open_mailbox(capacity, max_ids);
}
void ProfilingDevice::post(Mailbox& mailbox, const float* x, int64_t n) {
  timed("post", Part::hand_over, 0, [&] { inner_.hand_offs()->post(mailbox, x, n); });
}
void ProfilingDevice::hint(const Predictor& predictor, Act in, const HintArgs& args) {
  const size_t bytes = predictor.fc1.bytes() + predictor.fc2.bytes();
  timed("hint " + shape(predictor.fc2), Part::predictor, bytes, [&] { inner_.hand_offs()->hint(predictor, in, args); });
}
void ProfilingDevice::collect(Mailbox& mailbox, float* x, int64_t n) {
  // The answer's first element, added to nothing of use: the same answer is then there to be merged.
  timed("wait for the CPU", Part::wait, 0,
        [&] { inner_.hand_offs()->collect(mailbox, enabled_ ? unused_sum_.as<float>() : x, enabled_ ? 1 : n); });
  if (enabled_) timed("merge", Part::merge, 0, [&] { inner_.hand_offs()->collect(mailbox, x, n); });
}

}  // namespace hearth::engine
