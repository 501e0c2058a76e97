#pragma once
// Lines that a person types: with editing and history on a terminal (libedit), as they come elsewhere.
#include <memory>
#include <optional>
#include <string>

namespace hearth::tools {

class LineEditor {
 public:
  LineEditor();
  ~LineEditor();
  LineEditor(const LineEditor&) = delete;
  LineEditor& operator=(const LineEditor&) = delete;

  // The next line without its end; none at the end of the input. `prompt` is shown on a terminal only.
  std::optional<std::string> read(const std::string& prompt);
  bool on_terminal() const { return terminal_ != nullptr; }

 private:
  struct Terminal;
  std::unique_ptr<Terminal> terminal_;  // null: no terminal
};

}  // namespace hearth::tools
