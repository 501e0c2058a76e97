#pragma once
// Small charts as SVG text, coloured by the page's style sheet (page_style()), so that light and dark are one file.
#include <string>
#include <utility>
#include <vector>

namespace hearth::offline {

std::string escape_html(const std::string& text);

struct Series {
  std::string name;
  std::vector<std::pair<double, double>> points = {};  // by rising x
  int mark = -1;                                       // index of a point to be marked
  std::string mark_name = {};
  enum class Style { line, dashed, dots } style = Style::line;
};
struct Axis {
  std::string name;
  double from = 0, to = 0;  // from == to: what the series span, 0 included unless `log`
  bool log = false;         // logarithmic; points at or below 0 are left out
};
std::string line_chart(const Axis& x, const Axis& y, const std::vector<Series>& series);
// The same as a file of its own, with a title, a legend, a dot for every point, and light and dark colours.
std::string line_chart_file(const std::string& title, const Axis& x, const Axis& y, const std::vector<Series>& series);

// One row of cells per layer; value in [0, 1] is the strength of the colour, whose scale is drawn below, up to `full`.
// `first`: the number of the first row's layer.
std::string heat_map(const std::vector<std::vector<double>>& rows, const std::string& x_name, const std::string& full,
                     size_t first = 0);

// Horizontal stacked bars; each part's share of the longest bar.
struct Bar {
  std::string name;
  std::vector<double> parts;
  std::string value;  // printed behind it
};
std::string stacked_bars(const std::vector<std::string>& part_names, const std::vector<Bar>& bars);

// The <style> element of a page with these charts: light and dark by prefers-color-scheme, narrow screens too.
std::string page_style();

}  // namespace hearth::offline
