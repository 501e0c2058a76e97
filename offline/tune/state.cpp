#include "offline/tune/state.h"

#include "core/error.h"
#include "core/file.h"

namespace hearth::offline {
namespace {
constexpr const char* kFormat = "hearth tune state 1";
}

TuneState::TuneState(std::filesystem::path path, std::string key) : path_(std::move(path)), key_(std::move(key)) {
  if (!std::filesystem::exists(path_)) return;
  try {
    const nlohmann::json j = nlohmann::json::parse(read_text_file(path_));
    if (j.at("format") != kFormat) throw nlohmann::json::other_error::create(500, "another format", nullptr);
    if (j.at("key") != key_) return;
    for (const nlohmann::json& m : j.at("measurements")) {
      measurements_[{m.at("part").get<std::string>(), m.at("thresholds").get<Thresholds>()}] =
          m.at("sums").get<Measurement>();
    }
    resumed_ = !measurements_.empty();
  } catch (const nlohmann::json::exception& e) {
    fail("'{}' is no state of `hearth tune` ({}); delete it, or give another --state", path_.string(), e.what());
  }
}

Measurement& TuneState::at(const std::string& part, const Thresholds& thresholds) {
  return measurements_[{part, thresholds}];
}

void TuneState::save() const {
  nlohmann::json list = nlohmann::json::array();
  for (const auto& [key, sums] : measurements_) {
    if (sums.windows > 0) list.push_back({{"part", key.first}, {"thresholds", key.second}, {"sums", sums}});
  }
  const std::string text =
      nlohmann::json({{"format", kFormat}, {"key", key_}, {"measurements", std::move(list)}}).dump() + "\n";
  AtomicFile file(path_);
  file.write(text.data(), text.size());
  file.commit();
}

}  // namespace hearth::offline
