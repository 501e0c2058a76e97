#pragma once
// Writes a small mixture of experts with random weights, of any architecture, in any of the forms that files have, and
// with mistakes. A dense model is one whose layers are all dense and that has no key expert_count.
#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "gguf/gguf.h"
#include "model/architectures.h"
#include "support/random.h"

namespace hearth::test {

struct TinyMixtureOptions {
  enum class Form { stacked, merged, one_tensor_each };
  Form form = Form::stacked;
  std::string arch = "qwen3moe";
  DType type = DType::f32, router_type = DType::f32;
  int64_t n_layer = 3, n_embd = 64, n_ff = 32, n_expert = 6, n_used = 2, n_head = 4, n_head_kv = 2, n_vocab = 64;
  int64_t n_ff_shared = 0;     // with a sigmoid gate
  int64_t n_dense_layers = 0;  // with feed_forward_length 96
  // Of latent attention (deepseek2): heads of 24 elements, 8 of them rotated, with values of 16.
  int64_t n_latent = 32, n_q_latent = 0;
  bool joint_kv_b = false;       // as in files before April 2025
  bool transposed_down = false;  // of experts: ffn_down_t_exps, ffn_down_t_shexp
  bool expert_biases = false;    // of routed ones
  uint32_t seed = 1;
  std::set<std::string> without;         // keys (less the architecture) and tensors that are left out
  std::map<std::string, int64_t> other;  // keys (less the architecture) with other values, or more keys
};

inline std::filesystem::path write_tiny_mixture(const std::filesystem::path& path, const TinyMixtureOptions& o = {}) {
  using Kind = TinyMixtureOptions::Form;
  gguf::Writer w(path);
  w.set("general.architecture", o.arch);
  const auto set = [&](const std::string& key, int64_t value) {
    if (o.without.contains(key) || o.other.contains(key)) return;
    w.set(o.arch + "." + key, static_cast<uint32_t>(value));
  };
  set("block_count", o.n_layer), set("context_length", 64), set("embedding_length", o.n_embd);
  set("attention.head_count", o.n_head), set("attention.head_count_kv", o.n_head_kv);
  set("expert_count", o.n_expert), set("expert_used_count", o.n_used), set("expert_feed_forward_length", o.n_ff);
  if (o.n_dense_layers > 0) set("leading_dense_block_count", o.n_dense_layers), set("feed_forward_length", 96);
  const bool latent = o.arch == "deepseek2";
  constexpr int64_t kPlain = 16, kRotated = 8, kValue = 16;
  if (latent) {
    set("rope.dimension_count", kRotated), set("attention.kv_lora_rank", o.n_latent);
    if (o.n_q_latent > 0) set("attention.q_lora_rank", o.n_q_latent);
    set("attention.key_length", o.joint_kv_b ? kPlain + kRotated : o.n_latent + kRotated);
    set("attention.value_length", o.joint_kv_b ? kValue : o.n_latent);
    if (!o.joint_kv_b) {
      set("attention.key_length_mla", kPlain + kRotated), set("attention.value_length_mla", kValue);
    }
  }
  for (const auto& [key, value] : o.other) w.set(o.arch + "." + key, static_cast<uint32_t>(value));
  w.set(o.arch + ".attention.layer_norm_rms_epsilon", 1e-6f);
  w.set(o.arch + ".attention.layer_norm_epsilon", 1e-6f);

  struct Tensor {
    size_t index;
    DType type;
    std::vector<float> values;
    int64_t cols;
  };
  std::vector<Tensor> tensors;
  std::mt19937 rng(o.seed);
  const auto random = [&](int64_t rows, int64_t cols) {
    return random_normal(rng, static_cast<size_t>(rows * cols), 1.5f / std::sqrt(static_cast<float>(cols)));
  };
  const auto add = [&](const std::string& name, DType type, std::vector<int64_t> ne, std::vector<float> values) {
    if (o.without.contains(name)) return;
    const int64_t cols = ne[0];
    tensors.push_back({w.add_tensor(name, type, std::move(ne)), type, std::move(values), cols});
  };
  const auto matrix = [&](const std::string& name, int64_t rows, int64_t cols) {
    add(name, o.type, {cols, rows}, random(rows, cols));
  };
  const auto norm = [&](const std::string& name, int64_t n) {
    add(name, DType::f32, {n}, random_normal(rng, static_cast<size_t>(n), 0.1f, 1.0f));
  };
  const auto experts = [&](const std::string& p, const char* name, int64_t rows, int64_t cols,
                           const std::vector<float>& values) {
    if (o.form != Kind::one_tensor_each) {
      return add(p + name + "_exps.weight", o.type, {cols, rows, o.n_expert}, values);
    }
    for (int64_t e = 0; e < o.n_expert; ++e) {
      add(fmt::format("{}{}.{}.weight", p, name, e), o.type, {cols, rows},
          {values.begin() + e * rows * cols, values.begin() + (e + 1) * rows * cols});
    }
  };
  // kv_b's rows are drawn in the order of the joint tensor, so that both forms are one model.
  const auto latent_attention = [&](const std::string& p) {
    const int64_t n_q = o.n_head * (kPlain + kRotated), n = o.n_latent;
    if (o.n_q_latent > 0) {
      matrix(p + "attn_q_a.weight", o.n_q_latent, o.n_embd), norm(p + "attn_q_a_norm.weight", o.n_q_latent);
    }
    matrix(p + (o.n_q_latent > 0 ? "attn_q_b.weight" : "attn_q.weight"), n_q,
           o.n_q_latent > 0 ? o.n_q_latent : o.n_embd);
    matrix(p + "attn_kv_a_mqa.weight", n + kRotated, o.n_embd), norm(p + "attn_kv_a_norm.weight", n);
    const std::vector<float> joint = random(o.n_head * (kPlain + kValue), n);
    std::vector<float> k, v;
    for (int64_t h = 0; h < o.n_head; ++h) {
      const auto rows = joint.begin() + h * (kPlain + kValue) * n;
      for (int64_t i = 0; i < n * kPlain; ++i) k.push_back(rows[i % kPlain * n + i / kPlain]);
      v.insert(v.end(), rows + kPlain * n, rows + (kPlain + kValue) * n);
    }
    if (o.joint_kv_b) {
      add(p + "attn_kv_b.weight", o.type, {n, o.n_head * (kPlain + kValue)}, joint);
    } else {
      add(p + "attn_k_b.weight", o.type, {kPlain, n, o.n_head}, k),
          add(p + "attn_v_b.weight", o.type, {n, kValue, o.n_head}, v);
    }
    matrix(p + "attn_output.weight", o.n_embd, o.n_head * kValue);
  };
  const int64_t head = o.n_embd / o.n_head, n_kv = head * o.n_head_kv;
  const model::Architecture& arch = *model::find_architecture(o.arch);
  matrix("token_embd.weight", o.n_vocab, o.n_embd);
  if (arch.rope == RopeKind::none) matrix("position_embd.weight", 64 + arch.position_offset, o.n_embd);
  norm("output_norm.weight", o.n_embd);
  for (int64_t l = 0; l < o.n_layer; ++l) {
    const std::string p = fmt::format("blk.{}.", l);
    for (const std::string_view name : {arch.attn_norm, arch.attn_post_norm, arch.ffn_norm, arch.ffn_post_norm}) {
      if (!name.empty()) norm(fmt::format("{}{}.weight", p, name), o.n_embd);
    }
    if (latent) {
      latent_attention(p);
    } else {
      matrix(p + "attn_q.weight", o.n_embd, o.n_embd), matrix(p + "attn_k.weight", n_kv, o.n_embd);
      matrix(p + "attn_v.weight", n_kv, o.n_embd), matrix(p + "attn_output.weight", o.n_embd, o.n_embd);
    }
    if (o.arch == "qwen3moe") norm(p + "attn_q_norm.weight", head), norm(p + "attn_k_norm.weight", head);
    if (l < o.n_dense_layers) {
      if (!arch.fused_gate_up) matrix(p + "ffn_gate.weight", 96, o.n_embd);
      matrix(p + "ffn_up.weight", arch.fused_gate_up ? 192 : 96, o.n_embd);
      matrix(p + "ffn_down.weight", o.n_embd, 96);
      continue;
    }
    std::vector<float> router = random(o.n_expert, o.n_embd);
    for (float& x : router) x *= 2;  // decided
    add(p + "ffn_gate_inp.weight", o.router_type, {o.n_embd, o.n_expert}, router);
    const std::vector<float> gate = random(o.n_expert * o.n_ff, o.n_embd), up = random(o.n_expert * o.n_ff, o.n_embd);
    if (o.form == Kind::merged) {
      std::vector<float> both;
      for (int64_t e = 0; e < o.n_expert; ++e) {
        for (const auto* part : {&gate, &up}) {
          both.insert(both.end(), part->begin() + e * o.n_ff * o.n_embd, part->begin() + (e + 1) * o.n_ff * o.n_embd);
        }
      }
      experts(p, "ffn_gate_up", 2 * o.n_ff, o.n_embd, both);
    } else {
      experts(p, "ffn_gate", o.n_ff, o.n_embd, gate), experts(p, "ffn_up", o.n_ff, o.n_embd, up);
    }
    // The same numbers in either layout.
    const auto down = [&](int64_t n, int64_t n_ff) {
      std::vector<float> all = random(n * o.n_embd, n_ff);
      std::vector<float> t(all.size());
      for (int64_t i = 0; i < std::ssize(all); ++i) {
        const int64_t e = i / (o.n_embd * n_ff), r = i / n_ff % o.n_embd, c = i % n_ff;
        t[static_cast<size_t>((e * n_ff + c) * o.n_embd + r)] = all[static_cast<size_t>(i)];
      }
      return o.transposed_down ? t : all;
    };
    if (o.transposed_down) {
      experts(p, "ffn_down_t", o.n_ff, o.n_embd, down(o.n_expert, o.n_ff));
    } else {
      experts(p, "ffn_down", o.n_embd, o.n_ff, down(o.n_expert, o.n_ff));
    }
    for (const char* name : {"ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias"}) {
      const int64_t n = name[4] == 'd' ? o.n_embd : o.n_ff;
      if (o.expert_biases) add(p + name, DType::f32, {n, o.n_expert}, random(o.n_expert, n));
    }
    if (o.n_ff_shared == 0) continue;
    matrix(p + "ffn_gate_shexp.weight", o.n_ff_shared, o.n_embd);
    matrix(p + "ffn_up_shexp.weight", o.n_ff_shared, o.n_embd);
    if (o.transposed_down) {
      add(p + "ffn_down_t_shexp.weight", o.type, {o.n_embd, o.n_ff_shared}, down(1, o.n_ff_shared));
    } else {
      add(p + "ffn_down_shexp.weight", o.type, {o.n_ff_shared, o.n_embd}, down(1, o.n_ff_shared));
    }
    if (latent) continue;
    add(p + "ffn_gate_inp_shexp.weight", DType::f32, {o.n_embd}, random(1, o.n_embd));
  }
  w.begin();
  for (const Tensor& t : tensors) {
    std::vector<std::byte> bytes(t.values.size() / static_cast<size_t>(t.cols) * row_bytes(t.type, t.cols));
    traits(t.type).from_float(t.values.data(), bytes.data(), static_cast<int64_t>(t.values.size()));
    w.write(t.index, 0, bytes);
  }
  w.finish();
  return path;
}

}  // namespace hearth::test
