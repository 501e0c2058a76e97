#pragma once
// The subcommands of `hearth`. Each adds itself to the program and runs in its CLI11 callback; an Error thrown there is
// printed by main() as one line, and the program exits with 1.
#include <CLI/CLI.hpp>

namespace hearth::tools {

void register_run(CLI::App& app);
void register_serve(CLI::App& app);
void register_chat(CLI::App& app);
void register_logits(CLI::App& app);
void register_perplexity(CLI::App& app);
void register_bench(CLI::App& app);
void register_inspect(CLI::App& app);
void register_pull(CLI::App& app);
void register_list(CLI::App& app);
void register_rm(CLI::App& app);
void register_convert(CLI::App& app);
void register_quantize(CLI::App& app);
void register_doctor(CLI::App& app);
void register_tokenize(CLI::App& app);
void register_detokenize(CLI::App& app);
void register_synth(CLI::App& app);
void register_profile(CLI::App& app);
void register_plan(CLI::App& app);
void register_predictor(CLI::App& app);
void register_tune(CLI::App& app);
void register_report(CLI::App& app);

}  // namespace hearth::tools
