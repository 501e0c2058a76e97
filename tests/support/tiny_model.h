#pragma once
// Writes a small llama model with random weights and a byte-level vocabulary, for tests that need a model file but no
// particular one.
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "gguf/gguf.h"
#include "support/random.h"

namespace hearth::test {

struct TinyModelOptions {
  DType type = DType::f32;          // of the matrices
  std::optional<DType> down_type;   // of ffn_down or ffn_down_t, and of attn_v, where their rows are whole blocks
  std::string activation = "relu";  // hearth.ffn.activation
  bool vocabulary = true;           // 256 byte tokens, a few merges, <|endoftext|>
  bool transposed_down = false;     // write ffn_down_t
  int64_t predictor_rank = 0;       // adds fc1 and fc2, as PowerInfer's files have them
  int64_t n_layer = 2, n_embd = 64, n_ff = 96, n_head = 4, n_head_kv = 2, n_ctx = 64;
  uint32_t seed = 1;
  std::map<std::string, gguf::Value> keys;            // besides, or instead
  std::map<std::string, std::vector<float>> vectors;  // tensors besides
};

// 256 byte tokens, the two merges below, and the end of a text.
constexpr int32_t kTinyVocab = 259;
constexpr int32_t kTinyThe = 257;  // "the"
constexpr int32_t kTinyEos = 258;  // "<|endoftext|>"

namespace detail {

inline std::string utf8(uint32_t c) {
  if (c < 0x80) return {static_cast<char>(c)};
  return {static_cast<char>(0xC0 | (c >> 6)), static_cast<char>(0x80 | (c & 0x3F))};
}

// GPT-2's printable stand-ins for the 256 bytes: printable Latin-1 is itself, the others follow from U+0100 on.
inline std::vector<std::string> byte_tokens() {
  std::vector<std::string> tokens;
  uint32_t next = 256;
  for (uint32_t b = 0; b < 256; ++b) {
    const bool printable = (b >= 33 && b <= 126) || (b >= 161 && b != 173);
    tokens.push_back(utf8(printable ? b : next));
    next += printable ? 0 : 1;
  }
  return tokens;
}

inline void set_vocabulary(gguf::Writer& w) {
  std::vector<std::string> tokens = byte_tokens();
  tokens.insert(tokens.end(), {"th", "the", "<|endoftext|>"});
  std::vector<int32_t> types(tokens.size(), 1);  // normal
  types.back() = 3;                              // control
  w.set("tokenizer.ggml.model", std::string("gpt2"));
  w.set("tokenizer.ggml.pre", std::string("gpt-2"));
  w.set("tokenizer.ggml.tokens", gguf::Array(tokens));
  w.set("tokenizer.ggml.token_type", gguf::Array(types));
  w.set("tokenizer.ggml.merges", gguf::Array(std::vector<std::string>{"t h", "th e"}));
  w.set("tokenizer.ggml.eos_token_id", static_cast<uint32_t>(kTinyEos));
}

}  // namespace detail

inline std::filesystem::path write_tiny_model(const std::filesystem::path& path, const TinyModelOptions& o = {}) {
  gguf::Writer w(path);
  const auto set = [&](const char* key, int64_t value) {
    w.set(std::string("llama.") + key, static_cast<uint32_t>(value));
  };
  w.set("general.architecture", std::string("llama"));
  w.set("general.name", std::string("tiny"));
  set("block_count", o.n_layer), set("context_length", o.n_ctx), set("embedding_length", o.n_embd);
  set("feed_forward_length", o.n_ff), set("attention.head_count", o.n_head),
      set("attention.head_count_kv", o.n_head_kv);
  set("rope.dimension_count", o.n_embd / o.n_head);
  w.set("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  w.set("hearth.ffn.activation", o.activation);
  if (o.vocabulary) detail::set_vocabulary(w);
  for (const auto& [key, value] : o.keys) w.set(key, value);

  struct Tensor {
    size_t index;
    DType type;
    int64_t rows, cols;
  };
  std::vector<Tensor> tensors;
  const auto matrix = [&](const std::string& name, int64_t rows, int64_t cols) {
    const bool better = name.find("ffn_down") != std::string::npos || name.find("attn_v") != std::string::npos;
    const bool fits = o.down_type && cols % traits(*o.down_type).block_size == 0;
    const DType type = better && fits ? *o.down_type : o.type;
    tensors.push_back({w.add_tensor(name, type, {cols, rows}), type, rows, cols});
  };
  const auto norm = [&](const std::string& name) {
    tensors.push_back({w.add_tensor(name, DType::f32, {o.n_embd}), DType::f32, 1, o.n_embd});
  };
  const int64_t n_kv = o.n_embd / o.n_head * o.n_head_kv;
  matrix("token_embd.weight", kTinyVocab, o.n_embd);
  norm("output_norm.weight");
  for (int64_t l = 0; l < o.n_layer; ++l) {
    const std::string p = "blk." + std::to_string(l) + ".";
    norm(p + "attn_norm.weight"), norm(p + "ffn_norm.weight");
    matrix(p + "attn_q.weight", o.n_embd, o.n_embd), matrix(p + "attn_k.weight", n_kv, o.n_embd);
    matrix(p + "attn_v.weight", n_kv, o.n_embd), matrix(p + "attn_output.weight", o.n_embd, o.n_embd);
    matrix(p + "ffn_gate.weight", o.n_ff, o.n_embd), matrix(p + "ffn_up.weight", o.n_ff, o.n_embd);
    if (o.transposed_down) {
      matrix(p + "ffn_down_t.weight", o.n_ff, o.n_embd);
    } else {
      matrix(p + "ffn_down.weight", o.n_embd, o.n_ff);
    }
    if (o.predictor_rank > 0) {
      matrix(p + "fc1.weight", o.predictor_rank, o.n_embd), matrix(p + "fc2.weight", o.n_ff, o.predictor_rank);
    }
  }
  std::vector<std::pair<size_t, const std::vector<float>*>> vectors;
  for (const auto& [name, values] : o.vectors) {
    vectors.emplace_back(w.add_tensor(name, DType::f32, {std::ssize(values)}), &values);
  }
  w.begin();
  for (const auto& [index, values] : vectors) w.write(index, 0, std::as_bytes(std::span(*values)));
  std::mt19937 rng(o.seed);
  for (const Tensor& t : tensors) {
    const bool is_norm = t.rows == 1;
    const float std = is_norm ? 0.1f : 1.0f / std::sqrt(static_cast<float>(t.cols));
    const std::vector<float> values =
        random_normal(rng, static_cast<size_t>(t.rows * t.cols), std, is_norm ? 1.0f : 0.0f);
    std::vector<std::byte> bytes(static_cast<size_t>(t.rows) * row_bytes(t.type, t.cols));
    for (int64_t r = 0; r < t.rows; ++r) {
      traits(t.type).from_float(values.data() + r * t.cols,
                                bytes.data() + static_cast<size_t>(r) * row_bytes(t.type, t.cols), t.cols);
    }
    w.write(t.index, 0, bytes);
  }
  w.finish();
  return path;
}

}  // namespace hearth::test
