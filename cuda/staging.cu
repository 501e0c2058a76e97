#include "cuda/staging.cuh"

#include "cuda/layout.h"

namespace hearth::cuda {
namespace {

constexpr int kThreads = 256;

// One thread a block of 32 weights: quants to `quants`, its scale to `scales`. Blocks lie at odd multiples of 2 bytes.
template <typename Block>
__global__ void __launch_bounds__(kThreads)
    split_kernel(const Block* blocks, int64_t n, uint32_t* quants, unsigned short* scales) {
  constexpr int kWords = sizeof(Block::qs) / 4;
  grid_trigger();
  grid_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const auto* halves = reinterpret_cast<const unsigned short*>(blocks + i);
  scales[i] = halves[0];
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    quants[i * kWords + w] = halves[1 + 2 * w] | static_cast<uint32_t>(halves[2 + 2 * w]) << 16;
  }
}

}  // namespace

size_t Staging::bytes(const FfnShard& s) {
  size_t sum = 0;
  for (const Matrix* m : {&s.gate, &s.up, &s.down_t}) {
    if (!*m) continue;
    sum += aligned(m->bytes());
    if (is_quantized(m->type)) sum += adopted_layout(m->type, m->rows, m->cols).total_bytes;
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
    HEARTH_CHECK(m->scales == nullptr, "a matrix in another layout than the file's");
    const std::byte* const blocks = copy(slot, used, m->data, m->bytes());
    m->data = blocks;
    if (!is_quantized(m->type)) continue;
    const AdoptedLayout layout = adopted_layout(m->type, m->rows, m->cols);
    m->data = slot.memory + used;
    m->scales = slot.memory + used + layout.scales_offset;
    used += layout.total_bytes;
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
    const int64_t n = p.to.rows * (p.to.cols / 32);
    auto* quants = static_cast<uint32_t*>(const_cast<void*>(p.to.data));
    auto* scales = static_cast<unsigned short*>(const_cast<void*>(p.to.scales));
    const unsigned blocks = grid_size(ceil_div(n, kThreads));
    if (p.to.type == DType::q8_0) {
      launch(gpu_, split_kernel<BlockQ8_0>, blocks, kThreads, 0, static_cast<const BlockQ8_0*>(p.blocks), n, quants,
             scales);
    } else {
      launch(gpu_, split_kernel<BlockQ4_0>, blocks, kThreads, 0, static_cast<const BlockQ4_0*>(p.blocks), n, quants,
             scales);
    }
  }
}

void Staging::release(int index) {
  CUDA_CHECK(cudaEventRecord(slots_[static_cast<size_t>(index)].done, gpu_.stream));
}

}  // namespace hearth::cuda
