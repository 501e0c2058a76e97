#include "tools/help_formatter.h"

#include <algorithm>
#include <sstream>
#include <vector>

namespace hearth::tools {
namespace {

constexpr size_t kWidth = 110, kDescriptionColumn = 34;
constexpr const char* kLastGroup = "General";

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
  return line(option_heading(option), option_text(option));
}

std::string group_text(const CLI::App& app, const std::string& group) {
  std::string text;
  for (const CLI::Option* o : app.get_options()) {
    if (o->get_group() == group) text += option_line(*o);
  }
  return text.empty() ? std::string() : "\n" + group + ":\n" + text;
}

}  // namespace

std::string command_name(const CLI::App& app) {
  return app.get_parent() != nullptr ? command_name(*app.get_parent()) + " " + app.get_name() : app.get_name();
}

std::string synopsis(const CLI::App& app) {
  std::string text;
  for (const CLI::Option* o : app.get_options()) {
    if (!o->nonpositional()) text += o->get_required() ? o->get_name(true) + " " : "[" + o->get_name(true) + "] ";
  }
  for (const CLI::Option* o : app.get_options()) {
    if (o->nonpositional() && o->get_required()) text += o->get_name(false) + " " + value_name(*o) + " ";
  }
  if (!app.get_subcommands({}).empty()) text += "SUBCOMMAND ";
  return text + "[flags]";
}

std::vector<std::string> option_names(const CLI::Option& option) {
  std::vector<std::string> names;
  for (const std::string& s : option.get_snames()) names.push_back("-" + s);
  for (const std::string& l : option.get_lnames()) names.push_back("--" + l);
  return names;
}

std::vector<std::string> value_words(const CLI::Option& option) {
  const std::string type = option.get_type_name();  // CLI11's type name is the type and the checks' texts
  const size_t set = type.find('{');
  if (option.get_items_expected_max() == 0 || set == std::string::npos) return {};
  std::istringstream in(type.substr(set + 1, type.find('}', set) - set - 1));
  std::vector<std::string> words;
  for (std::string word; std::getline(in, word, ',');) words.push_back(word);
  return words;
}

std::string value_name(const CLI::Option& option) {
  if (option.get_items_expected_max() == 0) return {};
  std::string words;
  for (const std::string& word : value_words(option)) words += (words.empty() ? "" : "|") + word;
  if (!words.empty()) return words;
  const std::string type = option.get_type_name(), plain = type.substr(0, type.find(':'));
  if (plain == "INT" || plain == "UINT") return "N";
  return plain == "FLOAT" ? "X" : plain;
}

std::string option_heading(const CLI::Option& option) {
  if (!option.nonpositional()) return option.get_name(true);
  std::string text;
  for (const std::string& name : option_names(option)) text += (text.empty() ? "" : ", ") + name;
  const std::string value = value_name(option);
  return value.empty() ? text : text + " " + value;
}

std::string option_text(const CLI::Option& option) {
  std::string text = option.get_description();
  if (const std::string d = option.get_default_str(); !d.empty()) text += " (default: " + d + ")";
  if (option.get_required() && option.nonpositional()) text += " (required)";
  return text;
}

std::vector<std::string> option_groups(const CLI::App& app) {
  std::vector<std::string> groups = app.get_groups();
  groups.erase(std::remove(groups.begin(), groups.end(), std::string()), groups.end());  // of hidden options
  std::stable_partition(groups.begin(), groups.end(), [](const std::string& g) { return g != kLastGroup; });
  return groups;
}

std::string HelpFormatter::make_help(const CLI::App* app, std::string /*name*/, CLI::AppFormatMode /*mode*/) const {
  std::string text = wrap(app->get_description(), 0, 0, kWidth) + "\n\n";
  text += "Usage: " + command_name(*app) + " " + synopsis(*app) + "\n";
  const std::vector<const CLI::App*> subcommands = app->get_subcommands([](const CLI::App*) { return true; });
  if (!subcommands.empty()) text += "\nSubcommands:\n";
  for (const CLI::App* sub : subcommands) text += line(sub->get_name(), sub->get_description());
  for (const std::string& group : option_groups(*app)) text += group_text(*app, group);
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
