#pragma once
// Models with recorded results of a reference implementation (Hugging Face transformers or numpy in float): a directory
// with the checkpoint and goldens.json.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

namespace hearth::test {

struct Golden {
  std::string prompt;
  std::vector<int32_t> ids;
  std::vector<float> last_logits;  // all of them, or empty
  std::vector<int32_t> top_ids;    // of the last position
  std::vector<float> top_logits;
  std::vector<int32_t> greedy_ids;  // continuation
  double min_greedy_margin = 0;     // smallest gap between the best two logits on the way; 0 = not recorded
  std::string text;                 // prompt and continuation, or empty
  // Of mixtures: the experts chosen [layer][position of the prompt]; no positions where a layer is dense.
  std::vector<std::vector<std::vector<int32_t>>> experts;
};

struct Goldens {
  std::string ffn;  // an override of the FFN family, "relu(gate)*relu(up)", or empty
  std::vector<Golden> cases;
};

inline Goldens read_goldens(const std::filesystem::path& directory) {
  std::ifstream in(directory / "goldens.json");
  const nlohmann::json j = nlohmann::json::parse(in);
  Goldens goldens;
  if (j.contains("ffn") && j["ffn"].is_string()) goldens.ffn = j["ffn"];
  for (const auto& g : j.at("goldens")) {
    Golden c;
    c.prompt = g.value("prompt", "");
    c.ids = g.at("ids").get<std::vector<int32_t>>();
    if (g.contains("last_logits")) c.last_logits = g["last_logits"].get<std::vector<float>>();
    c.top_ids = g.at("top8_ids").get<std::vector<int32_t>>();
    c.top_logits = (g.contains("top8") ? g["top8"] : g.at("top8_logits")).get<std::vector<float>>();
    c.greedy_ids = g.at("greedy_ids").get<std::vector<int32_t>>();
    c.min_greedy_margin = g.value("min_greedy_margin", 0.0);
    c.text = g.value("text", "");
    for (const auto& layer : g.value("experts", nlohmann::json::array())) {
      c.experts.emplace_back();
      if (layer.is_null()) continue;
      for (const auto& position : layer) {
        c.experts.back().push_back(position.get<std::vector<int32_t>>());
        std::sort(c.experts.back().back().begin(), c.experts.back().back().end());
      }
    }
    goldens.cases.push_back(std::move(c));
  }
  return goldens;
}

// The larger of `worst` and |a - b|; infinite when that is not a number.
inline double worse_difference(double worst, float a, float b) {
  const double d = std::fabs(static_cast<double>(a) - b);
  return std::isnan(d) ? INFINITY : std::max(worst, d);
}

// The largest difference from the logits that are recorded: all, or the largest.
inline double golden_error(std::span<const float> logits, const Golden& g) {
  double worst = 0;
  const auto see = [&](size_t id, float recorded) { worst = worse_difference(worst, logits[id], recorded); };
  for (size_t i = 0; i < g.last_logits.size(); ++i) see(i, g.last_logits[i]);
  for (size_t i = 0; i < g.top_ids.size(); ++i) see(static_cast<size_t>(g.top_ids[i]), g.top_logits[i]);
  return worst;
}

}  // namespace hearth::test
