#include "cuda/staging.cuh"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/panels.h"
#include "cuda/experts.cuh"
#include "cuda/layout.h"
#include "cuda/reduce.cuh"

namespace hearth::cuda {
namespace {

constexpr int kThreads = 256;

// One thread a block of the file's layout, which becomes a part of a packed row.
template <DType D, typename Block>
__global__ void __launch_bounds__(kThreads) pack_kernel(const Block* blocks, int64_t n, int64_t cols, std::byte* rows) {
  grid_trigger();
  grid_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const int64_t per_row = cols / Block::size;
  const PackedRow at = packed_row(packed_format(D), cols);
  pack_block<D>(blocks[i], i % per_row, at, rows + i / per_row * at.stride);
}

// The same of panels: a warp has a block of each of a panel's rows, whose units lie side by side.
template <DType D, typename Block>
__global__ void __launch_bounds__(kThreads)
    pack_panels_kernel(const std::byte* panels, int64_t n_rows, int64_t cols, std::byte* rows) {
  static_assert(kPanelRows == kWarp);
  grid_trigger();
  grid_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, per_row = cols / Block::size;
  const int64_t group = i / kPanelRows, row = group / per_row * kPanelRows + i % kPanelRows;
  if (row >= n_rows) return;
  Block block;
  constexpr PanelFormat format = panel_format(D);
  read_panel_block(format, panels + group * kPanelRows * static_cast<int64_t>(sizeof(Block)), i % kPanelRows,
                   reinterpret_cast<std::byte*>(&block));
  const PackedRow at = packed_row(packed_format(D), cols);
  pack_block<D>(block, group % per_row, at, rows + row * at.stride);
}

size_t matrix_bytes(const Matrix& m) {
  if (!m) return 0;
  return aligned(stored_bytes(m)) + (is_quantized(m.type) ? adopted_bytes(m.type, m.rows, m.cols) : 0);
}
size_t vector_bytes(const Vector& v) {
  return static_cast<size_t>(v.n) * sizeof(float);
}

// Bytes of a table of a layer's experts, with the biases of the staged ones behind it.
size_t table_bytes(const ExpertSet& host, std::span<const int32_t> ids) {
  size_t sum = host.experts.size() * sizeof(ExpertEntry);
  for (const int32_t id : ids) {
    const Expert& e = host.experts[static_cast<size_t>(id)];
    sum += vector_bytes(e.ffn.gate_bias) + vector_bytes(e.ffn.up_bias) + vector_bytes(e.down_bias);
  }
  return sum;
}

}  // namespace

size_t Staging::bytes(const FfnShard& s) {
  size_t sum = 0;
  for (const Matrix* m : {&s.gate, &s.up, &s.down_t}) sum += matrix_bytes(*m);
  for (const Vector* v : {&s.gate_bias, &s.up_bias}) sum += aligned(vector_bytes(*v));
  return sum;
}

size_t Staging::bytes(const ExpertSet& host, std::span<const int32_t> ids) {
  size_t sum = aligned(table_bytes(host, ids));
  for (const int32_t id : ids) {
    const FfnShard& s = host.experts[static_cast<size_t>(id)].ffn;
    for (const Matrix* m : {&s.gate, &s.up, &s.down}) sum += matrix_bytes(*m);
  }
  return sum;
}

Staging::Staging(const Gpu& gpu, void* memory, int n_slots, size_t slot_bytes)
    : gpu_(gpu), stream_(make_stream()), slot_bytes_(slot_bytes), slots_(static_cast<size_t>(n_slots)) {
  auto* at = static_cast<std::byte*>(memory);
  for (Slot& s : slots_) {
    s.memory = at, s.filled = make_event(), s.done = make_event();
    at += slot_bytes;
  }
}

Staging::~Staging() {
  cudaStreamSynchronize(stream_);
}

std::byte* Staging::copy(Slot& slot, const void* host, size_t bytes) {
  std::byte* const to = slot.memory + slot.used;
  slot.used += aligned(bytes);
  HEARTH_CHECK(slot.used <= slot_bytes_, "{} bytes in a slot of {}", slot.used, slot_bytes_);
  CUDA_CHECK(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, stream_));
  return to;
}

// The slot from its beginning on, once its last user is done.
Staging::Slot& Staging::begin(int index) {
  Slot& slot = slots_[static_cast<size_t>(index)];
  if (slot.used > 0) CUDA_CHECK(cudaStreamWaitEvent(stream_, slot.done));
  slot.pending.clear();
  slot.used = 0;
  return slot;
}

Matrix Staging::copy(Slot& slot, const Matrix& host) {
  if (!host) return host;
  const bool quantized = is_quantized(host.type);
  HEARTH_CHECK(host.layout == Layout::rows || (quantized && host.layout == Layout::panels),
               "a matrix in another layout than the CPU's");
  Matrix m = host;
  m.data = copy(slot, host.data, stored_bytes(host));
  if (!quantized) return m;
  m.layout = Layout::planes;
  Matrix from = host;
  from.data = std::exchange(m.data, slot.memory + slot.used);
  slot.used += adopted_bytes(m.type, m.rows, m.cols);
  HEARTH_CHECK(slot.used <= slot_bytes_, "{} bytes in a slot of {}", slot.used, slot_bytes_);
  slot.pending.push_back({m, from});
  return m;
}

FfnShard Staging::stage(int index, const FfnShard& host) {
  Slot& slot = begin(index);
  FfnShard s = host;
  for (Matrix* m : {&s.gate, &s.up, &s.down_t}) *m = copy(slot, *m);
  for (Vector* v : {&s.gate_bias, &s.up_bias}) {
    if (*v) v->data = reinterpret_cast<const float*>(copy(slot, v->data, vector_bytes(*v)));
  }
  CUDA_CHECK(cudaEventRecord(slot.filled, stream_));
  return s;
}

ExpertSet Staging::stage(int index, const ExpertSet& host, std::span<const int32_t> ids) {
  Slot& slot = begin(index);
  const size_t bytes = table_bytes(host, ids);
  CUDA_CHECK(cudaEventSynchronize(slot.filled));  // the last table is on the GPU
  if (bytes > slot.table_bytes) slot.table = make_pinned(slot.table_bytes = bytes);
  auto* const entries = static_cast<ExpertEntry*>(static_cast<void*>(slot.table));
  std::fill_n(entries, host.experts.size(), ExpertEntry{});
  std::byte* const on_gpu = slot.memory;
  slot.used = aligned(bytes);
  HEARTH_CHECK(slot.used <= slot_bytes_, "{} bytes in a slot of {}", slot.used, slot_bytes_);
  size_t at = host.experts.size() * sizeof(ExpertEntry);
  const auto append = [&](const Vector& v) -> Vector {
    if (!v) return v;
    std::memcpy(reinterpret_cast<std::byte*>(entries) + at, v.data, vector_bytes(v));
    const auto* const data = reinterpret_cast<const float*>(on_gpu + at);
    at += vector_bytes(v);
    return {data, v.n};
  };
  slot.experts.assign(host.experts.size(), {});
  for (const int32_t id : ids) {
    Expert e = host.experts[static_cast<size_t>(id)];
    for (Matrix* m : {&e.ffn.gate, &e.ffn.up, &e.ffn.down}) *m = copy(slot, *m);
    for (Vector* v : {&e.ffn.gate_bias, &e.ffn.up_bias, &e.down_bias}) *v = append(*v);
    entries[id] = entry_of(e);
    slot.experts[static_cast<size_t>(id)] = e;
  }
  CUDA_CHECK(cudaMemcpyAsync(on_gpu, entries, bytes, cudaMemcpyHostToDevice, stream_));
  CUDA_CHECK(cudaEventRecord(slot.filled, stream_));
  return {slot.experts, host.shared, on_gpu};
}

void Staging::acquire(int index) {
  Slot& slot = slots_[static_cast<size_t>(index)];
  CUDA_CHECK(cudaStreamWaitEvent(gpu_.stream, slot.filled));
  for (const Pending& p : slot.pending) {
    with_block(p.to.type, [&]<DType D, typename Block>() {
      const int64_t per_row = p.to.cols / Block::size;
      auto* const to = static_cast<std::byte*>(const_cast<void*>(p.to.data));
      if (p.from.layout == Layout::rows) {
        const int64_t n = p.to.rows * per_row;
        launch(gpu_, pack_kernel<D, Block>, grid_size(ceil_div(n, kThreads)), kThreads, 0,
               static_cast<const Block*>(p.from.data), n, p.to.cols, to);
      } else {
        const int64_t n = round_up(p.to.rows, kPanelRows) * per_row;
        launch(gpu_, pack_panels_kernel<D, Block>, grid_size(ceil_div(n, kThreads)), kThreads, 0,
               static_cast<const std::byte*>(p.from.data), p.to.rows, p.to.cols, to);
      }
    });
  }
}

void Staging::release(int index) {
  CUDA_CHECK(cudaEventRecord(slots_[static_cast<size_t>(index)].done, gpu_.stream));
}

}  // namespace hearth::cuda
