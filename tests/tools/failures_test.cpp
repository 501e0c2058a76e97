// What users get wrong, and machines too: each ends with status 1 and one line that says what to do.
#include <sys/stat.h>

#include "program.h"
#include "support/tiny_model.h"

namespace hearth::test {
namespace {

class Failures : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    files_ = new TempDir;
    write_tiny_model(model(), {});
    write_tiny_model(no_vocabulary(), {.vocabulary = false});
  }
  static void TearDownTestSuite() { delete files_; }
  static std::string file(const std::string& name) { return (*files_ / name).string(); }
  static std::string model() { return file("tiny.gguf"); }
  static std::string no_vocabulary() { return file("no-vocabulary.gguf"); }
  static std::string write(const std::string& name, const std::string& bytes) {
    std::ofstream(file(name), std::ios::binary) << bytes;
    return file(name);
  }
  // `hearth run` on the small model with more flags.
  static Outcome run(std::vector<std::string> more) {
    std::vector<std::string> args = {"run", "-m", model(), "--device", "cpu", "-p", "the", "-n", "2"};
    args.insert(args.end(), more.begin(), more.end());
    return hearth(args);
  }

 private:
  static inline TempDir* files_ = nullptr;
};

TEST_F(Failures, Subcommands) {
  EXPECT_TRUE(fails_with(hearth({"rnu"}), "unknown subcommand 'rnu'; expected one of run, "));
  EXPECT_TRUE(fails_with(hearth({"--nonsense"}), "--nonsense"));
}

TEST_F(Failures, Flags) {
  EXPECT_TRUE(fails_with(hearth({"run"}), "--model is required; see `hearth run --help`"));
  EXPECT_TRUE(fails_with(run({"--nonsense"}), "--nonsense"));
  EXPECT_TRUE(fails_with(run({"-foo"}), "unknown flag '-foo'"));
  EXPECT_TRUE(fails_with(run({"-c", "many"}), "--ctx-size"));
  EXPECT_TRUE(fails_with(run({"-c", "99999999999999999999"}), "--ctx-size"));
  EXPECT_TRUE(fails_with(run({"-c", "-5"}), "--ctx-size"));
  EXPECT_TRUE(fails_with(run({"-t", "0"}), "--threads"));
  EXPECT_TRUE(fails_with(run({"-b", "0"}), "--batch-size"));
  EXPECT_TRUE(fails_with(run({"--sparsity", "some"}), "--sparsity"));
  EXPECT_TRUE(fails_with(run({"--sparse-threshold", "nan"}), "threshold"));
  EXPECT_TRUE(fails_with(run({"--device", "tpu"}), "--device"));
  EXPECT_TRUE(fails_with(run({"--isa", "mmx"}), "--isa"));
  EXPECT_TRUE(fails_with(run({"--activation", "tanh"}), "unknown activation 'tanh'"));
  EXPECT_TRUE(fails_with(run({"-f", "x"}), "--prompt excludes --file"));
  EXPECT_TRUE(fails_with(run({"-s", "12x"}), "--seed is '12x'"));
  EXPECT_TRUE(fails_with(run({"--temp", "-1"}), "temp"));
  EXPECT_TRUE(fails_with(run({"--temp", "nan"}), "temp"));
  EXPECT_TRUE(fails_with(run({"--top-p", "2"}), "top"));
  EXPECT_TRUE(fails_with(run({"--stop", ""}), "stop"));
  EXPECT_TRUE(fails_with(run({"-n"}), "--predict"));
  EXPECT_TRUE(fails_with(run({"--system-prompt", "x"}), "--chat"));
  EXPECT_TRUE(fails_with(hearth({"run", "-m", model(), "-ngl", "0", "--device", "cuda"}), "-ngl 0"));
}

TEST_F(Failures, ModelFiles) {
  const std::string whole = slurp(model());
  EXPECT_TRUE(fails_with(hearth({"run", "-m", file("absent.gguf")}), "absent.gguf"));
  EXPECT_TRUE(fails_with(hearth({"run", "-m", "/"}), "'/'"));
  EXPECT_TRUE(fails_with(hearth({"run", "-m", write("empty.gguf", "")}), "empty.gguf"));
  EXPECT_TRUE(
      fails_with(hearth({"run", "-m", write("text.gguf", "Once upon a time, there was no model.")}), "text.gguf"));
  for (const size_t bytes : {3u, 30u, 3000u, 9000u}) {
    EXPECT_TRUE(
        fails_with(hearth({"logits", "--ids", "1", "-m", write("cut.gguf", whole.substr(0, bytes))}), "cut.gguf"));
  }
  EXPECT_TRUE(fails_with(hearth({"logits", "--ids", "1", "-m", write("cut.gguf", whole.substr(0, whole.size() - 40))}),
                         "cut.gguf"));
}

TEST_F(Failures, AModelWithoutVocabularyCannotReadText) {
  EXPECT_TRUE(
      fails_with(hearth({"run", "-q", "-m", no_vocabulary(), "--device", "cpu", "-p", "the"}), "no vocabulary"));
  EXPECT_TRUE(fails_with(hearth({"logits", "-q", "-m", no_vocabulary(), "--device", "cpu", "-p", "the"}), "--ids"));
}

TEST_F(Failures, Prompts) {
  EXPECT_TRUE(fails_with(hearth({"run", "-q", "-m", model(), "--device", "cpu", "-p", ""}), "the prompt is empty"));
  EXPECT_TRUE(fails_with(hearth({"run", "-q", "-m", model(), "--device", "cpu"}, ""), "the prompt is empty"));
  EXPECT_TRUE(
      fails_with(hearth({"run", "-q", "-m", model(), "--device", "cpu", "-f", file("absent.txt")}), "absent.txt"));
  EXPECT_TRUE(fails_with(hearth({"run", "-q", "-m", model(), "--device", "cpu", "-f", "/"}), "'/'"));
  const std::string lengthy(65, 'x');
  EXPECT_EQ(hearth({"run", "-q", "-m", model(), "--device", "cpu", "-p", lengthy}).out, "") << "not even the prompt";
  EXPECT_TRUE(fails_with(hearth({"run", "-q", "-m", model(), "--device", "cpu", "-p", lengthy}),
                         "the prompt has 65 tokens and the context holds 64; use -c 66 or more"));
  EXPECT_TRUE(
      fails_with(hearth({"run", "-q", "-m", model(), "--device", "cpu", "-p", "x", "--chat"}), "chat template"));
}

TEST_F(Failures, TokenIds) {
  const auto logits = [](const std::string& ids) {
    return hearth({"logits", "-q", "-m", model(), "--device", "cpu", "--ids", ids});
  };
  EXPECT_TRUE(fails_with(logits("1,259"), "token id 259 is out of range, expected 0 to 258"));
  EXPECT_TRUE(fails_with(logits("-1"), "token id -1 is out of range"));
  EXPECT_TRUE(fails_with(logits("1,two"), "--ids"));
  EXPECT_TRUE(fails_with(logits("99999999999"), "--ids"));
  std::string many = "1";
  for (int i = 0; i < 64; ++i) many += ",1";
  EXPECT_TRUE(fails_with(logits(many), "context"));
  EXPECT_TRUE(fails_with(hearth({"logits", "-q", "-m", model(), "--device", "cpu", "-p", ""}), "no token to evaluate"));
}

TEST_F(Failures, Perplexity) {
  const auto perplexity = [](std::vector<std::string> more) {
    std::vector<std::string> args = {"perplexity", "-q", "-m", model(), "--device", "cpu"};
    args.insert(args.end(), more.begin(), more.end());
    return hearth(args);
  };
  EXPECT_TRUE(fails_with(perplexity({}), "-f"));
  EXPECT_TRUE(fails_with(perplexity({"--ids-file", write("odd.u16", "abc")}), "no multiple of 2"));
  EXPECT_TRUE(fails_with(perplexity({"--ids-file", write("odd.u32", "abcdef")}), "no multiple of 4"));
  EXPECT_TRUE(fails_with(perplexity({"--ids-file", write("high.u16", std::string("\1\0\xff\xff", 4))}),
                         "token id 65535 at 1 is out of range, expected 0 to 258"));
  EXPECT_TRUE(fails_with(perplexity({"--ids-file", write("one.u16", std::string("\1\0", 2))}), "expected 2 or more"));
  EXPECT_TRUE(fails_with(perplexity({"-f", write("a.txt", "some text"), "--window", "80", "-c", "64"}), "--window 80"));
  EXPECT_TRUE(fails_with(perplexity({"-f", file("a.txt"), "--window", "8", "--stride", "9"}), "--stride"));
  EXPECT_TRUE(fails_with(perplexity({"-f", file("a.txt"), "--ids-type", "u16"}), "--ids-file"));
}

TEST_F(Failures, Bench) {
  const auto bench = [](std::vector<std::string> more) {
    std::vector<std::string> args = {"bench", "-q", "-m", model(), "--device", "cpu", "--no-bandwidth"};
    args.insert(args.end(), more.begin(), more.end());
    return hearth(args);
  };
  EXPECT_TRUE(fails_with(bench({"-p", "-4"}), "-p is -4"));
  EXPECT_TRUE(fails_with(bench({"-p", "64,x"}), "--n-prompt"));
  EXPECT_TRUE(fails_with(bench({"-r", "0"}), "--repetitions"));
  EXPECT_TRUE(fails_with(bench({"-p", "32", "-n", "8", "-c", "16"}), "-c 32 or more"));
  EXPECT_TRUE(fails_with(bench({"-o", "xml"}), "--output"));
}

TEST_F(Failures, AFullDisk) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "needs /dev/full";
  const std::vector<std::vector<std::string>> commands = {
      {"run", "-q", "-m", model(), "--device", "cpu", "-p", "the", "-n", "3"},
      {"run", "-q", "-m", model(), "--device", "cpu", "-p", "the", "-n", "3", "--json"},
      {"logits", "-q", "-m", model(), "--device", "cpu", "--ids", "1"},
      {"perplexity", "-q", "-m", model(), "--device", "cpu", "-f", write("b.txt", "some text")},
      {"bench", "-q", "-m", model(), "--device", "cpu", "--no-bandwidth", "-p", "4", "-n", "2", "-r", "1"},
      {"inspect", model()},
      {"--help"},
      {"run", "--help"},
  };
  for (const auto& args : commands) {
    SCOPED_TRACE(args.front());
    EXPECT_TRUE(fails_with(hearth(args, "", "/dev/full"), "No space left on device"));
  }
}

TEST_F(Failures, OutputFilesThatCannotBeWritten) {
  const std::string absent = file("no/such/directory/out.gguf");
  EXPECT_TRUE(fails_with(hearth({"quantize", model(), absent, "q8_0"}), "out.gguf"));
  EXPECT_TRUE(fails_with(hearth({"synth", "--shape", "tiny", "-o", absent}), "out.gguf"));
  // The kernel's own file systems take no new files, not even from root, whom a directory's permissions do not stop.
  EXPECT_TRUE(fails_with(hearth({"quantize", model(), "/proc/hearth-out.gguf", "q8_0"}), "/proc/hearth-out.gguf"));
  if (geteuid() == 0) return;
  mkdir(file("locked").c_str(), 0500);
  EXPECT_TRUE(fails_with(hearth({"quantize", model(), file("locked/out.gguf"), "q8_0"}), "Permission denied"));
}

}  // namespace
}  // namespace hearth::test
