#include "offline/convert/hf_config.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "model/architectures.h"
#include "model/config.h"
#include "offline/convert/hf_architectures.h"

namespace hearth::convert {
namespace {

// config.json's names of activations, mapped to hearth's.
struct ActivationAlias {
  std::string_view hf_name, name;
};
constexpr std::array kActivations = {
    ActivationAlias{"relu", "relu"},          ActivationAlias{"silu", "silu"},
    ActivationAlias{"swish", "silu"},         ActivationAlias{"relu2", "relu2"},
    ActivationAlias{"relu_squared", "relu2"}, ActivationAlias{"squared_relu", "relu2"},
    ActivationAlias{"gelu", "gelu"},          ActivationAlias{"gelu_pytorch_tanh", "gelu_tanh"},
    ActivationAlias{"fatrelu", "fat_relu"},   ActivationAlias{"fat_relu", "fat_relu"},
    ActivationAlias{"drelu", "drelu"},
};

void read_activation(const Fields& f, const HfArchitecture& a, const char* key, const char* otherwise,
                     const std::optional<std::string>& ffn, HfConfig& c) {
  if (ffn) {
    model::parse_activation(*ffn);  // throws for an unknown name
    c.activation = *ffn;
  } else {
    const std::string hf_name = f.text(key).value_or(otherwise);
    const auto it = std::find_if(kActivations.begin(), kActivations.end(),
                                 [&](const ActivationAlias& alias) { return alias.hf_name == hf_name; });
    if (it == kActivations.end()) {
      fail("{}: {} '{}' is not supported; relu, fatrelu, relu2, drelu, silu, gelu and gelu_pytorch_tanh are", f.where(),
           key, hf_name);
    }
    c.activation = it->name;
    // Other publishers use this class name for sparse attention, which is not this.
    refuse_if(a.hf_name == "SparseLlamaForCausalLM" && c.activation == "silu", f, "a SparseLlamaForCausalLM with silu",
              "ProSparse's fatrelu or relu is");
    // Its modelling code has ReLU and does not ask.
    refuse_if(a.arch == "smallthinker" && c.activation != "relu", f, "SmallThinker with hidden_act " + hf_name,
              "relu is");
    if (a.drelu) {
      refuse_if(c.activation != "relu" && c.activation != "drelu", f, "a dReLU model with hidden_act " + hf_name,
                "relu is expected");
      c.activation = "drelu";
    }
  }
  if (a.clamped_silu) {
    constexpr double kAlpha = 1.702;
    refuse_if(c.activation != "silu" && c.activation != "clamped_silu", f, "gpt-oss with " + c.activation, "silu is");
    refuse_if(f.number("swiglu_alpha").value_or(kAlpha) != kAlpha, f, "another swiglu_alpha", "1.702 is");
    c.activation = "clamped_silu";
    c.activation_threshold = static_cast<float>(f.number("swiglu_limit").value_or(7.0));
    if (!(c.activation_threshold > 0)) {
      fail("{}: swiglu_limit is {}, expected a positive number", f.where(), c.activation_threshold);
    }
  }
  if (c.activation == "drelu" && !c.gated) fail("{}: drelu needs a gated FFN, and {} has none", f.where(), a.hf_name);
  if (c.activation == "fat_relu") {
    c.activation_threshold =
        static_cast<float>(f.number("hidden_act_param").value_or(0.01));  // ProSparse's key and value
    if (!(c.activation_threshold >= 0)) {
      fail("{}: hidden_act_param is {}, expected a threshold of 0 or more", f.where(), c.activation_threshold);
    }
  }
}

void read_llama_family(const Fields& f, const Json& config, const HfArchitecture& a,
                       const std::optional<std::string>& ffn, HfConfig& c) {
  c.n_layer = f.require_integer("num_hidden_layers", 1, 4096);
  c.n_embd = f.require_integer("hidden_size", 1, kMaxDim);
  c.n_ff = f.require_integer(a.n_ff_key, 1, kMaxDim);
  c.n_head = f.require_integer("num_attention_heads", 1, 4096);
  c.n_head_kv = f.integer("num_key_value_heads", 1, 4096).value_or(c.n_head);
  auto head_dim = f.integer("head_dim", 1, 4096);
  if (!head_dim && a.head_dim > 0) head_dim = a.head_dim;
  if (head_dim) {
    c.head_dim = *head_dim;
    c.explicit_head_dim = true;
  }
  if (a.latent_attention) read_latent(f, c);
  c.n_layers_ahead = f.integer("num_nextn_predict_layers", 0, 4096).value_or(0);
  c.n_ctx = f.require_integer("max_position_embeddings", 1, kMaxContext);
  c.norm_eps = f.require_number(a.eps_key);
  c.tied_head = f.flag("tie_word_embeddings", a.tied_head);
  c.output_bias = f.flag("attention_bias", false);
  c.qkv_bias = c.qkv_bias || c.output_bias;
  c.output_bias = c.output_bias && !a.only_qkv_bias;
  if (a.qk_norm_key != nullptr && !f.flag(a.qk_norm_key, false)) c.qk_norm = QkNorm::none;
  c.sinks = a.sinks;
  refuse_if(f.number("clip_qkv").value_or(0) != 0, f, "clip_qkv", "null is");
  c.ffn_bias = f.flag("mlp_bias", false);
  if (a.bias_key != nullptr) c.qkv_bias = c.output_bias = c.ffn_bias = f.flag(a.bias_key, true);
  c.experts = read_hf_experts(f, a.hf_name);
  read_windows(f, config, a, c);
  read_scales(f, a, c);
  read_activation(f, a, a.activation_key, a.activation, ffn, c);
}

void read_opt(const Fields& f, const HfArchitecture& a, const std::optional<std::string>& ffn, HfConfig& c) {
  c.n_layer = f.require_integer("num_hidden_layers", 1, 4096);
  c.n_embd = f.require_integer("hidden_size", 1, kMaxDim);
  c.n_ff = f.require_integer("ffn_dim", 1, kMaxDim);
  c.n_head = c.n_head_kv = f.require_integer("num_attention_heads", 1, 4096);
  c.n_ctx = f.require_integer("max_position_embeddings", 1, kMaxDim);
  c.norm_eps = 1e-5;  // torch's LayerNorm default; OPT's config has no key for it
  c.tied_head = f.flag("tie_word_embeddings", true);
  c.output_bias = c.ffn_bias = true;
  refuse_if(!f.flag("do_layer_norm_before", true), f, "do_layer_norm_before = false (OPT-350m)",
            "norms before each block are");
  refuse_if(f.flag("_remove_final_layer_norm", false), f, "_remove_final_layer_norm", "a final norm is");
  refuse_if(!f.flag("enable_bias", true), f, "enable_bias = false", "OPT with biases is");
  refuse_if(!f.flag("layer_norm_elementwise_affine", true), f, "layer_norm_elementwise_affine = false",
            "weighted norms are");
  const int64_t proj = f.integer("word_embed_proj_dim", 1, kMaxDim).value_or(c.n_embd);
  refuse_if(proj != c.n_embd, f, fmt::format("word_embed_proj_dim {} beside hidden_size {}", proj, c.n_embd),
            "equal ones are");
  read_activation(f, a, "activation_function", "relu", ffn, c);
}

void read_falcon(const Fields& f, const HfArchitecture& a, const std::optional<std::string>& ffn, HfConfig& c) {
  const auto either = [&](const char* key, const char* old_key, int64_t high) {
    const auto value = f.integer(key, 1, high);
    return value ? *value : f.require_integer(old_key, 1, high);
  };
  refuse_if(!f.flag("new_decoder_architecture", false), f, "the old Falcon decoder (7B)",
            "new_decoder_architecture = true is");
  refuse_if(f.flag("alibi", false), f, "alibi", "rotary positions are");
  refuse_if(f.flag("bias", false), f, "a Falcon with biases", "bias = false is");
  c.n_layer = either("num_hidden_layers", "n_layer", 4096);
  c.n_embd = f.require_integer("hidden_size", 1, kMaxDim);
  c.n_ff = f.integer("ffn_hidden_size", 1, kMaxDim).value_or(std::min(4 * c.n_embd, kMaxDim));
  c.n_head = either("num_attention_heads", "n_head", 4096);
  c.n_head_kv = either("num_kv_heads", "n_head_kv", 4096);
  c.n_ctx = f.integer("max_position_embeddings", 1, kMaxContext).value_or(2048);
  c.norm_eps = f.require_number("layer_norm_epsilon");
  c.tied_head = f.flag("tie_word_embeddings", true);
  c.falcon_single_norm = f.integer("num_ln_in_parallel_attn", 1, 2).value_or(2) == 1;
  read_activation(f, a, "activation", "gelu", ffn, c);
}

// eos_token_id may be a list: the first ends a text, the others end turns. Some old files say "none" with -1.
void read_token_ids(const Fields& f, HfConfig& c) {
  constexpr int64_t kMaxId = INT32_MAX;
  const auto id = [&](const char* key, std::optional<int64_t>& out) {
    const auto value = f.integer(key, -1, kMaxId);
    if (!out && value && *value >= 0) out = value;
  };
  const Json* eos = f.find("eos_token_id");
  if (eos != nullptr && eos->is_array()) {
    for (const Json& item : *eos) {
      const Json wrapped = {{"eos_token_id", item}};
      const int64_t value = Fields(wrapped, f.where()).require_integer("eos_token_id", 0, kMaxId);
      if (!c.eos) c.eos = value;
      if (*c.eos != value) c.other_eos.push_back(value);
    }
  } else {
    id("eos_token_id", c.eos);
  }
  id("bos_token_id", c.bos);
  id("pad_token_id", c.pad);
}

// Holds for every family.
void finish(const Fields& f, const HfArchitecture& a, HfConfig& c) {
  if (!c.explicit_head_dim) {
    if (c.n_embd % c.n_head != 0) fail("{}: hidden_size {} does not divide by {} heads", f.where(), c.n_embd, c.n_head);
    c.head_dim = c.n_embd / c.n_head;
  }
  if (c.n_head % c.n_head_kv != 0) {
    fail("{}: {} attention heads cannot share {} key/value heads evenly", f.where(), c.n_head, c.n_head_kv);
  }
  if (!(c.norm_eps >= 0 && c.norm_eps < 1))
    fail("{}: the norm's epsilon is {}, expected 0 to 1", f.where(), c.norm_eps);
  c.n_vocab = f.require_integer("vocab_size", 1, int64_t{1} << 24);
  if (c.family != Family::opt) read_rope(f, a, c);
}

}  // namespace

HfConfig parse_hf_config(const Json& config, const std::string& where, const std::optional<std::string>& ffn) {
  const Fields f(config, where);
  const HfArchitecture& a = find_architecture(config, where);
  if (const auto quantization = f.object("quantization_config")) {
    const std::string method = quantization->text("quant_method").value_or("unknown method");
    if (method != "mxfp4" || a.arch != "gpt-oss") {  // whose experts stay as they are
      fail(
          "{}: the weights are quantised ({}); convert the original f32, f16 or bf16 checkpoint, then `hearth "
          "quantize` it",
          where, method);
    }
  }
  HfConfig c;
  c.hf_architecture = a.hf_name;
  c.arch = a.arch;
  c.family = a.family;
  c.permute_rope = a.permute_rope;
  c.gated = a.gated;
  c.qkv_bias = a.qkv_bias;
  c.qk_norm = a.qk_norm;
  c.ffn_names = a.ffn_names;
  c.fused = a.fused, c.norms = a.norms, c.layer_norm = a.layer_norm, c.norms_less_one = a.norms_less_one;
  switch (a.family) {
    case Family::llama:
      read_llama_family(f, config, a, ffn, c);
      break;
    case Family::opt:
      read_opt(f, a, ffn, c);
      break;
    case Family::falcon:
      read_falcon(f, a, ffn, c);
      break;
  }
  finish(f, a, c);
  read_token_ids(f, c);
  return c;
}

HfConfig read_hf_config(const std::filesystem::path& directory, const std::optional<std::string>& ffn) {
  const auto path = directory / "config.json";
  if (!std::filesystem::exists(path)) {
    fail("'{}' has no config.json; expected a Hugging Face model directory", directory.string());
  }
  HfConfig c = parse_hf_config(read_json_object(path), fmt::format("'{}'", path.string()), ffn);
  if (const auto generation = directory / "generation_config.json"; std::filesystem::exists(generation)) {
    const Json json = read_json_object(generation);
    read_token_ids(Fields(json, fmt::format("'{}'", generation.string())), c);
  }
  return c;
}

void write_config(const HfConfig& c, gguf::Writer& writer) {
  const std::string p = c.arch + ".";
  const auto u32 = [&](const char* key, int64_t value) { writer.set(p + key, static_cast<uint32_t>(value)); };
  const auto f32 = [&](const char* key, double value) { writer.set(p + key, static_cast<float>(value)); };
  writer.set("general.architecture", c.arch);
  writer.set("general.type", std::string("model"));
  u32("vocab_size", c.n_vocab);
  u32("context_length", c.n_ctx);
  u32("embedding_length", c.n_embd);
  u32("block_count", c.n_layer);
  u32("feed_forward_length", c.n_ff);
  u32("attention.head_count", c.n_head);
  u32("attention.head_count_kv", c.latent ? 1 : c.n_head_kv);
  write_experts(c.experts, p, writer);
  if (c.explicit_head_dim && !c.latent) {
    u32("attention.key_length", c.head_dim);
    u32("attention.value_length", c.head_dim);
  }
  const bool rms = model::find_architecture(c.arch)->norm == NormKind::rms;
  f32(rms ? "attention.layer_norm_rms_epsilon" : "attention.layer_norm_epsilon", c.norm_eps);
  if (c.family == Family::falcon) writer.set(p + "tensor_data_layout", std::string("jploski"));
  write_attention(c, writer);
  writer.set("hearth.ffn.activation", c.activation);
  if (c.activation == "fat_relu" || c.activation == "clamped_silu") {
    writer.set("hearth.ffn.activation_threshold", c.activation_threshold);
  }
}

}  // namespace hearth::convert
