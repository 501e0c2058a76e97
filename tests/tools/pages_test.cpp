// Man pages, completions and --help name the same flags.
#include "tools/pages/pages.h"

#include <algorithm>
#include <regex>
#include <set>

#include "tools/cli.h"
#include "tools/help_formatter.h"

#include "scripts.h"

namespace hearth::test {
namespace {

using Names = std::set<std::string>;

// The flags at the beginnings of lines of an option list: "  -n, --predict N".
Names flags_at_line_starts(const std::string& text, const std::regex& line_start) {
  static const std::regex flag(R"((--?[a-zA-Z][\w-]*),?)");
  Names names;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!std::regex_search(line, line_start)) continue;
    std::istringstream words(line);
    std::smatch match;
    for (std::string word; words >> word && std::regex_match(word, match, flag);) names.insert(match[1]);
  }
  return names;
}

// A man page with its fonts and escapes taken out.
std::string plain(const std::string& page) {
  const std::string without_fonts = std::regex_replace(page, std::regex(R"(\\f[BIR])"), "");
  return std::regex_replace(without_fonts, std::regex(R"(\\-)"), "-");
}

Names all_flags(const CLI::App& command) {
  Names names;
  for (const CLI::Option* o : command.get_options()) {
    for (const std::string& name : tools::option_names(*o)) names.insert(name);
  }
  return names;
}

std::vector<std::string> words_of(const CLI::App& command) {
  std::istringstream in(tools::command_name(command));
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return {words.begin() + 1, words.end()};
}

TEST(Pages, HelpAndManPageNameTheSameFlags) {
  static const std::regex in_help("^  --?[a-zA-Z]"), in_page("^--?[a-zA-Z]");
  const auto app = tools::make_app();
  size_t flags = 0;
  for (const CLI::App* command : tools::all_commands(*app)) {
    SCOPED_TRACE(tools::command_name(*command));
    std::vector<std::string> args = words_of(*command);
    args.push_back("--help");
    const Names help = flags_at_line_starts(hearth(args).out, in_help);
    EXPECT_EQ(help, all_flags(*command));
    EXPECT_EQ(flags_at_line_starts(plain(tools::man_page(*command)), in_page), help);
    flags += help.size();
  }
  EXPECT_GE(flags, 300u);
}

TEST(Pages, ManPagesEscapeWhatRoffWouldRead) {
  CLI::App app("Does it. Or 'not'", "tool");
  bool odd = false;
  app.add_flag("--odd", odd, ".begins with a dot, \\n and a `quote`");
  app.footer("'tis a note.\nExample: tool --odd");
  const std::string page = tools::man_page(app);
  EXPECT_NE(page.find("\n\\&.begins with a dot, \\en and a \\(gaquote\\(ga\n"), std::string::npos) << page;
  EXPECT_NE(page.find("\n\\(aqtis a note."), std::string::npos) << page;
  EXPECT_NE(page.find(".SH EXAMPLES\n.nf\n\\fBtool \\-\\-odd\\fR\n"), std::string::npos) << page;
}

// What a shell offers behind the last of these words.
std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line.substr(0, line.find('\t')));
  std::sort(lines.begin(), lines.end());
  return lines;
}

class Bash {
 public:
  Bash() { std::ofstream(files_ / "completion") << tools::bash_completion(*tools::make_app()); }
  std::vector<std::string> offers(const std::string& words) const {
    const std::string script =
        "cd " + files_.path().string() + "; source ./completion; COMP_WORDS=(" + words +
        "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _hearth; printf \"%s\\n\" \"${COMPREPLY[@]}\"";
    const Outcome o = shell("bash -c '" + script + "'", files_);
    EXPECT_EQ(o.err, "");
    std::vector<std::string> lines = lines_of(o.out);
    if (lines == std::vector<std::string>{""}) lines.clear();
    return lines;
  }
  TempDir files_;
};

using Words = std::vector<std::string>;

TEST(Completions, BashOffersSubcommandsFlagsWordsAndFiles) {
  const Bash bash;
  std::ofstream(bash.files_ / "a model.gguf") << "x";
  EXPECT_EQ(bash.offers("hearth pr"), (Words{"predictor", "profile"}));
  EXPECT_EQ(bash.offers("hearth predictor \"\""), (Words{"compare", "eval", "fit"}));
  EXPECT_EQ(bash.offers("hearth run --devi"), Words{"--device"});
  EXPECT_EQ(bash.offers("hearth run --device c"), (Words{"cpu", "cuda"}));
  EXPECT_EQ(bash.offers("hearth run --device = c"), (Words{"cpu", "cuda"}));
  EXPECT_EQ(bash.offers("hearth run --device ="), (Words{"auto", "cpu", "cuda"}));
  EXPECT_EQ(bash.offers("hearth predictor fit -t 2 --method g"), Words{"gate-bits"});
  EXPECT_EQ(bash.offers("hearth run -m a"), Words{"a model.gguf"});
  EXPECT_EQ(bash.offers("hearth inspect a"), Words{"a model.gguf"});
  EXPECT_EQ(bash.offers("hearth run -n a"), Words{});
  EXPECT_EQ(bash.offers("hearth detokenize a"), Words{});
}

TEST(Completions, BashOffersEveryFlag) {
  const Bash bash;
  const auto app = tools::make_app();
  for (const CLI::App* command : tools::all_commands(*app)) {
    const Words offered = bash.offers(tools::command_name(*command) + " -");
    EXPECT_EQ(Names(offered.begin(), offered.end()), all_flags(*command)) << tools::command_name(*command);
  }
}

bool is_installed(const std::string& program, const TempDir& files) {
  return shell("command -v " + program, files).status == 0;
}

TEST(Completions, FishOffersEveryFlag) {
  TempDir files;
  if (!is_installed("fish", files)) GTEST_SKIP() << "fish is not installed";
  const auto app = tools::make_app();
  std::ofstream(files / "completion") << tools::fish_completion(*app);
  for (const CLI::App* command : tools::all_commands(*app)) {
    const std::string name = tools::command_name(*command);
    const auto offers = [&](const std::string& begin) {
      const Outcome o = shell("HOME=" + files.path().string() + " fish --no-config -c 'source " +
                                  (files / "completion").string() + "; complete -C \"" + name + " " + begin + "\"'",
                              files);
      EXPECT_EQ(o.err, "");
      return lines_of(o.out);
    };
    Names offered;
    for (const std::string& word : offers("-")) offered.insert(word);
    for (const std::string& word : offers("--")) offered.insert(word);
    EXPECT_EQ(offered, all_flags(*command)) << name;
  }
}

TEST(Completions, ZshReadsThem) {
  TempDir files;
  if (!is_installed("zsh", files)) GTEST_SKIP() << "zsh is not installed";
  const auto app = tools::make_app();
  std::ofstream(files / "_hearth") << tools::zsh_completion(*app);
  const Outcome o = shell("zsh -n " + (files / "_hearth").string(), files);
  EXPECT_EQ(o.status, 0);
  EXPECT_EQ(o.err, "");
  const std::string text = slurp(files / "_hearth");
  for (const CLI::App* command : tools::all_commands(*app)) {
    for (const std::string& flag : all_flags(*command)) EXPECT_NE(text.find(flag), std::string::npos) << flag;
  }
}

}  // namespace
}  // namespace hearth::test
