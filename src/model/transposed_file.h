#pragma once
// Down projections that were quantised again, transposed, in a file beside their model, so that loading it once more
// only maps them: GGUF of architecture `hearth-transposed`, blk.N.ffn_down_t.weight as in a model, of mixtures
// ffn_down_t_exps and ffn_down_t_shexp, and
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

// A layer's transposed down projection, or those of its experts one behind the other, with data or as wanted.
struct TransposedDown {
  int64_t layer = 0;
  Matrix matrix;                    // [n_ff][n_embd], or [n_expert * n_ff][n_embd]
  std::string name = "ffn_down_t";  // or ffn_down_t_exps, ffn_down_t_shexp
  int64_t n_expert = 0;             // of ffn_down_t_exps
};

struct TransposedFile {
  gguf::File file;
  RequantizationError error;
  std::vector<TransposedDown> downs;  // views of the file, in the order in which they were wanted

  // Contents of `path`, if it is of the model with this fingerprint and has each of the wanted matrices in its type and
  // shape; nothing where there is no file, or that of another model or type. Throws Error when it cannot be read.
  static std::optional<TransposedFile> find(const std::filesystem::path& path, const std::string& fingerprint,
                                            const std::vector<TransposedDown>& wanted);
};

// Replaces the file at `path`, under a temporary name until it is complete.
void write_transposed(const std::filesystem::path& path, const std::string& fingerprint,
                      const std::vector<TransposedDown>& downs, const RequantizationError& error);

}  // namespace hearth::model
