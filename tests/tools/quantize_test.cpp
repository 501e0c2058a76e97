// `hearth quantize` and `hearth profile --importance` as they are typed.
#include <regex>

#include "gguf/gguf.h"
#include "program.h"
#include "support/tiny_model.h"

namespace hearth::test {
namespace {

class QuantizeProgram : public ::testing::Test {
 protected:
  std::string file(const std::string& name) { return (dir_ / name).string(); }
  void SetUp() override {
    TinyModelOptions options;
    options.activation = "silu", options.n_embd = 256, options.n_ff = 512;
    write_tiny_model(in_, options);
    std::ofstream(text_) << "the cat and the dog went there and then the hen saw them all<|endoftext|>"
                         << "one two three four<|endoftext|>then the other one";
  }
  // quantize IN OUT ...
  Outcome quantize(std::vector<std::string> rest) {
    std::vector<std::string> args = {"quantize", in_, out_};
    args.insert(args.end(), rest.begin(), rest.end());
    return hearth(args);
  }
  std::string type_of(const std::string& name) { return gguf::File::open(out_).find_tensor(name)->traits->name; }

  TempDir dir_;
  std::string in_ = file("in.gguf"), out_ = file("out.gguf"), text_ = file("text.txt"), im_ = file("im.gguf");
};

TEST_F(QuantizeProgram, Mixes) {
  const Outcome o = quantize({"q4_K_m"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(type_of("blk.0.ffn_up.weight"), "q4_k");
  EXPECT_EQ(type_of("token_embd.weight"), "q6_k");  // the head, too
  ASSERT_EQ(quantize({"Q2_K", "--pure"}).status, 0);
  EXPECT_EQ(type_of("blk.0.attn_v.weight"), "q2_k");
  ASSERT_EQ(quantize({"q3_k", "--tensor-type", "attn_v=q8_0", "--tensor-type", "blk\\.1=F16"}).status, 0);
  EXPECT_EQ(type_of("blk.0.attn_v.weight"), "q8_0");
  EXPECT_EQ(type_of("blk.1.attn_v.weight"), "q8_0");
  EXPECT_EQ(type_of("blk.1.ffn_up.weight"), "f16");
}

TEST_F(QuantizeProgram, ADryRunPrintsEachTensorAndTheSums) {
  const Outcome o = quantize({"--dry-run", "Q4_K_M"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_FALSE(std::filesystem::exists(out_));
  const auto has = [&](const std::string& line) { return std::regex_search(o.out, std::regex(line)); };
  EXPECT_TRUE(has("\nblk.0.ffn_up.weight +f32 -> q4_k +512.00 KiB -> +72.00 KiB\n")) << o.out;
  EXPECT_TRUE(has("\nblk.0.attn_norm.weight +f32 -> f32 +1.00 KiB -> +1.00 KiB\n")) << o.out;
  EXPECT_TRUE(has("\ntotal +4.[0-9]+ MiB -> +[0-9.]+ KiB\n")) << o.out;
}

TEST_F(QuantizeProgram, WrongArguments) {
  EXPECT_TRUE(fails_with(quantize({"q7"}), "TYPE is 'q7', expected one of f32,"));
  EXPECT_TRUE(fails_with(quantize({"q4_k", "--head-type", "Q4_K_M"}), "a mix; expected one type"));
  EXPECT_TRUE(fails_with(quantize({"q4_k", "--tensor-type", "ffn_up"}), "expected REGEX=TYPE"));
  EXPECT_TRUE(fails_with(quantize({"q4_k", "--tensor-type", "=q8_0"}), "expected REGEX=TYPE"));
  EXPECT_TRUE(fails_with(quantize({"q4_k", "--tensor-type", "ffn_up=q9"}), "'ffn_up=q9' is 'q9'"));
  EXPECT_TRUE(fails_with(quantize({"q4_k", "--tensor-type", "[=q8_0"}), "no valid regular expression"));
  EXPECT_TRUE(fails_with(quantize({"q4_k", "--tensor-type", "ffn_dwon=q8_0"}), "matches no matrix"));
  EXPECT_TRUE(fails_with(quantize({"q4_k", "--importance", in_}), "of the kind 'model'"));
  EXPECT_TRUE(fails_with(quantize({"q4_k", "--importance", text_}), "is no GGUF file"));
  EXPECT_TRUE(fails_with(quantize({"q4_k", "--importance", file("absent")}), "absent"));
  EXPECT_TRUE(fails_with(hearth({"convert", dir_.path().string(), "-o", out_, "--type", "Q4_K_M"}), "is a mix"));
  EXPECT_FALSE(std::filesystem::exists(out_));
}

TEST_F(QuantizeProgram, ImportanceFromTheProfiler) {
  const std::vector<std::string> profile = {"profile", "-m",           in_, "-f", text_, "--device", "cpu", "-o",
                                            file("s"), "--importance", im_, "-c", "32"};
  const Outcome made = hearth(profile);
  ASSERT_EQ(made.status, 0) << made.err;
  EXPECT_NE(made.err.find("the importance of 14 matrices"), std::string::npos) << made.err;
  const Outcome o = quantize({"q4_k", "--importance", im_});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_NE(o.err.find("14 matrices are quantised by their columns' importance"), std::string::npos) << o.err;

  std::vector<std::string> args = profile;
  args.push_back("--resume");
  EXPECT_EQ(hearth(args).status, 0) << "everything is done, and stays";
  std::filesystem::remove(im_);
  EXPECT_TRUE(fails_with(hearth(args), "im.gguf"));
  EXPECT_TRUE(fails_with(hearth({"profile", "-m", in_, "--import", dir_.path().string(), "--importance", im_}),
                         "--importance takes texts"));
}

// The bundled model in 2 bits, computed in f16: with the importance of its own stories it predicts others better.
TEST_F(QuantizeProgram, ImportanceLowersPerplexity) {
  const std::string demo = (source_dir() / "models" / "hearth-demo.gguf").string(), back = file("back.gguf");
  const auto write_stories = [&](const std::string& path, int first_seed) {
    for (int seed = first_seed; seed < first_seed + 3; ++seed) {
      const Outcome o = hearth({"run", "-m", demo, "-p", "Once upon a time", "-n", "400", "--ignore-eos", "-s",
                                std::to_string(seed), "--device", "cpu", "-q"});
      ASSERT_EQ(o.status, 0) << o.err;
      std::ofstream(path, std::ios::app) << o.out << "<|endoftext|>";
    }
  };
  std::filesystem::remove(text_);
  write_stories(text_, 1);
  write_stories(file("other.txt"), 11);
  ASSERT_EQ(hearth({"profile", "-m", demo, "-f", text_, "--device", "cpu", "-o", file("s"), "--importance", im_,
                    "--heldout-every", "0"})
                .status,
            0);
  const auto perplexity = [&](std::vector<std::string> rest) {
    std::vector<std::string> args = {"quantize", demo, out_, "q2_k", "--allow-requantize"};
    args.insert(args.end(), rest.begin(), rest.end());
    EXPECT_EQ(hearth(args).status, 0);
    EXPECT_EQ(hearth({"quantize", out_, back, "f16", "--allow-requantize"}).status, 0);
    const Outcome o = hearth({"perplexity", "-m", back, "-f", file("other.txt"), "--device", "cpu"});
    const size_t at = o.out.find("perplexity = ");
    EXPECT_NE(at, std::string::npos) << o.err;
    return at == std::string::npos ? 0.0 : std::stod(o.out.substr(at + 13));
  };
  const double with = perplexity({"--importance", im_}), without = perplexity({});
  EXPECT_LT(with, without);
}

}  // namespace
}  // namespace hearth::test
