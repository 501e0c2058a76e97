#include "cuda/staging.cuh"

#include "cuda/layout.h"

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

}  // namespace

size_t Staging::bytes(const FfnShard& s) {
  size_t sum = 0;
  for (const Matrix* m : {&s.gate, &s.up, &s.down_t}) {
    if (!*m) continue;
    sum += aligned(m->bytes());
    if (is_quantized(m->type)) sum += adopted_bytes(m->type, m->rows, m->cols);
  }
  for (const Vector* v : {&s.gate_bias, &s.up_bias}) {
    if (*v) sum += aligned(static_cast<size_t>(v->n) * sizeof(float));
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

std::byte* Staging::copy(Slot& slot, size_t& used, const void* host, size_t bytes) {
  std::byte* const to = slot.memory + used;
  used += aligned(bytes);
  HEARTH_CHECK(used <= slot_bytes_, "{} bytes in a slot of {}", used, slot_bytes_);
  CUDA_CHECK(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, stream_));
  return to;
}

FfnShard Staging::stage(int index, const FfnShard& host) {
  Slot& slot = slots_[static_cast<size_t>(index)];
  if (slot.used) CUDA_CHECK(cudaStreamWaitEvent(stream_, slot.done));
  slot.used = true;
  slot.pending.clear();
  size_t used = 0;
  FfnShard s = host;
  for (Matrix* m : {&s.gate, &s.up, &s.down_t}) {
    if (!*m) continue;
    HEARTH_CHECK(m->layout == Layout::rows, "a matrix in another layout than the file's");
    const std::byte* const blocks = copy(slot, used, m->data, m->bytes());
    m->data = blocks;
    if (!is_quantized(m->type)) continue;
    m->data = slot.memory + used, m->layout = Layout::planes;
    used += adopted_bytes(m->type, m->rows, m->cols);
    HEARTH_CHECK(used <= slot_bytes_, "{} bytes in a slot of {}", used, slot_bytes_);
    slot.pending.push_back({*m, blocks});
  }
  for (Vector* v : {&s.gate_bias, &s.up_bias}) {
    if (*v) v->data = reinterpret_cast<const float*>(copy(slot, used, v->data, static_cast<size_t>(v->n) * 4));
  }
  CUDA_CHECK(cudaEventRecord(slot.filled, stream_));
  return s;
}

void Staging::acquire(int index) {
  Slot& slot = slots_[static_cast<size_t>(index)];
  CUDA_CHECK(cudaStreamWaitEvent(gpu_.stream, slot.filled));
  for (const Pending& p : slot.pending) {
    with_block(p.to.type, [&]<DType D, typename Block>() {
      const int64_t n = p.to.rows * (p.to.cols / Block::size);
      launch(gpu_, pack_kernel<D, Block>, grid_size(ceil_div(n, kThreads)), kThreads, 0,
             static_cast<const Block*>(p.blocks), n, p.to.cols,
             static_cast<std::byte*>(const_cast<void*>(p.to.data)));
    });
  }
}

void Staging::release(int index) {
  CUDA_CHECK(cudaEventRecord(slots_[static_cast<size_t>(index)].done, gpu_.stream));
}

}  // namespace hearth::cuda
