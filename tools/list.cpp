// hearth list: which models are in the cache.
#include <algorithm>
#include <array>
#include <ctime>
#include <memory>

#include "core/log.h"
#include "core/units.h"
#include "hub/cache.h"
#include "hub/settings.h"
#include "tools/commands.h"
#include "tools/output.h"

namespace hearth::tools {
namespace {

std::string time_text(std::time_t time, const char* format, bool utc) {
  std::tm parts{};
  (utc ? gmtime_r : localtime_r)(&time, &parts);
  std::array<char, 40> text{};
  return {text.data(), std::strftime(text.data(), text.size(), format, &parts)};
}

nlohmann::ordered_json to_json(const hub::Contents& contents, const std::string& cache) {
  nlohmann::ordered_json j = {{"cache", cache}, {"models", nlohmann::ordered_json::array()}};
  for (const hub::CachedModel& m : contents.models) {
    j["models"].push_back({{"repository", m.repository},
                           {"file", m.model.path()},
                           {"type", m.model.type},
                           {"size", m.model.size()},
                           {"parts", m.model.parts.size()},
                           {"complete", m.model.missing == 0},
                           {"when", time_text(m.when, "%Y-%m-%dT%H:%M:%SZ", true)},
                           {"commit", m.commit},
                           {"current", m.current},
                           {"path", m.path.string()}});
  }
  j["unfinished"] = nlohmann::ordered_json::array();
  for (const hub::Unfinished& u : contents.unfinished)
    j["unfinished"].push_back({{"repository", u.repository}, {"size", u.size}, {"path", u.path.string()}});
  j["other_files"] = contents.n_others;
  j["other_bytes"] = contents.other_bytes;
  return j;
}

std::string table(const hub::Contents& contents) {
  std::vector<std::array<std::string, 6>> rows = {{"repository", "file", "type", "size", "when", ""}};
  for (const hub::CachedModel& m : contents.models) {
    std::string note = m.current ? "" : "an older version";
    if (m.model.missing > 0) note = fmt::format("part {} is missing", m.model.missing);
    rows.push_back({hub::printable(m.repository), hub::printable(m.model.path()), m.model.type,
                    human_bytes(m.model.size()), time_text(m.when, "%Y-%m-%d %H:%M", false), note});
  }
  std::array<size_t, 6> widths{};
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line = fmt::format("{:<{}}  {:<{}}  {:<{}}  {:>{}}  {:<{}}  {}", row[0], widths[0], row[1], widths[1],
                                   row[2], widths[2], row[3], widths[3], row[4], widths[4], row[5]);
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

void list(bool json) {
  const hub::Cache cache(hub::Settings::from_environment().cache);
  const hub::Contents contents = cache.contents();
  if (json) {
    write_out(to_json(contents, cache.root().string()).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) +
              "\n");
    return;
  }
  if (contents.models.empty()) {
    log::info("no model is in the cache '{}'; `hearth pull OWNER/NAME` brings one", cache.root().string());
  } else {
    write_out(table(contents));
  }
  for (const hub::Unfinished& u : contents.unfinished)
    log::info("unfinished: {} of a file of {}; `hearth pull` goes on, `hearth rm {}` removes it", human_bytes(u.size),
              u.repository, u.repository);
  if (contents.n_others > 0)
    log::info("files of other kinds, not listed: {} ({})", contents.n_others, human_bytes(contents.other_bytes));
}

}  // namespace

void register_list(CLI::App& app) {
  const auto json = std::make_shared<bool>(false);
  CLI::App* sub = app.add_subcommand("list", "List the models of the Hugging Face hub that are in the cache");
  sub->add_flag("--json", *json, "Print JSON: names, sizes in bytes, commits, paths")->group("General");
  sub->get_help_ptr()->group("General");
  sub->footer(
      "Models that other programs downloaded (huggingface_hub, llama.cpp) are listed, too.\n"
      "Example: hearth list --json");
  sub->callback([json] { list(*json); });
}

}  // namespace hearth::tools
