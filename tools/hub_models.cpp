#include "tools/hub_models.h"

#include <memory>

#include "core/log.h"
#include "core/units.h"
#include "tools/common.h"
#include "tools/interrupt.h"
#include "tools/progress.h"

namespace hearth::tools {

CLI::Option* add_hf_repo_option(CLI::App& sub, CLI::Option& model) {
  return sub
      .add_option_function<std::vector<std::string>>(
          "--hf-repo", [&model](const std::vector<std::string>&) { model.required(false); },
          "In place of -m, -hf for short: a model of the Hugging Face hub, OWNER/NAME[:TYPE|:FILE], as `hearth pull` "
          "brings it into the cache")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->type_name("NAME")
      ->group(model.get_group());
}

void resolve_hf_repos(CLI::App& app) {
  for (CLI::App* sub : app.get_subcommands()) {
    resolve_hf_repos(*sub);
    const CLI::Option* names = sub->get_option_no_throw("--hf-repo");
    if (names == nullptr || names->count() == 0) continue;
    const auto given = [&](const char* flag) {
      const CLI::Option* option = sub->get_option_no_throw(flag);
      return option != nullptr && option->count() > 0;
    };
    set_logging(given("--quiet"), given("--verbose"));
    CLI::Option& model = *sub->get_option("--model");
    if (names->count() > 1 && model.get_items_expected_max() == 1 &&
        model.get_multi_option_policy() != CLI::MultiOptionPolicy::TakeAll)
      throw CLI::ArgumentMismatch("--hf-repo: one model was expected, " + std::to_string(names->count()) +
                                  " were given");
    for (const std::string& name : names->results())
      model.add_result(bring_model(name, Source::hub_or_cache).path.string());
    model.run_callback();
  }
}

hub::Pulled bring_model(const std::string& text, Source source) {
  const hub::ModelName name = hub::parse_model_name(text);
  hub::Settings settings = hub::Settings::from_environment();
  const InterruptGuard interrupt;
  std::unique_ptr<TransferProgress> progress;
  settings.cancelled = [&] { return interrupt.requested(); };
  settings.notice = [&](const std::string& message) {
    if (progress) progress->clear();
    log::info("{}", message);
  };
  const hub::Watcher watcher{
      .begins =
          [&](const hub::RepositoryFile& file, size_t number, size_t count, uint64_t have) {
            const std::string part = count > 1 ? fmt::format(" ({} of {})", number, count) : "";
            const std::string there = have > 0 ? fmt::format(", {} are there", human_bytes(have)) : "";
            log::info("downloading {}{}, {}{}", file.path, part, human_bytes(file.size), there);
            progress = std::make_unique<TransferProgress>(file.path + part, file.size, have);
          },
      .comes = [&](uint64_t have) { progress->update(have); },
      .ends = [&] { progress.reset(); },
  };
  try {
    const hub::Pulled pulled =
        source == Source::hub ? hub::pull(name, settings, watcher) : hub::resolve(name, settings, watcher);
    if (!pulled.why.empty()) log::info("{}: {} ({})", name.repository, pulled.model.path(), pulled.why);
    return pulled;
  } catch (const hub::Cancelled&) {
    log::info("interrupted; what came so far is kept, and the same command goes on");
    throw CLI::RuntimeError(kInterruptedStatus);
  }
}

}  // namespace hearth::tools
