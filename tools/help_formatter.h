#pragma once
// How --help looks: groups of flags, descriptions wrapped to the usual width, defaults and values in words.
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace hearth::tools {

class HelpFormatter : public CLI::FormatterBase {
 public:
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;
};

// The parts of it, which man pages and completions show, too.
// "hearth predictor fit"
std::string command_name(const CLI::App& app);
// The words that go on behind the command's name: "IN OUT --model FILE [flags]".
std::string synopsis(const CLI::App& app);
// {"-n", "--predict", "--n-predict"}; empty for arguments without a flag.
std::vector<std::string> option_names(const CLI::Option& option);
// The words that its value has to be one of; empty where there is no such list.
std::vector<std::string> value_words(const CLI::Option& option);
// "N", "X", "FILE", the words with | between them; empty for a switch.
std::string value_name(const CLI::Option& option);
// "-n, --predict, --n-predict N"
std::string option_heading(const CLI::Option& option);
// Its description, its default, and whether it is required.
std::string option_text(const CLI::Option& option);
// The groups of flags in the order in which they are shown.
std::vector<std::string> option_groups(const CLI::App& app);

// Breaks text at spaces so that no line exceeds `width`, lines after the first indented by `indent` spaces. The first
// line is taken to begin at column `column`. Line breaks in the text stay.
std::string wrap(const std::string& text, size_t column, size_t indent, size_t width);

}  // namespace hearth::tools
