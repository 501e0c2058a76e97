#pragma once
// The findings of a tuning run, as JSON (kept in the sidecar, read by reports) and as a table.
#include <nlohmann/json.hpp>
#include <string>

#include "offline/tune/tune.h"

namespace hearth::offline {

// A record's facts beside the result.
struct TuneContext {
  std::string model, fingerprint, device;
  std::vector<model::ProfiledText> texts;  // the last one is for validation when `separate_validation`
  bool separate_validation = false;
  int64_t window = 0, fit_tokens = 0, validation_tokens = 0;
};

nlohmann::json tune_record(const TuneResult& result, const TuneRequest& request, const TuneContext& context);
std::string tune_table(const TuneResult& result);

}  // namespace hearth::offline
