#include "offline/report/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace hearth::offline {
namespace {

constexpr double kWidth = 640, kHeight = 330, kLeft = 58, kRight = 22, kTop = 34, kBottom = 52;
constexpr size_t kColours = 6;

Axis spanned(Axis axis, const std::vector<Series>& series, bool second) {
  if (axis.from != axis.to) return axis;
  double low = axis.log ? INFINITY : 0, high = 0;
  for (const Series& s : series) {
    for (const auto& [x, y] : s.points) {
      const double v = second ? y : x;
      if (axis.log && !(v > 0)) continue;
      low = std::min(low, v), high = std::max(high, v);
    }
  }
  if (axis.log && !(high > 0)) low = 0.1, high = 1;
  axis.from = low, axis.to = high > low ? high : low + 1;
  return axis;
}

// Steps of 1, 2 or 5 times a power of ten that make about five ticks; on a logarithmic axis the powers of ten, with 2
// and 5 times them where they are few.
std::vector<double> ticks(const Axis& axis) {
  std::vector<double> out;
  const auto add = [&](double v) {
    const double slack = 1e-4 * (axis.to - axis.from);
    if (v >= axis.from - (axis.log ? 0 : slack) && v <= axis.to + slack) out.push_back(v);
  };
  if (!axis.log) {
    const double raw = (axis.to - axis.from) / 5, power = std::pow(10, std::floor(std::log10(raw)));
    double step = 10 * power;
    for (const double m : {5.0, 2.0, 1.0}) {
      if (raw <= m * power * 1.0001) step = m * power;
    }
    for (double k = std::floor(axis.from / step); k * step <= axis.to + step; ++k) add(k * step);
    return out;
  }
  const bool few = axis.to / axis.from < 1000;
  for (double power = std::pow(10, std::floor(std::log10(axis.from))); power <= axis.to; power *= 10) {
    for (const double m : {1.0, 2.0, 5.0}) {
      if (m == 1.0 || few) add(m * power);
    }
  }
  return out;
}

struct Scale {
  Axis x, y;
  static double share(const Axis& a, double v) {
    return a.log ? std::log(v / a.from) / std::log(a.to / a.from) : (v - a.from) / (a.to - a.from);
  }
  double px(double v) const { return kLeft + share(x, v) * (kWidth - kLeft - kRight); }
  double py(double v) const { return kHeight - kBottom - share(y, v) * (kHeight - kTop - kBottom); }
  bool shows(const std::pair<double, double>& p) const { return (!x.log || p.first > 0) && (!y.log || p.second > 0); }
};

std::string axes(const Scale& s) {
  std::string out;
  const double bottom = kHeight - kBottom;
  for (const double v : ticks(s.x)) {
    out += fmt::format("<line class=\"grid\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\"/>", s.px(v), kTop,
                       bottom);
    out += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.4g}</text>", s.px(v), bottom + 18, v);
  }
  for (const double v : ticks(s.y)) {
    out += fmt::format("<line class=\"grid\" x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/>", kLeft,
                       kWidth - kRight, s.py(v));
    out += fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{:.4g}</text>", kLeft - 6, s.py(v) + 4, v);
  }
  out += fmt::format("<text class=\"axis\" x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                     (kLeft + kWidth - kRight) / 2, kHeight - 8, escape_html(s.x.name));
  return out + fmt::format("<text class=\"axis\" x=\"4\" y=\"18\">{}</text>", escape_html(s.y.name));
}

// A point's circle and name, on the side where there is room; names of later series go below their points.
std::string marked(const Scale& s, const Series& series, size_t index) {
  const auto& [x, y] = series.points[static_cast<size_t>(series.mark)];
  const bool right = s.px(x) > kWidth / 2;
  return fmt::format("<circle class=\"d{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"5\"/>", index % kColours, s.px(x),
                     s.py(y)) +
         fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>", s.px(x) + (right ? -9 : 9),
                     s.py(y) + (index % 2 == 0 ? -8 : 18), right ? "end" : "start", escape_html(series.mark_name));
}

std::string drawn(const Scale& s, const Series& series, size_t index) {
  std::string out, points;
  for (const auto& p : series.points) {
    if (!s.shows(p)) continue;
    if (series.style == Series::Style::dots) {
      out += fmt::format("<circle class=\"d{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\"/>", index % kColours, s.px(p.first),
                         s.py(p.second));
    } else {
      points += fmt::format("{:.1f},{:.1f} ", s.px(p.first), s.py(p.second));
    }
  }
  if (points.empty()) return out;
  const char* const dashes = series.style == Series::Style::dashed ? " stroke-dasharray=\"6 5\"" : "";
  return fmt::format("<polyline class=\"l{}\"{} points=\"{}\"/>", index % kColours, dashes, points);
}

std::string legend(const std::vector<std::string>& names) {
  std::string out = "<p class=\"legend\">";
  for (size_t i = 0; i < names.size(); ++i)
    out += fmt::format("<span><i class=\"b{}\"></i>{}</span> ", i % kColours, escape_html(names[i]));
  return out + "</p>";
}

// The colours of charts, light and dark.
std::string chart_style() {
  static constexpr const char* kLight[] = {"#1f6feb", "#d9480f", "#2b8a3e", "#9c36b5", "#b08900", "#5c677d"};
  static constexpr const char* kDark[] = {"#6ea8fe", "#ff922b", "#69db7c", "#da77f2", "#ffd43b", "#adb5bd"};
  std::string out = ":root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--mute:#5b6470;--grid:#e2e5e9;";
  for (size_t i = 0; i < kColours; ++i) out += fmt::format("--c{}:{};", i, kLight[i]);
  out += "}@media(prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e8eaed;--mute:#9aa4b0;--grid:#2c3239;";
  for (size_t i = 0; i < kColours; ++i) out += fmt::format("--c{}:{};", i, kDark[i]);
  out +=
      "}}text{fill:var(--fg);font-size:13px}text.axis{fill:var(--mute)}.grid{stroke:var(--grid)}"
      "polyline{fill:none;stroke-width:2}.heat{fill:var(--c1);shape-rendering:crispEdges}";
  for (size_t i = 0; i < kColours; ++i) {
    out += fmt::format(".l{0}{{stroke:var(--c{0})}}.d{0},.f{0}{{fill:var(--c{0})}}.b{0}{{background:var(--c{0})}}", i);
  }
  return out;
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
    out += drawn(s, series[i], i);
    const bool mark = series[i].mark >= 0 && s.shows(series[i].points[static_cast<size_t>(series[i].mark)]);
    if (mark) out += marked(s, series[i], i);
  }
  return out + "</svg>" + (names.size() > 1 ? legend(names) : "");
}

std::string line_chart_file(const std::string& title, const Axis& x, const Axis& y, const std::vector<Series>& series) {
  constexpr double kTitle = 30, kLegendRow = 20;
  const Scale s{spanned(x, series, false), spanned(y, series, true)};
  const double height = kTitle + kHeight + kLegendRow * static_cast<double>(series.size()) + 8;
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" font-family=\"system-ui,sans-serif\" "
      "role=\"img\">\n<style>{2}</style>\n<rect width=\"{0}\" height=\"{1}\" fill=\"var(--bg)\"/>\n"
      "<text x=\"4\" y=\"20\" font-weight=\"bold\">{3}</text>\n<g transform=\"translate(0 {4})\">",
      kWidth, height, chart_style(), escape_html(title), kTitle);
  out += axes(s);
  for (size_t i = 0; i < series.size(); ++i) {
    out += drawn(s, series[i], i);
    Series dots = series[i];
    dots.style = Series::Style::dots;
    out += drawn(s, dots, i);
    const double row = kHeight + 8 + kLegendRow * static_cast<double>(i);
    out += fmt::format("<rect class=\"f{}\" x=\"{}\" y=\"{}\" width=\"12\" height=\"12\"/>", i % kColours, kLeft, row);
    out += fmt::format("<text x=\"{}\" y=\"{}\">{}</text>\n", kLeft + 20, row + 11, escape_html(series[i].name));
  }
  return out + "</g></svg>\n";
}

std::string heat_map(const std::vector<std::vector<double>>& rows, const std::string& x_name, const std::string& full,
                     size_t first) {
  const double height = std::clamp(240.0 / static_cast<double>(rows.size()), 6.0, 22.0);
  const double bottom = kTop + height * static_cast<double>(rows.size());
  std::string out = fmt::format("<svg viewBox=\"0 0 {} {:.0f}\" role=\"img\">", kWidth, bottom + 62);
  out += "<text class=\"axis\" x=\"4\" y=\"18\">layer</text>";
  const size_t every = std::max<size_t>(1, static_cast<size_t>(std::ceil(18 / height)));
  const auto cell = [&](double x, double y, double width, double h, double strength) {
    out += fmt::format(
        "<rect class=\"heat\" x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" opacity=\"{:.3f}\"/>", x, y,
        width, h, strength);
  };
  for (size_t r = 0; r < rows.size(); ++r) {
    const double y = kTop + height * static_cast<double>(r);
    const double width = (kWidth - kLeft - kRight) / static_cast<double>(rows[r].size());
    for (size_t c = 0; c < rows[r].size(); ++c)
      cell(kLeft + width * static_cast<double>(c), y, width, height, rows[r][c]);
    if (r % every == 0)
      out += fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>", kLeft - 6, y + height / 2 + 4,
                         first + r);
  }
  out += fmt::format("<text class=\"axis\" x=\"{}\" y=\"{:.0f}\" text-anchor=\"middle\">{}</text>",
                     (kLeft + kWidth - kRight) / 2, bottom + 20, escape_html(x_name));
  constexpr int kSteps = 20;
  for (int i = 0; i < kSteps; ++i) cell(kLeft + 8 * i, bottom + 36, 8, 12, static_cast<double>(i + 1) / kSteps);
  out += fmt::format("<text x=\"{}\" y=\"{:.0f}\" text-anchor=\"end\">0</text>", kLeft - 6, bottom + 47);
  return out + fmt::format("<text x=\"{}\" y=\"{:.0f}\">{}</text></svg>", kLeft + 8 * kSteps + 6, bottom + 47,
                           escape_html(full));
}

std::string stacked_bars(const std::vector<std::string>& part_names, const std::vector<Bar>& bars) {
  double longest = 0;
  for (const Bar& b : bars) {
    double sum = 0;
    for (const double p : b.parts) sum += p;
    longest = std::max(longest, sum);
  }
  constexpr double kRow = 22, kValue = 92;
  std::string out = fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\">", kWidth,
                                kTop + kRow * static_cast<double>(bars.size()) + 4);
  out += "<text class=\"axis\" x=\"4\" y=\"18\">layer</text>";
  for (size_t r = 0; r < bars.size(); ++r) {
    const double y = kTop + kRow * static_cast<double>(r);
    double x = kLeft;
    out += fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>", kLeft - 6, y + 14,
                       escape_html(bars[r].name));
    for (size_t p = 0; p < bars[r].parts.size(); ++p) {
      const double width = longest > 0 ? bars[r].parts[p] / longest * (kWidth - kLeft - kValue) : 0;
      out += fmt::format("<rect class=\"f{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"17\"/>", p % kColours,
                         x, y, width);
      x += width;
    }
    out += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", x + 6, y + 14, escape_html(bars[r].value));
  }
  return out + "</svg>" + legend(part_names);
}

std::string page_style() {
  return "<style>" + chart_style() +
         "body{background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:0 auto;"
         "padding:1rem}h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem}svg{width:100%;height:auto;margin-"
         "bottom:.8rem;display:"
         "block}"
         "p.note,.legend{color:var(--mute);font-size:.9rem}.legend span{margin-right:1rem;"
         "display:inline-block}.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.35em}"
         ".scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.88rem}td,th{padding:.2rem .6rem;text-align:"
         "right;border-bottom:1px solid var(--grid);white-space:nowrap}"
         "@media(max-width:30rem){svg text{font-size:18px}body{padding:.6rem}table{font-size:.8rem}td,th{padding:.2rem "
         ".4rem}}"
         "</style>";
}

}  // namespace hearth::offline
