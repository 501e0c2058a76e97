#pragma once
// Which tensors of a Hugging Face checkpoint become which tensors of the GGUF file, under llama.cpp's names, and how
// their rows are re-ordered on the way.
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "offline/convert/hf_config.h"
#include "offline/convert/safetensors.h"

namespace hearth::convert {

enum class RowOrder {
  as_is,
  // Within each head, rows (i, i + head_dim/2) become neighbours: Hugging Face rotates halves, llama.cpp's llama family
  // pairs.
  rope_pairs,
  // Falcon's fused qkv: groups of (query heads of the group, key, value) become all queries, all keys, all values.
  falcon_qkv,
};

// Where matrices of one kind, of experts or of heads, are within one tensor, counted in its elements; of MXFP4, which is
// never transposed, in its rows: element [r][c] of matrix m is at m * matrix + r * row + c * column + first.
struct Strides {
  int64_t matrix = 0, row = 0, column = 1, first = 0;
};

struct MappedTensor {
  std::string name;  // in GGUF
  const SafeTensor* source = nullptr;
  int64_t rows = 0, cols = 0;  // a vector has cols 1
  bool vector = false;
  bool keep_f32 = false;  // positions, as in llama.cpp
  RowOrder order = RowOrder::as_is;
  // The matrices that are stacked in three dimensions, of experts or of heads. Each has rows / n_stacked rows of the
  // result. They come from a tensor each, in `each`, or all from `source`.
  int64_t n_stacked = 0;
  std::vector<const SafeTensor*> each;
  bool plus_one = false;                // the checkpoint has the values less one
  std::optional<Strides> strides = {};  // where `source` has them, if not one row behind the other
  // MXFP4, which stays as it is: `source` has the codes [..][cols / 32][16], the low one of a byte first; this one the
  // exponents [..][cols / 32].
  const SafeTensor* scales = nullptr;
};

// Every tensor the model needs, in file order: embeddings first, then layer by layer. Throws Error when one is missing,
// has another shape than config.json says or a type that is not f32, f16 or bf16 (or MXFP4, of experts of gpt-oss), or when the checkpoint has a tensor
// that the architecture does not know. `notice` hears of tensors that are left out on purpose.
std::vector<MappedTensor> map_tensors(const HfConfig& config, const Checkpoint& checkpoint,
                                      const std::function<void(std::string_view)>& notice);

// The row of the checkpoint's tensor that becomes row `row`.
int64_t source_row(const HfConfig& config, RowOrder order, int64_t row);

}  // namespace hearth::convert
