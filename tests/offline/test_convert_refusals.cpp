// Damaged, hostile and unsupported checkpoints: each is refused with one line that names what is wrong, and leaves no
// file.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "core/error.h"
#include "gguf/gguf.h"
#include "hf_reference.h"
#include "offline/convert/convert.h"
#include "support/paths.h"

namespace hearth {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

// A copy of one of the project's checkpoints, to be damaged.
class Directory {
 public:
  explicit Directory(const fs::path& at, const char* fixture) : path_(at / "hf") {
    fs::copy(test::data_dir() / "zoo" / fixture, path_);
    for (const auto& entry : fs::directory_iterator(path_))
      fs::permissions(entry.path(), fs::perms::owner_write, fs::perm_options::add);
  }
  const fs::path& path() const { return path_; }
  fs::path operator/(const char* name) const { return path_ / name; }

  void edit_json(const char* name, const std::function<void(json&)>& edit) const {
    json j = json::parse(test::slurp(path_ / name));
    edit(j);
    test::spill(path_ / name, j.dump());
  }
  void edit_bytes(const char* name, const std::function<void(std::string&)>& edit) const {
    std::string bytes = test::slurp(path_ / name);
    edit(bytes);
    test::spill(path_ / name, bytes);
  }
  // Rewrites the header of a safetensors file; the data stay.
  void edit_header(const std::function<void(json&)>& edit, const char* name = "model.safetensors") const {
    edit_bytes(name, [&](std::string& bytes) {
      uint64_t n = 0;
      std::memcpy(&n, bytes.data(), 8);
      json header = json::parse(bytes.substr(8, n));
      edit(header);
      replace_header(bytes, header.dump());
    });
  }
  static void replace_header(std::string& bytes, const std::string& text) {
    uint64_t n = 0;
    std::memcpy(&n, bytes.data(), 8);
    const uint64_t size = text.size();
    bytes = std::string(reinterpret_cast<const char*>(&size), 8) + text + bytes.substr(8 + n);
  }

 private:
  fs::path path_;
};

struct Case {
  const char* name;
  const char* fixture;
  std::function<void(const Directory&)> damage;
  const char* message;  // part of it
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
};

using Dir = const Directory&;
constexpr const char* kSafe = "model.safetensors";
constexpr const char* kQ = "model.layers.0.self_attn.q_proj.weight";

std::vector<Case> safetensors_cases() {
  const auto header = [](std::function<void(json&)> edit) { return [edit](Dir d) { d.edit_header(edit); }; };
  const auto raw_header = [](std::string text) {
    return [text](Dir d) { d.edit_bytes(kSafe, [&](std::string& b) { Directory::replace_header(b, text); }); };
  };
  const auto length = [](uint64_t n) {
    return [n](Dir d) { d.edit_bytes(kSafe, [&](std::string& b) { std::memcpy(b.data(), &n, 8); }); };
  };
  const std::string entry = R"({"dtype":"F16","shape":[1],"data_offsets":[0,2]})";
  return {
      {"empty_file", "llama-relu-gqa", [](Dir d) { test::spill(d / kSafe, ""); }, "is empty"},
      {"five_bytes", "llama-relu-gqa", [](Dir d) { test::spill(d / kSafe, "abcde"); },
       "too few for a safetensors file"},
      {"truncated_data", "llama-relu-gqa",
       [](Dir d) { d.edit_bytes(kSafe, [](std::string& b) { b.resize(b.size() - 2); }); }, "is the download complete?"},
      {"truncated_header", "llama-relu-gqa", [](Dir d) { d.edit_bytes(kSafe, [](std::string& b) { b.resize(100); }); },
       "is the download complete?"},
      {"trailing_bytes", "llama-relu-gqa", [](Dir d) { d.edit_bytes(kSafe, [](std::string& b) { b += "x"; }); },
       "belong to no tensor"},
      {"header_of_2_to_the_63", "llama-relu-gqa", length(uint64_t{1} << 63), "its header would be"},
      {"header_of_all_ones", "llama-relu-gqa", length(~uint64_t{0}), "its header would be"},
      {"header_just_beyond_the_file", "llama-relu-gqa", length(5'000'000), "is the download complete?"},
      {"header_no_json", "llama-relu-gqa", raw_header("{\"a\":"), "not valid JSON"},
      {"header_a_list", "llama-relu-gqa", raw_header("[1,2]"), "expected a JSON object"},
      {"header_invalid_utf8", "llama-relu-gqa", raw_header("{\"\xff\":1}"), "not valid JSON"},
      {"header_nested_100000_deep", "llama-relu-gqa", raw_header("{\"a\":" + std::string(100'000, '[')),
       "nests deeper"},
      {"header_duplicate_key", "llama-relu-gqa", raw_header("{\"a\":" + entry + ",\"a\":" + entry + "}"),
       "twice in one object"},
      {"header_huge_number", "llama-relu-gqa",
       raw_header(R"({"a":{"dtype":"F16","shape":[1e999],"data_offsets":[0,2]}})"), "a number is too large"},
      {"entry_no_object", "llama-relu-gqa", header([](json& h) { h[kQ] = 3; }), "expected an object"},
      {"dtype_unknown", "llama-relu-gqa", header([](json& h) { h[kQ]["dtype"] = "Q7"; }), "unknown dtype \"Q7\""},
      {"dtype_missing", "llama-relu-gqa", header([](json& h) { h[kQ].erase("dtype"); }), "unknown dtype"},
      {"dtype_integer", "llama-relu-gqa", header([](json& h) { h[kQ]["dtype"] = "I16"; }),
       "F32, F16 and BF16 are supported"},
      {"shape_missing", "llama-relu-gqa", header([](json& h) { h[kQ].erase("shape"); }), "has no shape"},
      {"shape_negative", "llama-relu-gqa", header([](json& h) { h[kQ]["shape"][0] = -32; }), "impossible shape"},
      {"shape_overflows", "llama-relu-gqa", header([](json& h) {
         h[kQ]["shape"] = {int64_t{1} << 40, int64_t{1} << 40};
       }),
       "impossible shape"},
      {"shape_of_many_dimensions", "llama-relu-gqa",
       header([](json& h) { h[kQ]["shape"] = std::vector<int>(1000, 1); }), "at most 8 dimensions"},
      {"shape_not_the_data", "llama-relu-gqa", header([](json& h) {
         h[kQ]["shape"] = {32, 31};
       }),
       "its shape and type need"},
      {"shape_not_the_configs", "llama-relu-gqa", header([](json& h) {
         h[kQ]["shape"] = {16, 64};
       }),
       "config.json makes it [32,32]"},
      {"offsets_missing", "llama-relu-gqa", header([](json& h) { h[kQ].erase("data_offsets"); }),
       "no pair of ascending data_offsets"},
      {"offsets_descending", "llama-relu-gqa",
       header([](json& h) { std::swap(h[kQ]["data_offsets"][0], h[kQ]["data_offsets"][1]); }), "no pair of ascending"},
      {"offsets_negative", "llama-relu-gqa", header([](json& h) { h[kQ]["data_offsets"][0] = -2; }),
       "no pair of ascending"},
      {"offsets_beyond_the_file", "llama-relu-gqa",
       header([](json& h) { h[kQ]["data_offsets"][1] = uint64_t{1} << 62; }), "is the download complete?"},
      {"offsets_overlap", "llama-relu-gqa", header([](json& h) {
         for (json& offset : h[kQ]["data_offsets"]) offset = offset.get<uint64_t>() - 2;
       }),
       "overlaps another tensor's"},
      {"a_hole", "llama-relu-gqa", header([](json& h) { h.erase(kQ); }), "belong to no tensor"},
      {"tensor_missing", "llama-relu-gqa", header([](json& h) {
         h["model.layers.9.x"] = h[kQ];
         h.erase(kQ);
       }),
       "q_proj.weight is missing from the checkpoint"},
      {"tensor_unknown", "llama-relu-gqa",
       [](Dir d) { d.edit_json("config.json", [](json& c) { c["num_hidden_layers"] = 1; }); },
       "is not one that LlamaForCausalLM is known to have"},
      {"head_missing", "llama-silu-rope3",
       [](Dir d) { d.edit_json("config.json", [](json& c) { c["tie_word_embeddings"] = false; }); },
       "tie_word_embeddings is not set"},
      {"value_beyond_f16", "llama-relu2-linear",
       [](Dir d) {
         d.edit_bytes(kSafe, [](std::string& b) {
           const float big = 1e6f;
           std::memcpy(b.data() + b.size() - 4 * 33, &big, 4);  // in the last matrix but one tensor
         });
       },
       "use --type bf16 or f32"},
  };
}

std::vector<Case> shard_cases() {
  constexpr const char* kIndex = "model.safetensors.index.json";
  const auto index = [](std::function<void(json&)> edit) {
    return [edit](Dir d) { d.edit_json("model.safetensors.index.json", edit); };
  };
  return {
      {"no_weights", "llama-relu-gqa", [](Dir d) { fs::remove(d / kSafe); }, "neither model.safetensors nor"},
      {"pickled_weights_only", "llama-relu-gqa", [](Dir d) { fs::rename(d / kSafe, d / "pytorch_model.bin"); },
       "save the model as safetensors"},
      {"index_no_json", "qwen3-silu", [](Dir d) { test::spill(d / kIndex, "{"); }, "not valid JSON"},
      {"index_without_map", "qwen3-silu", index([](json& j) { j.erase("weight_map"); }), "weight_map is missing"},
      {"index_escapes", "qwen3-silu", index([](json& j) { j["weight_map"]["lm_head.weight"] = "../../etc/passwd"; }),
       "expected a plain file name"},
      {"index_names_a_number", "qwen3-silu", index([](json& j) { j["weight_map"]["lm_head.weight"] = 7; }),
       "expected a file name"},
      {"index_promises_too_much", "qwen3-silu",
       index([](json& j) { j["weight_map"]["ghost.weight"] = "model-00001-of-00003.safetensors"; }),
       "promises tensor ghost.weight"},
      {"index_hides_a_tensor", "qwen3-silu", index([](json& j) { j["weight_map"].erase("lm_head.weight"); }),
       "is not listed for this shard"},
      {"shard_missing", "qwen3-silu", [](Dir d) { fs::remove(d / "model-00002-of-00003.safetensors"); }, "cannot open"},
      {"tensor_in_two_shards", "llama-silu-rope3",
       [](Dir d) {
         fs::copy_file(d / "model-00001-of-00002.safetensors", d / "z.safetensors");
         d.edit_json("model.safetensors.index.json", [](json& j) { j["weight_map"]["x"] = "z.safetensors"; });
       },
       "is in two shards"},
  };
}

std::vector<Case> config_cases() {
  const auto config = [](std::function<void(json&)> edit) {
    return [edit](Dir d) { d.edit_json("config.json", edit); };
  };
  const auto set = [config](const char* key, json value) { return config([key, value](json& c) { c[key] = value; }); };
  return {
      {"config_missing", "llama-relu-gqa", [](Dir d) { fs::remove(d / "config.json"); }, "has no config.json"},
      {"config_empty", "llama-relu-gqa", [](Dir d) { test::spill(d / "config.json", ""); }, "not valid JSON"},
      {"config_a_string", "llama-relu-gqa", [](Dir d) { test::spill(d / "config.json", "\"hello\""); },
       "expected a JSON object"},
      {"architecture_missing", "llama-relu-gqa", config([](json& c) { c.erase("architectures"); }),
       "architectures is missing"},
      {"architecture_unknown", "llama-relu-gqa", set("architectures", {"GPTBigCodeForCausalLM"}),
       "supported are LlamaForCausalLM"},
      {"quantised", "llama-relu-gqa", set("quantization_config", {{"quant_method", "gptq"}}),
       "the weights are quantised (gptq)"},
      {"layers_missing", "llama-relu-gqa", config([](json& c) { c.erase("num_hidden_layers"); }),
       "num_hidden_layers is missing"},
      {"layers_a_string", "llama-relu-gqa", set("num_hidden_layers", "2"),
       "num_hidden_layers is \"2\", expected an integer"},
      {"layers_huge", "llama-relu-gqa", set("num_hidden_layers", uint64_t{1} << 63),
       "expected an integer from 1 to 4096"},
      {"embedding_zero", "llama-relu-gqa", set("hidden_size", 0), "hidden_size is 0"},
      {"embedding_fraction", "llama-relu-gqa", set("hidden_size", 32.5), "hidden_size is 32.5"},
      {"heads_do_not_divide", "llama-relu-gqa", set("num_attention_heads", 5), "does not divide by 5 heads"},
      {"kv_heads_do_not_divide", "llama-relu-gqa", set("num_key_value_heads", 3), "cannot share 3 key/value heads"},
      {"odd_head", "mistral-silu", set("head_dim", 15), "odd head size"},
      {"epsilon_of_one", "llama-relu-gqa", set("rms_norm_eps", 1), "epsilon is 1"},
      {"activation_unknown", "llama-relu-gqa", set("hidden_act", "mish"), "hidden_act 'mish' is not supported"},
      {"rope_dynamic", "llama-fatrelu", set("rope_scaling", {{"type", "dynamic"}, {"factor", 4}}),
       "RoPE scaling 'dynamic' is not supported"},
      {"rope_dynamic_new", "llama-relu-gqa", set("rope_parameters", {{"rope_type", "dynamic"}, {"factor", 4}}),
       "RoPE scaling 'dynamic' is not supported"},
      {"rope_no_factor", "llama-relu-gqa", set("rope_parameters", {{"rope_type", "linear"}}), "factor is missing"},
      {"rope_negative_factor", "llama-relu-gqa", set("rope_parameters", {{"rope_type", "linear"}, {"factor", -2}}),
       "expected a positive number"},
      {"rope_partial", "llama-relu-gqa", set("partial_rotary_factor", 0.5), "partial_rotary_factor is not supported"},
      {"experts", "mistral-silu", set("num_local_experts", 8), "a mixture of experts is not supported"},
      {"layer_of_unknown_type", "qwen2-relu", config([](json& c) {
         c["use_sliding_window"] = true;
         c["layer_types"] = {"full_attention", "chunked_attention"};
       }),
       "a layer of type chunked_attention is not supported"},
      {"falcon_old_decoder", "falcon-relu", set("new_decoder_architecture", false), "old Falcon decoder"},
      {"falcon_alibi", "falcon-relu", set("alibi", true), "alibi is not supported"},
      {"opt_norm_after", "opt-relu", set("do_layer_norm_before", false), "OPT-350m"},
      {"opt_projection", "opt-relu", set("word_embed_proj_dim", 16), "word_embed_proj_dim 16"},
      {"vocabulary_smaller_than_tokens", "llama-relu-gqa", set("vocab_size", 100), "config.json makes it [100,32]"},
  };
}

std::vector<Case> tokenizer_cases() {
  const auto tokenizer = [](std::function<void(json&)> edit) {
    return [edit](Dir d) { d.edit_json("tokenizer.json", edit); };
  };
  const auto model = [](std::function<void(std::string&)> edit) {
    return [edit](Dir d) { d.edit_bytes("tokenizer.model", edit); };
  };
  return {
      {"no_tokenizer", "llama-relu-gqa", [](Dir d) { fs::remove(d / "tokenizer.json"); }, "has no tokenizer"},
      {"tokenizer_no_json", "llama-relu-gqa", [](Dir d) { test::spill(d / "tokenizer.json", "nope"); },
       "not valid JSON"},
      {"tokenizer_nested", "llama-relu-gqa",
       [](Dir d) {
         test::spill(d / "tokenizer.json", "{\"model\":" + std::string(70, '[') + std::string(70, ']') + "}");
       },
       "nests deeper"},
      {"tokenizer_duplicate_token", "llama-relu-gqa",
       [](Dir d) {
         test::spill(d / "tokenizer.json", R"({"model":{"type":"BPE","vocab":{"a":0,"a":1},"merges":[]}})");
       },
       "twice in one object"},
      {"model_missing", "llama-relu-gqa", tokenizer([](json& t) { t.erase("model"); }), "model is missing"},
      {"unigram", "llama-relu-gqa", tokenizer([](json& t) { t["model"]["type"] = "Unigram"; }),
       "type 'Unigram' is not supported"},
      {"vocab_a_list", "llama-relu-gqa", tokenizer([](json& t) { t["model"]["vocab"] = json::array(); }),
       "vocab is missing or of the wrong type"},
      {"id_twice", "llama-relu-gqa", tokenizer([](json& t) { t["model"]["vocab"]["!"] = 5; }), "share the id 5"},
      {"id_negative", "llama-relu-gqa", tokenizer([](json& t) { t["model"]["vocab"]["!"] = -1; }), "has the id -1"},
      {"id_a_string", "llama-relu-gqa", tokenizer([](json& t) { t["model"]["vocab"]["!"] = "1"; }),
       "expected an integer"},
      {"id_huge", "llama-relu-gqa", tokenizer([](json& t) { t["model"]["vocab"]["!"] = ~uint64_t{0}; }),
       "vocab_size is"},
      {"merge_of_three", "llama-relu-gqa", tokenizer([](json& t) { t["model"]["merges"][0] = "a b c"; }), "merge 0 is"},
      {"merge_of_nothing", "qwen2-relu", tokenizer([](json& t) {
         t["model"]["merges"][0] = {"a", ""};
       }),
       "merge 0 is"},
      {"merge_a_number", "llama-relu-gqa", tokenizer([](json& t) { t["model"]["merges"][2] = 4; }), "merge 2 is 4"},
      {"merge_unknown_token", "llama-relu-gqa", tokenizer([](json& t) { t["model"]["merges"][0] = "z z"; }),
       "which the vocabulary lacks"},
      {"added_token_beyond", "llama-relu-gqa", tokenizer([](json& t) { t["added_tokens"][0]["id"] = 100000; }),
       "vocab_size is"},
      {"added_token_without_text", "llama-relu-gqa", tokenizer([](json& t) { t["added_tokens"][0].erase("content"); }),
       "without content"},
      {"pretokenizer_unknown", "llama-relu-gqa", tokenizer([](json& t) {
         t["pre_tokenizer"] = {{"type", "Whitespace"}};
       }),
       "the pre-tokenizer (Whitespace)"},
      {"pretokenizer_missing", "llama-relu-gqa", tokenizer([](json& t) { t["pre_tokenizer"] = nullptr; }),
       "the pre-tokenizer (none)"},
      {"normalizer_unknown", "llama-relu-gqa", tokenizer([](json& t) {
         t["normalizer"] = {{"type", "Lowercase"}};
       }),
       "the normalizer"},
      {"eos_beyond", "llama-relu-gqa",
       [](Dir d) {
         fs::remove(d / "tokenizer_config.json");
         d.edit_json("config.json", [](json& c) { c["eos_token_id"] = 5000; });
       },
       "eos_token_id 5000"},
      {"merges_txt_bad", "opt-relu", [](Dir d) { test::spill(d / "merges.txt", "#version: 0.2\na b c\n"); },
       "merge 0 is"},
      {"tokenizer_class_unknown", "opt-relu",
       [](Dir d) { test::spill(d / "tokenizer_config.json", R"({"tokenizer_class":"BloomTokenizer"})"); },
       "found tokenizer_class 'BloomTokenizer'"},
      {"spm_empty", "mistral-silu", [](Dir d) { test::spill(d / "tokenizer.model", ""); }, "is empty"},
      {"spm_text", "mistral-silu", [](Dir d) { test::spill(d / "tokenizer.model", "version https://git-lfs"); },
       "SentencePiece model"},
      {"spm_truncated", "mistral-silu", model([](std::string& b) { b.resize(b.size() / 2 + 3); }), "tokenizer.model"},
      {"spm_piece_longer_than_file", "mistral-silu", model([](std::string& b) { b[1] = '\x7f'; }), "tokenizer.model"},
      {"spm_endless_varint", "mistral-silu", model([](std::string& b) { b = std::string(12, '\xff'); }),
       "runs over 10 bytes"},
      {"spm_length_of_2_to_the_63", "mistral-silu",
       model([](std::string& b) { b = "\x0a" + std::string(9, '\x80') + "\x01"; }), "truncated"},
      {"spm_bad_wire_type", "mistral-silu", model([](std::string& b) { b = "\x0b"; }), "wire type 3 is unknown"},
      {"spm_score_not_finite", "mistral-silu",
       model([](std::string& b) { b.replace(b.find('\x15') + 1, 4, "\xff\xff\xff\x7f"); }), "no finite score"},
      {"spm_type_unknown", "mistral-silu", model([](std::string& b) { b[b.find('\x18') + 1] = 9; }), "unknown type 9"},
      {"spm_unigram", "mistral-silu",
       model([](std::string& b) { b.replace(b.rfind(std::string("\x18\x02\x98", 3)) + 1, 1, "\x01"); }),
       "SentencePiece model of type 1"},
      {"spm_no_pieces", "mistral-silu", model([](std::string& b) { b = std::string("\x12\x02\x18\x02", 4); }),
       "holds no pieces"},
      {"spm_more_pieces_than_rows", "mistral-silu",
       model([](std::string& b) { b += std::string("\x0a\x03\x0a\x01z", 5); }), "do not fit config.json's vocab_size"},
  };
}

class Refusal : public testing::TestWithParam<Case> {};

TEST_P(Refusal, IsOneClearLineAndNoFile) {
  const Case& c = GetParam();
  const test::TempDir dir;
  const Directory hf(dir.path(), c.fixture);
  c.damage(hf);
  const fs::path out = dir / "out.gguf";
  try {
    convert::Options options;
    options.n_threads = 2;
    convert::convert_checkpoint(hf.path(), out, options);
    ADD_FAILURE() << "was accepted";
  } catch (const Error& e) {
    const std::string message = e.what();
    EXPECT_NE(message.find(c.message), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_LT(message.size(), 1000u) << message;
  }
  for (const auto& entry : fs::directory_iterator(dir.path())) EXPECT_EQ(entry.path().filename(), "hf");
}

const auto case_name = [](const testing::TestParamInfo<Case>& p) { return std::string(p.param.name); };
INSTANTIATE_TEST_SUITE_P(Safetensors, Refusal, testing::ValuesIn(safetensors_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Shards, Refusal, testing::ValuesIn(shard_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Config, Refusal, testing::ValuesIn(config_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Tokenizer, Refusal, testing::ValuesIn(tokenizer_cases()), case_name);

TEST(ConvertPaths, BadOnesAreNamed) {
  const test::TempDir dir;
  const auto message = [](const fs::path& from, const fs::path& to) -> std::string {
    try {
      convert::convert_checkpoint(from, to, {});
    } catch (const Error& e) {
      return e.what();
    }
    return "accepted";
  };
  EXPECT_NE(message(dir / "absent", dir / "o.gguf").find("is not a directory"), std::string::npos);
  const auto zoo = test::data_dir() / "zoo" / "llama-relu-gqa";
  EXPECT_NE(message(zoo, dir.path()).find("it is a directory"), std::string::npos);
  EXPECT_NE(message(zoo, dir / "no/such/folder.gguf").find("cannot write"), std::string::npos);
  EXPECT_NE(message(zoo, "/dev/full/x").find("cannot write"), std::string::npos);
}

TEST(ConvertFallback, OddColumnsAreStoredAsF16AndSaid) {
  const test::TempDir dir;
  const Directory hf(dir.path(), "llama-relu-gqa");
  hf.edit_json("config.json", [](json& c) { c["intermediate_size"] = 72; });  // 72 is no multiple of 32
  // The FFN's tensors are cut to 72 neurons: a new file with the same data layout, without the rest.
  auto tensors = test::reference_tensors(hf.path());
  json header;
  std::string data;
  for (auto& [name, t] : tensors) {
    if (name.find("gate_proj") != std::string::npos || name.find("up_proj") != std::string::npos) t.shape = {72, 32};
    if (name.find("down_proj") != std::string::npos) t.shape = {32, 72};
    int64_t n = 1;
    for (const int64_t d : t.shape) n *= d;
    const std::string bytes(reinterpret_cast<const char*>(t.values.data()), static_cast<size_t>(n) * 4);
    header[name] = {{"dtype", "F32"}, {"shape", t.shape}, {"data_offsets", {data.size(), data.size() + bytes.size()}}};
    data += bytes;
  }
  const std::string text = header.dump() + " ";  // an odd length: the data are unaligned
  const uint64_t n = text.size() | 1;
  test::spill(hf / kSafe,
              std::string(reinterpret_cast<const char*>(&n), 8) + text + std::string(n - text.size(), ' ') + data);
  std::vector<std::string> notices;
  convert::Options options;
  options.type = DType::q8_0;
  options.on_notice = [&](std::string_view s) { notices.emplace_back(s); };
  convert::convert_checkpoint(hf.path(), dir / "out.gguf", options);
  const gguf::File file = gguf::File::open(dir / "out.gguf");
  EXPECT_EQ(file.find_tensor("blk.0.ffn_down.weight")->traits->type, DType::f16);
  EXPECT_EQ(file.find_tensor("blk.0.ffn_up.weight")->traits->type, DType::q8_0);
  ASSERT_EQ(notices.size(), 2u);  // one for each layer
  EXPECT_NE(notices[0].find("blk.0.ffn_down.weight has 72 columns"), std::string::npos) << notices[0];
  // Unaligned data arrive whole.
  const auto* norm = file.find_tensor("output_norm.weight");
  EXPECT_EQ(std::memcmp(file.data(*norm).data(), tensors.at("model.norm.weight").values.data(), 32 * 4), 0);
}

}  // namespace
}  // namespace hearth
