#pragma once
// Down projections that were quantised again, transposed, in a file beside their model, so that loading it once more
// only maps them: GGUF of architecture `hearth-transposed`, blk.N.ffn_down_t.weight as in a model, and
//   hearth-transposed.model.fingerprint   string   fingerprint() of the model
//   hearth-transposed.squared_error, .squared   f64   what quantising again has changed (RequantizationError)
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "gguf/gguf.h"
#include "model/transpose_down.h"

namespace hearth::model {

// `dir/name.gguf` -> `dir/name.down_t.gguf`; of split files, without the part's number.
std::filesystem::path transposed_path(const std::filesystem::path& model);

// A layer's transposed down projection, with data or as it is wanted.
struct TransposedDown {
  int64_t layer = 0;
  Matrix matrix;
};

struct TransposedFile {
  gguf::File file;
  RequantizationError error;
  std::vector<TransposedDown> layers;  // views of the file, in the order in which they were wanted

  // Contents of `path`, if it is of the model with this fingerprint and has each of the wanted matrices in its type and
  // shape; nothing where there is no file, or that of another model or type. Throws Error when it cannot be read.
  static std::optional<TransposedFile> find(const std::filesystem::path& path, const std::string& fingerprint,
                                            const std::vector<TransposedDown>& wanted);
};

// Replaces the file at `path`, under a temporary name until it is complete.
void write_transposed(const std::filesystem::path& path, const std::string& fingerprint,
                      const std::vector<TransposedDown>& layers, const RequantizationError& error);

}  // namespace hearth::model
