#pragma once
// Products of large matrices in f32, wherever they are computed fastest: what fitting predictors consists of. The
// host's are in predictor/products.h, a GPU's in cuda/cuda.h. Matrices that are used more than once stay in the memory
// of the Products between calls. Results do not depend on the number of threads, nor on timing; two kinds of Products
// differ by rounding.
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "core/tensor.h"

namespace hearth {

// f32 values [rows][cols] in the memory of one Products, `stride` elements from row to row.
struct Block {
  float* data = nullptr;
  int64_t rows = 0, cols = 0, stride = 0;
  Block part(int64_t row, int64_t col, int64_t n_rows, int64_t n_cols) const {
    return {data + row * stride + col, n_rows, n_cols, stride};
  }
  Block row_part(int64_t row, int64_t n_rows) const { return part(row, 0, n_rows, cols); }
};

class Products;

// Owns a block. Move-only; must not outlive its Products.
class OwnedBlock {
 public:
  OwnedBlock() = default;
  OwnedBlock(Products* owner, const Block& block) : owner_(owner), block_(block) {}
  OwnedBlock(OwnedBlock&& other) noexcept { *this = std::move(other); }
  OwnedBlock& operator=(OwnedBlock&& other) noexcept {
    std::swap(owner_, other.owner_);
    std::swap(block_, other.block_);
    return *this;
  }
  ~OwnedBlock();
  operator const Block&() const { return block_; }  // NOLINT: implicit
  const Block& operator*() const { return block_; }
  const Block* operator->() const { return &block_; }

 private:
  Products* owner_ = nullptr;
  Block block_;
};

// A block in a product, as it is or transposed.
struct Operand {
  Operand(const Block& b, bool is_transposed = false) : block(b), transposed(is_transposed) {}  // NOLINT: implicit
  Operand(const OwnedBlock& b) : Operand(*b) {}                                                 // NOLINT
  Block block;
  bool transposed;
  int64_t rows() const { return transposed ? block.cols : block.rows; }
  int64_t cols() const { return transposed ? block.rows : block.cols; }
};
inline Operand transposed(const Block& b) {
  return {b, true};
}

// How a product is stored: c = scale * a b, or c += scale * a b.
struct ProductForm {
  float scale = 1.0f;
  bool accumulate = false;
};

// One step of AdamW (arXiv 1711.05101), the `step`-th from 1.
struct AdamStep {
  float rate = 1e-3f, decay = 0.0f;
  float beta1 = 0.9f, beta2 = 0.999f, epsilon = 1e-8f;
  int step = 1;
};

class Products {
 public:
  virtual ~Products() = default;
  virtual std::string name() const = 0;  // of the device that multiplies

  // All zero. Throws Error when there is not enough memory.
  OwnedBlock allocate(int64_t rows, int64_t cols) { return {this, {allocate_values(rows * cols), rows, cols, cols}}; }
  // A host matrix of any computable type, as f32.
  OwnedBlock upload(const Matrix& host) {
    OwnedBlock b = allocate(host.rows, host.cols);
    write(host, b);
    return b;
  }
  // `host`, in the file's layout, has the block's shape; it may be reused on return.
  virtual void write(const Matrix& host, const Block& to) = 0;
  // Into host rows `stride` elements apart (0: as long as they are), when all that was asked before is done.
  virtual void read(const Block& from, float* host, int64_t stride = 0) = 0;

  virtual void copy(const Block& from, const Block& to) = 0;  // of one shape, not overlapping

  // c [a.rows()][b.cols()] = a b. c must not overlap a or b.
  virtual void multiply(const Operand& a, const Operand& b, const Block& c, ProductForm form = {}) = 0;
  // Updates `value` and its moments `first` and `second`, all of one shape and without gaps between rows.
  virtual void adam(const Block& value, const Block& gradient, const Block& first, const Block& second,
                    const AdamStep& step) = 0;

  // Bytes allocated now, and the most there ever were.
  size_t bytes() const { return bytes_; }
  size_t peak_bytes() const { return peak_bytes_; }

 protected:
  friend class OwnedBlock;
  virtual float* allocate_values(int64_t n) = 0;  // zero-filled
  virtual void release_values(float* data, int64_t n) = 0;
  void count(int64_t values) {
    bytes_ += static_cast<size_t>(values) * sizeof(float);
    peak_bytes_ = bytes_ > peak_bytes_ ? bytes_ : peak_bytes_;
  }
  void uncount(int64_t values) { bytes_ -= static_cast<size_t>(values) * sizeof(float); }

 private:
  size_t bytes_ = 0, peak_bytes_ = 0;
};

inline OwnedBlock::~OwnedBlock() {
  if (owner_ != nullptr) owner_->release_values(block_.data, block_.rows * block_.cols);
}

}  // namespace hearth
