#pragma once
// The work that an interrupted fit leaves for the next run: a directory beside the sidecar with the layers that are
// done, each a file written atomically, and the inputs that the layers under way are fitted on.
//   key          what is fitted, on what and how, as JSON; another key's work is thrown away
//   layer-N.gguf the predictor of layer N, in the sidecar's format
//   samples      sample_store.h
#include <filesystem>
#include <nlohmann/json.hpp>

#include "model/model.h"
#include "model/predictors.h"

namespace hearth::offline {

class FitWork {
 public:
  // The directory of a sidecar's fit: FILE.fit
  static std::filesystem::path directory_for(const std::filesystem::path& sidecar);

  // Makes the directory, or takes up what is there for the same key. `model` must outlive the object.
  FitWork(std::filesystem::path directory, const nlohmann::json& key, const model::Model& model);

  const std::filesystem::path& directory() const { return directory_; }
  std::filesystem::path samples() const { return directory_ / "samples"; }
  bool has(size_t layer) const;
  size_t layers_done() const;
  // Throws Error when it cannot be read or was made for another model.
  model::PredictorData load(size_t layer) const;
  void keep(size_t layer, model::PredictorData predictor) const;
  void drop_samples() const;
  void remove() const;  // the directory with all that FitWork put there

 private:
  std::filesystem::path file_of(size_t layer) const;
  std::filesystem::path directory_;
  const model::Model& model_;
};

// A stored predictor with memory of its own.
model::PredictorData owned_copy(const model::StoredPredictor& stored);

}  // namespace hearth::offline
