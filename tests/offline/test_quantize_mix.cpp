// Which type each matrix gets in each mix. What is expected of whole models is what llama.cpp gives them: its
// tests/snapshots/*.schema list it for models of these shapes.
#include <gtest/gtest.h>

#include <map>

#include "core/error.h"
#include "offline/quantize/mix.h"

namespace hearth::offline {
namespace {

struct Shape {
  MixModel model;
  int64_t n_embd = 1024, n_ff = 3072;
  bool tied = false;
};

std::vector<MixTensor> tensors_of(const Shape& s, const std::string& down = "ffn_down") {
  const int64_t kv = s.n_embd / s.model.n_head * s.model.n_head_kv;
  std::vector<MixTensor> all = {{"token_embd.weight", {s.n_embd, 32000}}};
  if (!s.tied) all.push_back({"output.weight", {s.n_embd, 32000}});
  for (int64_t l = s.model.n_layer - 1; l >= 0; --l) {  // the order in the file does not matter
    const auto add = [&](const std::string& name, int64_t cols, int64_t rows) {
      all.push_back({fmt::format("blk.{}.{}.weight", l, name), {cols, rows}});
    };
    add("attn_q", s.n_embd, s.n_embd), add("attn_k", s.n_embd, kv), add("attn_v", s.n_embd, kv);
    add("attn_output", s.n_embd, s.n_embd);
    add("ffn_gate", s.n_embd, s.n_ff), add("ffn_up", s.n_embd, s.n_ff), add(down, s.n_ff, s.n_embd);
  }
  return all;
}

// "0-4,7"
std::string ranges(const std::vector<int64_t>& ascending) {
  std::string text;
  for (size_t i = 0; i < ascending.size(); ++i) {
    const size_t first = i;
    while (i + 1 < ascending.size() && ascending[i + 1] == ascending[i] + 1) ++i;
    text += fmt::format("{}{}", text.empty() ? "" : ",", ascending[first]);
    if (i > first) text += fmt::format("-{}", ascending[i]);
  }
  return text;
}

// Which tensors are not of the mix's main type: "attn_v=q6_k[0-4,7]; output=q6_k".
std::string differences(const std::string& mix, const Shape& s, const std::vector<MixTensor>& tensors) {
  const FileType type = *parse_file_type(mix);
  const std::vector<DType> types = mix_types(type, s.model, tensors);
  std::map<std::pair<std::string, std::string>, std::vector<int64_t>> layers;
  for (size_t i = tensors.size(); i-- > 0;) {
    if (types[i] == type.base) continue;
    std::string name = tensors[i].name.substr(0, tensors[i].name.rfind('.'));
    std::vector<int64_t> layer;
    if (name.starts_with("blk.")) {
      layer.push_back(std::stoll(name.substr(4)));
      name = name.substr(name.rfind('.') + 1);
    }
    auto& all = layers[{name, traits(types[i]).name}];
    all.insert(all.end(), layer.begin(), layer.end());
  }
  std::string text;
  for (const auto& [key, of] : layers) {
    text += fmt::format("{}{}={}", text.empty() ? "" : "; ", key.first, key.second);
    if (!of.empty()) text += fmt::format("[{}]", ranges(of));
  }
  return text;
}
std::string differences(const std::string& mix, const Shape& s) {
  return differences(mix, s, tensors_of(s));
}

const Shape k28Layers = {{.arch = "qwen3", .n_layer = 28, .n_head = 16, .n_head_kv = 8}};
const Shape k40Layers = {{.arch = "qwen3", .n_layer = 40, .n_head = 40, .n_head_kv = 8}, 5120, 17408};
const Shape k80Layers = {{.arch = "llama", .n_layer = 80, .n_head = 64, .n_head_kv = 8}, 8192, 28672};

using Expected = std::vector<std::pair<const char*, const char*>>;
void expect(const Shape& shape, const Expected& mixes) {
  for (const auto& [mix, expected] : mixes) EXPECT_EQ(differences(mix, shape), expected) << mix;
}

// Qwen3-0.6B: two query heads share a key head.
TEST(QuantizeMix, OfASmallModel) {
  expect(k28Layers,
         {{"Q2_K", "attn_output=q3_k[0-27]; attn_v=q3_k[0-27]; ffn_down=q3_k[0-27]; output=q6_k"},
          {"Q2_K_S", "ffn_down=q4_k[0-2]; output=q6_k"},
          {"Q3_K_S", "output=q6_k"},
          {"Q3_K_M",
           "attn_output=q4_k[0-27]; attn_v=q4_k[2-27]; attn_v=q5_k[0-1]; ffn_down=q4_k[1-27]; ffn_down=q5_k[0]; "
           "output=q6_k"},
          {"Q3_K_L", "attn_output=q5_k[0-27]; attn_v=q5_k[0-27]; ffn_down=q5_k[0-27]; output=q6_k"},
          {"Q4_K_S", "attn_v=q5_k[0-3]; ffn_down=q5_k[0-2]; output=q6_k"},
          {"Q4_K_M", "attn_v=q6_k[0-2,5,8,11,14,17,20,23-27]; ffn_down=q6_k[0-2,5,8,11,14,17,20,23-27]; output=q6_k"},
          {"Q5_K_S", "output=q6_k"},
          {"Q5_K_M", "attn_v=q6_k[0-2,5,8,11,14,17,20,23-27]; ffn_down=q6_k[0-2,5,8,11,14,17,20,23-27]; output=q6_k"},
          {"Q6_K", ""},
          {"IQ4_NL", "ffn_down=q5_k[0-2]; output=q6_k"},
          {"IQ4_XS", "ffn_down=q5_k[0-2]; output=q6_k"}});
}

// Qwen3-14B: five do, so attn_v is small and may have more bits.
TEST(QuantizeMix, OfAModelWithSharedKeysAndValues) {
  expect(k40Layers, {{"Q2_K", "attn_output=q3_k[0-39]; attn_v=q4_k[0-39]; ffn_down=q3_k[0-39]; output=q6_k"},
                     {"Q2_K_S", "attn_v=q4_k[0-39]; ffn_down=q4_k[0-4]; output=q6_k"},
                     {"Q3_K_S", "output=q6_k"},
                     {"Q3_K_M",
                      "attn_output=q4_k[0-39]; attn_v=q4_k[2-39]; attn_v=q5_k[0-1]; ffn_down=q4_k[2-39]; "
                      "ffn_down=q5_k[0-1]; output=q6_k"},
                     {"Q3_K_L", "attn_output=q5_k[0-39]; attn_v=q5_k[0-39]; ffn_down=q5_k[0-39]; output=q6_k"},
                     {"Q4_K_S", "attn_v=q5_k[0-3]; ffn_down=q5_k[0-4]; output=q6_k"},
                     {"Q4_K_M",
                      "attn_v=q6_k[0-4,7,10,13,16,19,22,25,28,31,34-39]; "
                      "ffn_down=q6_k[0-4,7,10,13,16,19,22,25,28,31,34-39]; output=q6_k"},
                     {"Q5_K_S", "output=q6_k"},
                     {"Q5_K_M",
                      "attn_v=q6_k[0-4,7,10,13,16,19,22,25,28,31,34-39]; "
                      "ffn_down=q6_k[0-4,7,10,13,16,19,22,25,28,31,34-39]; output=q6_k"},
                     {"Q6_K", ""},
                     {"IQ4_NL", "attn_v=q5_k[0-39]; ffn_down=q5_k[0-4]; output=q6_k"},
                     {"IQ4_XS", "attn_v=q5_k[0-39]; ffn_down=q5_k[0-4]; output=q6_k"}});
}

// Llama 3.1 70B: a rule of its own, 5 bits for attn_v at least.
TEST(QuantizeMix, OfA70B) {
  expect(
      k80Layers,
      {{"Q2_K", "attn_output=q3_k[0-79]; attn_v=q5_k[0-79]; ffn_down=q3_k[0-79]; output=q6_k"},
       {"Q2_K_S", "attn_v=q5_k[0-79]; ffn_down=q4_k[0-9]; output=q6_k"},
       {"Q3_K_S", "attn_v=q5_k[0-79]; output=q6_k"},
       {"Q3_K_M", "attn_output=q4_k[0-79]; attn_v=q5_k[0-79]; ffn_down=q4_k[5-79]; ffn_down=q5_k[0-4]; output=q6_k"},
       {"Q3_K_L", "attn_output=q5_k[0-79]; attn_v=q5_k[0-79]; ffn_down=q5_k[0-79]; output=q6_k"},
       {"Q4_K_S", "attn_v=q5_k[0-79]; ffn_down=q5_k[0-9]; output=q6_k"},
       {"Q4_K_M",
        "attn_v=q5_k[10-11,13-14,16-17,19-20,22-23,25-26,28-29,31-32,34-35,37-38,40-41,43-44,46-47,49-50,52-53,55-56,"
        "58-59,61-62,64-65,67-68]; attn_v=q6_k[0-9,12,15,18,21,24,27,30,33,36,39,42,45,48,51,54,57,60,63,66,69-79]; "
        "ffn_down=q6_k[0-9,12,15,18,21,24,27,30,33,36,39,42,45,48,51,54,57,60,63,66,69-79]; output=q6_k"},
       {"Q5_K_S", "output=q6_k"},
       {"Q5_K_M",
        "attn_v=q6_k[0-9,12,15,18,21,24,27,30,33,36,39,42,45,48,51,54,57,60,63,66,69-79]; "
        "ffn_down=q6_k[0-9,12,15,18,21,24,27,30,33,36,39,42,45,48,51,54,57,60,63,66,69-79]; output=q6_k"},
       {"Q6_K", ""},
       {"IQ4_NL", "attn_v=q5_k[0-79]; ffn_down=q5_k[0-9]; output=q6_k"},
       {"IQ4_XS", "attn_v=q5_k[0-79]; ffn_down=q5_k[0-9]; output=q6_k"}});
}

TEST(QuantizeMix, TiedHeadsAreHeads) {
  Shape s = k28Layers;
  s.tied = true;
  EXPECT_EQ(differences("Q5_K_S", s), "token_embd=q6_k");
  EXPECT_EQ(differences("Q6_K", s), "");
  EXPECT_EQ(differences("IQ4_XS", s), "ffn_down=q5_k[0-2]; token_embd=q6_k");
}

TEST(QuantizeMix, TransposedDownMatricesAreDownMatrices) {
  EXPECT_EQ(differences("Q4_K_S", k28Layers, tensors_of(k28Layers, "ffn_down_t")),
            "attn_v=q5_k[0-3]; ffn_down_t=q5_k[0-2]; output=q6_k");
}

TEST(QuantizeMix, ImportanceReplacesTheWiderFirstLayersOfIq4) {
  Shape s = k28Layers;
  s.model.importance = true;
  EXPECT_EQ(differences("IQ4_XS", s), "output=q6_k");
  EXPECT_EQ(differences("Q4_K_S", s), "attn_v=q5_k[0-3]; ffn_down=q5_k[0-2]; output=q6_k");
}

TEST(QuantizeMix, FalconHasRulesOfItsOwn) {
  Shape s = {{.arch = "falcon", .n_layer = 32, .n_head = 71, .n_head_kv = 1}, 4544, 18176};
  std::vector<MixTensor> tensors = {{"token_embd.weight", {4544, 65024}}, {"output.weight", {4544, 65024}}};
  for (int64_t l = 0; l < 32; ++l) {
    const auto add = [&](const std::string& name, int64_t cols) {
      tensors.push_back({fmt::format("blk.{}.{}.weight", 31 - l, name), {cols, 4544}});
    };
    add("attn_qkv", 4544), add("attn_output", 4544), add("ffn_up", 4544), add("ffn_down", 18176);
  }
  const std::string more = "0-3,6,9,12,15,18,21,24,27-31";
  EXPECT_EQ(
      differences("Q4_K_M", s, tensors),
      "attn_qkv=q6_k[" + more + "]; ffn_down=q5_k[2-3,6,9,12,15,18,21,24,27-31]; ffn_down=q6_k[0-1]; output=q8_0");
  EXPECT_EQ(differences("Q4_K_S", s, tensors), "attn_qkv=q5_k[0-3]; output=q8_0");
  EXPECT_EQ(differences("Q3_K_L", s, tensors),
            "attn_output=q4_k[0-31]; attn_qkv=q5_k[0-31]; ffn_down=q4_k[0-31]; output=q8_0");
  EXPECT_EQ(differences("Q3_K_M", s, tensors),
            "attn_qkv=q4_k[2-31]; attn_qkv=q5_k[0-1]; ffn_down=q4_k[2-3,6,9,12,15,18,21,24,27-31]; "
            "ffn_down=q5_k[0-1]; output=q8_0");
}

TEST(QuantizeMix, EightExperts) {
  Shape s = {{.arch = "llama", .n_layer = 32, .n_head = 32, .n_head_kv = 8, .n_expert = 8}, 4096, 14336};
  const std::string attention = "attn_k=q8_0[0-31]; attn_output=q5_k[0-31]; attn_v=q8_0[0-31]; ";
  EXPECT_EQ(differences("Q4_K_S", s), attention + "ffn_down=q5_k[0-3]; output=q6_k");
  EXPECT_EQ(differences("Q2_K", s), attention + "ffn_down=q3_k[0-31]; output=q6_k");
  EXPECT_EQ(differences("Q3_K_L", s), "attn_k=q8_0[0-31]; attn_v=q8_0[0-31]; ffn_down=q5_k[0-31]; output=q6_k");
  EXPECT_EQ(differences("Q5_K_S", s), "attn_k=q8_0[0-31]; attn_v=q8_0[0-31]; output=q6_k");
}

TEST(QuantizeMix, Mxfp4OfExpertsAlone) {
  Shape s = {{.arch = "gpt-oss", .n_layer = 1, .n_head = 8, .n_head_kv = 1, .n_expert = 32}, 2880, 2880};
  const std::vector<MixTensor> tensors = {{"token_embd.weight", {2880, 100}},
                                          {"output.weight", {2880, 100}},
                                          {"blk.0.attn_q.weight", {2880, 4096}},
                                          {"blk.0.ffn_down_exps.weight", {2880, 2880, 32}}};
  EXPECT_EQ(differences("MXFP4_MOE", s, tensors), "attn_q=q8_0[0]; output=q8_0; token_embd=q8_0");
}

TEST(QuantizeMix, HeadsThatBlocksDoNotDivideHave8Bits) {
  Shape s = k28Layers;
  s.n_embd = 1056;
  EXPECT_EQ(differences("Q5_K_S", s), "output=q8_0");
}

TEST(QuantizeMix, OneTypeMeansEveryMatrix) {
  for (const FileType& type : {FileType(DType::q4_k), *parse_file_type("Q4_K"), parse_file_type("q4_k_m")->pure()}) {
    for (const DType t : mix_types(type, k28Layers.model, tensors_of(k28Layers))) EXPECT_EQ(t, DType::q4_k);
  }
}

TEST(QuantizeMix, Names) {
  // The numbers are llama.cpp's LLAMA_FTYPE_MOSTLY_*.
  const std::map<std::string, std::pair<DType, uint32_t>> known = {
      {"f16", {DType::f16, 1}},      {"q8_0", {DType::q8_0, 7}},      {"Q5_1", {DType::q5_1, 9}},
      {"Q2_K", {DType::q2_k, 10}},   {"q3_k_s", {DType::q3_k, 11}},   {"Q3_K_M", {DType::q3_k, 12}},
      {"Q3_K_L", {DType::q3_k, 13}}, {"Q4_K_S", {DType::q4_k, 14}},   {"q4_k_m", {DType::q4_k, 15}},
      {"Q5_K_S", {DType::q5_k, 16}}, {"Q5_k_M", {DType::q5_k, 17}},   {"Q6_K", {DType::q6_k, 18}},
      {"Q2_K_S", {DType::q2_k, 21}}, {"IQ4_NL", {DType::iq4_nl, 25}}, {"iq4_xs", {DType::iq4_xs, 30}},
      {"BF16", {DType::bf16, 32}},   {"mxfp4", {DType::mxfp4, 38}},   {"MXFP4_MOE", {DType::mxfp4, 38}},
      {"q4_k", {DType::q4_k, 15}},
  };
  for (const auto& [name, expected] : known) {
    const auto type = parse_file_type(name);
    ASSERT_TRUE(type.has_value()) << name;
    EXPECT_EQ(type->base, expected.first) << name;
    EXPECT_EQ(type->file_type, expected.second) << name;
    EXPECT_EQ(type->pure().file_type, expected.second) << name;
  }
  for (const char* name : {"", "q4", "q4_k_", "q8_1", "i32", "iq2_xs", "q4_k_mm"}) {
    EXPECT_FALSE(parse_file_type(name).has_value()) << name;
  }
  EXPECT_FALSE(parse_dtype("q4_k_m").has_value());
  EXPECT_EQ(parse_dtype("IQ4_XS"), DType::iq4_xs);
}

TEST(QuantizeMix, RowsThatBlocksDoNotDivide) {
  const std::map<DType, DType> narrower = {{DType::q2_k, DType::q4_0}, {DType::q3_k, DType::q4_0},
                                           {DType::q4_k, DType::q5_0}, {DType::q5_k, DType::q5_1},
                                           {DType::q6_k, DType::q8_0}, {DType::iq4_xs, DType::iq4_nl}};
  for (const DTypeTraits& t : all_traits()) {
    if (!t.computable()) continue;
    SCOPED_TRACE(t.name);
    EXPECT_EQ(fitting_type(t.type, 512, DType::f32), t.type);
    const bool wide = t.block_size == 256;
    EXPECT_EQ(fitting_type(t.type, 96, DType::f32), wide ? narrower.at(t.type) : t.type);
    EXPECT_EQ(fitting_type(t.type, 40, DType::f32), t.block_size > 1 ? DType::f16 : t.type);
    EXPECT_EQ(fitting_type(t.type, 40, DType::bf16), t.block_size > 1 ? DType::bf16 : t.type);
  }
}

}  // namespace
}  // namespace hearth::offline
