#include "engine/profiling_device.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/error.h"
#include "core/mailbox.h"

namespace hearth::engine {
namespace {

std::string shape(const Matrix& m) {
  return fmt::format("{}x{} {}", m.rows, m.cols, traits(m.type).name);
}

size_t bytes_of(const FfnShard& s) {
  size_t bytes = 0;
  for (const Matrix* m : {&s.gate, &s.up, &s.down, &s.down_t}) bytes += *m ? m->bytes() : 0;
  return bytes;
}

}  // namespace

std::vector<ProfilingDevice::Row> ProfilingDevice::rows() const {
  std::vector<Row> result;
  for (const auto& [name, row] : rows_) result.push_back(row);
  std::stable_sort(result.begin(), result.end(), [](const Row& a, const Row& b) { return a.seconds > b.seconds; });
  return result;
}

template <typename F>
void ProfilingDevice::timed(std::string operation, size_t weight_bytes, F&& work) {
  inner_.synchronize();
  const auto begin = std::chrono::steady_clock::now();
  work();
  inner_.synchronize();
  Row& row = rows_[operation];
  row.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  row.weight_bytes += weight_bytes;
  ++row.calls;
  row.operation = std::move(operation);
}

void ProfilingDevice::upload(void* device, const void* host, size_t bytes) {
  timed("upload", 0, [&] { inner_.upload(device, host, bytes); });
}
void ProfilingDevice::download(void* host, const void* device, size_t bytes) {
  timed("download", 0, [&] { inner_.download(host, device, bytes); });
}

void ProfilingDevice::embed(const Matrix& table, const int32_t* ids, const Matrix& positions, const int32_t* pos,
                            int64_t position_offset, int64_t T, float* x) {
  timed("embed", 0, [&] { inner_.embed(table, ids, positions, pos, position_offset, T, x); });
}
void ProfilingDevice::norm(const NormArgs& args, const float* x, int64_t T, Act out) {
  timed("norm", 0, [&] { inner_.norm(args, x, T, out); });
}

void ProfilingDevice::quantize(Act a, int64_t T, int64_t n) {
  timed("quantize", 0, [&] { inner_.quantize(a, T, n); });
}
void ProfilingDevice::matmul(std::span<const MatmulPart> parts, Act in, int64_t T) {
  Matrix all = parts.front().w;  // the parts of a group share their input, so one shape tells it
  size_t bytes = 0;
  all.rows = 0;
  for (const MatmulPart& p : parts) {
    all.rows += p.w.rows;
    bytes += p.w.bytes();
  }
  timed("matmul " + shape(all), bytes, [&] { inner_.matmul(parts, in, T); });
}

void ProfilingDevice::rope_kv(const RopeKvArgs& args, int64_t T) {
  timed("rope_kv", 0, [&] { inner_.rope_kv(args, T); });
}
void ProfilingDevice::attention(const AttentionArgs& args, int64_t T, Act out) {
  timed("attention", 0, [&] { inner_.attention(args, T, out); });
}
void ProfilingDevice::ffn_dense(const FfnShard& shard, Act in, int64_t T, Vector y_bias, float* y) {
  timed("ffn_dense " + shape(shard.gate), bytes_of(shard), [&] { inner_.ffn_dense(shard, in, T, y_bias, y); });
}
void ProfilingDevice::predict(const Predictor& predictor, Act in, const PredictArgs& args) {
  const size_t bytes = predictor.fc1.bytes() + predictor.fc2.bytes();
  timed("predict " + shape(predictor.fc2), bytes, [&] { inner_.predict(predictor, in, args); });
}
void ProfilingDevice::ffn_sparse(const FfnShard& shard, const SparseArgs& sparse, Act in, Vector y_bias, float* y) {
  timed("ffn_sparse " + shape(shard.gate), 0, [&] { inner_.ffn_sparse(shard, sparse, in, y_bias, y); });
}
void ProfilingDevice::argmax(const float* logits, int64_t n, int32_t* id) {
  timed("argmax", 0, [&] { inner_.argmax(logits, n, id); });
}

void ProfilingDevice::post(Mailbox& mailbox, const float* x, int64_t n) {
  timed("post", 0, [&] { inner_.post(mailbox, x, n); });
}
void ProfilingDevice::collect(Mailbox& mailbox, float* x, int64_t n) {
  timed("collect (waits for the CPU)", 0, [&] { inner_.collect(mailbox, x, n); });
}

}  // namespace hearth::engine
