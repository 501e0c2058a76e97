#pragma once
// Which files of a repository are meant.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace hearth::hub {

// OWNER/NAME[:FILE|:TYPE]
struct ModelName {
  std::string repository;  // OWNER/NAME
  std::string wanted;      // a type (Q4_K_M), a file (*.gguf), or empty
};
// Throws Error for what cannot be a name on the hub.
ModelName parse_model_name(const std::string& text);

struct RepositoryFile {
  std::string path;  // with slashes, relative
  uint64_t size = 0;
  std::string etag;  // the SHA-256 of an LFS file, else Git's SHA-1; empty where unknown
};

// One model: a GGUF file, or all parts of a split one in their order.
struct ModelFiles {
  std::vector<RepositoryFile> parts;
  std::string type;    // by the name: "Q4_K_M", "F16"; empty when it names none
  size_t missing = 0;  // the number of a part that is not there; 0: all are
  uint64_t size() const;
  const std::string& path() const { return parts.front().path; }
};

// The models among `files`, ordered by path. What runs beside a model is left out (mmproj, imatrix, draft models), and
// so are hearth's own files. Throws Error for a split file of which a part is missing.
std::vector<ModelFiles> models_among(std::vector<RepositoryFile> files);
// Those of `models` that `wanted` means: all for an empty one, else a file by its path or name, or a type in any case.
std::vector<ModelFiles> matching(const std::vector<ModelFiles>& models, const std::string& wanted);

// As llama.cpp chooses: what is named, or else Q4_K_M, Q8_0, the first.
struct Choice {
  ModelFiles model;
  std::string why;  // for the user; empty when the name left nothing open
};
// Split files with a missing part are not chosen. Throws Error with the choices and their sizes when nothing fits or
// several do.
Choice choose(const std::vector<ModelFiles>& all, const ModelName& name);

// True for a relative path of plain components: nothing that leaves the folder, no control characters.
bool is_plain_path(const std::string& path);

// A name of somebody else's for a terminal: no control characters, no more than 200 bytes.
std::string printable(const std::string& text);

}  // namespace hearth::hub
