// The HTML report: complete, self-contained, well-formed; what the sidecar lacks is said in a sentence.
#include "offline/report/report.h"

#include <gtest/gtest.h>

#include <optional>
#include <regex>

#include "core/error.h"
#include "model/model.h"
#include "offline/report/svg.h"
#include "support/paths.h"
#include "support/tiny_mixture.h"
#include "support/tiny_model.h"

namespace hearth::offline {
namespace {

// Every element is closed, in order; void elements and the doctype aside.
void expect_balanced(const std::string& html) {
  static const std::regex tag("<(/?)([a-zA-Z0-9!]+)[^<>]*?(/?)>");
  std::vector<std::string> open;
  for (auto it = std::sregex_iterator(html.begin(), html.end(), tag); it != std::sregex_iterator(); ++it) {
    const std::string name = (*it)[2];
    if (name == "!doctype" || name == "meta" || (*it)[3] == "/") continue;
    if ((*it)[1] != "/") {
      open.push_back(name);
    } else {
      ASSERT_FALSE(open.empty()) << "</" << name << "> without a beginning";
      ASSERT_EQ(open.back(), name);
      open.pop_back();
    }
  }
  EXPECT_TRUE(open.empty()) << open.back() << " is never closed";
}

class Report : public testing::Test {
 protected:
  std::string page(const model::Sidecar& sidecar) {
    PlanRequest request;
    const Planner planner(shape_of(*model_), frequencies_of(shape_of(*model_), &sidecar), request);
    return html_report(sidecar, planner, planner.plan(planner.largest_useful_budget()));
  }
  model::Sidecar profiled() {
    model::Sidecar s = model::Sidecar::empty_for(model_->file(), model_->config());
    s.model_name = "a <b> & \"c\"";
    s.statistics.source = "test";
    s.statistics.tokens = 100, s.statistics.tokens_heldout = 50;
    for (model::LayerStatistics& l : s.statistics.layers) {
      l.active_heldout.resize(l.active.size());
      for (size_t i = 0; i < l.active.size(); ++i) l.active[i] = i % 100, l.active_heldout[i] = i % 50;
    }
    return s;
  }
  test::TempDir dir_;
  std::optional<model::Model> model_ = model::Model::load(test::write_tiny_model(dir_ / "tiny.gguf"));
};

TEST_F(Report, SaysWhatIsMissing) {
  const std::string html = page(model::Sidecar::empty_for(model_->file(), model_->config()));
  for (const char* said : {"hearth profile", "hearth predictor fit", "hearth tune"}) {
    EXPECT_NE(html.find(said), std::string::npos) << said;
  }
  EXPECT_NE(html.find("What GPU memory buys"), std::string::npos);
  expect_balanced(html);
}

TEST_F(Report, IsSelfContainedAndEscapesNames) {
  const std::string html = page(profiled());
  expect_balanced(html);
  EXPECT_EQ(html.find("http"), std::string::npos);
  EXPECT_EQ(html.find("<script"), std::string::npos);
  EXPECT_NE(html.find("a &lt;b&gt; &amp; &quot;c&quot;"), std::string::npos);
  EXPECT_EQ(html.find("nan"), std::string::npos);
  EXPECT_EQ(html.find("inf"), std::string::npos);
  for (const char* said : {"prefers-color-scheme", "width=device-width", "How often neurons fire", "other text"}) {
    EXPECT_NE(html.find(said), std::string::npos) << said;
  }
}

TEST_F(Report, DrawsExpertsOfMixtures) {
  model_ = model::Model::load(test::write_tiny_mixture(dir_ / "mixture.gguf", {.n_dense_layers = 1}));
  model::Sidecar s = model::Sidecar::empty_for(model_->file(), model_->config());
  s.statistics.source = "test", s.statistics.tokens = 100;
  s.statistics.layers[0].active[0] = 40;
  for (size_t l = 1; l < 3; ++l) {
    s.statistics.layers[l].active = {0, 20, 0, 80, 100, 0};
    s.statistics.layers[l].previous = {50, 100};
  }
  const std::string html = page(s);
  expect_balanced(html);
  for (const char* said : {"How often neurons fire", "How often experts are chosen", "A token uses 2 of 6",
                           "50 % of a token", "hottest neurons and experts"}) {
    EXPECT_NE(html.find(said), std::string::npos) << said;
  }
  // The first mixture's row: the most often chosen expert, then the others by falling frequency.
  const size_t map = html.find("How often experts are chosen");
  std::vector<std::string> opacities;
  for (size_t at = map; opacities.size() < 6;) {
    at = html.find("opacity=\"", at) + 9;
    opacities.push_back(html.substr(at, 5));
  }
  EXPECT_EQ(opacities, (std::vector<std::string>{"1.000", "0.800", "0.200", "0.000", "0.000", "0.000"}));
  EXPECT_NE(html.find(">1</text>", map), std::string::npos);  // rows are named by their layers
}

TEST_F(Report, RefusesARecordThatIsNone) {
  model::Sidecar s = profiled();
  s.thresholds = model::TunedThresholds{{0.1f, 0.1f}, "{}", {}, 0};
  EXPECT_THROW(page(s), Error);
}

TEST(Svg, MarksTheKneeAndScalesToTheData) {
  const std::string svg = line_chart({"x"}, {"y"}, {{"s", {{0, 0}, {1, 1}, {2, 8}}, 1, "knee"}});
  EXPECT_NE(svg.find(">knee</text>"), std::string::npos);
  EXPECT_NE(svg.find("points=\"58.0,278.0 338.0,247.5 618.0,34.0 \""), std::string::npos) << svg;
  expect_balanced(svg);
}

TEST(Svg, LogarithmicAxesLeaveOutWhatTheyCannotShow) {
  const std::vector<Series> series = {{"s", {{0, 0}, {1, 0.01}, {2, 0.1}, {3, 1}}, 0, "knee"}};
  const std::string svg = line_chart({"x"}, {"y", 0, 0, true}, series);
  // The first point is at 0; the others are a decade apart, 122 of 244 each.
  EXPECT_NE(svg.find("points=\"244.7,278.0 431.3,156.0 618.0,34.0 \""), std::string::npos) << svg;
  EXPECT_EQ(svg.find(">knee</text>"), std::string::npos) << "a mark on a point that is not shown";
  for (const char* tick : {">0.01</text>", ">0.02</text>", ">0.1</text>", ">1</text>"}) {
    EXPECT_NE(svg.find(tick), std::string::npos) << tick;
  }
  EXPECT_EQ(svg.find("inf"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_NE(line_chart({"x"}, {"y", 0, 0, true}, {{"s", {{0, 0}}}}).find("</svg>"), std::string::npos);
}

TEST(Svg, DotsAndDashes) {
  const std::string svg = line_chart({"x"}, {"y"},
                                     {{"dots", {{0, 1}, {1, 2}}, -1, "", Series::Style::dots},
                                      {"dashes", {{0, 1}, {1, 2}}, -1, "", Series::Style::dashed}});
  EXPECT_EQ(svg.find("<polyline"), svg.rfind("<polyline"));
  EXPECT_NE(svg.find("stroke-dasharray"), std::string::npos);
  EXPECT_NE(svg.find("<circle class=\"d0\""), std::string::npos);
  expect_balanced(svg);
}

}  // namespace
}  // namespace hearth::offline
