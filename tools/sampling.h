#pragma once
// How tokens are drawn, as flags.
#include <CLI/CLI.hpp>

#include "text/sampler.h"

namespace hearth::tools {

// --temp, --top-k, --top-p, --min-p, --repeat-penalty, --repeat-last-n.
void add_sampling_options(CLI::App& sub, text::SamplerParams& s);

}  // namespace hearth::tools
