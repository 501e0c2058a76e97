#pragma once
// How --help looks: groups of flags, descriptions wrapped to the usual width, defaults and values in words.
#include <CLI/CLI.hpp>
#include <string>

namespace hearth::tools {

class HelpFormatter : public CLI::FormatterBase {
 public:
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;
};

// Breaks text at spaces so that no line exceeds `width`, lines after the first indented by `indent` spaces. The first
// line is taken to begin at column `column`. Line breaks in the text stay.
std::string wrap(const std::string& text, size_t column, size_t indent, size_t width);

}  // namespace hearth::tools
