#include "tools/figures.h"

#include <cmath>

#include "core/log.h"
#include "tools/common.h"
#include "tools/system.h"

namespace hearth::tools {
namespace {

double per_second(double n, double seconds) {
  return seconds > 0 ? n / seconds : 0.0;
}
double each(double total, int64_t n) {
  return n > 0 ? total / static_cast<double>(n) : 0.0;
}

std::string rate_line(const char* what, double seconds, int64_t n, const char* unit) {
  return fmt::format("{:>16} time = {:10.2f} ms / {:5} {:6} ({:8.2f} ms per token, {:8.2f} tokens per second)", what,
                     seconds * 1e3, n, unit, each(seconds * 1e3, n), per_second(static_cast<double>(n), seconds));
}

}  // namespace

std::string human_count(size_t count) {
  const auto n = static_cast<double>(count);
  if (n >= 1e9) return fmt::format("{:.2f}B", n / 1e9);
  if (n >= 1e6) return fmt::format("{:.1f}M", n / 1e6);
  if (n >= 1e3) return fmt::format("{:.1f}K", n / 1e3);
  return fmt::format("{}", count);
}

std::string human_duration(double seconds) {
  const auto s = static_cast<int64_t>(std::llround(std::max(0.0, seconds)));
  if (s < 60) return fmt::format("{} s", s);
  if (s < 3600) return fmt::format("{} min {} s", s / 60, s % 60);
  return fmt::format("{} h {} min", s / 3600, s / 60 % 60);
}

void print_timings(const Timings& t, size_t model_bytes) {
  log::info("{:>16} time = {:10.2f} ms ({:.2f} GB/s)", "load", t.load * 1e3,
            per_second(static_cast<double>(model_bytes) * 1e-9, t.load));
  if (t.first_token > 0) log::info("{:>16} time = {:10.2f} ms after the start", "first token", t.first_token * 1e3);
  log::info("{}", rate_line("prompt eval", t.prompt, t.n_prompt, "tokens"));
  log::info("{}", rate_line("eval", t.eval, t.n_eval, "runs"));
  log::info("{}", rate_line("sampling", t.sample, t.n_sample, "runs"));
  log::info("{:>16} time = {:10.2f} ms / {:5} tokens", "total", t.total * 1e3, t.n_prompt + t.n_eval);
}

nlohmann::json to_json(const Timings& t) {
  return {{"load_ms", t.load * 1e3},
          {"first_token_ms", t.first_token > 0 ? nlohmann::json(t.first_token * 1e3) : nlohmann::json()},
          {"prompt_eval_ms", t.prompt * 1e3},
          {"prompt_tokens", t.n_prompt},
          {"prompt_tokens_per_second", per_second(static_cast<double>(t.n_prompt), t.prompt)},
          {"eval_ms", t.eval * 1e3},
          {"eval_runs", t.n_eval},
          {"eval_tokens_per_second", per_second(static_cast<double>(t.n_eval), t.eval)},
          {"sample_ms", t.sample * 1e3},
          {"total_ms", t.total * 1e3}};
}

void print_density(Session& session) {
  const engine::Engine& e = session.engine();
  const double density = e.density().density();
  if (std::isnan(density)) return;  // dense, or no single token was evaluated
  const std::string neurons =
      e.config().experts ? "the chosen experts' neurons" : fmt::format("{} neurons a layer", e.config().n_ff);
  log::info("{:>16} = {:.2f} % of {}, over {} tokens", "density", density * 100, neurons, e.density().steps);
}

namespace {
size_t device_bytes(Session& session) {
  size_t total = 0;
  for (const MemoryUse& use : session.device().memory()) total += use.bytes;
  return total;
}
}  // namespace

void print_division(Session& session, const Timings& t) {
  if (!session.planned()) return;
  const double host = session.engine().density().host_share();
  if (!std::isnan(host)) log::info("{:>16} = {:.1f} % of the active neurons on the GPU", "hit share", (1 - host) * 100);
  const engine::Engine& e = session.engine();
  const engine::SideBytes bytes = e.traffic(e.density(), session.text().n_past()).total();
  const std::string linked =
      bytes.link > 0 ? fmt::format(", {} over the link", human_bytes(static_cast<size_t>(bytes.link))) : "";
  log::info("{:>16} = {} on the GPU and {} on the CPU{}, a token", "bytes read",
            human_bytes(static_cast<size_t>(bytes.main)), human_bytes(static_cast<size_t>(bytes.host)), linked);
  const engine::Placement& p = session.planned()->placement;
  log::info("{:>16} = {} used, {} planned, budget {}", "GPU memory", human_bytes(device_bytes(session)),
            human_bytes(p.planned_bytes()), human_bytes(p.vram_budget));
  if (const auto expected = session.planned()->tokens_per_second) {
    log::info("{:>16} = {:.1f} tokens per second, measured {:.1f}", "expected", *expected,
              per_second(static_cast<double>(t.n_eval), t.eval));
  }
}

nlohmann::json division_json(Session& session) {
  if (!session.planned()) return nullptr;
  const engine::Placement& p = session.planned()->placement;
  const double host = session.engine().density().host_share();
  nlohmann::json j = {{"hit_share", nullptr},
                      {"gpu_bytes_used", device_bytes(session)},
                      {"gpu_bytes_planned", p.planned_bytes()},
                      {"vram_budget_bytes", p.vram_budget},
                      {"gpu_bytes_per_token", nullptr},
                      {"cpu_bytes_per_token", nullptr},
                      {"link_bytes_per_token", nullptr},
                      {"expected_tokens_per_second", nullptr}};
  const engine::Engine& e = session.engine();
  const engine::SideBytes bytes = e.traffic(e.density(), session.text().n_past()).total();
  j["gpu_bytes_per_token"] = bytes.main, j["cpu_bytes_per_token"] = bytes.host;
  j["link_bytes_per_token"] = bytes.link;
  if (!std::isnan(host)) j["hit_share"] = 1 - host;
  if (session.planned()->tokens_per_second) j["expected_tokens_per_second"] = *session.planned()->tokens_per_second;
  return j;
}

void print_memory(Session& session) {
  std::string parts = fmt::format("model {} (mapped file)", human_bytes(session.model().file().total_bytes()));
  for (const MemoryUse& use : session.device().memory()) {
    parts += fmt::format(", {} {}", to_string(use.purpose), human_bytes(use.bytes));
  }
  log::info("{:>16} = {}", "memory", parts);
}

void print_peak_memory() {
  log::info("{:>16} = {} resident", "process peak", human_bytes(process_memory().peak_resident));
}

nlohmann::json memory_json(Session& session) {
  nlohmann::json j = {{"model_file_bytes", session.model().file().total_bytes()},
                      {"peak_resident_bytes", process_memory().peak_resident}};
  for (const MemoryUse& use : session.device().memory()) j["device_bytes"][to_string(use.purpose)] = use.bytes;
  return j;
}

}  // namespace hearth::tools
