#pragma once
// The measurements of a tuning run so far, in a file beside the sidecar, so that an interrupted run goes on where it
// stopped and another bound needs no second sweep.
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "offline/tune/evaluate.h"

namespace hearth::offline {

class TuneState {
 public:
  // `key` says what the measurements are valid for. Measurements of another key in the file are dropped; a file that is
  // no state is an Error, so that nothing else is overwritten.
  TuneState(std::filesystem::path path, std::string key);

  // The sums of one part ("fit", "validation") under thresholds; new ones are empty.
  Measurement& at(const std::string& part, const Thresholds& thresholds);
  bool resumed() const { return resumed_; }
  void save() const;  // atomically

 private:
  std::filesystem::path path_;
  std::string key_;
  bool resumed_ = false;
  std::map<std::pair<std::string, Thresholds>, Measurement> measurements_;
};

}  // namespace hearth::offline
