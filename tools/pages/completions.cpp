#include <algorithm>
#include <utility>

#include "tools/help_formatter.h"
#include "tools/pages/pages.h"

namespace hearth::tools {
namespace {

bool is_switch(const CLI::Option& option) {
  return option.get_items_expected_max() == 0;
}
bool takes_file(const CLI::Option& option) {
  const std::string value = value_name(option);
  return value == "FILE" || value == "DIR";
}
bool may_repeat(const CLI::Option& option) {
  return option.get_items_expected_max() > 1;
}

// Whether arguments without a flag are files.
bool takes_files(const CLI::App& command) {
  const auto options = command.get_options();
  return std::any_of(options.begin(), options.end(),
                     [](const CLI::Option* o) { return !o->nonpositional() && takes_file(*o); });
}

std::string joined(const std::vector<std::string>& words, const char* between = " ") {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

// In single quotes, for every shell: a quote is closed, escaped and opened again.
std::string in_quotes(const std::string& text) {
  std::string out(1, '\'');
  for (const char c : text) {
    if (c == '\'') out += "'\\'";  // and the quote itself opens again
    out += c;
  }
  return out += '\'';
}

// The first sentence of a description, in at most a line of a terminal.
std::string brief(const std::string& description) {
  constexpr size_t kMost = 72;
  std::string text = description.substr(0, std::min(description.find("; "), description.find(". ")));
  if (text.size() <= kMost) return text;
  text.resize(text.rfind(' ', kMost - 4));
  return text + " ...";
}

std::string names_of_subcommands(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::App* sub : command.get_subcommands({})) names.push_back(sub->get_name());
  return joined(names);
}

// "predictor fit " of `hearth predictor fit`, empty for the program.
std::string path_of(const CLI::App& command) {
  return command.get_parent() == nullptr ? "" : path_of(*command.get_parent()) + command.get_name() + " ";
}

std::string bash_case(const CLI::App& command) {
  std::string flags, values;
  for (const CLI::Option* o : command.get_options()) {
    const std::vector<std::string> names = option_names(*o);
    if (names.empty()) continue;
    flags += (flags.empty() ? "" : " ") + joined(names);
    if (is_switch(*o)) continue;
    const std::string words = joined(value_words(*o));
    values += "        " + joined(names, " | ") + ") values=";
    values += takes_file(*o) ? "FILE" : words.empty() ? "NONE" : in_quotes(words);
    values += " ;;\n";
  }
  std::string text = "    " + in_quotes(" " + path_of(command)) + "*)\n";
  text += "      flags=" + in_quotes(flags) + "\n";
  const std::string below = names_of_subcommands(command);
  const std::string words = !below.empty() ? in_quotes(below) : takes_files(command) ? "FILE" : "NONE";
  text += "      words=" + words + "\n";
  if (!values.empty()) text += "      case $flag in\n" + values + "      esac\n";
  return text + "      ;;\n";
}

std::string zsh_escaped(std::string text) {
  std::string out;
  for (const char c : text) {
    if (c == '[' || c == ']' || c == ':' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

std::string zsh_function_name(const CLI::App& command) {
  std::string name = "_" + man_page_name(command);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

// '(-m --model)'{-m+,--model=}'[Model file]:FILE:_files'
std::string zsh_option(const CLI::Option& option) {
  std::vector<std::string> names = option_names(option);
  if (names.empty()) return "'*:FILE:_files'";
  const std::string before = may_repeat(option) ? "'*'" : "'(" + joined(names) + ")'";
  std::string action;
  if (!is_switch(option)) {
    for (std::string& name : names) name += name[1] == '-' ? "=" : "+";
    const std::string words = joined(value_words(option));
    const std::string message = words.empty() ? value_name(option) : "value";
    action = ":" + zsh_escaped(message) + ":";
    action += takes_file(option) ? "_files" : words.empty() ? "" : "(" + words + ")";
  }
  const std::string forms = names.size() == 1 ? names[0] : "{" + joined(names, ",") + "}";
  return before + forms + in_quotes("[" + zsh_escaped(brief(option.get_description())) + "]" + action);
}

std::string zsh_function(const CLI::App& command) {
  std::string text = zsh_function_name(command) + "() {\n";
  const std::vector<const CLI::App*> below = command.get_subcommands([](const CLI::App*) { return true; });
  if (!below.empty()) {
    text += "  if (( CURRENT > 2 )); then\n";
    text += "    local name=" + zsh_function_name(command) + "_$words[2]\n";
    text += "    (( $+functions[$name] )) || return 1\n";
    text += "    shift words\n    (( CURRENT-- ))\n    $name\n    return\n  fi\n";
    text += "  local -a subcommands=(\n";
    for (const CLI::App* sub : below) {
      text += "    " + in_quotes(sub->get_name() + ":" + zsh_escaped(brief(sub->get_description()))) + "\n";
    }
    text += "  )\n  [[ $PREFIX == -* ]] || _describe subcommand subcommands\n";
  }
  text += "  _arguments -s";
  bool files = false;  // once for all arguments without a flag
  for (const CLI::Option* o : command.get_options()) {
    if (!o->nonpositional() && (!takes_file(*o) || std::exchange(files, true))) continue;
    text += " \\\n    " + zsh_option(*o);
  }
  return text + "\n}\n\n";
}

std::string fish_lines(const CLI::App& command) {
  std::string path = path_of(command);
  if (!path.empty()) path.insert(0, " ").pop_back();
  std::string text;
  for (const CLI::App* sub : command.get_subcommands([](const CLI::App*) { return true; })) {
    text += "complete -c hearth -n '__hearth_at" + path + "' -a " + sub->get_name() + " -d " +
            in_quotes(brief(sub->get_description())) + "\n";
  }
  // Flags of a command that has subcommands come before those.
  const std::string where = command.get_subcommands({}).empty() ? "__hearth_in" : "__hearth_at";
  const std::string begin = "complete -c hearth -n '" + where + path + "'";
  for (const CLI::Option* o : command.get_options()) {
    if (!o->nonpositional()) continue;
    text += begin;
    for (const std::string& name : o->get_snames()) text += " -s " + name;
    for (const std::string& name : o->get_lnames()) text += " -l " + name;
    if (!is_switch(*o)) text += takes_file(*o) ? " -r -F" : " -x";
    if (const std::string words = joined(value_words(*o)); !words.empty()) text += " -a " + in_quotes(words);
    text += " -d " + in_quotes(brief(o->get_description())) + "\n";
  }
  return takes_files(command) ? text + begin + " -F\n" : text;
}

}  // namespace

std::string bash_completion(const CLI::App& app) {
  std::string text = R"(# bash completion for hearth, made from `hearth --help`
_hearth() {
  local current=${COMP_WORDS[COMP_CWORD]} flag=${COMP_WORDS[COMP_CWORD - 1]} flags= words= values=
  # bash takes --flag=value for three words.
  if [[ $current == = ]]; then
    current=
  elif [[ $flag == = ]]; then
    flag=${COMP_WORDS[COMP_CWORD - 2]}
  fi
  case " ${COMP_WORDS[*]:1:COMP_CWORD-1} " in
)";
  // The first pattern that fits is taken, so children come before their parents.
  std::vector<const CLI::App*> commands = all_commands(app);
  std::reverse(commands.begin(), commands.end());
  for (const CLI::App* command : commands) text += bash_case(*command);
  text += R"(  esac
  [[ -n $values ]] || values=$words
  if [[ $values == "$words" && $current == -* ]]; then values=$flags; fi
  case $values in
    NONE) COMPREPLY=() ;;
    FILE)
      compopt -o filenames 2>/dev/null
      mapfile -t COMPREPLY < <(compgen -f -- "$current")
      ;;
    *) mapfile -t COMPREPLY < <(compgen -W "$values" -- "$current") ;;
  esac
}
complete -F _hearth hearth
)";
  return text;
}

std::string zsh_completion(const CLI::App& app) {
  std::string text = "#compdef hearth\n# Made from `hearth --help`.\n\n";
  for (const CLI::App* command : all_commands(app)) text += zsh_function(*command);
  return text + "_hearth \"$@\"\n";
}

std::string fish_completion(const CLI::App& app) {
  std::string text = R"(# fish completion for hearth, made from `hearth --help`
# Whether the words before the cursor begin with these subcommands.
function __hearth_in
    set -l words (commandline -opc)
    set -e words[1]
    test (count $words) -ge (count $argv); or return 1
    set -l i 0
    for word in $argv
        set i (math $i + 1)
        test "$words[$i]" = "$word"; or return 1
    end
end
# Whether they are just these.
function __hearth_at
    __hearth_in $argv; and test (count (commandline -opc)) -eq (math (count $argv) + 1)
end
complete -c hearth -f
)";
  for (const CLI::App* command : all_commands(app)) text += fish_lines(*command);
  return text;
}

}  // namespace hearth::tools
