#pragma once
// Importance matrices: how much each column of a matrix matters, as the mean square of what it is multiplied with. Read
// and written in llama.cpp's GGUF format (ggml-org/llama.cpp, tools/imatrix): general.type "imatrix", and for each matrix
// NAME two f32 tensors, NAME.in_sum2 [columns, n] and NAME.counts [1, n], n = 1 but for stacks of experts.
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace hearth::offline {

struct Importance {
  struct Sums {
    std::vector<double> squares;   // [n][columns]: of the inputs, summed over tokens
    std::vector<uint64_t> counts;  // [n]: tokens
  };
  std::map<std::string, Sums, std::less<>> matrices;  // by the matrix's name
  std::vector<std::string> datasets;                  // what the tokens are of
  uint32_t chunk_size = 0;                            // tokens evaluated at once
  uint32_t chunk_count = 0;

  // Throws Error when the file is no importance matrix, or damaged.
  static Importance read(const std::filesystem::path& path);
  void write(const std::filesystem::path& path) const;
  // [n][columns]: squares / counts; 1 for an expert that no token reached, as in llama.cpp. Empty when the matrix is not
  // among them.
  std::vector<float> means(std::string_view name) const;
};

}  // namespace hearth::offline
