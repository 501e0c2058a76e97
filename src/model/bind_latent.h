#pragma once
// The tensors of one layer's multi-head latent attention under llama.cpp's names. Part of model.cpp.
#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"
#include "model/model.h"

namespace hearth::model {

template <typename Binder>
class LatentBinder {
 public:
  // `layer_prefix`: "blk.3."
  LatentBinder(Binder& binder, const Config& config, std::string layer_prefix)
      : b_(binder), c_(config), d_(config.latent), p_(std::move(layer_prefix)) {}

  void bind(LayerWeights& l) {
    const int64_t n_q = c_.n_head * (d_.n_plain + c_.n_rot), n_kv = d_.n_latent + c_.n_rot;
    if (d_.n_q_latent > 0) {
      l.latent.q_a = b_.matrix(p_ + "attn_q_a.weight", d_.n_q_latent, c_.n_embd);
      l.latent.q_a_norm = b_.vector(p_ + "attn_q_a_norm.weight", d_.n_q_latent);
      l.wq = b_.matrix(p_ + "attn_q_b.weight", n_q, d_.n_q_latent);
    } else {
      l.wq = b_.matrix(p_ + "attn_q.weight", n_q, c_.n_embd);
    }
    const Matrix kv = b_.matrix(p_ + "attn_kv_a_mqa.weight", n_kv, c_.n_embd);
    l.wk = kv.slice_rows(0, d_.n_latent), l.latent.k_rotated = kv.slice_rows(d_.n_latent, c_.n_rot);
    l.latent.norm = b_.vector(p_ + "attn_kv_a_norm.weight", d_.n_latent);
    b_.has(p_ + "attn_kv_b.weight") ? bind_joint(l) : bind_split(l);
    l.wo = b_.matrix(p_ + "attn_output.weight", c_.n_embd, c_.n_head * d_.n_value);
    l.bo = b_.optional_vector(p_ + "attn_output.bias", c_.n_embd);
  }

 private:
  void bind_split(LayerWeights& l) {
    l.latent.k_b = b_.stacked(p_ + "attn_k_b.weight", c_.n_head, d_.n_latent, d_.n_plain);
    l.latent.v_b = b_.stacked(p_ + "attn_v_b.weight", c_.n_head, d_.n_value, d_.n_latent);
  }
  // Files before April 2025: each head's rows for keys [n_plain][n_latent], then those for values. The former are
  // transposed, in f32 where they are quantised, so that nothing is rounded.
  void bind_joint(LayerWeights& l) {
    const int64_t per_head = d_.n_plain + d_.n_value, n = d_.n_latent;
    const Matrix both = b_.matrix(p_ + "attn_kv_b.weight", c_.n_head * per_head, n);
    const size_t row = both.row_size();
    std::byte* const v = b_.own_matrix(static_cast<size_t>(c_.n_head * d_.n_value) * row);
    const DType type = is_quantized(both.type) ? DType::f32 : both.type;
    std::byte* const k = b_.own_matrix(static_cast<size_t>(c_.n_head * n) * row_bytes(type, d_.n_plain));
    std::vector<float> rows(static_cast<size_t>(d_.n_plain * n)), transposed(rows.size());
    for (int64_t h = 0; h < c_.n_head; ++h) {
      const Matrix keys = both.slice_rows(h * per_head, d_.n_plain);
      std::memcpy(v + static_cast<size_t>(h * d_.n_value) * row, keys.row(d_.n_plain),
                  static_cast<size_t>(d_.n_value) * row);
      for (int64_t r = 0; r < d_.n_plain; ++r) traits(both.type).to_float(keys.row(r), rows.data() + r * n, n);
      for (int64_t i = 0; i < std::ssize(rows); ++i) {
        transposed[static_cast<size_t>(i % n * d_.n_plain + i / n)] = rows[static_cast<size_t>(i)];
      }
      traits(type).from_float(transposed.data(), k + static_cast<size_t>(h * n) * row_bytes(type, d_.n_plain),
                              std::ssize(transposed));
    }
    l.latent.k_b = {type, c_.n_head * n, d_.n_plain, k};
    l.latent.v_b = {both.type, c_.n_head * d_.n_value, n, v};
  }

  Binder& b_;
  const Config& c_;
  const LatentDescription& d_;
  const std::string p_;
};

}  // namespace hearth::model
