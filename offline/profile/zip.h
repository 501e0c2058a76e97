#pragma once
// Reads zip archives whose members are stored without compression: the container of torch.save(). Every offset is
// checked against the archive before it is used.
#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace hearth::offline {

struct ZipMember {
  std::string name;
  std::span<const std::byte> data;  // into the archive
};

// Members in the order of the archive's directory. `file` stands for the archive in messages. Throws Error for what is
// no zip archive, is damaged (a checksum is wrong, ranges overlap the end), compressed, encrypted, or in the 64-bit
// form.
std::vector<ZipMember> read_stored_zip(std::span<const std::byte> archive, const std::string& file);

}  // namespace hearth::offline
