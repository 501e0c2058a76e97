// Every flag of every subcommand is explained, and --help works.
#include "tools/cli.h"
#include "tools/help_formatter.h"

#include "program.h"

namespace hearth::test {
namespace {

std::vector<std::string> subcommands() {
  std::vector<std::string> names;
  const auto app = tools::make_app();
  for (const CLI::App* sub : app->get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(sub->get_name());
  return names;
}

// Without the line breaks that wrapping put in.
std::string on_one_line(const std::string& text) {
  return tools::wrap(text, 0, 0, std::string::npos);
}

std::string joined(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return on_one_line(text);
}

TEST(Help, ThereAreTheSubcommandsOfTheManual) {
  const std::vector<std::string> names = subcommands();
  for (const char* name : {"run", "logits", "perplexity", "bench", "inspect", "convert", "quantize", "synth", "doctor",
                           "serve", "chat", "tokenize", "detokenize"}) {
    EXPECT_NE(std::find(names.begin(), names.end(), name), names.end()) << name;
  }
}

TEST(Help, EveryFlagIsExplainedInTheHelpThatIsPrinted) {
  const auto app = tools::make_app();
  for (const CLI::App* sub : app->get_subcommands([](const CLI::App*) { return true; })) {
    SCOPED_TRACE(sub->get_name());
    const Outcome help = hearth({sub->get_name(), "--help"});
    EXPECT_EQ(help.status, 0);
    EXPECT_EQ(help.err, "");
    EXPECT_NE(help.out.find("Usage: hearth " + sub->get_name()), std::string::npos) << help.out;
    EXPECT_NE(help.out.find("Example: hearth " + sub->get_name()), std::string::npos) << "no example in the footer";
    for (const CLI::Option* option : sub->get_options()) {
      EXPECT_GE(option->get_description().size(), 6u) << option->get_name();
      EXPECT_NE(joined(help.out).find(on_one_line(option->get_description())), std::string::npos) << option->get_name();
    }
  }
}

TEST(Help, NamesTheSubcommandsAndTheVersion) {
  const Outcome help = hearth({"--help"});
  EXPECT_EQ(help.status, 0);
  for (const std::string& name : subcommands()) EXPECT_NE(help.out.find("\n  " + name), std::string::npos) << name;
  const Outcome version = hearth({"--version"});
  EXPECT_EQ(version.status, 0);
  EXPECT_EQ(version.out, "hearth " HEARTH_VERSION "\n");
}

TEST(Help, NoLineIsTooWideForATerminal) {
  for (const std::string& name : subcommands()) {
    std::istringstream lines(hearth({name, "--help"}).out);
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 120u) << name << ": " << line;
  }
}

TEST(Help, WrapsAtSpaces) {
  EXPECT_EQ(tools::wrap("one two three", 0, 2, 8), "one two\n  three");
  EXPECT_EQ(tools::wrap("one two", 6, 0, 8), "one\ntwo");
  EXPECT_EQ(tools::wrap("unbreakable", 0, 2, 4), "unbreakable");
  EXPECT_EQ(tools::wrap("a\nb c", 0, 1, 80), "a\n b c");
  EXPECT_EQ(tools::wrap("", 0, 0, 80), "");
}

}  // namespace
}  // namespace hearth::test
