#pragma once
// Sizes for people.
#include <cstddef>
#include <string>

namespace hearth {

std::string human_bytes(size_t bytes);  // "35.70 MiB"

}  // namespace hearth
