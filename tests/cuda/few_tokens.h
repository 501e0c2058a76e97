#pragma once
// A token's results on the GPU must have the same bits among others as alone.
#include <fmt/format.h>

#include <cstring>

#include "twin.h"

namespace hearth::test {

// Rows [T][bytes] that an operation writes on the GPU.
struct FewRows {
  template <typename T>
  FewRows(const Twin<T>& twin, int64_t n_tokens)
      : data(reinterpret_cast<std::byte*>(twin.on(kGpu))), bytes(twin.bytes() / static_cast<size_t>(n_tokens)) {}
  std::byte* data;
  size_t bytes;
};

// op(t, count) does tokens [t, t + count): all at once, then one by one, from the same state of `rows`, which must end
// the same.
inline void expect_as_alone(Device& gpu, int64_t T, const std::vector<FewRows>& rows,
                            const std::function<void(int64_t, int64_t)>& op) {
  std::vector<std::vector<std::byte>> before, together;
  const auto read = [&](const FewRows& r) {
    std::vector<std::byte> bytes(r.bytes * static_cast<size_t>(T));
    gpu.download(bytes.data(), r.data, bytes.size());
    return bytes;
  };
  for (const FewRows& r : rows) before.push_back(read(r));
  op(0, T);
  for (const FewRows& r : rows) together.push_back(read(r));
  for (size_t i = 0; i < rows.size(); ++i) gpu.upload(rows[i].data, before[i].data(), before[i].size());
  for (int64_t t = 0; t < T; ++t) op(t, 1);
  for (size_t i = 0; i < rows.size(); ++i) {
    const std::vector<std::byte> alone = read(rows[i]);
    ASSERT_NE(std::memcmp(alone.data(), before[i].data(), alone.size()), 0) << "output " << i << " was not written";
    for (int64_t t = 0; t < T; ++t) {
      const size_t at = rows[i].bytes * static_cast<size_t>(t);
      ASSERT_EQ(std::memcmp(alone.data() + at, together[i].data() + at, rows[i].bytes), 0)
          << "output " << i << " of token " << t << " of " << T;
    }
  }
}

}  // namespace hearth::test
