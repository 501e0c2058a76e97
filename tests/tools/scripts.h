#pragma once
// Runs the scripts of tools/ with programs that stand in for those they start.
#include <gtest/gtest.h>

#include <cstdlib>

#include "program.h"

namespace hearth::test {

inline std::filesystem::path tool(const std::string& name) {
  return source_dir() / "tools" / name;
}

inline void write_program(const std::filesystem::path& path, const std::string& body) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << "#!/usr/bin/env bash\n" << body;
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
}

// A line for the shell; its stdout and stderr are kept in `files`.
inline Outcome shell(const std::string& line, const TempDir& files) {
  const std::string out = (files / "stdout").string(), err = (files / "stderr").string();
  const int status = std::system(("( " + line + " ) >'" + out + "' 2>'" + err + "'").c_str());  // NOLINT
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), slurp(out), slurp(err)};
}

inline std::string last_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.substr(text.rfind('\n') + 1);  // npos + 1 is 0
}

}  // namespace hearth::test
