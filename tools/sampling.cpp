#include "tools/sampling.h"

namespace hearth::tools {

void add_sampling_options(CLI::App& sub, text::SamplerParams& s) {
  const auto option = [&sub](const char* name, auto& value, const char* help) {
    sub.add_option(name, value, help)->capture_default_str()->group("Sampling");
  };
  option("--temp", s.temp, "Temperature; 0: always the likeliest token");
  option("--top-k", s.top_k, "Draw among the K likeliest tokens; 0: off");
  option("--top-p", s.top_p, "Draw among the likeliest tokens that sum up to this probability; 1: off");
  option("--min-p", s.min_p, "Drop tokens less likely than this times the likeliest one; 0: off");
  option("--repeat-penalty", s.repeat_penalty, "Make recent tokens less likely by this factor; 1: off");
  option("--repeat-last-n", s.repeat_last_n, "How many recent tokens that is; 0: none, -1: all");
}

}  // namespace hearth::tools
