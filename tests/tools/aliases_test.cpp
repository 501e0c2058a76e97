// llama.cpp's flags reach the options they mean.
#include "tools/aliases.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "tools/cli.h"

namespace hearth::tools {
namespace {

std::vector<std::string> expand(std::vector<std::string> args) {
  return expand_aliases(*make_app(), std::move(args));
}

TEST(Aliases, SingleDashLongFlagsBecomeOurs) {
  EXPECT_EQ(expand({"run", "-ngl", "99", "-m", "x"}),
            (std::vector<std::string>{"run", "--gpu-layers", "99", "-m", "x"}));
  EXPECT_EQ(expand({"run", "-ngl=0"}), (std::vector<std::string>{"run", "--gpu-layers=0"}));
  EXPECT_EQ(expand({"run", "-dev", "cpu", "-sys", "s"}),
            (std::vector<std::string>{"run", "--device", "cpu", "--system-prompt", "s"}));
}

TEST(Aliases, ValuesStayAsTheyAre) {
  const std::vector<std::string> prompt = {"run", "-p", "-ngl", "-n", "-1", "--temp", "-ngl"};
  EXPECT_EQ(expand(prompt), prompt);
  const std::vector<std::string> nested = {"predictor", "eval", "--sparse-threshold", "-1e6", "-c", "16"};
  EXPECT_EQ(expand(nested), nested);
  const std::vector<std::string> glued = {"run", "-n128", "-t2"};
  EXPECT_EQ(expand(glued), glued);
  const std::vector<std::string> rest = {"quantize", "--", "-ngl"};
  EXPECT_EQ(expand(rest), rest);
}

TEST(Aliases, FlagsThatWouldBeMisreadAreRefused) {
  EXPECT_THROW(expand({"run", "-foo"}), Error);  // CLI11 would read the file "oo"
  EXPECT_THROW(expand({"run", "-model", "x"}), Error);
  EXPECT_THROW(expand({"rnu"}), Error);
}

TEST(Aliases, EveryFlagOfLlamaCppIsKnownToRun) {
  const auto app = make_app();
  const CLI::App* run = app->get_subcommand("run");
  for (const char* flag : {"-m",
                           "--model",
                           "-p",
                           "--prompt",
                           "-f",
                           "--file",
                           "-n",
                           "--predict",
                           "--n-predict",
                           "-c",
                           "--ctx-size",
                           "-b",
                           "--batch-size",
                           "-t",
                           "--threads",
                           "-s",
                           "--seed",
                           "--temp",
                           "--top-k",
                           "--top-p",
                           "--min-p",
                           "--repeat-penalty",
                           "--repeat-last-n",
                           "--ignore-eos",
                           "--gpu-layers",
                           "--n-gpu-layers",
                           "--chat-template",
                           "--no-display-prompt",
                           "--reverse-prompt",
                           "--main-gpu",
                           "-e",
                           "--escape"}) {
    EXPECT_NE(run->get_option_no_throw(flag), nullptr) << flag;
  }
}

}  // namespace
}  // namespace hearth::tools
