#pragma once
// Types of weights as the table has them, so that tests take up a new one by themselves.
#include <vector>

#include "core/dtype.h"

namespace hearth::test {

template <typename Which>
std::vector<DType> types_where(Which which) {
  std::vector<DType> types;
  for (const DTypeTraits& t : all_traits()) {
    if (t.computable() && which(t)) types.push_back(t.type);
  }
  return types;
}
// Every type that hearth computes with.
inline std::vector<DType> every_type() {
  return types_where([](const DTypeTraits&) { return true; });
}

}  // namespace hearth::test
