#pragma once
// Reads one integer vector written by torch.save(), without running what the file says: the pickle inside is parsed as
// data, by the few instructions that a saved tensor consists of, and everything else is refused.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace hearth::offline {

// The elements of a one-dimensional contiguous LongTensor or IntTensor. `file` stands for it in messages. Throws Error
// for anything else.
std::vector<int64_t> read_torch_vector(std::span<const std::byte> image, const std::string& file);

}  // namespace hearth::offline
