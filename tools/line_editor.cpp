#include "tools/line_editor.h"

#include <histedit.h>
#include <unistd.h>

#include <iostream>

namespace hearth::tools {

struct LineEditor::Terminal {
  EditLine* edit = nullptr;
  History* history = nullptr;
  std::string prompt;
};

LineEditor::LineEditor() {
  if (isatty(STDIN_FILENO) == 0 || isatty(STDOUT_FILENO) == 0) return;
  terminal_ = std::make_unique<Terminal>();
  Terminal& t = *terminal_;
  t.edit = el_init("hearth", stdin, stdout, stderr);
  t.history = history_init();
  HistEvent event;
  history(t.history, &event, H_SETSIZE, 1000);
  el_set(t.edit, EL_CLIENTDATA, &t);
  el_set(
      t.edit, EL_PROMPT, +[](EditLine* edit) -> char* {
        void* data = nullptr;
        el_get(edit, EL_CLIENTDATA, &data);
        return static_cast<Terminal*>(data)->prompt.data();
      });
  el_set(t.edit, EL_EDITOR, "emacs");
  el_set(t.edit, EL_HIST, history, t.history);
  el_set(t.edit, EL_SIGNAL, 1);
  el_source(t.edit, nullptr);  // the user's ~/.editrc
}

LineEditor::~LineEditor() {
  if (!terminal_) return;
  history_end(terminal_->history);
  el_end(terminal_->edit);
}

std::optional<std::string> LineEditor::read(const std::string& prompt) {
  std::string line;
  if (!terminal_) {
    if (!std::getline(std::cin, line)) return std::nullopt;
    return line;
  }
  terminal_->prompt = prompt;
  int n = 0;
  const char* text = el_gets(terminal_->edit, &n);
  if (text == nullptr || n <= 0) return std::nullopt;
  line.assign(text, static_cast<size_t>(n));
  HistEvent event;
  if (line != "\n") history(terminal_->history, &event, H_ENTER, line.c_str());
  while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.pop_back();
  return line;
}

}  // namespace hearth::tools
