#include <algorithm>
#include <cctype>
#include <sstream>

#include "tools/help_formatter.h"
#include "tools/pages/pages.h"

namespace hearth::tools {
namespace {

// Text as roff takes it literally.
std::string roff(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool begins_line = i == 0 || text[i - 1] == '\n';
    switch (text[i]) {
      case '\\':
        out += "\\e";
        break;
      case '-':
        out += "\\-";
        break;
      case '`':
        out += "\\(ga";
        break;
      case '^':
        out += "\\(ha";
        break;
      case '~':
        out += "\\(ti";
        break;
      case '\'':
        out += "\\(aq";
        break;
      case '.':
        out += begins_line ? "\\&." : ".";
        break;
      default:
        out += text[i];
    }
  }
  return out;
}

std::string bold(const std::string& text) {
  return "\\fB" + roff(text) + "\\fR";
}

std::string italic(const std::string& text) {
  return "\\fI" + roff(text) + "\\fR";
}

std::string heading(const CLI::Option& option) {
  std::string text;
  for (const std::string& name : option_names(option)) text += (text.empty() ? "" : ", ") + bold(name);
  if (text.empty()) return italic(option.get_name(true));
  const std::string value = value_name(option);
  return value.empty() ? text : text + " " + italic(value);
}

// A footer is sentences, and lines that begin with "Example: ".
struct Footer {
  std::string notes, examples;
};
Footer split_footer(const std::string& text) {
  constexpr std::string_view kExample = "Example: ";
  Footer footer;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.compare(0, kExample.size(), kExample) == 0) {
      if (!footer.examples.empty()) footer.examples += ".PP\n";
      footer.examples += ".nf\n" + bold(line.substr(kExample.size())) + "\n.fi\n";
    } else {
      if (!footer.notes.empty()) footer.notes += ".PP\n";
      footer.notes += roff(line) + "\n";
    }
  }
  return footer;
}

std::string reference(const CLI::App& command) {
  return bold(man_page_name(command)) + "(1)";
}

std::string see_also(const CLI::App& command) {
  std::string text;
  const auto add = [&](const CLI::App& other) {
    if (&other != &command) text += (text.empty() ? "" : ",\n") + reference(other);
  };
  const CLI::App& around = command.get_parent() != nullptr ? *command.get_parent() : command;
  add(around);
  for (const CLI::App* sibling : around.get_subcommands({})) add(*sibling);
  return text;
}

}  // namespace

std::vector<const CLI::App*> all_commands(const CLI::App& app) {
  std::vector<const CLI::App*> commands = {&app};
  for (const CLI::App* sub : app.get_subcommands({})) {
    const std::vector<const CLI::App*> below = all_commands(*sub);
    commands.insert(commands.end(), below.begin(), below.end());
  }
  return commands;
}

std::string man_page_name(const CLI::App& command) {
  std::string name = command_name(command);
  std::replace(name.begin(), name.end(), ' ', '-');
  return name;
}

std::string man_page(const CLI::App& command) {
  const std::string name = man_page_name(command);
  std::string title = name;
  std::transform(title.begin(), title.end(), title.begin(), [](unsigned char c) { return std::toupper(c); });
  std::string text = ".\\\" Made from `" + command_name(command) + " --help`.\n";
  text += ".TH \"" + roff(title) + "\" 1 \"\" \"hearth " HEARTH_VERSION "\" \"hearth\"\n";
  text += ".SH NAME\n" + roff(name) + " \\- " + roff(command.get_description()) + "\n";
  text += ".SH SYNOPSIS\n" + bold(command_name(command)) + " " + roff(synopsis(command)) + "\n";
  const std::vector<const CLI::App*> below = command.get_subcommands([](const CLI::App*) { return true; });
  if (!below.empty()) text += ".SH SUBCOMMANDS\n";
  for (const CLI::App* sub : below) text += ".TP\n" + reference(*sub) + "\n" + roff(sub->get_description()) + "\n";
  text += ".SH OPTIONS\n";
  for (const std::string& group : option_groups(command)) {
    if (group != "Options") text += ".SS " + roff(group) + "\n";
    for (const CLI::Option* o : command.get_options()) {
      if (o->get_group() == group) text += ".TP\n" + heading(*o) + "\n" + roff(option_text(*o)) + "\n";
    }
  }
  const Footer footer = split_footer(command.get_footer());
  if (!footer.notes.empty()) text += ".SH NOTES\n" + footer.notes;
  if (!footer.examples.empty()) text += ".SH EXAMPLES\n" + footer.examples;
  return text + ".SH SEE ALSO\n" + see_also(command) + "\n";
}

}  // namespace hearth::tools
