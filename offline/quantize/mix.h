#pragma once
// Which type each matrix of a quantised file gets: the mixes that llama.cpp names (Q4_K_M, ...), by its rules
// (ggml-org/llama.cpp, src/llama-quant.cpp), and what rows get that a type's blocks do not divide.
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "gguf/gguf.h"

namespace hearth::offline {

// A named mix: most matrices are `base`, others what the rules in mix.cpp say.
struct Mix {
  const char* name;
  uint32_t file_type;  // llama.cpp's general.file_type
  DType base;
  unsigned bit;  // in the rules' sets of mixes
};

// A user's wish: one type for every matrix, or a mix.
struct FileType {
  FileType(DType type) : name(traits(type).name), base(type), file_type(traits(type).file_type) {}  // NOLINT: implicit
  explicit FileType(const Mix& m) : name(m.name), base(m.base), file_type(m.file_type), mix(&m) {}
  // Every matrix in the base type; the mix's number stays in general.file_type, as in llama.cpp.
  FileType pure() const;

  std::string name;
  DType base;
  uint32_t file_type;
  const Mix* mix = nullptr;
};

// "q4_k", in any case: one type. "q4_k_m": a mix. Names that llama.cpp has for a mix and for a type (Q2_K, Q6_K, IQ4_NL,
// IQ4_XS) mean the mix. nullopt for other names.
std::optional<FileType> parse_file_type(std::string_view name);
// For help and messages: "Q2_K, Q2_K_S, ...".
std::string mix_names();

// The facts of a model that the rules ask for.
struct MixModel {
  std::string arch;  // general.architecture
  int64_t n_layer = 0;
  int64_t n_head = 0, n_head_kv = 0;  // of the first layer
  int64_t n_expert = 0;
  bool importance = false;  // there is an importance matrix, of the down matrices too
  // Keys that are missing (a sidecar has none) stay 0.
  static MixModel of(const gguf::File& file);
};

struct MixTensor {
  std::string name;
  std::vector<int64_t> ne;
};

// The type that `type` means for each of a file's tensors, for matrices that are to be quantised at all, and before
// fitting_type(). Predictors get the base type. A file without output.weight has a tied head.
std::vector<DType> mix_types(const FileType& type, const MixModel& model, std::span<const MixTensor> tensors);

// `wanted` where its blocks divide rows of `cols`, else the nearest type with blocks of 32, else 16 bits: those of the
// source where it is bf16 or f16, f16 otherwise.
DType fitting_type(DType wanted, int64_t cols, DType source);

}  // namespace hearth::offline
