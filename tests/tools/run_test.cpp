// `hearth run`, from outside: what is printed where, and what ends a text.
#include <nlohmann/json.hpp>

#include "program.h"
#include "support/tiny_model.h"
#include "tools/prompt.h"

namespace hearth::test {
namespace {

using nlohmann::json;

class Run : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    files_ = new TempDir;
    write_tiny_model(model(), {});
    write_tiny_model(*files_ / "long.gguf", {.n_ctx = 1 << 19});
  }
  static void TearDownTestSuite() { delete files_; }
  static std::string model() { return (*files_ / "tiny.gguf").string(); }
  static std::string long_model() { return (*files_ / "long.gguf").string(); }
  static std::vector<std::string> args(std::vector<std::string> more) {
    std::vector<std::string> all = {"run", "-m", model(), "--device", "cpu"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  static json run_json(std::vector<std::string> more) {
    more.push_back("--json");
    const Outcome o = hearth(args(std::move(more)));
    EXPECT_EQ(o.status, 0) << o.err;
    return json::parse(o.out);
  }

 private:
  static inline TempDir* files_ = nullptr;
};

TEST_F(Run, TextOnStdoutAndFiguresOnStderr) {
  const Outcome o = hearth(args({"-p", "the", "-n", "5", "--temp", "0", "--ignore-eos"}));
  EXPECT_EQ(o.status, 0);
  EXPECT_EQ(o.out.rfind("the", 0), 0u) << o.out;
  EXPECT_EQ(o.out.back(), '\n');
  for (const char* figure : {"load time =", "prompt eval time =", "eval time =", "total time =", "tokens per second)",
                             "ms per token,", "density =", "memory = model", "KV cache", "process peak =", "seed ="}) {
    EXPECT_NE(o.err.find(figure), std::string::npos) << figure << " is missing in\n" << o.err;
  }
  EXPECT_NE(o.err.find("llama"), std::string::npos) << "the first line tells the model";
  EXPECT_NE(o.err.find("sparsity exact"), std::string::npos) << o.err;
  EXPECT_EQ(o.err.find("process peak"), o.err.rfind("process peak")) << "told once";
  EXPECT_EQ(hearth(args({"-q", "-p", "the", "-n", "5", "--temp", "0"})).err, "");
}

// Copied weights are a part of the memory that is told, and change nothing else.
TEST_F(Run, FromTheMappingOrFromACopy) {
  const std::vector<std::string> rest = {"-p", "the", "-n", "5", "--temp", "0", "--ignore-eos"};
  std::vector<std::string> mapped = rest, copied = rest, both = rest;
  mapped.push_back("--mmap"), copied.push_back("--no-mmap");
  both.insert(both.end(), {"--mmap", "--no-mmap"});
  const Outcome of_mapped = hearth(args(mapped)), of_copied = hearth(args(copied));
  EXPECT_EQ(of_mapped.out, of_copied.out);
  EXPECT_EQ(of_mapped.err.find(", weights "), std::string::npos) << of_mapped.err;
  EXPECT_NE(of_copied.err.find(", weights "), std::string::npos) << of_copied.err;
  EXPECT_NE(hearth(args(both)).err.find(" excludes "), std::string::npos);
}

TEST_F(Run, PromptFromFileAndStdin) {
  const std::vector<std::string> rest = {"-q", "-n", "3", "--temp", "0", "--ignore-eos"};
  std::vector<std::string> with_p = rest, with_f = rest;
  with_p.insert(with_p.end(), {"-p", "the hearth"});
  const std::string expected = hearth(args(with_p)).out;
  EXPECT_EQ(hearth(args(rest), "the hearth\n").out, expected);
  TempDir dir;
  std::ofstream(dir / "p.txt") << "the hearth\n";
  with_f.insert(with_f.end(), {"-f", (dir / "p.txt").string()});
  EXPECT_EQ(hearth(args(with_f)).out, expected);
  with_f.back() = "-";
  EXPECT_EQ(hearth(args(with_f), "the hearth\n").out, expected);
}

TEST_F(Run, TheSameSeedGivesTheSameText) {
  const std::vector<std::string> flags = {"-p", "the", "-n", "20", "--ignore-eos", "-s", "7"};
  const json first = run_json(flags), second = run_json(flags);
  EXPECT_EQ(first["ids"], second["ids"]);
  EXPECT_EQ(first["seed"], 7);
  std::vector<std::string> other = flags;
  other.back() = "8";
  EXPECT_NE(run_json(other)["ids"], first["ids"]);  // 20 draws of 40 candidates agree with probability 1e-20 or so
  std::vector<std::string> random = flags;
  random.back() = "-1";
  const json drawn = run_json(random);
  random.back() = std::to_string(drawn["seed"].get<uint64_t>());
  EXPECT_EQ(run_json(random)["ids"], drawn["ids"]) << "the printed seed repeats the run";
}

TEST_F(Run, GreedyOnTheDeviceEqualsGreedySampling) {
  // A penalty of nearly nothing takes the other way, through the sampler.
  const json device = run_json({"-p", "the", "-n", "12", "--temp", "0"});
  const json sampler = run_json({"-p", "the", "-n", "12", "--temp", "0", "--repeat-penalty", "1.0000001"});
  EXPECT_EQ(device["ids"], sampler["ids"]);
}

TEST_F(Run, EveryKernelSetAndThreadCountContinuesAlike) {
  const json expected = run_json({"-p", "the", "-n", "8", "--temp", "0", "--isa", "reference"});
  for (const char* threads : {"1", "2", "3"}) {
    EXPECT_EQ(run_json({"-p", "the", "-n", "8", "--temp", "0", "-t", threads})["ids"], expected["ids"]) << threads;
  }
  EXPECT_EQ(run_json({"-p", "the", "-n", "8", "--temp", "0", "--sparsity", "off"})["ids"], expected["ids"]);
}

TEST_F(Run, AContextBeyondTheTrainedOneIsAWarning) {
  const auto warns = [](const char* n_ctx) {
    const Outcome o = hearth(args({"-q", "-p", "the", "-n", "1", "-c", n_ctx}));
    EXPECT_EQ(o.status, 0) << o.err;
    return o.err;
  };
  EXPECT_EQ(warns("64"), "");
  EXPECT_EQ(warns("65"),
            "warning: the context of 65 is longer than the 64 tokens that this model was trained for: later "
            "text may make no sense\n");
}

TEST_F(Run, WhatEndsAText) {
  const json length = run_json({"-p", "the", "-n", "4", "--ignore-eos"});
  EXPECT_EQ(length["ending"], "length");
  EXPECT_EQ(length["ids"].size(), 4u);
  const json nothing = run_json({"-p", "the", "-n", "0"});
  EXPECT_EQ(nothing["ids"].size(), 0u);

  const json context = run_json({"-p", "the", "--ignore-eos"});
  EXPECT_EQ(context["ending"], "context");
  EXPECT_EQ(context["ids"].size(), 64u) << "one prompt token; the 64th drawn is not evaluated any more";
}

TEST_F(Run, StopStringsCutTheText) {
  const std::vector<std::string> flags = {"-p", "the", "-n", "40", "--temp", "0", "--ignore-eos"};
  const std::string text = run_json(flags)["text"];
  // A stop string of whole characters from the middle of the text: random weights say anything, and what is no UTF-8
  // has become U+FFFD.
  const auto begins_character = [&](size_t i) { return (static_cast<unsigned char>(text[i]) & 0xC0) != 0x80; };
  size_t begin = text.size() / 2, end = begin + 1;
  while (!begins_character(begin)) ++begin;
  while (end < text.size() && (end <= begin || !begins_character(end))) ++end;
  const std::string stop = text.substr(begin, end - begin);
  ASSERT_FALSE(stop.empty());
  std::vector<std::string> with_stop = flags;
  with_stop.insert(with_stop.end(), {"--stop", "never to be found", "--stop", stop});
  const json stopped = run_json(with_stop);
  EXPECT_EQ(stopped["ending"], "stop");
  EXPECT_EQ(stopped["text"], text.substr(0, text.find(stop)));
}

TEST_F(Run, LlamaCppFlags) {
  const Outcome cpu = hearth({"run", "-m", model(), "-p", "the", "-n", "2", "-ngl", "0"});
  EXPECT_EQ(cpu.status, 0) << cpu.err;
  EXPECT_NE(cpu.err.find("cpu ("), std::string::npos);
  const Outcome explained = hearth(args({"-p", "the", "-n", "2", "-ngl", "99"}));
  EXPECT_EQ(explained.status, 0) << explained.err;
  EXPECT_NE(explained.err.find("does not place by layers"), std::string::npos) << explained.err;
}

TEST_F(Run, ChatWrapsThePrompt) {
  const json plain = run_json({"-p", "the", "-n", "1"});
  const json chat = run_json({"-p", "the", "-n", "1", "--chat", "--chat-template", "chatml"});
  EXPECT_EQ(plain["prompt_ids"], json::array({kTinyThe}));
  EXPECT_GT(chat["prompt_ids"].size(), 20u) << "<|im_start|>user … <|im_start|>assistant, byte by byte";
}

TEST_F(Run, CtrlCEndsCleanly) {
  Program program({"run", "-m", long_model(), "--device", "cpu", "-c", "400000", "-p", "the", "--ignore-eos"});
  ASSERT_TRUE(program.wait_for_output(50));
  program.signal(SIGINT);
  const Outcome o = program.wait();
  EXPECT_EQ(o.status, 130);
  EXPECT_NE(o.err.find("eval time ="), std::string::npos) << o.err;
  EXPECT_EQ(o.out.back(), '\n');
}

TEST(Prompt, Unescapes) {
  EXPECT_EQ(tools::unescape(R"(a\nb\t\\\"\x41\q\)"), "a\nb\t\\\"A\\q\\");
  EXPECT_EQ(tools::unescape(R"(\x4)"), R"(\x4)");
}

}  // namespace
}  // namespace hearth::test
