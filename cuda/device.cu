// The operations of the CUDA device (device.cuh), but for the sparse ones.
#include <array>
#include <cstring>

#include "cuda/device.cuh"
#include "cuda/info.cuh"
#include "cuda/kernels.cuh"

namespace hearth::cuda {
namespace {

bool overlap(const float* a, int64_t n_a, const float* b, int64_t n_b) {
  const auto first_a = reinterpret_cast<uintptr_t>(a), first_b = reinterpret_cast<uintptr_t>(b);
  const auto bytes = [](int64_t n) { return static_cast<uintptr_t>(n) * sizeof(float); };
  return first_a < first_b + bytes(n_b) && first_b < first_a + bytes(n_a);
}

// Whether some kernel can do this norm on the way.
bool is_short_rms(const NormArgs& a) {
  return a.kind == NormKind::rms && !a.bias && a.n % 32 == 0 && a.n <= kMaxNormColumns;
}

}  // namespace

CudaDevice::CudaDevice(int gpu, const GpuShape& at_most) {
  const size_t context = activate(gpu);  // makes it current, too
  const size_t before = query_memory(gpu).free;
  cudaDeviceProp p{};
  CUDA_CHECK(cudaGetDeviceProperties(&p, gpu));
  name_ = p.name;
  stream_ = make_stream();
  gpu_ = {gpu,
          stream_,
          std::min(p.multiProcessorCount, at_most.multiprocessors),
          std::min(p.sharedMemPerBlockOptin, at_most.shared_per_block),
          static_cast<size_t>(p.l2CacheSize),
          at_most.overlap && supports_overlap(gpu)};
  heap_.emplace(gpu, account_);
  weights_.emplace(gpu, account_);
  gemm_.emplace(gpu_);
  side_.emplace();
  staging_ = make_pinned(2 * kStagingBytes);
  gave_up_ = make_pinned(sizeof(uint32_t));
  std::memset(gave_up_, 0, sizeof(uint32_t));
  // What the handles of this device took besides.
  const size_t after = query_memory(gpu).free;
  account_.add(Purpose::context, context + (before > after ? before - after : 0));
}

CudaDevice::~CudaDevice() {
  cudaSetDevice(gpu_.index);
  cudaDeviceSynchronize();
  staging_slots_.reset();
  staging_memory_ = {};
  storage_ = {};
}

void CudaDevice::use_from_this_thread() {
  CUDA_CHECK(cudaSetDevice(gpu_.index));
}

void CudaDevice::check_reserved(int64_t T) const {
  HEARTH_CHECK(storage_.bytes() > 0 && T >= 1 && T <= limits_.max_tokens, "{} tokens, reserved for {}", T,
               limits_.max_tokens);
}
void CudaDevice::check_few(int64_t T) const {
  check_reserved(T);
  HEARTH_CHECK(T <= kFewTokens, "{} tokens that skip neurons", T);
}

// --- norms on the way ---

int64_t LeftNorm::row_of(const float* x, const float* norm_weight, int64_t rows) const {
  if (y == nullptr || weight != norm_weight || x < y || (x - y) % n != 0) return -1;
  const int64_t first = (x - y) / n;
  return first + rows <= T ? first : -1;
}

UnscaledNorm CudaDevice::unscaled() const {
  auto* squares =
      reinterpret_cast<float*>(scratch_.norm + std::min(limits_.max_tokens, kFewTokens) * UnscaledNorm::kRowBytes);
  return {scratch_.norm, squares};
}

std::optional<InputNorm> CudaDevice::norm_on_the_way(const Input& in, const Matrix& w, int64_t T,
                                                     std::span<const Output> outputs, Reader reader) const {
  if (!in.normed() || T > kFewTokens || !is_short_rms(in.norm) || in.norm.n != w.cols || !can_norm(w)) {
    return std::nullopt;
  }
  const int64_t n = in.norm.n;
  if (overlap(in.x, T * n, in.act.x, T * n)) return std::nullopt;
  int64_t rows = 0;
  for (const Output& o : outputs) {
    if (overlap(in.x, T * n, o.data, T * o.stride)) return std::nullopt;
    rows += o.n;
  }
  InputNorm norm{in.x, in.norm.weight.data, in.norm.eps, static_cast<int>(n), in.act, {}};
  if (!is_quantized(w.type)) return norm;
  const int64_t row = left_.n == n ? left_.row_of(in.x, norm.weight, T) : -1;
  if (row >= 0) norm.unscaled = unscaled().row(row);
  if (reader == Reader::product && (row < 0 || in.act.q8 == nullptr || rows < n)) return std::nullopt;
  return norm;
}

void CudaDevice::norm_first(const Input& in, int64_t T) {
  if (in.normed()) cuda::norm(gpu_, in.norm, in.x, T, in.act);
}

std::optional<OutputNorm> CudaDevice::half_of(const NextNorm* next, int64_t T, int64_t n) const {
  if (next == nullptr || T > kFewTokens || !is_short_rms(next->norm) || next->norm.n != n) return std::nullopt;
  const Matrix& reader = next->reader;
  if (!is_quantized(reader.type) || reader.cols != n || !can_norm(reader)) return std::nullopt;
  return OutputNorm{next->norm.weight.data, unscaled()};
}

// --- operations ---

void CudaDevice::embed(const Matrix& table, const int32_t* ids, const Matrix& positions, const int32_t* pos,
                       int64_t position_offset, int64_t T, float* x) {
  cuda::embed(gpu_, table, ids, positions, pos, position_offset, T, x);
  left_ = {};
}

void CudaDevice::quantize(Act a, int64_t T, int64_t n) {
  if (a.q8 != nullptr) quantize_rows(gpu_, a.x, T, n, a.q8);
}

void CudaDevice::norm(const NormArgs& args, const float* x, int64_t T, Act out) {
  cuda::norm(gpu_, args, x, T, out);
  left_ = {};
}

void CudaDevice::add_norm(const NormArgs& args, float* x, int64_t T, float* y) {
  norm(args, x, T, {x, nullptr});
  add(gpu_, x, T * args.n, y);
}

void CudaDevice::scale(float factor, int64_t n, float* x) {
  cuda::scale(gpu_, factor, n, x);
  left_ = {};
}

void CudaDevice::soft_cap(float cap, int64_t n, float* x) {
  cuda::soft_cap(gpu_, cap, n, x);
  left_ = {};
}

void CudaDevice::matmul(std::span<const MatmulPart> parts, const Input& in, int64_t T, const NextNorm* next) {
  check_reserved(T);
  const bool few = T <= kFewTokens;
  if (!few) norm_first(in, T);
  LeftNorm left;
  // Runs of parts of one type go together: one launch for q, k and v, and one conversion of their input.
  for (size_t first = 0, n = 0; first < parts.size(); first += n) {
    const DType type = parts[first].w.type;
    for (n = 1; first + n < parts.size() && parts[first + n].w.type == type && !(few && n == kMaxParts);) ++n;
    const auto run = parts.subspan(first, n);
    if (!few) {
      gemm_->multiply(run, in.act.x, T);
      continue;
    }
    std::optional<InputNorm> norm;
    if (first == 0) {
      std::array<Output, kMaxParts> outputs{};
      for (size_t i = 0; i < n; ++i) outputs[i] = {run[i].y, run[i].w.rows, y_stride(run[i])};
      norm = norm_on_the_way(in, run[0].w, T, {outputs.data(), n});
      if (!norm) norm_first(in, T);
    }
    std::optional<OutputNorm> half;
    const MatmulPart& only = parts[0];
    if (!norm && parts.size() == 1 && y_stride(only) == only.w.rows && can_leave_norm(gpu_, only.w)) {
      half = half_of(next, T, only.w.rows);
    }
    if (half) left = {only.y, half->weight, T, only.w.rows};
    matvec(gpu_, run, in.act, T, norm ? &*norm : nullptr, half ? &*half : nullptr);
  }
  left_ = left;
}

void CudaDevice::attention(const AttentionArgs& a, int64_t T, Act out) {
  check_reserved(T);
  if (T <= kFewTokens) {
    const size_t bytes = attention_scratch(gpu_, a.n_head, a.n_head_kv, a.head_dim, T).partial_bytes;
    HEARTH_CHECK(bytes <= scratch_.attention_bytes, "attention of {}/{} heads needs more scratch than was reserved",
                 a.n_head, a.n_head_kv);
  }
  cuda::attention(gpu_, a, T, scratch_.attention, scratch_.counters, out);
  left_ = {};
}

void CudaDevice::head_products(const HeadProducts& products, int64_t T) {
  check_reserved(T);
  cuda::head_products(gpu_, products, T);
  left_ = {};
}

Act CudaDevice::ffn_hidden(const FfnShard& s, const Input& in, int64_t T) {
  const bool few = T <= kFewTokens;
  const Act hidden{scratch_.gate, few && s.down && is_quantized(s.down.type) ? scratch_.hidden_q8 : nullptr};
  if (few && ffn_fusable(s)) {
    const Output output{hidden.x, s.n(), s.n()};
    const auto norm = norm_on_the_way(in, s.gate, T, {&output, 1});
    if (!norm) norm_first(in, T);
    ffn_gate_up(gpu_, s, in.act, T, hidden, norm ? &*norm : nullptr);
    return hidden;
  }
  const MatmulPart parts[] = {{.w = s.gate, .y = scratch_.gate}, {.w = s.up, .y = scratch_.up}};
  matmul({parts, s.up ? size_t{2} : size_t{1}}, in, T, nullptr);
  ffn_combine(gpu_, s, scratch_.gate, s.up ? scratch_.up : nullptr, T, hidden.x);
  if (hidden.q8 != nullptr) quantize_rows(gpu_, hidden.x, T, s.n(), hidden.q8);
  return hidden;
}

void CudaDevice::ffn_dense(const FfnShard& s, const Input& in, int64_t T, Vector y_bias, float* y,
                           const NextNorm* next) {
  check_reserved(T);
  HEARTH_CHECK(static_cast<bool>(s.down) != static_cast<bool>(s.down_t));
  HEARTH_CHECK(s.n() <= limits_.n_ff);
  const Act hidden = ffn_hidden(s, in, T);
  if (s.down) {
    const MatmulPart down{.w = s.down, .bias = y_bias, .y = y, .accumulate = true};
    return matmul({&down, 1}, hidden, T, next);
  }
  left_ = {};
  if (T > kFewTokens) return gemm_->multiply_transposed(s.down_t, hidden.x, T, y_bias, y);
  down_rows(gpu_, s.down_t, hidden.x, T, y_bias, scratch_.down, scratch_.down_counters, y);
}

void CudaDevice::argmax(const float* logits, int64_t n, int64_t T, int32_t* ids) {
  check_reserved(1);
  const int64_t most = std::min(limits_.max_tokens, kFewTokens);  // that there is scratch for
  for (int64_t t = 0; t < T; t += most) {
    cuda::argmax(gpu_, logits + t * n, n, std::min(most, T - t), scratch_.argmax, ids + t);
  }
}

// --- recording ---

void CudaDevice::begin() {
  finish_hints();
  left_ = {};
  CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed));
}

int CudaDevice::end() {
  finish_hints();
  left_ = {};
  cudaGraph_t captured = nullptr;
  CUDA_CHECK(cudaStreamEndCapture(stream_, &captured));
  const Graph graph(captured);
  cudaGraphExec_t exec = nullptr;
  CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  graphs_.emplace_back(exec);
  CUDA_CHECK(cudaGraphUpload(exec, stream_));
  return static_cast<int>(graphs_.size()) - 1;
}

void CudaDevice::launch(int id) {
  HEARTH_CHECK(id >= 0 && static_cast<size_t>(id) < graphs_.size());
  finish_hints();
  left_ = {};
  CUDA_CHECK(cudaGraphLaunch(graphs_[static_cast<size_t>(id)], stream_));
}

void CudaDevice::stamp() {
  finish_hints();
  stamps_.stamp(stream_);
}

std::unique_ptr<Device> make_device(int gpu, const GpuShape& at_most) {
  require_gpu(gpu);
  return std::make_unique<CudaDevice>(gpu, at_most);
}

}  // namespace hearth::cuda
