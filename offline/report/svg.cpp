#include "offline/report/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace hearth::offline {
namespace {

constexpr double kWidth = 640, kHeight = 320, kLeft = 62, kRight = 22, kTop = 12, kBottom = 44;
constexpr size_t kColours = 6;

// A step of 1, 2 or 5 times a power of ten that makes about five ticks.
double tick_step(double span) {
  const double raw = span / 5, power = std::pow(10, std::floor(std::log10(raw)));
  for (const double m : {1.0, 2.0, 5.0}) {
    if (raw <= m * power * 1.0001) return m * power;
  }
  return 10 * power;
}

Axis spanned(Axis axis, const std::vector<Series>& series, bool second) {
  if (axis.from != axis.to) return axis;
  double low = 0, high = 0;
  for (const Series& s : series) {
    for (const auto& [x, y] : s.points) low = std::min(low, second ? y : x), high = std::max(high, second ? y : x);
  }
  axis.from = low, axis.to = high > low ? high : low + 1;
  return axis;
}

struct Scale {
  Axis x, y;
  double px(double v) const { return kLeft + (v - x.from) / (x.to - x.from) * (kWidth - kLeft - kRight); }
  double py(double v) const { return kHeight - kBottom - (v - y.from) / (y.to - y.from) * (kHeight - kTop - kBottom); }
};

std::string axes(const Scale& s) {
  std::string out;
  const double bottom = kHeight - kBottom;
  for (double step = tick_step(s.x.to - s.x.from), v = std::ceil(s.x.from / step) * step; v <= s.x.to * 1.0001;
       v += step) {
    out += fmt::format("<line class=\"grid\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\"/>", s.px(v), kTop,
                       bottom);
    out += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.4g}</text>", s.px(v), bottom + 16, v);
  }
  for (double step = tick_step(s.y.to - s.y.from), v = std::ceil(s.y.from / step) * step; v <= s.y.to * 1.0001;
       v += step) {
    out += fmt::format("<line class=\"grid\" x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/>", kLeft,
                       kWidth - kRight, s.py(v));
    out += fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{:.4g}</text>", kLeft - 6, s.py(v) + 4, v);
  }
  out += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>", (kLeft + kWidth - kRight) / 2,
                     kHeight - 8, escape_html(s.x.name));
  out += fmt::format("<text transform=\"translate(14 {}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
                     (kTop + bottom) / 2, escape_html(s.y.name));
  return out;
}

std::string legend(const std::vector<std::string>& names) {
  std::string out = "<p class=\"legend\">";
  for (size_t i = 0; i < names.size(); ++i)
    out += fmt::format("<span><i class=\"b{}\"></i>{}</span> ", i % kColours, escape_html(names[i]));
  return out + "</p>";
}

}  // namespace

std::string escape_html(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out += c;
    }
  }
  return out;
}

std::string line_chart(const Axis& x, const Axis& y, const std::vector<Series>& series) {
  const Scale s{spanned(x, series, false), spanned(y, series, true)};
  std::string out = fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\">", kWidth, kHeight) + axes(s);
  std::vector<std::string> names;
  for (size_t i = 0; i < series.size(); ++i) {
    names.push_back(series[i].name);
    std::string points;
    for (const auto& [px, py] : series[i].points) points += fmt::format("{:.1f},{:.1f} ", s.px(px), s.py(py));
    out += fmt::format("<polyline class=\"l{}\" points=\"{}\"/>", i % kColours, points);
    if (series[i].mark < 0) continue;
    const auto& [mx, my] = series[i].points[static_cast<size_t>(series[i].mark)];
    out += fmt::format("<circle class=\"d{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"5\"/>", i % kColours, s.px(mx), s.py(my));
    const bool right = s.px(mx) > kWidth / 2;
    out += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>", s.px(mx) + (right ? -9 : 9),
                       s.py(my) - 8, right ? "end" : "start", escape_html(series[i].mark_name));
  }
  return out + "</svg>" + (names.size() > 1 ? legend(names) : "");
}

std::string heat_map(const std::vector<std::vector<double>>& rows, const std::string& x_name) {
  const double height = std::clamp(240.0 / static_cast<double>(rows.size()), 6.0, 22.0);
  const double bottom = kTop + height * static_cast<double>(rows.size());
  std::string out = fmt::format("<svg viewBox=\"0 0 {} {:.0f}\" role=\"img\">", kWidth, bottom + 34);
  const size_t every = std::max<size_t>(1, static_cast<size_t>(std::ceil(14 / height)));
  for (size_t r = 0; r < rows.size(); ++r) {
    const double y = kTop + height * static_cast<double>(r);
    const double width = (kWidth - kLeft - kRight) / static_cast<double>(rows[r].size());
    for (size_t c = 0; c < rows[r].size(); ++c) {
      out += fmt::format(
          "<rect class=\"heat\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" opacity=\"{:.3f}\"/>",
          kLeft + width * static_cast<double>(c), y, width + 0.3, height - 1, rows[r][c]);
    }
    if (r % every == 0)
      out += fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>", kLeft - 6, y + height / 2 + 4, r);
  }
  out += fmt::format("<text x=\"{}\" y=\"{:.0f}\" text-anchor=\"middle\">{}</text>", (kLeft + kWidth - kRight) / 2,
                     bottom + 20, escape_html(x_name));
  return out +
         fmt::format("<text transform=\"translate(14 {:.0f}) rotate(-90)\" text-anchor=\"middle\">layer</text></svg>",
                     (kTop + bottom) / 2);
}

std::string stacked_bars(const std::vector<std::string>& part_names, const std::vector<Bar>& bars) {
  double longest = 0;
  for (const Bar& b : bars) {
    double sum = 0;
    for (const double p : b.parts) sum += p;
    longest = std::max(longest, sum);
  }
  constexpr double kRow = 20, kValue = 76;
  std::string out = fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\">", kWidth,
                                kTop + kRow * static_cast<double>(bars.size()) + 4);
  for (size_t r = 0; r < bars.size(); ++r) {
    const double y = kTop + kRow * static_cast<double>(r);
    double x = kLeft;
    out += fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>", kLeft - 6, y + 12,
                       escape_html(bars[r].name));
    for (size_t p = 0; p < bars[r].parts.size(); ++p) {
      const double width = longest > 0 ? bars[r].parts[p] / longest * (kWidth - kLeft - kValue) : 0;
      out += fmt::format("<rect class=\"f{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"15\"/>", p % kColours,
                         x, y, width);
      x += width;
    }
    out += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", x + 6, y + 12, escape_html(bars[r].value));
  }
  return out + "</svg>" + legend(part_names);
}

std::string page_style() {
  static constexpr const char* kLight[] = {"#1f6feb", "#d9480f", "#2b8a3e", "#9c36b5", "#b08900", "#5c677d"};
  static constexpr const char* kDark[] = {"#6ea8fe", "#ff922b", "#69db7c", "#da77f2", "#ffd43b", "#adb5bd"};
  std::string out = "<style>:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--mute:#5b6470;--grid:#e2e5e9;";
  for (size_t i = 0; i < kColours; ++i) out += fmt::format("--c{}:{};", i, kLight[i]);
  out += "}@media(prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e8eaed;--mute:#9aa4b0;--grid:#2c3239;";
  for (size_t i = 0; i < kColours; ++i) out += fmt::format("--c{}:{};", i, kDark[i]);
  out +=
      "}}body{background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:0 auto;"
      "padding:1rem}h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem}svg{width:100%;height:auto;display:"
      "block}"
      "svg text{fill:var(--fg);font-size:12px}.grid{stroke:var(--grid)}polyline{fill:none;stroke-width:2}"
      ".heat{fill:var(--c1)}p.note,.legend{color:var(--mute);font-size:.9rem}.legend span{margin-right:1rem;"
      "display:inline-block}.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.35em}"
      ".scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.88rem}td,th{padding:.2rem .6rem;text-align:"
      "right;border-bottom:1px solid var(--grid);white-space:nowrap}"
      "@media(max-width:30rem){svg text{font-size:17px}body{padding:.6rem}}";
  for (size_t i = 0; i < kColours; ++i) {
    out += fmt::format(".l{0}{{stroke:var(--c{0})}}.d{0},.f{0}{{fill:var(--c{0})}}.b{0}{{background:var(--c{0})}}", i);
  }
  return out + "</style>";
}

}  // namespace hearth::offline
