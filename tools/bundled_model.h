#pragma once
// The model that `cmake --install` and the packages put beside the program.
#include <filesystem>

namespace hearth::tools {

// The bundled model, PREFIX/share/hearth/hearth-demo.gguf of the program PREFIX/bin/hearth; empty where there is none.
std::filesystem::path bundled_model();

}  // namespace hearth::tools
