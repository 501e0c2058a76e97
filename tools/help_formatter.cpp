#include "tools/help_formatter.h"

#include <algorithm>
#include <sstream>
#include <vector>

namespace hearth::tools {
namespace {

constexpr size_t kWidth = 110, kDescriptionColumn = 34;
constexpr const char* kLastGroup = "General";

// "-n, --predict, --n-predict"
std::string flag_names(const CLI::Option& option) {
  std::string names;
  for (const std::string& s : option.get_snames()) names += (names.empty() ? "-" : ", -") + s;
  for (const std::string& l : option.get_lnames()) names += (names.empty() ? "--" : ", --") + l;
  return names;
}

// What follows the flag: "N", "X", "FILE", or the words it may be. CLI11's type name is the type and the checks' texts.
std::string value_name(const CLI::Option& option) {
  if (option.get_items_expected_max() == 0) return {};  // a switch
  const std::string type = option.get_type_name();
  if (const size_t set = type.find('{'); set != std::string::npos) {
    std::string words = type.substr(set + 1, type.find('}', set) - set - 1);
    std::replace(words.begin(), words.end(), ',', '|');
    return words;
  }
  const std::string plain = type.substr(0, type.find(':'));
  if (plain == "INT" || plain == "UINT") return "N";
  return plain == "FLOAT" ? "X" : plain;
}

std::string line(const std::string& left, const std::string& description) {
  std::string text = "  " + left;
  if (text.size() + 2 > kDescriptionColumn) {
    text += "\n" + std::string(kDescriptionColumn, ' ');
  } else {
    text.resize(kDescriptionColumn, ' ');
  }
  return text + wrap(description, kDescriptionColumn, kDescriptionColumn, kWidth) + "\n";
}

std::string option_line(const CLI::Option& option) {
  std::string left = option.nonpositional() ? flag_names(option) : option.get_name(true);
  const std::string value = value_name(option);
  if (option.nonpositional() && !value.empty()) left += " " + value;
  std::string description = option.get_description();
  if (const std::string d = option.get_default_str(); !d.empty()) description += " (default: " + d + ")";
  if (option.get_required() && option.nonpositional()) description += " (required)";
  return line(left, description);
}

std::string usage(const CLI::App& app, const std::string& name) {
  // The parsed name of a subcommand comes without its parents'.
  std::string text = app.get_parent() != nullptr ? app.get_parent()->get_name() + " " + app.get_name() : name;
  for (const CLI::Option* o : app.get_options()) {
    if (!o->nonpositional()) text += o->get_required() ? " " + o->get_name(true) : " [" + o->get_name(true) + "]";
  }
  for (const CLI::Option* o : app.get_options()) {
    if (o->nonpositional() && o->get_required()) text += " " + o->get_name(false) + " " + value_name(*o);
  }
  if (!app.get_subcommands({}).empty()) text += " SUBCOMMAND";
  return "Usage: " + text + " [flags]\n";
}

std::string group_text(const CLI::App& app, const std::string& group) {
  std::string text;
  for (const CLI::Option* o : app.get_options()) {
    if (o->get_group() == group) text += option_line(*o);
  }
  return text.empty() || group.empty() ? std::string() : "\n" + group + ":\n" + text;
}

}  // namespace

std::string HelpFormatter::make_help(const CLI::App* app, std::string name, CLI::AppFormatMode /*mode*/) const {
  std::string text = wrap(app->get_description(), 0, 0, kWidth) + "\n\n" + usage(*app, name);
  const std::vector<const CLI::App*> subcommands = app->get_subcommands([](const CLI::App*) { return true; });
  if (!subcommands.empty()) text += "\nSubcommands:\n";
  for (const CLI::App* sub : subcommands) text += line(sub->get_name(), sub->get_description());
  std::vector<std::string> groups = app->get_groups();
  std::stable_partition(groups.begin(), groups.end(), [](const std::string& g) { return g != kLastGroup; });
  for (const std::string& group : groups) text += group_text(*app, group);
  if (const std::string footer = app->get_footer(); !footer.empty()) text += "\n" + wrap(footer, 0, 0, kWidth) + "\n";
  return text;
}

std::string wrap(const std::string& text, size_t column, size_t indent, size_t width) {
  std::string out;
  std::istringstream lines(text);
  bool first_line = true;
  for (std::string one; std::getline(lines, one); first_line = false) {
    if (!first_line) {
      out += "\n" + std::string(indent, ' ');
      column = indent;
    }
    std::istringstream words(one);
    bool first_word = true;
    for (std::string word; words >> word; first_word = false) {
      if (!first_word && column + 1 + word.size() > width) {
        out += "\n" + std::string(indent, ' ');
        column = indent;
      } else if (!first_word) {
        out += ' ', ++column;
      }
      out += word;
      column += word.size();
    }
  }
  return out;
}

}  // namespace hearth::tools
