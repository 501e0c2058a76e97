#pragma once
// Figures for people and for programs: sizes, timings, memory.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "core/units.h"

namespace hearth::tools {

class Session;

std::string human_count(size_t count);       // "35.7M", "6.74B"
std::string human_duration(double seconds);  // "12 s", "3 min 20 s", "2 h 5 min"

// llama.cpp's figures of one run. Seconds.
struct Timings {
  double load = 0, prompt = 0, sample = 0, eval = 0, total = 0;
  double first_token = 0;  // from the start of the process until the first token was drawn; 0: none was
  int64_t n_prompt = 0;    // prompt tokens
  int64_t n_sample = 0;    // tokens drawn
  int64_t n_eval = 0;      // single-token evaluations
};
void print_timings(const Timings& t, size_t model_bytes);  // on stderr, in llama.cpp's wording
nlohmann::json to_json(const Timings& t);

// Sparse modes: the share of neurons that were computed.
void print_density(Session& session);
// A divided model: who computed how much, memory and speed against the plan. Nothing for an undivided one.
void print_division(Session& session, const Timings& t);
nlohmann::json division_json(Session& session);  // null for an undivided model
// The mapped model, and what the device holds by purpose.
void print_memory(Session& session);
// The most that the process ever had in memory, pages of the mapped model included.
void print_peak_memory();
nlohmann::json memory_json(Session& session);

}  // namespace hearth::tools
