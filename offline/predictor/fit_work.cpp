#include "offline/predictor/fit_work.h"

#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "model/sidecar.h"

namespace hearth::offline {

using model::OwnedMatrix;
using model::PredictorData;

std::filesystem::path FitWork::directory_for(const std::filesystem::path& sidecar) {
  std::filesystem::path directory = sidecar;
  directory += ".fit";
  return directory;
}

FitWork::FitWork(std::filesystem::path directory, const nlohmann::json& key, const model::Model& model)
    : directory_(std::move(directory)), model_(model) {
  const std::filesystem::path key_file = directory_ / "key";
  const std::string text = key.dump(1) + "\n";
  if (std::filesystem::exists(key_file)) {
    if (read_text_file(key_file) == text) return;
    log::info("'{}' holds an unfinished fit of something else; it is thrown away", directory_.string());
    remove();
  }
  std::error_code error;
  std::filesystem::create_directory(directory_, error);
  if (error) fail("cannot make the directory '{}': {}", directory_.string(), error.message());
  AtomicFile file(key_file);
  file.write(text.data(), text.size());
  file.commit();
}

std::filesystem::path FitWork::file_of(size_t layer) const {
  return directory_ / fmt::format("layer-{}.gguf", layer);
}

bool FitWork::has(size_t layer) const {
  return std::filesystem::exists(file_of(layer));
}

size_t FitWork::layers_done() const {
  size_t done = 0;
  for (size_t l = 0; l < model_.weights().layers.size(); ++l) done += has(l) ? 1 : 0;
  return done;
}

PredictorData FitWork::load(size_t layer) const {
  const model::Sidecar s = model::Sidecar::read(file_of(layer));
  s.check_matches(model_.file(), model_.config());
  return owned_copy(model::read_predictors(*s.file, s.n_embd, s.n_ff).at(layer));
}

void FitWork::keep(size_t layer, PredictorData predictor) const {
  model::Sidecar s = model::Sidecar::empty_for(model_.file(), model_.config());
  s.new_predictors.resize(model_.weights().layers.size());
  s.new_predictors[layer] = std::move(predictor);
  s.write(file_of(layer));
}

void FitWork::drop_samples() const {
  std::filesystem::remove(samples());
}

void FitWork::remove() const {
  for (size_t l = 0; l < model_.weights().layers.size(); ++l) std::filesystem::remove(file_of(l));
  drop_samples();
  std::filesystem::remove(directory_ / "key");
  std::error_code not_empty;  // somebody else's files stay
  std::filesystem::remove(directory_, not_empty);
}

PredictorData owned_copy(const model::StoredPredictor& stored) {
  const model::LayerPredictor& from = stored.predictor;
  const Predictor& w = from.weights;
  PredictorData p;
  if (!w) return p;
  const auto matrix = [](const Matrix& m) {
    const auto* data = static_cast<const std::byte*>(m.data);
    return m ? OwnedMatrix{m.type, m.rows, m.cols, {data, data + m.bytes()}} : OwnedMatrix{};
  };
  const auto floats = [](const Vector& v) {
    return v ? std::vector<float>(v.data, v.data + v.n) : std::vector<float>();
  };
  p.method = from.method, p.input = from.input, p.relu = w.relu, p.figures = stored.figures;
  p.fc1 = matrix(w.fc1), p.fc2 = matrix(w.fc2);
  p.fc1_bias = floats(w.fc1_bias), p.threshold = floats(w.threshold);
  return p;
}

}  // namespace hearth::offline
