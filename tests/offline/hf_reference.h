#pragma once
// A second, deliberately plain reading of Hugging Face checkpoints: what the converter's output is compared with.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/half.h"

namespace hearth::test {

struct ReferenceTensor {
  std::vector<int64_t> shape;
  std::vector<float> values;
};

inline std::string slurp(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
inline void spill(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// Every tensor of every *.safetensors file of a directory, as floats.
inline std::map<std::string, ReferenceTensor> reference_tensors(const std::filesystem::path& directory) {
  std::map<std::string, ReferenceTensor> result;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.path().extension() != ".safetensors") continue;
    const std::string bytes = slurp(entry.path());
    uint64_t header = 0;
    std::memcpy(&header, bytes.data(), 8);
    const nlohmann::json entries = nlohmann::json::parse(bytes.substr(8, header));
    for (const auto& [name, t] : entries.items()) {
      if (name == "__metadata__") continue;
      ReferenceTensor r{t.at("shape").get<std::vector<int64_t>>(), {}};
      const std::string type = t.at("dtype");
      const std::string data =
          bytes.substr(8 + header + t.at("data_offsets")[0].get<size_t>(),
                       t.at("data_offsets")[1].get<size_t>() - t.at("data_offsets")[0].get<size_t>());
      const size_t width = type == "F32" ? 4 : 2;
      for (size_t at = 0; at < data.size(); at += width) {
        float f = 0;
        uint16_t h = 0;
        std::memcpy(type == "F32" ? static_cast<void*>(&f) : &h, data.data() + at, width);
        r.values.push_back(type == "F32" ? f : type == "F16" ? f16_to_f32(h) : bf16_to_f32(h));
      }
      result[name] = std::move(r);
    }
  }
  return result;
}

// llama.cpp's name for a tensor of a Hugging Face checkpoint.
inline std::string reference_name(std::string name, const std::string& model_type) {
  const auto replace = [&](const std::string& from, const std::string& to) {
    if (const size_t at = name.find(from); at != std::string::npos) name.replace(at, from.size(), to);
  };
  using Pairs = std::vector<std::pair<std::string, std::string>>;
  static const Pairs falcon = {{"transformer.word_embeddings", "token_embd"},
                               {"transformer.ln_f", "output_norm"},
                               {"transformer.h.", "blk."},
                               {"ln_attn", "attn_norm_2"},
                               {"ln_mlp", "attn_norm"},
                               {"self_attention.query_key_value", "attn_qkv"},
                               {"self_attention.dense", "attn_output"},
                               {"mlp.dense_h_to_4h", "ffn_up"},
                               {"mlp.dense_4h_to_h", "ffn_down"}};
  static const Pairs opt = {{"model.decoder.embed_tokens", "token_embd"},
                            {"model.decoder.embed_positions", "position_embd"},
                            {"model.decoder.final_layer_norm", "output_norm"},
                            {"model.decoder.layers.", "blk."},
                            {"self_attn_layer_norm", "attn_norm"},
                            {"final_layer_norm", "ffn_norm"},
                            {"self_attn.out_proj", "attn_output"},
                            {"self_attn.q_proj", "attn_q"},
                            {"self_attn.k_proj", "attn_k"},
                            {"self_attn.v_proj", "attn_v"},
                            {"fc1", "ffn_up"},
                            {"fc2", "ffn_down"}};
  static const Pairs llama = {{"model.embed_tokens", "token_embd"},
                              {"model.norm", "output_norm"},
                              {"lm_head", "output"},
                              {"model.layers.", "blk."},
                              {"input_layernorm", "attn_norm"},
                              {"post_attention_layernorm", "ffn_norm"},
                              {"self_attn.q_proj", "attn_q"},
                              {"self_attn.k_proj", "attn_k"},
                              {"self_attn.v_proj", "attn_v"},
                              {"self_attn.o_proj", "attn_output"},
                              {"self_attn.q_norm", "attn_q_norm"},
                              {"self_attn.k_norm", "attn_k_norm"},
                              {"mlp.gate_proj", "ffn_gate"},
                              {"mlp.up_proj", "ffn_up"},
                              {"mlp.down_proj", "ffn_down"},
                              {"mlp.c_fc", "ffn_up"},
                              {"mlp.c_proj", "ffn_down"}};
  for (const auto& [from, to] : model_type == "falcon" ? falcon : model_type == "opt" ? opt : llama) replace(from, to);
  return name;
}

// Rows of [heads][2][half] become [heads][half][2] (llama.cpp's LlamaModel.permute).
inline std::vector<float> reference_permute(const std::vector<float>& in, size_t heads, size_t cols) {
  const size_t half = in.size() / cols / heads / 2;
  std::vector<float> out;
  for (size_t h = 0; h < heads; ++h) {
    for (size_t i = 0; i < half; ++i) {
      for (size_t s = 0; s < 2; ++s) {
        const auto row = in.begin() + static_cast<ptrdiff_t>(((h * 2 + s) * half + i) * cols);
        out.insert(out.end(), row, row + static_cast<ptrdiff_t>(cols));
      }
    }
  }
  return out;
}

// [groups][heads of the group, key, value][head_dim] rows become all queries, all keys, all values.
inline std::vector<float> reference_falcon_qkv(const std::vector<float>& in, size_t heads, size_t groups) {
  const size_t block = in.size() / (heads + 2 * groups), per_group = heads / groups;  // one head's values
  std::vector<float> q, k, v;
  for (size_t g = 0; g < groups; ++g) {
    for (size_t m = 0; m < per_group + 2; ++m) {
      auto& out = m < per_group ? q : m == per_group ? k : v;
      const auto at = in.begin() + static_cast<ptrdiff_t>((g * (per_group + 2) + m) * block);
      out.insert(out.end(), at, at + static_cast<ptrdiff_t>(block));
    }
  }
  q.insert(q.end(), k.begin(), k.end());
  q.insert(q.end(), v.begin(), v.end());
  return q;
}

}  // namespace hearth::test
