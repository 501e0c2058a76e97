// Tables and plots of compared predictors, from the JSON that `hearth predictor compare` prints.
#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include "core/error.h"
#include "offline/predictor/compare.h"

namespace hearth::offline {
namespace {

constexpr double kWidth = 760, kHeight = 480, kLeft = 70, kRight = 190, kTop = 40, kBottom = 56;
constexpr double kLowestRecall = 0.90, kHighestRatio = 3.0;
constexpr std::array<const char*, 10> kColours = {"#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd",
                                                  "#8c564b", "#e377c2", "#17becf", "#bcbd22", "#7f7f7f"};

// Recall is drawn by what is lost, 1 - recall, on a logarithmic scale from 10 % up to 0.05 %.
double y_of(double recall) {
  const double lost = std::clamp(1 - recall, 5e-4, 1 - kLowestRecall);
  const double share = std::log(lost / (1 - kLowestRecall)) / std::log(5e-4 / (1 - kLowestRecall));
  return kHeight - kBottom - share * (kHeight - kTop - kBottom);
}
double x_of(double ratio) {
  return kLeft + std::clamp(ratio, 0.0, kHighestRatio) / kHighestRatio * (kWidth - kLeft - kRight);
}

std::string text_at(double x, double y, std::string_view anchor, const std::string& text) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor, text);
}
std::string line(double x1, double y1, double x2, double y2, std::string_view style) {
  return fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" {}/>\n", x1, y1, x2, y2, style);
}

std::string axes(const std::string& title) {
  std::string out = text_at(kLeft, 22, "start", title);
  for (const double recall : {0.90, 0.95, 0.98, 0.99, 0.995, 0.999}) {
    const double y = y_of(recall);
    out += line(kLeft, y, kWidth - kRight, y, recall == 0.99 ? "stroke=\"#888\"" : "stroke=\"#ddd\"");
    out += text_at(kLeft - 8, y + 4, "end", fmt::format("{:g}%", 100 * recall));
  }
  for (double ratio = 0; ratio <= kHighestRatio; ratio += 0.5) {
    const double x = x_of(ratio);
    out += line(x, kTop, x, kHeight - kBottom, "stroke=\"#eee\"");
    out += text_at(x, kHeight - kBottom + 18, "middle", fmt::format("{:g}", ratio));
  }
  out += text_at((kLeft + kWidth - kRight) / 2, kHeight - 16, "middle", "predicted neurons / active neurons");
  out += fmt::format(
      "<text transform=\"translate(18 {:.0f}) rotate(-90)\" text-anchor=\"middle\">loss-weighted recall</text>\n",
      (kTop + kHeight - kBottom) / 2);
  return out;
}

}  // namespace

std::string markdown_table(const nlohmann::json& compared, const std::string& text, double target) {
  std::string out =
      "| predictor | bytes, of the FFN's | loss-weighted recall | recall | precision | true density | predicted | "
      "predicted / true |\n|---|---|---|---|---|---|---|---|\n";
  for (const auto& c : compared) {
    for (const auto& p : c.at("points")) {
      if (std::fabs(p.at("target").get<double>() - target) > 1e-9) continue;
      const auto& t = p.at("texts").at(text);
      const auto percent = [&](const char* key) { return 100 * t.at(key).get<double>(); };
      out += fmt::format("| {} | {:.1f} % | {:.3f} % | {:.2f} % | {:.1f} % | {:.2f} % | {:.2f} % | {:.2f} |\n",
                         c.at("name").get<std::string>(), 100 * c.at("share_of_ffn").get<double>(),
                         percent("loss_recall"), percent("recall"), percent("precision"), percent("density"),
                         percent("predicted_density"), t.at("ratio").get<double>());
    }
  }
  return out;
}

std::string recall_plot_svg(const nlohmann::json& compared, const std::string& text, const std::string& title) {
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
      kWidth, kHeight);
  out += axes(title);
  size_t n = 0;
  for (const auto& c : compared) {
    const char* colour = kColours[n % kColours.size()];
    const std::string_view dash = n / kColours.size() % 2 == 0 ? "" : " stroke-dasharray=\"5 3\"";
    std::string points;
    for (const auto& p : c.at("points")) {
      const auto& t = p.at("texts").at(text);
      const double recall = t.at("loss_recall").get<double>(), ratio = t.at("ratio").get<double>();
      if (recall < kLowestRecall || ratio > kHighestRatio) continue;
      points += fmt::format("{:.1f},{:.1f} ", x_of(ratio), y_of(recall));
    }
    const double y = kTop + 16 * static_cast<double>(n) + 8;
    out += fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.8\"{}/>\n", points, colour,
                       dash);
    out += fmt::format(
        "<line x1=\"{:.0f}\" y1=\"{:.0f}\" x2=\"{:.0f}\" y2=\"{:.0f}\" stroke=\"{}\" stroke-width=\"2\"{}/>\n",
        kWidth - kRight + 12, y, kWidth - kRight + 34, y, colour, dash);
    out +=
        text_at(kWidth - kRight + 40, y + 4, "start",
                fmt::format("{}, {:.1f} %", c.at("name").get<std::string>(), 100 * c.at("share_of_ffn").get<double>()));
    ++n;
  }
  return out + "</svg>\n";
}

}  // namespace hearth::offline
