#include "tools/cli.h"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <new>
#include <sstream>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/log.h"
#include "tools/aliases.h"
#include "tools/bundled_model.h"
#include "tools/commands.h"
#include "tools/help_formatter.h"
#include "tools/hub_models.h"
#include "tools/output.h"

namespace hearth::tools {
namespace {

// The name of the subcommand that was being parsed, for "see `hearth NAME --help`".
std::string help_command(const CLI::App& app) {
  for (const CLI::App* sub : app.get_subcommands()) return "hearth " + sub->get_name() + " --help";
  return "hearth --help";
}

int report(std::string message) {
  while (!message.empty() && message.back() == '\n') message.pop_back();
  std::replace(message.begin(), message.end(), '\n', ' ');  // one line, whatever a path or a library's text contains
  log::write(log::Level::quiet, "error: ", message);
  return 1;
}

// Where a model has to be named and an installed program has one: how to try it.
std::string hint(const CLI::ParseError& e) {
  const bool model = e.get_name() == "RequiredError" && std::string_view(e.what()).find("--model") != std::string::npos;
  const std::filesystem::path bundled = model ? bundled_model() : std::filesystem::path();
  return bundled.empty() ? std::string() : fmt::format("; to try hearth give -m {}", bundled.string());
}

int handle_parse_error(const CLI::App& app, const CLI::ParseError& e) {
  if (e.get_name() == "RuntimeError") return e.get_exit_code();  // a subcommand's own exit status
  if (e.get_exit_code() != 0) return report(fmt::format("{}{}; see `{}`", e.what(), hint(e), help_command(app)));
  std::ostringstream out, err;  // --help, --version
  app.exit(e, out, err);
  write_out(out.str());
  flush_out();
  return 0;
}

int parse_and_run(CLI::App& app, std::vector<std::string> args) {
  try {
    if (args.empty()) args = {"--help"};
    args = expand_aliases(app, std::move(args));
    std::reverse(args.begin(), args.end());  // CLI11 takes a vector from its back
    app.parse(std::move(args));              // runs the subcommand's callback
    flush_out();
    return 0;
  } catch (const CLI::ParseError& e) {
    return handle_parse_error(app, e);
  }
}

}  // namespace

std::unique_ptr<CLI::App> make_app() {
  auto app = std::make_unique<CLI::App>(
      "hearth runs language models that are larger than the GPU's memory, fast, on one PC.", "hearth");
  app->set_version_flag("--version", "hearth " HEARTH_VERSION, "Print the version and exit");
  app->set_help_flag("-h,--help", "Print this help and exit");
  app->formatter(std::make_shared<HelpFormatter>());
  app->require_subcommand(1);
  register_run(*app);
  register_serve(*app);
  register_chat(*app);
  register_logits(*app);
  register_perplexity(*app);
  register_bench(*app);
  register_inspect(*app);
  register_pull(*app);
  register_list(*app);
  register_rm(*app);
  register_convert(*app);
  register_quantize(*app);
  register_tokenize(*app);
  register_detokenize(*app);
  register_synth(*app);
  register_profile(*app);
  register_plan(*app);
  register_predictor(*app);
  register_tune(*app);
  register_report(*app);
  register_doctor(*app);
  app->parse_complete_callback([top = app.get()] { resolve_hf_repos(*top); });  // before the subcommand's work
  // After the subcommands, which would inherit it.
  app->footer(
      "Text goes to stdout, everything else to stderr. Exit status: 0 done, 1 error (one line on stderr says what to "
      "do), 130 ended by Ctrl-C.\nExample: hearth run -m models/hearth-demo.gguf -p \"Once upon a time\" -n 100\n"
      "`hearth SUBCOMMAND --help` lists a subcommand's flags.");
  return app;
}

int hearth_main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);  // a closed pipe is a failed write, and told as one
  try {
    const auto app = make_app();
    return parse_and_run(*app, {argv + 1, argv + argc});
  } catch (const Error& e) {
    return report(e.what());
  } catch (const std::bad_alloc&) {
    return report("out of memory; try a shorter context (-c), a smaller batch (-b) or a smaller model");
  } catch (const std::exception& e) {
    return report(fmt::format("unexpected failure: {}", e.what()));
  } catch (...) {
    return report("unexpected failure of an unknown kind");
  }
}

}  // namespace hearth::tools
