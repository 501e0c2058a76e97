#include "tools/bundled_model.h"

namespace hearth::tools {

std::filesystem::path bundled_model() {
  std::error_code ignored;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  const std::filesystem::path model = program.parent_path().parent_path() / "share" / "hearth" / "hearth-demo.gguf";
  return !program.empty() && std::filesystem::exists(model, ignored) ? model : std::filesystem::path();
}

}  // namespace hearth::tools
