#include "hub/choose.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <map>
#include <regex>

#include "core/error.h"
#include "core/units.h"

namespace hearth::hub {
namespace {

constexpr size_t kShownChoices = 20;

std::string upper(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::toupper(c); });
  return text;
}

bool ends_with(const std::string& text, std::string_view end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

std::string base_name(const std::string& path) {
  return path.substr(path.rfind('/') + 1);
}

bool is_model(const std::string& path) {
  const std::string name = upper(base_name(path));
  if (!ends_with(name, ".GGUF")) return false;
  static constexpr std::array kOthers = {"MMPROJ", "IMATRIX", "MTP-", "EAGLE3-", "DFLASH-", "DSPARK-"};  // llama.cpp's
  for (const char* other : kOthers) {
    if (name.find(other) != std::string::npos) return false;
  }
  return !ends_with(name, ".SPARSE.GGUF") && !ends_with(name, ".DOWN_T.GGUF");
}

// NAME-0000i-of-0000n.gguf
struct Part {
  std::string prefix;
  size_t number = 1, count = 1;
};
Part part_of(const std::string& path) {
  static const std::regex shape("(.+)-([0-9]{5})-of-([0-9]{5})\\.gguf");
  std::smatch m;
  if (!std::regex_match(path, m, shape)) return {path};
  return {m[1], std::stoul(m[2]), std::stoul(m[3])};
}

// Quantisations as files are named by them. What is in front may be a variant: UD-Q4_K_XL.
std::string type_of(const std::string& path) {
  static const std::regex type(
      "(?:^|[^A-Z0-9])((?:UD-)?(?:I?Q[1-9]_[A-Z0-9]+(?:_[A-Z0-9]+)*|TQ[12]_0|BF16|F16|FP16|F32|FP32|MXFP4(?:_MOE)?|"
      "NVFP4))(?=[-./]|$)");
  const std::string name = upper(base_name(path));
  std::string last;
  for (std::sregex_iterator m(name.begin(), name.end(), type), end; m != end; ++m) last = (*m)[1];
  return last;
}

// TYPE in a path, as a word of its own: "F16" is not in "BF16", "Q4_K" not in "Q4_K_M".
bool has_type(const std::string& path, const std::string& type) {
  const std::string text = upper(path), word = upper(type);
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
    const char before = at == 0 ? '/' : text[at - 1], after = text[at + word.size()];
    if (std::isalnum(static_cast<unsigned char>(before)) == 0 && (after == '-' || after == '.' || after == '/'))
      return true;
  }
  return false;
}

std::string list_of(const std::vector<ModelFiles>& models) {
  std::string text;
  for (size_t i = 0; i < std::min(models.size(), kShownChoices); ++i) {
    text += fmt::format("{}{} ({})", i > 0 ? ", " : "", models[i].path(), human_bytes(models[i].size()));
  }
  if (models.size() > kShownChoices) text += fmt::format(" and {} more", models.size() - kShownChoices);
  return text;
}

// Keeps, if models share a type, those whose name ends with exactly it: "UD-Q4_K_M" is a variant of Q4_K_M.
std::vector<ModelFiles> of_exact_type(const std::vector<ModelFiles>& models, const std::string& type) {
  std::vector<ModelFiles> exact;
  std::copy_if(models.begin(), models.end(), std::back_inserter(exact),
               [&](const ModelFiles& m) { return m.type == upper(type); });
  return exact.empty() ? models : exact;
}

}  // namespace

ModelName parse_model_name(const std::string& text) {
  const size_t colon = text.find(':');
  ModelName name{text.substr(0, colon), colon == std::string::npos ? "" : text.substr(colon + 1)};
  // The hub's rules: two words of letters, digits, '-', '_', '.'; no "--" or "..", neither '-' nor '.' at an end.
  static const std::regex word(
      "[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?/[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?");
  const std::string& r = name.repository;
  if (r.size() > 200 || !std::regex_match(r, word) || r.find("--") != std::string::npos ||
      r.find("..") != std::string::npos)
    fail("'{}' is no name of a model, OWNER/NAME[:FILE|:TYPE] was expected, as ggml-org/gemma-3-1b-it-GGUF:Q4_K_M",
         text);
  if (colon != std::string::npos && name.wanted.empty())
    fail("'{}' ends with a colon; a type (Q4_K_M) or a file was expected behind it", text);
  return name;
}

uint64_t ModelFiles::size() const {
  uint64_t sum = 0;
  for (const RepositoryFile& part : parts) sum += part.size;
  return sum;
}

std::vector<ModelFiles> models_among(std::vector<RepositoryFile> files) {
  std::sort(files.begin(), files.end(), [](const auto& a, const auto& b) { return a.path < b.path; });
  std::vector<ModelFiles> models;
  std::map<std::pair<std::string, size_t>, size_t> split;  // prefix and count -> index of the model
  for (RepositoryFile& file : files) {
    if (!is_model(file.path)) continue;
    const Part part = part_of(file.path);
    const auto [known, fresh] = split.try_emplace({part.prefix, part.count}, models.size());
    if (fresh) models.push_back({{}, type_of(file.path)});
    ModelFiles& model = models[known->second];
    if (part.number != model.parts.size() + 1 && model.missing == 0) model.missing = model.parts.size() + 1;
    model.parts.push_back(std::move(file));
  }
  for (const auto& [key, index] : split) {
    ModelFiles& model = models[index];
    if (model.parts.size() != key.second && model.missing == 0) model.missing = model.parts.size() + 1;
  }
  return models;
}

std::vector<ModelFiles> matching(const std::vector<ModelFiles>& models, const std::string& wanted) {
  if (wanted.empty()) return models;
  const bool file = ends_with(upper(wanted), ".GGUF");
  std::vector<ModelFiles> found;
  for (const ModelFiles& model : models) {
    const bool fits = file ? std::any_of(model.parts.begin(), model.parts.end(),
                                         [&](const RepositoryFile& part) {
                                           return part.path == wanted || base_name(part.path) == wanted;
                                         })
                           : has_type(model.path(), wanted);
    if (fits) found.push_back(model);
  }
  // A whole path means one file, though others in folders may be named alike.
  for (const ModelFiles& model : found) {
    for (const RepositoryFile& part : model.parts) {
      if (part.path == wanted) return {model};
    }
  }
  return file ? found : of_exact_type(found, wanted);
}

Choice choose(const std::vector<ModelFiles>& all, const ModelName& name) {
  std::vector<ModelFiles> models;  // the complete ones
  std::copy_if(all.begin(), all.end(), std::back_inserter(models), [](const ModelFiles& m) { return m.missing == 0; });
  if (models.empty() && !all.empty())
    fail("'{}' is a split file, and part {} is missing in '{}'", all.front().path(), all.front().missing,
         name.repository);
  if (models.empty()) fail("'{}' holds no GGUF model; look for a repository with -GGUF in its name", name.repository);
  std::vector<ModelFiles> found;
  std::string type = name.wanted;
  if (!name.wanted.empty()) {
    found = matching(models, name.wanted);
    if (found.empty()) fail("'{}' holds no '{}'; there is {}", name.repository, name.wanted, list_of(models));
  } else {
    for (const char* usual : {"Q4_K_M", "Q8_0"}) {
      if (found.empty()) found = matching(models, type = usual);
    }
    if (found.empty())
      return {models.front(), models.size() == 1 ? "" : "the first, as there is no Q4_K_M and no Q8_0"};
  }
  if (found.size() > 1)
    fail("'{}' holds {} models that '{}' may mean; name one as {}:FILE: {}", name.repository, found.size(), type,
         name.repository, list_of(found));
  return {found.front(), name.wanted.empty() && models.size() > 1 ? fmt::format("as no type was named, {}", type) : ""};
}

bool is_plain_path(const std::string& path) {
  constexpr size_t kLongestName = 200, kLongestPath = 1024;
  if (path.empty() || path.size() > kLongestPath) return false;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    const std::string name = path.substr(begin, end - begin);
    const bool plain =
        !name.empty() && name != "." && name != ".." && name.size() <= kLongestName &&
        std::all_of(name.begin(), name.end(), [](unsigned char c) { return c >= 0x20 && c != 0x7F && c != '\\'; });
    if (!plain) return false;
    begin = end + 1;
  }
  return true;
}

std::string printable(const std::string& text) {
  std::string out;
  for (const unsigned char c : text.substr(0, 200)) out += c < 0x20 || c == 0x7F ? '?' : static_cast<char>(c);
  return out;
}

}  // namespace hearth::hub
