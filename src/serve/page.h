#pragma once
// The page at "/": page.html, put into the program when it is built (src/serve/CMakeLists.txt).
#include <string_view>

namespace hearth::serve {

extern const std::string_view kPage;

}  // namespace hearth::serve
