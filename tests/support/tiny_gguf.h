#pragma once
// A small random GGUF model for tests that need real files and no meaning: ReGLU llama by default.
#include <cmath>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "gguf/gguf.h"
#include "support/random.h"

namespace hearth::test {

struct TinyGguf {
  int64_t n_layer = 2, n_embd = 32, n_ff = 96, n_head = 4, n_head_kv = 2, n_vocab = 64, n_ctx = 128;
  DType type = DType::f32;
  bool gated = true;
  bool transposed_down = true;
  bool tied_head = true;
  int64_t predictor_rank = 0;  // adds fc1 and fc2, as PowerInfer's files have them
  std::string activation = "relu";
  uint32_t seed = 1;
};

inline void write_tiny_gguf(const std::filesystem::path& path, const TinyGguf& m) {
  gguf::Writer out(path);
  const auto u32 = [&](const std::string& key, int64_t v) {
    out.set(fmt::format("llama.{}", key), static_cast<uint32_t>(v));
  };
  out.set("general.architecture", std::string("llama"));
  out.set("general.name", std::string("tiny"));
  out.set("hearth.ffn.activation", m.activation);
  u32("block_count", m.n_layer), u32("embedding_length", m.n_embd), u32("feed_forward_length", m.n_ff);
  u32("attention.head_count", m.n_head), u32("attention.head_count_kv", m.n_head_kv), u32("context_length", m.n_ctx);
  out.set("llama.attention.layer_norm_rms_epsilon", 1e-5f);

  struct Tensor {
    size_t index;
    DType type;
    int64_t n;
    float std;
    float mean;
  };
  std::vector<Tensor> tensors;
  const auto matrix = [&](const std::string& name, int64_t cols, int64_t rows) {
    tensors.push_back({out.add_tensor(name, m.type, {cols, rows}), m.type, cols * rows,
                       1.0f / std::sqrt(static_cast<float>(cols)), 0.0f});
  };
  const auto norm = [&](const std::string& name) {
    tensors.push_back({out.add_tensor(name, DType::f32, {m.n_embd}), DType::f32, m.n_embd, 0.1f, 1.0f});
  };
  const int64_t kv = m.n_embd / m.n_head * m.n_head_kv;
  matrix("token_embd.weight", m.n_embd, m.n_vocab);
  if (!m.tied_head) matrix("output.weight", m.n_embd, m.n_vocab);
  norm("output_norm.weight");
  for (int64_t l = 0; l < m.n_layer; ++l) {
    const std::string p = fmt::format("blk.{}.", l);
    norm(p + "attn_norm.weight"), norm(p + "ffn_norm.weight");
    matrix(p + "attn_q.weight", m.n_embd, m.n_embd), matrix(p + "attn_k.weight", m.n_embd, kv);
    matrix(p + "attn_v.weight", m.n_embd, kv), matrix(p + "attn_output.weight", m.n_embd, m.n_embd);
    if (m.gated) matrix(p + "ffn_gate.weight", m.n_embd, m.n_ff);
    matrix(p + "ffn_up.weight", m.n_embd, m.n_ff);
    if (m.transposed_down)
      matrix(p + "ffn_down_t.weight", m.n_embd, m.n_ff);
    else
      matrix(p + "ffn_down.weight", m.n_ff, m.n_embd);
    if (m.predictor_rank > 0) {
      matrix(p + "fc1.weight", m.n_embd, m.predictor_rank);
      matrix(p + "fc2.weight", m.predictor_rank, m.n_ff);
    }
  }
  out.begin();
  std::mt19937 rng(m.seed);
  for (const Tensor& t : tensors) {
    const std::vector<float> values = random_normal(rng, static_cast<size_t>(t.n), t.std, t.mean);
    std::vector<std::byte> bytes(row_bytes(t.type, t.n));
    traits(t.type).from_float(values.data(), bytes.data(), t.n);
    out.write(t.index, 0, bytes);
  }
  out.finish();
}

}  // namespace hearth::test
