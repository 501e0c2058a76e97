// hearth pull: brings a model from the Hugging Face hub into the cache.
#include <memory>
#include <string>

#include "core/log.h"
#include "core/units.h"
#include "tools/commands.h"
#include "tools/common.h"
#include "tools/hub_models.h"
#include "tools/output.h"

namespace hearth::tools {
namespace {

struct Options {
  std::string name;
  bool quiet = false, verbose = false;
};

void pull(const Options& o) {
  set_logging(o.quiet, o.verbose);
  const hub::Pulled pulled = bring_model(o.name, Source::hub);
  if (pulled.new_bytes > 0) {
    log::info("{} came over the network; sizes and checksums are right", human_bytes(pulled.new_bytes));
  } else {
    log::info("all of it was in the cache, {}", human_bytes(pulled.model.size()));
  }
  write_out(pulled.path.string() + "\n");
}

}  // namespace

void register_pull(CLI::App& app) {
  const auto o = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("pull", "Download a model from the Hugging Face hub into the cache");
  sub->add_option(
         "NAME", o->name,
         "OWNER/NAME, perhaps with :TYPE (Q4_K_M, Q8_0, F16 …) or :FILE; without, Q4_K_M, or Q8_0, or the first")
      ->required();
  add_logging_options(*sub, o->quiet, o->verbose);
  sub->footer(
      "Prints the path of the file, of a split model its first part. The cache is that of huggingface_hub: HF_HOME, "
      "HF_HUB_CACHE and HF_ENDPOINT are obeyed; HF_TOKEN, or `hf auth login`, gives access to gated models. Ctrl-C, or "
      "a cut, loses nothing: the same command goes on.\n"
      "Example: hearth pull ggml-org/gemma-3-1b-it-GGUF:Q8_0");
  sub->callback([o] { pull(*o); });
}

}  // namespace hearth::tools
