#include "offline/profile/importance_collector.h"

#include <array>
#include <string>

#include "core/error.h"

namespace hearth::offline {
namespace {

constexpr int64_t kPiece = 512;  // columns handed to a thread at once

struct Reader {
  MatrixInput input;
  const char* name;       // blk.N.NAME.weight
  const char* also = "";  // the name under which a file may have it instead
};
constexpr std::array kReaders = {
    Reader{MatrixInput::attention, "attn_q"},
    Reader{MatrixInput::attention, "attn_k"},
    Reader{MatrixInput::attention, "attn_v"},
    Reader{MatrixInput::attention, "attn_qkv"},
    Reader{MatrixInput::attn_output, "attn_output"},
    Reader{MatrixInput::ffn, "ffn_gate"},
    Reader{MatrixInput::ffn, "ffn_up"},
    Reader{MatrixInput::down, "ffn_down", "ffn_down_t"},
};

std::string tensor_name(size_t layer, std::string_view name) {
  return fmt::format("blk.{}.{}.weight", layer, name);
}

}  // namespace

ImportanceCollector::ImportanceCollector(ThreadTeam& team, const gguf::File& file, Importance& sums)
    : team_(team), file_(file), sums_(sums) {}

void ImportanceCollector::add(size_t layer, MatrixInput input, const float* rows, int64_t T, int64_t n) {
  batch_.assign(static_cast<size_t>(n), 0.0);
  team_.for_chunks(n, kPiece, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = 0; t < T; ++t) {
      const float* row = rows + t * n;
      for (int64_t i = begin; i < end; ++i) batch_[static_cast<size_t>(i)] += static_cast<double>(row[i]) * row[i];
    }
  });
  for (const Reader& r : kReaders) {
    const std::string name = tensor_name(layer, r.name);
    const bool there = file_.find_tensor(name) != nullptr || file_.find_tensor(tensor_name(layer, r.also)) != nullptr;
    if (r.input != input || !there) continue;
    Importance::Sums& sums = sums_.matrices[name];
    sums.squares.resize(batch_.size());
    sums.counts.resize(1);
    for (size_t i = 0; i < batch_.size(); ++i) sums.squares[i] += batch_[i];
    sums.counts[0] += static_cast<uint64_t>(T);
  }
}

}  // namespace hearth::offline
