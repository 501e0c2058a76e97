#pragma once
// Prompts of a divided mixture: which of the CPU's chosen experts visit the main device, and which the CPU computes
// meanwhile. Both sides find out by themselves, of the same choice and the same figures, and need not tell each other.
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "core/experts.h"

namespace hearth::engine {

// Seconds of one machine. They are fixed when a model is loaded, so that a prompt is shared out in the same way every
// time. Unless told otherwise: a PC's.
struct ShareRates {
  double first_visit = 60e-6;       // from the choice to the first byte over the link
  double link_byte = 1 / 25e9;      // a byte over the link
  double cpu_byte = 1 / 45e9;       // a byte that the CPU reads meanwhile
  double cpu_product = 2 / 0.5e12;  // a weight times a token on the CPU
};

// What a batch asks of one expert.
struct ExpertWork {
  double tokens = 0;   // that chose it; 0: none, and nobody computes it
  double bytes = 0;    // of its matrices
  double weights = 0;  // in them
};

struct Shares {
  std::vector<bool> visits;                  // by expert
  double link_seconds = 0, cpu_seconds = 0;  // of those that visit; of the others
  double seconds() const { return std::max(link_seconds, cpu_seconds); }
};

// The link takes link_byte * bytes for an expert, and first_visit once; the CPU takes max(cpu_byte * bytes, cpu_product *
// weights * tokens). Experts visit in the order of their tokens, the most first, of equals the smaller id, for as long
// as each lowers the longer side's time.
Shares share_out(std::span<const ExpertWork> experts, const ShareRates& rates);

// By expert of `host`, which the CPU has where it is not empty: whether it visits. `ids`: the choice of a whole batch.
std::vector<bool> visitors(std::span<const Expert> host, std::span<const int32_t> ids, const ShareRates& rates);

}  // namespace hearth::engine
