#include "tools/aliases.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string_view>

#include "core/error.h"

namespace hearth::tools {
namespace {

struct Alias {
  std::string_view from, to;
};
constexpr std::array kAliases = {
    Alias{"-ngl", "--gpu-layers"},    Alias{"-dev", "--device"},  Alias{"-mg", "--gpu"},
    Alias{"-sys", "--system-prompt"}, Alias{"-cnv", "--chat"},    Alias{"-np", "--parallel"},
    Alias{"-hf", "--hf-repo"},        Alias{"-hfr", "--hf-repo"},
};

bool is_number(std::string_view s) {
  return !s.empty() && std::all_of(s.begin(), s.end(), [](unsigned char c) {
    return std::isdigit(c) != 0 || c == '.' || c == ',' || c == '-';
  });
}

std::string subcommand_names(const CLI::App& app) {
  std::string names;
  for (const CLI::App* sub : app.get_subcommands({})) names += (names.empty() ? "" : ", ") + sub->get_name();
  return names;
}

const CLI::App* find_subcommand(const CLI::App& app, const std::string& name) {
  for (const CLI::App* sub : app.get_subcommands({})) {
    if (sub->get_name() == name) return sub;
  }
  fail("unknown subcommand '{}'; expected one of {}", name, subcommand_names(app));
}

// "predictor eval " of `hearth predictor eval`; empty for the program itself.
std::string words_of(const CLI::App& command) {
  const CLI::App* parent = command.get_parent();
  return parent != nullptr ? words_of(*parent) + command.get_name() + " " : "";
}

// How many words after this flag are its values at least.
int values_after(const CLI::App& command, const std::string& flag) {
  if (flag.find('=') != std::string::npos) return 0;
  const CLI::Option* option = command.get_option_no_throw(flag);
  return option != nullptr ? option->get_items_expected_min() : 0;
}

std::string rewrite(const CLI::App& command, const std::string& word) {
  const bool single_dash_word = word.size() > 2 && word[0] == '-' && word[1] != '-' && !is_number(word.substr(1));
  if (!single_dash_word) return word;
  const size_t equals = word.find('=');
  for (const Alias& alias : kAliases) {
    if (word.substr(0, equals) == alias.from) {
      return std::string(alias.to) + (equals == std::string::npos ? "" : word.substr(equals));
    }
  }
  const std::string flag = word.substr(0, 2), rest = word.substr(2);
  const bool glued = command.get_option_no_throw(flag) != nullptr && (is_number(rest) || rest[0] == '=');
  if (!glued) fail("unknown flag '{}'; see `hearth {}--help`", word, words_of(command));
  return word;
}

}  // namespace

std::vector<std::string> expand_aliases(const CLI::App& app, std::vector<std::string> args) {
  const CLI::App* command = &app;
  int values = 0;  // how many of the next words belong to the last flag
  for (std::string& word : args) {
    if (word == "--") break;
    if (values > 0) {
      --values;
      continue;
    }
    if (!command->get_subcommands({}).empty() && !word.empty() && word[0] != '-') {
      command = find_subcommand(*command, word);
      continue;
    }
    word = rewrite(*command, word);
    if (command == &app && app.get_option_no_throw(word) == nullptr) {
      fail("unknown flag '{}'; flags come after a subcommand, one of {}", word, subcommand_names(app));
    }
    values = values_after(*command, word);
  }
  return args;
}

}  // namespace hearth::tools
