#include "offline/convert/tensor_map.h"

#include <array>
#include <span>
#include <unordered_set>

#include "core/error.h"

namespace hearth::convert {
namespace {

enum class Dim { one, n_head, n_embd, n_ff, n_gate_up, n_q, n_kv, n_qkv, q_norm, k_norm, n_vocab, n_positions };

// When a tensor is there.
enum class When {
  always,
  untied,
  split,  // q, k and v apart
  fused,
  gate,  // a tensor of its own
  up,
  qkv_bias,
  output_bias,
  ffn_bias,
  gate_bias,
  qk_norm,
  norm_bias,
  sinks,
  two_norms,
  single_norm,
};

struct Row {
  std::string_view hf, gguf;
  Dim rows, cols;  // cols one: a vector
  When when = When::always;
  RowOrder order = RowOrder::as_is;
};

constexpr std::array kLlamaModel = {
    Row{"model.embed_tokens.weight", "token_embd.weight", Dim::n_vocab, Dim::n_embd},
    Row{"lm_head.weight", "output.weight", Dim::n_vocab, Dim::n_embd, When::untied},
    Row{"model.norm.weight", "output_norm.weight", Dim::n_embd, Dim::one},
    Row{"model.norm.bias", "output_norm.bias", Dim::n_embd, Dim::one, When::norm_bias},
};
constexpr std::array kNormsBefore = {
    Row{"input_layernorm.weight", "attn_norm.weight", Dim::n_embd, Dim::one},
    Row{"input_layernorm.bias", "attn_norm.bias", Dim::n_embd, Dim::one, When::norm_bias},
    Row{"post_attention_layernorm.weight", "ffn_norm.weight", Dim::n_embd, Dim::one},
    Row{"post_attention_layernorm.bias", "ffn_norm.bias", Dim::n_embd, Dim::one, When::norm_bias},
};
constexpr std::array kNormsBetween = {
    Row{"input_layernorm.weight", "attn_norm.weight", Dim::n_embd, Dim::one},
    Row{"post_attention_layernorm.weight", "post_attention_norm.weight", Dim::n_embd, Dim::one},
};
constexpr std::array kNormsAfter = {
    Row{"post_attention_layernorm.weight", "post_attention_norm.weight", Dim::n_embd, Dim::one},
    Row{"post_feedforward_layernorm.weight", "post_ffw_norm.weight", Dim::n_embd, Dim::one},
};
constexpr std::array kNormsAround = {
    Row{"input_layernorm.weight", "attn_norm.weight", Dim::n_embd, Dim::one},
    Row{"post_attention_layernorm.weight", "post_attention_norm.weight", Dim::n_embd, Dim::one},
    Row{"pre_feedforward_layernorm.weight", "ffn_norm.weight", Dim::n_embd, Dim::one},
    Row{"post_feedforward_layernorm.weight", "post_ffw_norm.weight", Dim::n_embd, Dim::one},
};
// rope_pairs counts only for architectures with interleaved RoPE (HfConfig::permute_rope).
constexpr std::array kLlamaAttention = {
    Row{"self_attn.qkv_proj.weight", "attn_qkv.weight", Dim::n_qkv, Dim::n_embd, When::fused},
    Row{"self_attn.q_proj.weight", "attn_q.weight", Dim::n_q, Dim::n_embd, When::split, RowOrder::rope_pairs},
    Row{"self_attn.q_proj.bias", "attn_q.bias", Dim::n_q, Dim::one, When::qkv_bias, RowOrder::rope_pairs},
    Row{"self_attn.k_proj.weight", "attn_k.weight", Dim::n_kv, Dim::n_embd, When::split, RowOrder::rope_pairs},
    Row{"self_attn.k_proj.bias", "attn_k.bias", Dim::n_kv, Dim::one, When::qkv_bias, RowOrder::rope_pairs},
    Row{"self_attn.v_proj.weight", "attn_v.weight", Dim::n_kv, Dim::n_embd, When::split},
    Row{"self_attn.v_proj.bias", "attn_v.bias", Dim::n_kv, Dim::one, When::qkv_bias},
    Row{"self_attn.q_norm.weight", "attn_q_norm.weight", Dim::q_norm, Dim::one, When::qk_norm},
    Row{"self_attn.k_norm.weight", "attn_k_norm.weight", Dim::k_norm, Dim::one, When::qk_norm},
    Row{"self_attn.o_proj.weight", "attn_output.weight", Dim::n_embd, Dim::n_q},
    Row{"self_attn.o_proj.bias", "attn_output.bias", Dim::n_embd, Dim::one, When::output_bias},
    Row{"self_attn.sinks", "attn_sinks.weight", Dim::n_head, Dim::one, When::sinks},
};
constexpr std::array kLlamaFfn = {
    Row{"mlp.gate_up_proj.weight", "ffn_up.weight", Dim::n_gate_up, Dim::n_embd, When::fused},
    Row{"mlp.gate_proj.weight", "ffn_gate.weight", Dim::n_ff, Dim::n_embd, When::gate},
    Row{"mlp.gate_proj.bias", "ffn_gate.bias", Dim::n_ff, Dim::one, When::gate_bias},
    Row{"mlp.up_proj.weight", "ffn_up.weight", Dim::n_ff, Dim::n_embd, When::up},
    Row{"mlp.up_proj.bias", "ffn_up.bias", Dim::n_ff, Dim::one, When::ffn_bias},
    Row{"mlp.down_proj.weight", "ffn_down.weight", Dim::n_embd, Dim::n_ff},
    Row{"mlp.down_proj.bias", "ffn_down.bias", Dim::n_embd, Dim::one, When::ffn_bias},
};
constexpr std::array kCFcFfn = {
    Row{"mlp.c_fc.weight", "ffn_up.weight", Dim::n_ff, Dim::n_embd},
    Row{"mlp.c_fc.bias", "ffn_up.bias", Dim::n_ff, Dim::one, When::ffn_bias},
    Row{"mlp.c_proj.weight", "ffn_down.weight", Dim::n_embd, Dim::n_ff},
    Row{"mlp.c_proj.bias", "ffn_down.bias", Dim::n_embd, Dim::one, When::ffn_bias},
};

constexpr std::array kOptModel = {
    Row{"model.decoder.embed_tokens.weight", "token_embd.weight", Dim::n_vocab, Dim::n_embd},
    Row{"model.decoder.embed_positions.weight", "position_embd.weight", Dim::n_positions, Dim::n_embd},
    Row{"lm_head.weight", "output.weight", Dim::n_vocab, Dim::n_embd, When::untied},
    Row{"model.decoder.final_layer_norm.weight", "output_norm.weight", Dim::n_embd, Dim::one},
    Row{"model.decoder.final_layer_norm.bias", "output_norm.bias", Dim::n_embd, Dim::one},
};
constexpr std::array kOptLayer = {
    Row{"self_attn_layer_norm.weight", "attn_norm.weight", Dim::n_embd, Dim::one},
    Row{"self_attn_layer_norm.bias", "attn_norm.bias", Dim::n_embd, Dim::one},
    Row{"self_attn.q_proj.weight", "attn_q.weight", Dim::n_q, Dim::n_embd},
    Row{"self_attn.q_proj.bias", "attn_q.bias", Dim::n_q, Dim::one},
    Row{"self_attn.k_proj.weight", "attn_k.weight", Dim::n_kv, Dim::n_embd},
    Row{"self_attn.k_proj.bias", "attn_k.bias", Dim::n_kv, Dim::one},
    Row{"self_attn.v_proj.weight", "attn_v.weight", Dim::n_kv, Dim::n_embd},
    Row{"self_attn.v_proj.bias", "attn_v.bias", Dim::n_kv, Dim::one},
    Row{"self_attn.out_proj.weight", "attn_output.weight", Dim::n_embd, Dim::n_q},
    Row{"self_attn.out_proj.bias", "attn_output.bias", Dim::n_embd, Dim::one},
    Row{"final_layer_norm.weight", "ffn_norm.weight", Dim::n_embd, Dim::one},
    Row{"final_layer_norm.bias", "ffn_norm.bias", Dim::n_embd, Dim::one},
    Row{"fc1.weight", "ffn_up.weight", Dim::n_ff, Dim::n_embd},
    Row{"fc1.bias", "ffn_up.bias", Dim::n_ff, Dim::one},
    Row{"fc2.weight", "ffn_down.weight", Dim::n_embd, Dim::n_ff},
    Row{"fc2.bias", "ffn_down.bias", Dim::n_embd, Dim::one},
};

constexpr std::array kFalconModel = {
    Row{"transformer.word_embeddings.weight", "token_embd.weight", Dim::n_vocab, Dim::n_embd},
    Row{"lm_head.weight", "output.weight", Dim::n_vocab, Dim::n_embd, When::untied},
    Row{"transformer.ln_f.weight", "output_norm.weight", Dim::n_embd, Dim::one},
    Row{"transformer.ln_f.bias", "output_norm.bias", Dim::n_embd, Dim::one},
};
// llama.cpp's names: attn_norm feeds the FFN (and the attention too where there is no attn_norm_2).
constexpr std::array kFalconLayer = {
    Row{"ln_mlp.weight", "attn_norm.weight", Dim::n_embd, Dim::one, When::two_norms},
    Row{"ln_mlp.bias", "attn_norm.bias", Dim::n_embd, Dim::one, When::two_norms},
    Row{"ln_attn.weight", "attn_norm_2.weight", Dim::n_embd, Dim::one, When::two_norms},
    Row{"ln_attn.bias", "attn_norm_2.bias", Dim::n_embd, Dim::one, When::two_norms},
    Row{"input_layernorm.weight", "attn_norm.weight", Dim::n_embd, Dim::one, When::single_norm},
    Row{"input_layernorm.bias", "attn_norm.bias", Dim::n_embd, Dim::one, When::single_norm},
    Row{"self_attention.query_key_value.weight", "attn_qkv.weight", Dim::n_qkv, Dim::n_embd, When::always,
        RowOrder::falcon_qkv},
    Row{"self_attention.dense.weight", "attn_output.weight", Dim::n_embd, Dim::n_q},
    Row{"mlp.dense_h_to_4h.weight", "ffn_up.weight", Dim::n_ff, Dim::n_embd},
    Row{"mlp.dense_4h_to_h.weight", "ffn_down.weight", Dim::n_embd, Dim::n_ff},
};

struct FamilyTables {
  std::string_view layer_prefix;
  std::span<const Row> model, norms, layer, ffn;  // a layer's FFN where it is not among its other rows
};
std::span<const Row> norms_of(Norms norms) {
  switch (norms) {
    case Norms::between:
      return kNormsBetween;
    case Norms::after:
      return kNormsAfter;
    case Norms::around:
      return kNormsAround;
    case Norms::before:
      break;
  }
  return kNormsBefore;
}
FamilyTables tables(const HfConfig& c) {
  switch (c.family) {
    case Family::opt:
      return {"model.decoder.layers.", kOptModel, {}, kOptLayer, {}};
    case Family::falcon:
      return {"transformer.h.", kFalconModel, {}, kFalconLayer, {}};
    case Family::llama:
      break;
  }
  const std::span<const Row> ffn = c.ffn_names == FfnNames::c_fc ? std::span<const Row>(kCFcFfn) : kLlamaFfn;
  return {"model.layers.", kLlamaModel, norms_of(c.norms), kLlamaAttention, ffn};
}

int64_t extent(Dim dim, const HfConfig& c) {
  switch (dim) {
    case Dim::one:
      return 1;
    case Dim::n_embd:
      return c.n_embd;
    case Dim::n_ff:
      return c.n_ff;
    case Dim::n_q:
      return c.n_head * c.head_dim;
    case Dim::n_kv:
      return c.n_head_kv * c.head_dim;
    case Dim::n_qkv:
      return (c.n_head + 2 * c.n_head_kv) * c.head_dim;
    case Dim::n_head:
      return c.n_head;
    case Dim::n_gate_up:
      return 2 * c.n_ff;
    case Dim::q_norm:
      return c.qk_norm == QkNorm::by_head ? c.head_dim : c.n_head * c.head_dim;
    case Dim::k_norm:
      return c.qk_norm == QkNorm::by_head ? c.head_dim : c.n_head_kv * c.head_dim;
    case Dim::n_vocab:
      return c.n_vocab;
    case Dim::n_positions:
      return c.n_ctx + 2;  // OPT's positions start at row 2
  }
  return 0;
}

bool present(When when, const HfConfig& c) {
  switch (when) {
    case When::always:
      return true;
    case When::untied:
      return !c.tied_head;
    case When::split:
    case When::up:
      return !c.fused;
    case When::fused:
      return c.fused;
    case When::gate:
      return c.gated && !c.fused;
    case When::qkv_bias:
      return c.qkv_bias;
    case When::output_bias:
      return c.output_bias;
    case When::ffn_bias:
      return c.ffn_bias;
    case When::gate_bias:
      return c.gated && c.ffn_bias;
    case When::qk_norm:
      return c.qk_norm != QkNorm::none;
    case When::sinks:
      return c.sinks;
    case When::norm_bias:
      return c.layer_norm;
    case When::two_norms:
      return !c.falcon_single_norm;
    case When::single_norm:
      return c.falcon_single_norm;
  }
  return false;
}

class Mapper {
 public:
  Mapper(const HfConfig& config, const Checkpoint& checkpoint) : c_(config), checkpoint_(checkpoint) {}

  void add(const Row& row, const std::string& hf, std::string gguf) {
    if (!present(row.when, c_)) return;
    const SafeTensor* t = find(hf);
    if (t == nullptr) {
      fail("tensor {} is missing from the checkpoint{}", hf,
           row.when == When::untied ? ", and tie_word_embeddings is not set" : "");
    }
    const bool vector = row.cols == Dim::one;
    MappedTensor m{
        std::move(gguf), t, extent(row.rows, c_), extent(row.cols, c_), vector, false, RowOrder::as_is, 0, {}};
    const std::vector<int64_t> expected = vector ? std::vector{m.rows} : std::vector{m.rows, m.cols};
    check(*t, expected);
    m.keep_f32 = row.rows == Dim::n_positions;
    m.plus_one = c_.norms_less_one && row.gguf.ends_with("norm.weight");
    if (row.order != RowOrder::rope_pairs || c_.permute_rope) m.order = row.order;
    used_.insert(t->name);
    result_.push_back(std::move(m));
  }

  // The experts of layer l; `hf` and `gguf` are its prefixes.
  void add_experts(const std::string& hf, const std::string& gguf) {
    const HfExperts& e = c_.experts;
    if (e.style == ExpertStyle::gpt_oss) return add_gpt_oss(hf + "mlp.", gguf);
    struct Names {
      const char *block, *router, *gate, *up, *down;
    };
    const Names n = e.style == ExpertStyle::mixtral ? Names{"block_sparse_moe.", "gate", "w1", "w3", "w2"}
                    : e.style == ExpertStyle::smallthinker
                        ? Names{"block_sparse_moe.", "primary_router", "gate", "up", "down"}
                        : Names{"mlp.", "gate", "gate_proj", "up_proj", "down_proj"};
    const std::string block = hf + n.block;
    add_matrix(block + n.router + ".weight", gguf + "ffn_gate_inp.weight", e.routing.n_expert, c_.n_embd).keep_f32 =
        true;
    if (e.correction) add_vector(block + "gate.e_score_correction_bias", gguf + "exp_probs_b.bias", e.routing.n_expert);
    const auto stack = [&](const char* name, const char* in_gguf, int64_t rows, int64_t cols) {
      std::vector<const SafeTensor*> each;
      for (int64_t i = 0; i < e.routing.n_expert; ++i) {
        each.push_back(&require(fmt::format("{}experts.{}.{}.weight", block, i, name), {rows, cols}));
        if (each.back()->traits != each.front()->traits) {
          fail("tensor {} is {}, and {} is {}; experts of one type are supported", each.back()->name,
               each.back()->dtype, each.front()->name, each.front()->dtype);
        }
      }
      result_.push_back({gguf + in_gguf, each.front(), e.routing.n_expert * rows, cols, false, false, RowOrder::as_is,
                         e.routing.n_expert, std::move(each)});
    };
    stack(n.gate, "ffn_gate_exps.weight", e.n_ff, c_.n_embd);
    stack(n.up, "ffn_up_exps.weight", e.n_ff, c_.n_embd);
    stack(n.down, "ffn_down_exps.weight", c_.n_embd, e.n_ff);
    if (e.n_ff_shared == 0) return;
    const std::string shared = hf + std::string(e.shared_prefix);
    add_matrix(shared + "gate_proj.weight", gguf + "ffn_gate_shexp.weight", e.n_ff_shared, c_.n_embd);
    add_matrix(shared + "up_proj.weight", gguf + "ffn_up_shexp.weight", e.n_ff_shared, c_.n_embd);
    add_matrix(shared + "down_proj.weight", gguf + "ffn_down_shexp.weight", c_.n_embd, e.n_ff_shared);
    if (!e.shared_gate) return;
    const SafeTensor& gate = require(block + "shared_expert_gate.weight", {1, c_.n_embd});
    result_.push_back({gguf + "ffn_gate_inp_shexp.weight", &gate, 1, c_.n_embd, false, true, RowOrder::as_is, 0, {}});
  }

  // Multi-head latent attention. kv_b_proj has, head after head, rows that make keys and rows that make values.
  void add_latent_attention(const std::string& hf, const std::string& gguf) {
    const model::LatentDescription& d = c_.latent;
    const int64_t n_head = c_.n_head, n_queries = n_head * (d.n_plain + c_.n_rot), per_head = d.n_plain + d.n_value;
    if (d.n_q_latent > 0) {
      add_matrix(hf + "q_a_proj.weight", gguf + "attn_q_a.weight", d.n_q_latent, c_.n_embd);
      add_vector(hf + "q_a_layernorm.weight", gguf + "attn_q_a_norm.weight", d.n_q_latent);
      add_matrix(hf + "q_b_proj.weight", gguf + "attn_q_b.weight", n_queries, d.n_q_latent);
    } else {
      add_matrix(hf + "q_proj.weight", gguf + "attn_q.weight", n_queries, c_.n_embd);
    }
    add_matrix(hf + "kv_a_proj_with_mqa.weight", gguf + "attn_kv_a_mqa.weight", d.n_latent + c_.n_rot, c_.n_embd);
    add_vector(hf + "kv_a_layernorm.weight", gguf + "attn_kv_a_norm.weight", d.n_latent);
    const SafeTensor& kv_b = require(hf + "kv_b_proj.weight", {n_head * per_head, d.n_latent});
    MappedTensor k{gguf + "attn_k_b.weight", &kv_b, n_head * d.n_latent, d.n_plain};
    k.n_stacked = n_head, k.strides = {.matrix = per_head * d.n_latent, .row = 1, .column = d.n_latent};
    MappedTensor v{gguf + "attn_v_b.weight", &kv_b, n_head * d.n_value, d.n_latent};
    v.n_stacked = n_head;
    v.strides = {.matrix = per_head * d.n_latent, .row = d.n_latent, .first = d.n_plain * d.n_latent};
    result_.push_back(std::move(k)), result_.push_back(std::move(v));
    add_matrix(hf + "o_proj.weight", gguf + "attn_output.weight", c_.n_embd, n_head * d.n_value);
  }

  // `hf` and `gguf` are the prefixes of a layer's FFN.
  void add_gpt_oss(const std::string& hf, const std::string& gguf) {
    const int64_t n_expert = c_.experts.routing.n_expert, n_ff = c_.experts.n_ff, n_embd = c_.n_embd;
    add_matrix(hf + "router.weight", gguf + "ffn_gate_inp.weight", n_expert, n_embd).keep_f32 = true;
    add_vector(hf + "router.bias", gguf + "ffn_gate_inp.bias", n_expert);
    // [rows][cols] of every expert are every step-th rows of a matrix of the checkpoint, from `first` on.
    const auto add = [&](const std::string& name, const char* in_gguf, int64_t rows, int64_t cols, int64_t step,
                         int64_t first) {
      MappedTensor m{gguf + in_gguf + "_exps.weight", nullptr, n_expert * rows, cols};
      const int64_t all = step * rows, n_blocks = cols / 32;
      if (find(name + "_blocks") != nullptr) {
        if (cols % 32 != 0) fail("tensor {}_blocks has blocks of 32, which rows of {} do not divide into", name, cols);
        m.source = &require(name + "_blocks", {n_expert, all, n_blocks, 16}, "U8");
        m.scales = &require(name + "_scales", {n_expert, all, n_blocks}, "U8");
        m.strides = {.matrix = all, .row = step, .first = first};
      } else {
        m.source = &require(name, {n_expert, cols, all});
        m.strides = {.matrix = cols * all, .row = step, .column = all, .first = first};
      }
      m.n_stacked = n_expert;
      result_.push_back(std::move(m));
      MappedTensor bias{gguf + in_gguf + "_exps.bias", &require(name + "_bias", {n_expert, all}), n_expert, rows};
      bias.keep_f32 = true, bias.strides = {.row = all, .column = step, .first = first};
      result_.push_back(std::move(bias));
    };
    add(hf + "experts.gate_up_proj", "ffn_gate", n_ff, n_embd, 2, 0);
    add(hf + "experts.gate_up_proj", "ffn_up", n_ff, n_embd, 2, 1);
    add(hf + "experts.down_proj", "ffn_down", n_embd, n_ff, 1, 0);
  }

  // All that is left must be known to be unnecessary.
  void check_leftovers(const std::function<void(std::string_view)>& notice) const {
    size_t predictors = 0, ahead = 0;
    const std::string first_ahead = fmt::format("model.layers.{}.", c_.n_layer);
    for (const SafeTensor& t : checkpoint_.tensors()) {
      if (used_.contains(t.name) || is_redundant(t.name)) continue;
      if (c_.n_layers_ahead == 1 && t.name.starts_with(first_ahead)) {
        ++ahead;
        continue;
      }
      if (c_.activation == "drelu" && t.name.find("predictor") != std::string::npos) {
        ++predictors;
        continue;
      }
      fail("tensor {} of the checkpoint is not one that {} is known to have", t.name, c_.hf_architecture);
    }
    if (ahead > 0) notice(fmt::format("{} tensors of a layer that predicts one token more are left out", ahead));
    if (predictors > 0) notice(fmt::format("{} tensors of built-in activation predictors are left out", predictors));
  }

  std::vector<MappedTensor> take() { return std::move(result_); }

 private:
  // `dtype`: of a tensor that holds no numbers; null: a type of numbers.
  static void check(const SafeTensor& t, const std::vector<int64_t>& expected, const char* dtype = nullptr) {
    if (t.shape != expected) {
      fail("tensor {} has the shape {}, but config.json makes it {}", t.name, shown(Json(t.shape)),
           shown(Json(expected)));
    }
    if (dtype != nullptr && t.dtype != dtype) fail("tensor {} has dtype {}, expected {}", t.name, t.dtype, dtype);
    if (dtype == nullptr && t.traits == nullptr)
      fail("tensor {} has dtype {}; F32, F16 and BF16 are supported", t.name, t.dtype);
  }
  const SafeTensor& require(const std::string& hf, const std::vector<int64_t>& shape, const char* dtype = nullptr) {
    const SafeTensor* t = find(hf);
    if (t == nullptr) fail("tensor {} is missing from the checkpoint", hf);
    check(*t, shape, dtype);
    used_.insert(t->name);
    return *t;
  }
  MappedTensor& add_matrix(const std::string& hf, std::string gguf, int64_t rows, int64_t cols) {
    const SafeTensor& t = require(hf, {rows, cols});
    return result_.emplace_back(MappedTensor{std::move(gguf), &t, rows, cols, false, false, RowOrder::as_is, 0, {}});
  }
  void add_vector(const std::string& hf, std::string gguf, int64_t n) {
    const SafeTensor& t = require(hf, {n});
    result_.push_back({std::move(gguf), &t, n, 1, true, true, RowOrder::as_is, 0, {}});
  }

  // Checkpoints of OPT's base model lack the leading "model.".
  const SafeTensor* find(const std::string& hf) const {
    const SafeTensor* t = checkpoint_.find(hf);
    if (t == nullptr && c_.family == Family::opt && hf.starts_with("model.")) t = checkpoint_.find(hf.substr(6));
    return t;
  }

  // Buffers that follow from the configuration, and the copy of the embedding that a tied head may be saved as.
  bool is_redundant(const std::string& name) const {
    return name.ends_with(".rotary_emb.inv_freq") || name.ends_with(".attention.masked_bias") ||
           name.ends_with(".attention.bias") || (c_.tied_head && name == "lm_head.weight");
  }

  const HfConfig& c_;
  const Checkpoint& checkpoint_;
  std::vector<MappedTensor> result_;
  std::unordered_set<std::string> used_;
};

}  // namespace

std::vector<MappedTensor> map_tensors(const HfConfig& config, const Checkpoint& checkpoint,
                                      const std::function<void(std::string_view)>& notice) {
  const FamilyTables t = tables(config);
  Mapper mapper(config, checkpoint);
  for (const Row& row : t.model) mapper.add(row, std::string(row.hf), std::string(row.gguf));
  for (int64_t l = 0; l < config.n_layer; ++l) {
    const std::string hf = fmt::format("{}{}.", t.layer_prefix, l), gguf = fmt::format("blk.{}.", l);
    const bool experts = config.experts.in_layer(l);
    for (const auto& rows : {t.norms, t.layer, t.ffn}) {
      for (const Row& row : rows) {
        if (experts && row.hf.starts_with("mlp.")) continue;
        if (config.latent && row.hf.starts_with("self_attn.")) continue;
        mapper.add(row, hf + std::string(row.hf), gguf + std::string(row.gguf));
      }
    }
    if (config.latent) mapper.add_latent_attention(hf + "self_attn.", gguf);
    if (experts) mapper.add_experts(hf, gguf);
  }
  mapper.check_leftovers(notice);
  return mapper.take();
}

int64_t source_row(const HfConfig& c, RowOrder order, int64_t row) {
  const int64_t d = c.head_dim;
  switch (order) {
    case RowOrder::as_is:
      return row;
    case RowOrder::rope_pairs: {
      const int64_t head = row / d, j = row % d;
      return head * d + (j % 2) * (d / 2) + j / 2;
    }
    case RowOrder::falcon_qkv: {
      const int64_t per_group = c.n_head / c.n_head_kv;
      const int64_t head = row / d, j = row % d;
      if (head < c.n_head) return ((head / per_group) * (per_group + 2) + head % per_group) * d + j;
      const int64_t kv = head - c.n_head;  // keys, then values
      return ((kv % c.n_head_kv) * (per_group + 2) + per_group + kv / c.n_head_kv) * d + j;
    }
  }
  return row;
}

}  // namespace hearth::convert
