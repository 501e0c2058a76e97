#include "tools/fit_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <set>

#include "core/buffer.h"
#include "core/error.h"
#include "engine/page_pool.h"
#include "tools/figures.h"

namespace hearth::tools {

uint64_t bytes_as(const model::Model& model, DType type) {
  model::Weights weights = model.weights();
  std::set<const void*> seen;
  const auto block = static_cast<uint64_t>(traits(type).block_size);
  const auto block_bytes = static_cast<uint64_t>(traits(type).block_bytes);
  uint64_t sum = 0;
  weights.for_each_matrix([&](const Matrix& m) {
    if (!seen.insert(m.data).second) return;
    const uint64_t row = (static_cast<uint64_t>(m.cols) + block - 1) / block * block_bytes;
    sum += std::min<uint64_t>(m.bytes(), static_cast<uint64_t>(m.rows) * row);
  });
  return sum;
}

std::vector<TypeSize> smaller_types(const model::Model& model) {
  std::vector<TypeSize> sizes;
  uint64_t last = model.weight_bytes();
  for (const DType type : {DType::q8_0, DType::q6_k, DType::q4_k, DType::q3_k, DType::q2_k}) {
    const uint64_t bytes = bytes_as(model, type);
    if (static_cast<double>(bytes) < 0.95 * static_cast<double>(last)) sizes.push_back({type, bytes}), last = bytes;
  }
  return sizes;
}

void check_cache_fits(int64_t n_ctx, uint64_t position_bytes, uint64_t available) {
  const auto page = static_cast<uint64_t>(kPagePositions) * position_bytes;
  const uint64_t needed = static_cast<uint64_t>(engine::pages_of(n_ctx)) * page;
  if (needed <= available) return;
  const auto most = static_cast<int64_t>(available / page) * kPagePositions;
  if (most == 0) {
    fail("a context of {} takes {} of memory for its KV cache and {} is available; nothing shorter fits either", n_ctx,
         human_bytes(needed), human_bytes(available));
  }
  fail("a context of {} takes {} of memory for its KV cache and {} is available; use -c {} or less", n_ctx,
       human_bytes(needed), human_bytes(available), most);
}

std::optional<std::string> disk_warning(const HostNeed& need) {
  if (need.weights <= need.available) return std::nullopt;
  std::string text = fmt::format(
      "the weights take {} and {} of memory is available for them: the file is mapped and runs from disk; a "
      "token reads up to {} of it",
      human_bytes(need.weights), human_bytes(need.available), human_bytes(static_cast<size_t>(need.token_bytes)));
  if (need.experts) text += ", less where its experts were used before";
  if (need.disk_rate && need.token_bytes > 0) {
    text += fmt::format("; at this disk's {:.1f} GB/s in pieces of {} KiB that is about {:.2g} tokens/s",
                        *need.disk_rate * 1e-9, kDiskPiece >> 10, *need.disk_rate / need.token_bytes);
  }
  const auto fits = std::find_if(need.smaller.begin(), need.smaller.end(),
                                 [&](const TypeSize& t) { return t.bytes <= need.available; });
  if (fits != need.smaller.end()) {
    text += fmt::format("; in {} it takes {} and fits (hearth quantize)", traits(fits->type).name,
                        human_bytes(fits->bytes));
  }
  return text;
}

std::optional<double> measure_disk(const std::filesystem::path& file) {
  using Clock = std::chrono::steady_clock;
  constexpr size_t kPiece = kDiskPiece, kMost = size_t{128} << 20;
  constexpr std::chrono::duration<double> kLimit{0.3};
  struct Descriptor {
    int fd;
    ~Descriptor() {
      if (fd >= 0) close(fd);
    }
  } const d{open(file.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC)};
  struct stat info {};
  if (d.fd < 0 || fstat(d.fd, &info) != 0 || static_cast<size_t>(info.st_size) < 2 * kPiece) return std::nullopt;
  HostBuffer buffer(kPiece);
  const auto middle = static_cast<off_t>(static_cast<size_t>(info.st_size) / 2 / kPiece * kPiece);
  const auto begin = Clock::now();
  size_t done = 0;
  double seconds = 0;
  while (done < kMost && seconds < kLimit.count()) {
    const ssize_t got = pread(d.fd, buffer.data(), kPiece, middle + static_cast<off_t>(done));
    if (got <= 0) break;
    done += static_cast<size_t>(got);
    seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    if (static_cast<size_t>(got) < kPiece) break;
  }
  if (done == 0 || seconds <= 0) return std::nullopt;
  return static_cast<double>(done) / seconds;
}

}  // namespace hearth::tools
