// hearth rm: removes models from the cache.
#include <unistd.h>

#include <iostream>
#include <memory>
#include <string>

#include "core/error.h"
#include "core/log.h"
#include "core/units.h"
#include "hub/cache.h"
#include "hub/settings.h"
#include "tools/commands.h"

namespace hearth::tools {
namespace {

struct Options {
  std::string name;
  bool yes = false;
};

bool confirmed() {
  log::write(log::Level::quiet, "", "Remove? [y/N]");
  std::string answer;
  return std::getline(std::cin, answer) && (answer == "y" || answer == "Y" || answer == "yes");
}

void rm(const Options& o) {
  const hub::Cache cache(hub::Settings::from_environment().cache);
  const hub::Removal removal = cache.plan_removal(hub::parse_model_name(o.name));
  if (removal.whole) {
    log::info("all of {} in '{}', {}", removal.repository, cache.folder(removal.repository).string(),
              human_bytes(removal.bytes));
  } else {
    for (const auto& path : removal.files) log::info("{}", path.string());
    log::info("{} of {}", human_bytes(removal.bytes), removal.repository);
  }
  if (!o.yes) {
    if (isatty(STDIN_FILENO) == 0) fail("there is no terminal to ask whether to remove this; give --yes");
    if (!confirmed()) return log::info("nothing was removed");
  }
  cache.remove(removal);
  log::info("removed");
}

}  // namespace

void register_rm(CLI::App& app) {
  const auto o = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("rm", "Remove models of the Hugging Face hub from the cache");
  sub->add_option("NAME", o->name, "OWNER/NAME for all of it, or with :TYPE or :FILE")->required();
  sub->add_flag("-y,--yes", o->yes, "Do not ask")->group("General");
  sub->get_help_ptr()->group("General");
  sub->footer(
      "Goes through all versions in the cache; bytes that another file needs stay. Sidecars beside a model go with "
      "it.\n"
      "Example: hearth rm ggml-org/gemma-3-1b-it-GGUF:Q8_0");
  sub->callback([o] { rm(*o); });
}

}  // namespace hearth::tools
