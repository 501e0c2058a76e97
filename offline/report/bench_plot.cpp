#include "offline/report/bench_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>
#include <string_view>

#include "core/error.h"
#include "offline/report/svg.h"

namespace hearth::offline {
namespace {

using nlohmann::ordered_json;

struct Dimension {
  const char* key;
  const char* name;   // of the axis
  const char* label;  // of a line, with the value
  double scale;
};
constexpr Dimension kDimensions[] = {
    {"vram_budget", "GPU memory budget, GiB", "{:g} GiB", 1.0 / (1 << 30)},
    {"n_threads", "CPU threads", "{:g} threads", 1},
    {"n_depth", "tokens of context in use", "at {:g}", 1},
    {"link_share", "share of cold neurons read over the link", "{:g} over the link", 1},
    {"density", "active neurons, %", "{:.1f} % active", 100},
    {"n_ctx", "context length", "-c {:g}", 1},
    {"n_gen", "tokens generated", "tg{:g}", 1}};

double value_of(const ordered_json& row, const Dimension& d) {
  const auto it = row.find(d.key);
  return it != row.end() && it->is_number() ? it->get<double>() * d.scale : 0.0;
}

// Densities are measured, so they differ a little between any two rows.
double rounded(double v) {
  return std::round(v * 1000) / 1000;
}

std::vector<ordered_json> generating(const ordered_json& rows) {
  std::vector<ordered_json> found;
  for (const ordered_json& r : rows) {
    if (!r.contains("error") && r.value("n_gen", 0) > 0 && r.at("avg_ts").is_number()) found.push_back(r);
  }
  if (found.empty()) fail("nothing to plot: no result is of generating tokens; run `hearth bench` with -n above 0");
  return found;
}

size_t values_of(const std::vector<ordered_json>& rows, const Dimension& d) {
  std::set<double> values;
  for (const ordered_json& r : rows) values.insert(rounded(value_of(r, d)));
  return values.size();
}

// Density follows from the budget or the model; it is what was swept only when the model or the threshold was.
bool swept_density(const std::vector<ordered_json>& rows) {
  std::set<std::string> settings;
  for (const ordered_json& r : rows)
    settings.insert(r.at("model_filename").dump() + r.value("sparse_threshold", ordered_json()).dump());
  return settings.size() > 1;
}

bool is_density(const Dimension& d) {
  return d.key == std::string_view("density");
}

// Those that differ between the rows.
std::vector<const Dimension*> varying_in(const std::vector<ordered_json>& rows) {
  const bool densities = swept_density(rows);
  std::vector<const Dimension*> varying;
  for (const Dimension& d : kDimensions) {
    if ((!is_density(d) || densities) && values_of(rows, d) > 1) varying.push_back(&d);
  }
  return varying;
}

// Rows of one line of the plot, by rising x.
struct Line {
  std::string name;  // what tells it from the others; empty when it is the only one
  std::vector<std::pair<double, ordered_json>> points;
};

std::vector<Line> lines_of(const std::vector<ordered_json>& rows, const std::vector<const Dimension*>& varying,
                           const Dimension& x) {
  std::vector<Line> lines;
  for (const ordered_json& r : rows) {
    std::string name;
    for (const Dimension* d : varying) {
      if (d == &x || is_density(*d)) continue;
      name += (name.empty() ? "" : ", ") + fmt::format(fmt::runtime(d->label), value_of(r, *d));
    }
    auto line = std::find_if(lines.begin(), lines.end(), [&](const Line& l) { return l.name == name; });
    if (line == lines.end()) line = lines.insert(lines.end(), {name, {}});
    line->points.emplace_back(value_of(r, x), r);
  }
  for (Line& l : lines) {
    std::stable_sort(l.points.begin(), l.points.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  }
  return lines;
}

// Nothing where no row has the figure.
void add_series(std::vector<Series>& all, const Line& line, const char* key, const std::string& name) {
  Series s{.name = line.name.empty() ? name : name + ", " + line.name, .points = {}, .mark_name = {}};
  for (const auto& [x, row] : line.points) {
    const auto it = row.find(key);
    if (it != row.end() && it->is_number()) s.points.emplace_back(x, it->get<double>());
  }
  if (!s.points.empty()) all.push_back(std::move(s));
}

}  // namespace

std::string bench_plot_svg(const ordered_json& all) {
  const std::vector<ordered_json> rows = generating(all);
  const std::vector<const Dimension*> varying = varying_in(rows);
  const Dimension* x = varying.empty() ? &kDimensions[0] : varying.front();
  for (const Dimension* d : varying) {
    if (values_of(rows, *d) > values_of(rows, *x)) x = d;
  }
  const std::vector<Line> lines = lines_of(rows, varying, *x);
  std::vector<Series> series;
  for (const Line& line : lines) {
    add_series(series, line, "avg_ts", "measured");
    add_series(series, line, "floor_ts", "floor");
    if (lines.size() == 1) add_series(series, line, "expected_ts", "plan");
  }
  const ordered_json& first = rows.front();
  const std::filesystem::path file = first.at("model_filename").get<std::string>();
  const bool one_model = std::all_of(rows.begin(), rows.end(), [&](const ordered_json& r) {
    return r.at("model_filename") == first.at("model_filename");
  });
  const std::string model = one_model ? file.filename().string() : first.value("model_type", std::string("models"));
  return line_chart_file(fmt::format("{}: tokens per second ({})", model, first.value("device", std::string("?"))),
                         {.name = x->name}, {.name = "tokens per second"}, series);
}

}  // namespace hearth::offline
