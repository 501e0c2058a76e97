// core/products.h on a GPU: cuBLAS, in f32 throughout (no TF32: fitting inverts what it multiplies).
#include "core/products.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>

#include "cuda/cuda.h"
#include "cuda/info.cuh"
#include "cuda/launch.cuh"
#include "cuda/launch_shapes.h"
#include "cuda/memory.cuh"

namespace hearth::cuda {
namespace {

constexpr int kThreads = 256;
constexpr size_t kWorkspaceBytes = size_t{32} << 20;  // what cuBLAS advises for compute capability 9.0
constexpr size_t kVisitBytes = size_t{32} << 20;      // of 16-bit values on their way to f32
constexpr size_t kReturnBytes = size_t{4} << 20;      // of page-locked memory that results come back through, twice

__device__ float as_float(__half v) {
  return __half2float(v);
}
__device__ float as_float(__nv_bfloat16 v) {
  return __bfloat162float(v);
}

// out[r][c] = in[r][c], [rows][cols] without gaps to rows `stride` apart.
template <typename T>
__global__ void widen_kernel(const T* in, int64_t n, int64_t cols, float* out, int64_t stride) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i / cols * stride + i % cols] = as_float(in[i]);
}

__global__ void adam_kernel(float* value, const float* gradient, float* first, float* second, int64_t n, AdamStep s,
                            float c1, float c2) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float g = gradient[i];
  const float m = s.beta1 * first[i] + (1 - s.beta1) * g;
  const float v = s.beta2 * second[i] + (1 - s.beta2) * g * g;
  first[i] = m, second[i] = v;
  value[i] -= s.rate * (m / c1 / (sqrtf(v / c2) + s.epsilon) + s.decay * value[i]);
}

int as_int(int64_t v) {
  HEARTH_CHECK(v >= 0 && v <= INT_MAX, "{} is too large for cuBLAS", v);
  return static_cast<int>(v);
}

bool without_gaps(const Block& b) {
  return b.stride == b.cols || b.rows <= 1;
}

class CudaProducts final : public Products {
 public:
  explicit CudaProducts(int gpu) : gpu_(gpu) {
    activate(gpu);  // makes it current, too
    stream_ = make_stream();
    cublas_ = make_cublas(stream_);
    uploader_ = std::make_unique<Uploader>();
    for (int half : {0, 1}) returns_[half] = make_pinned(kReturnBytes), returned_[half] = make_event();
    workspace_ = heap_.allocate(kWorkspaceBytes, Purpose::scratch);
    visit_ = heap_.allocate(kVisitBytes, Purpose::scratch);
    // A workspace of its own: the same choice of algorithms, and so the same bits, run after run.
    CUDA_CHECK(cublas().set_workspace(cublas_, workspace_, kWorkspaceBytes));
    cudaDeviceProp properties{};
    CUDA_CHECK(cudaGetDeviceProperties(&properties, gpu));
    name_ = properties.name;
  }
  ~CudaProducts() override {
    cudaStreamSynchronize(stream_);  // a failure here has nobody to tell
    heap_.release(visit_, kVisitBytes, Purpose::scratch);
    heap_.release(workspace_, kWorkspaceBytes, Purpose::scratch);
  }

  std::string name() const override { return name_; }

  void write(const Matrix& host, const Block& to) override {
    HEARTH_CHECK(host.rows == to.rows && host.cols == to.cols);
    if (host.type == DType::f16 || host.type == DType::bf16) return write_16_bit(host, to);
    if (host.type == DType::f32) return write_f32(static_cast<const float*>(host.data), to);
    const int64_t at_once = std::max<int64_t>(1, static_cast<int64_t>(kVisitBytes / sizeof(float)) / host.cols);
    std::vector<float> values;
    for (int64_t r = 0; r < host.rows; r += at_once) {
      const int64_t count = std::min(at_once, host.rows - r);
      values.resize(static_cast<size_t>(count * host.cols));
      traits(host.type).to_float(host.row(r), values.data(), count * host.cols);
      write_f32(values.data(), to.row_part(r, count));
    }
  }

  // Through page-locked memory: one half is copied out of while the other fills.
  void read(const Block& from, float* host, int64_t stride) override {
    if (from.rows == 0 || from.cols == 0) return;
    const int64_t step = stride == 0 ? from.cols : stride;
    const size_t width = static_cast<size_t>(from.cols) * sizeof(float);
    HEARTH_CHECK(width <= kReturnBytes, "rows of {} values are too long to be read", from.cols);
    const auto rows_at_once = static_cast<int64_t>(kReturnBytes / width);
    const auto rows_of = [&](int64_t r) { return std::min(rows_at_once, from.rows - r); };
    const auto fetch = [&](int64_t r, int half) {
      CUDA_CHECK(cudaMemcpy2DAsync(returns_[half], width, from.data + r * from.stride,
                                   static_cast<size_t>(from.stride) * sizeof(float), width,
                                   static_cast<size_t>(rows_of(r)), cudaMemcpyDeviceToHost, stream_));
      CUDA_CHECK(cudaEventRecord(returned_[half], stream_));
    };
    fetch(0, 0);
    for (int64_t r = 0, half = 0; r < from.rows; r += rows_at_once, half ^= 1) {
      const int64_t next = r + rows_at_once;
      if (next < from.rows) fetch(next, static_cast<int>(half ^ 1));
      CUDA_CHECK(cudaEventSynchronize(returned_[half]));
      const auto* rows = static_cast<const std::byte*>(static_cast<void*>(returns_[half]));
      for (int64_t i = 0; i < rows_of(r); ++i)
        std::memcpy(host + (r + i) * step, rows + static_cast<size_t>(i) * width, width);
    }
  }

  void copy(const Block& from, const Block& to) override {
    HEARTH_CHECK(from.rows == to.rows && from.cols == to.cols);
    CUDA_CHECK(cudaMemcpy2DAsync(to.data, static_cast<size_t>(to.stride) * sizeof(float), from.data,
                                 static_cast<size_t>(from.stride) * sizeof(float),
                                 static_cast<size_t>(from.cols) * sizeof(float), static_cast<size_t>(from.rows),
                                 cudaMemcpyDeviceToDevice, stream_));
  }

  void multiply(const Operand& a, const Operand& b, const Block& c, ProductForm form) override {
    const int64_t rows = a.rows(), cols = b.cols(), depth = a.cols();
    HEARTH_CHECK(b.rows() == depth && c.rows == rows && c.cols == cols && depth > 0, "a product of {} x {} and {} x {}",
                 rows, depth, b.rows(), cols);
    // cuBLAS is column-major: to it our row-major blocks are their transposes, and c^T = b^T a^T.
    const float beta = form.accumulate ? 1.0f : 0.0f;
    CUDA_CHECK(cublas().sgemm(cublas_, b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                              a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, as_int(cols), as_int(rows), as_int(depth),
                              &form.scale, b.block.data, as_int(b.block.stride), a.block.data, as_int(a.block.stride),
                              &beta, c.data, as_int(c.stride)));
  }

  void adam(const Block& value, const Block& gradient, const Block& first, const Block& second,
            const AdamStep& step) override {
    const int64_t n = value.rows * value.cols;
    for (const Block& b : {value, gradient, first, second}) {
      HEARTH_CHECK(b.rows == value.rows && b.cols == value.cols && without_gaps(b));
    }
    const auto t = static_cast<float>(step.step);
    adam_kernel<<<grid_size(ceil_div(n, kThreads)), kThreads, 0, stream_>>>(
        value.data, gradient.data, first.data, second.data, n, step, 1 - std::pow(step.beta1, t),
        1 - std::pow(step.beta2, t));
    CUDA_CHECK(cudaGetLastError());
  }

 private:
  float* allocate_values(int64_t n) override {
    const size_t bytes = static_cast<size_t>(n) * sizeof(float);
    void* data = heap_.allocate(bytes, Purpose::scratch);
    CUDA_CHECK(cudaMemsetAsync(data, 0, bytes, stream_));
    count(n);
    return static_cast<float*>(data);
  }
  void release_values(float* data, int64_t n) override {  // cudaFree waits for what still uses it
    heap_.release(data, static_cast<size_t>(n) * sizeof(float), Purpose::scratch);
    uncount(n);
  }

  void write_f32(const float* host, const Block& to) {
    const size_t width = static_cast<size_t>(to.cols) * sizeof(float);
    if (without_gaps(to)) {
      return uploader_->copy(to.data, host, width * static_cast<size_t>(to.rows), stream_);
    }
    CUDA_CHECK(cudaMemcpy2DAsync(to.data, static_cast<size_t>(to.stride) * sizeof(float), host, width, width,
                                 static_cast<size_t>(to.rows), cudaMemcpyHostToDevice, stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
  }

  void write_16_bit(const Matrix& host, const Block& to) {
    const int64_t at_once = std::max<int64_t>(1, static_cast<int64_t>(kVisitBytes / sizeof(f16_t)) / host.cols);
    HEARTH_CHECK(host.cols * static_cast<int64_t>(sizeof(f16_t)) <= static_cast<int64_t>(kVisitBytes));
    for (int64_t r = 0; r < host.rows; r += at_once) {
      const int64_t count = std::min(at_once, host.rows - r), n = count * host.cols;
      uploader_->copy(visit_, host.row(r), static_cast<size_t>(n) * sizeof(f16_t), stream_);
      const unsigned grid = grid_size(ceil_div(n, kThreads));
      float* out = to.data + r * to.stride;
      if (host.type == DType::f16) {
        widen_kernel<<<grid, kThreads, 0, stream_>>>(static_cast<const __half*>(visit_), n, host.cols, out, to.stride);
      } else {
        widen_kernel<<<grid, kThreads, 0, stream_>>>(static_cast<const __nv_bfloat16*>(visit_), n, host.cols, out,
                                                     to.stride);
      }
      CUDA_CHECK(cudaGetLastError());
    }
  }

  int gpu_;
  std::string name_;
  Account account_;
  Heap heap_{gpu_, account_};
  Stream stream_;
  Cublas cublas_;
  std::unique_ptr<Uploader> uploader_;
  PinnedMemory returns_[2];
  Event returned_[2];
  void* workspace_ = nullptr;
  void* visit_ = nullptr;
};

}  // namespace

std::unique_ptr<Products> make_products(int gpu) {
  require_gpu(gpu);
  return std::make_unique<CudaProducts>(gpu);
}

}  // namespace hearth::cuda
