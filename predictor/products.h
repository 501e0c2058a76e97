#pragma once
// core/products.h on a host device's kernels, and what is built on products alone and so runs wherever they do.
#include <cstdint>
#include <vector>

#include "core/device.h"
#include "core/products.h"
#include "core/thread_team.h"

namespace hearth::predictor {

// Values of a tile of rows or tokens that visits the Products' memory: 64 MiB.
constexpr int64_t kTileValues = int64_t{16} << 20;
// Rows of `cols` elements in a tile, a multiple of 64.
int64_t tile_rows(int64_t cols);

class HostProducts final : public Products {
 public:
  // `device`, a host device nobody else uses (it is told its limits here), and its team must outlive the object.
  HostProducts(Device& device, ThreadTeam& team);

  std::string name() const override { return device_.name(); }
  void write(const Matrix& host, const Block& to) override;
  void read(const Block& from, float* host, int64_t stride) override;
  void copy(const Block& from, const Block& to) override { read(from, to.data, to.stride); }
  void multiply(const Operand& a, const Operand& b, const Block& c, ProductForm form) override;
  void adam(const Block& value, const Block& gradient, const Block& first, const Block& second,
            const AdamStep& step) override;

 private:
  float* allocate_values(int64_t n) override;
  void release_values(float* data, int64_t n) override;
  // Rows [first, first + n) and columns [k, k + n_k) of x, times scale, without gaps: x itself where it is so already.
  const float* packed(const Operand& x, int64_t first, int64_t n, int64_t k, int64_t n_k, float scale,
                      std::vector<float>& scratch);

  Device& device_;
  ThreadTeam& team_;
  std::vector<float> packed_a_, packed_b_;
};

// Products of many host matrices with the same tokens x [T][n], in any type, which must outlive the object. The tokens
// stay in the Products' memory where they take no more than `resident_bytes`.
class TokenProducts {
 public:
  static constexpr size_t kResidentBytes = size_t{1} << 30;
  // At most `tokens_at_once` of them are multiplied at once.
  TokenProducts(const Matrix& x, Products& products, size_t resident_bytes = kResidentBytes,
                int64_t tokens_at_once = INT64_MAX);
  int64_t tokens() const { return x_.rows; }
  // out[r][t] = sum_c w[r][c] x[t][c], w of any type: [w.rows][T].
  void multiply(const Matrix& w, float* out) const;

 private:
  Matrix x_;
  Products& products_;
  int64_t tokens_at_once_;
  OwnedBlock resident_;
};

// out [cols][rows] of in [rows][cols].
void transpose(const float* in, int64_t rows, int64_t cols, float* out);
// Rows [first, first + count) as f32, whatever their type.
std::vector<float> dequantized(const Matrix& m, int64_t first, int64_t count);

}  // namespace hearth::predictor
