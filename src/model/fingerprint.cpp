// The identity of a model file, and where its sidecar lies.
#include <xxhash.h>

#include <algorithm>
#include <regex>

#include "core/error.h"
#include "model/sidecar.h"

namespace hearth::model {
namespace {

constexpr uint64_t kSampleBytes = 256;

class Hasher {
 public:
  Hasher() : state_(XXH3_createState()) {
    HEARTH_CHECK(state_ != nullptr);
    XXH3_64bits_reset(state_);
  }
  ~Hasher() { XXH3_freeState(state_); }
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;

  void add(const void* data, size_t bytes) { XXH3_64bits_update(state_, data, bytes); }
  void add(uint64_t value) { add(&value, sizeof value); }
  void add(const std::string& text) {
    add(static_cast<uint64_t>(text.size()));
    add(text.data(), text.size());
  }
  std::string hex() const { return fmt::format("{:016x}", XXH3_64bits_digest(state_)); }

 private:
  XXH3_state_t* state_;
};

void add_tensor(Hasher& hash, const gguf::File& file, const gguf::TensorInfo& t) {
  hash.add(t.name);
  hash.add(static_cast<uint64_t>(t.traits->type));
  for (const int64_t n : t.ne) hash.add(static_cast<uint64_t>(n));
  const std::span<const std::byte> data = file.data(t);
  const uint64_t sample = std::min<uint64_t>(kSampleBytes, data.size());
  for (const uint64_t at : {uint64_t{0}, (data.size() - sample) / 2, data.size() - sample}) {
    hash.add(data.data() + at, sample);
  }
}

}  // namespace

std::string fingerprint(const gguf::File& file) {
  Hasher hash;
  hash.add(file.get<std::string>("general.architecture").value_or(""));
  hash.add(file.get<std::string>("hearth.ffn.activation").value_or(""));
  std::vector<const gguf::TensorInfo*> tensors;
  for (const gguf::TensorInfo& t : file.tensors()) tensors.push_back(&t);
  std::sort(tensors.begin(), tensors.end(), [](auto* a, auto* b) { return a->name < b->name; });
  for (const gguf::TensorInfo* t : tensors) add_tensor(hash, file, *t);
  return hash.hex();
}

std::filesystem::path sidecar_path(const std::filesystem::path& model) {
  std::string name = model.filename().string();
  if (name.ends_with(".gguf")) name.resize(name.size() - 5);
  static const std::regex part("-[0-9]{5}-of-[0-9]{5}$");
  name = std::regex_replace(name, part, "");
  return model.parent_path() / (name + ".sparse.gguf");
}

}  // namespace hearth::model
