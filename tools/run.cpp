// `hearth run`: prints the prompt and what the model says next.
#include <charconv>
#include <cmath>
#include <memory>

#include "core/error.h"
#include "core/log.h"
#include "model/sidecar.h"
#include "text/chat.h"
#include "text/stream_decoder.h"
#include "tools/commands.h"
#include "tools/compare_dense.h"
#include "tools/generate.h"
#include "tools/interrupt.h"
#include "tools/output.h"
#include "tools/progress.h"
#include "tools/prompt.h"
#include "tools/sampling.h"
#include "tools/start_lines.h"

namespace hearth::tools {
namespace {

struct RunOptions {
  ModelOptions model;
  PromptOptions prompt;
  GenerateOptions generate;
  std::string seed = "-1";
  bool no_display_prompt = false;
  bool chat = false;
  std::string chat_template;
  std::string system_prompt;
  std::optional<int64_t> compare_dense;  // this many generated tokens
  bool json = false, stats = false;
};

std::optional<uint64_t> parse_seed(const std::string& text) {
  if (text == "-1") return std::nullopt;
  uint64_t seed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  if (error != std::errc() || end != text.data() + text.size()) {
    fail("--seed is '{}', expected a whole number from 0 to 2^64-1, or -1 for a random one", text);
  }
  return seed;
}

std::vector<int32_t> encode_chat_prompt(const RunOptions& o, const text::Tokenizer& tokenizer,
                                        const std::string& user) {
  auto messages = nlohmann::ordered_json::array();
  if (!o.system_prompt.empty()) messages.push_back({{"role", "system"}, {"content", o.system_prompt}});
  messages.push_back({{"role", "user"}, {"content", user}});
  return text::ChatTemplate::of(tokenizer, o.chat_template).encode(tokenizer, messages);
}

std::vector<int32_t> encode_prompt(const text::Tokenizer& tokenizer, const std::string& text) {
  std::vector<int32_t> ids = tokenizer.encode(text);
  if (ids.empty() && tokenizer.bos()) ids.push_back(*tokenizer.bos());
  if (ids.empty()) fail("the prompt is empty, and this model has no token to begin a text with; give -p TEXT");
  return ids;
}

// The last line on how much was left out. What a profile says is zero anyway is told beside it.
void print_skipped(Session& session, const RunOptions& o) {
  engine::Engine& engine = session.engine();
  const double density = engine.density().density();
  if (std::isnan(density) || !session.thresholded()) return;
  std::string line = fmt::format("{:.2f} % of the neurons, by a threshold", 100 * (1 - density));
  const auto sidecar = model::Sidecar::find(session.model().file(), session.model().config(), o.model.sidecar);
  if (sidecar && sidecar->has_statistics() && sidecar->statistics.threshold == 0 && !sidecar->has_mixtures()) {
    double active = 0;
    const size_t n_layer = sidecar->statistics.layers.size();
    for (size_t l = 0; l < n_layer; ++l) active += sidecar->statistics.density(l) / static_cast<double>(n_layer);
    line += fmt::format("; without one {:.2f} %, by the profile", 100 * (1 - active));
  }
  log::info("{:>16} = {}", "skipped", line);
}

// Nothing to say, null, for a run that was dense or too short.
std::optional<offline::Comparison> compare(Session& session, const RunOptions& o, std::span<const int32_t> prompt,
                                           const Generated& g) {
  if (!o.compare_dense || g.ending == Ending::interrupted) return std::nullopt;
  if (session.engine().sparsity() == engine::Sparsity::off) {
    log::info("--compare-dense: every neuron was computed, so there is nothing to compare");
    return std::nullopt;
  }
  const offline::Comparison c = compare_with_dense(session.engine(), session.text(), prompt, g.ids, *o.compare_dense);
  if (c.n() == 0) {
    log::info("--compare-dense: fewer than two tokens were generated, so there is nothing to compare");
    return std::nullopt;
  }
  log::info("{:>16} = KL {:.5f} ± {:.5f} nats, the same token likeliest in {:.1f} %, over {} tokens", "against dense",
            c.kl.mean(), c.n() > 1 ? c.kl.standard_error() : 0.0, 100 * c.agreement.mean(), c.n());
  return c;
}

nlohmann::json result_json(Session& session, const std::vector<int32_t>& prompt_ids, const Generated& g) {
  const engine::Engine& engine = session.engine();
  return {{"prompt_ids", prompt_ids},
          {"ids", g.ids},
          {"text", g.text},
          {"ending", to_string(g.ending)},
          {"seed", g.seed},
          {"timings", to_json(g.timings)},
          {"sparsity", engine::to_string(engine.sparsity())},
          {"sparsity_measured_ts", to_json(session.measured_ways())},
          {"density", json_number(static_cast<float>(engine.density().density()))},
          {"division", division_json(session)},
          {"memory", memory_json(session)}};
}

// Shows how far the prompt is, then how far the text.
std::string generation_text(Session& session, const Timings& t, int64_t n_prompt, int64_t n_predict) {
  if (t.n_prompt < n_prompt) {
    const double rate = static_cast<double>(t.n_prompt) / t.prompt;
    return live_text("prompt tokens", t.n_prompt, n_prompt, rate, NAN,
                     static_cast<double>(n_prompt - t.n_prompt) / rate);
  }
  const engine::Engine& engine = session.engine();
  const int64_t room = engine.n_ctx() - n_prompt, total = n_predict < 0 ? room : std::min(n_predict, room);
  const double rate = t.eval > 0 ? static_cast<double>(t.n_eval) / t.eval : 0;
  const double hits = session.planned() ? 1 - engine.density().host_share() : NAN;
  const double left = rate > 0 ? static_cast<double>(std::max<int64_t>(0, total - t.n_eval)) / rate : -1;
  return live_text("tokens", t.n_eval, total, rate, hits, left);
}

void run(const RunOptions& o) {
  GenerateOptions options = o.generate;
  options.sampler.seed = parse_seed(o.seed);
  text::Sampler{options.sampler};    // refuse bad flags
  text::StopMatcher{options.stops};  // before the model is loaded
  Session session(o.model);
  const text::Tokenizer& tokenizer = session.require_tokenizer("run");
  const std::string text = read_prompt(o.prompt);
  const std::vector<int32_t> ids = o.chat ? encode_chat_prompt(o, tokenizer, text) : encode_prompt(tokenizer, text);

  require_room(session.engine(), session.text(), ids.size());  // before anything is printed

  print_start(session, o.model);

  const InterruptGuard interrupt;
  if (!o.json && !o.chat && !o.no_display_prompt) write_out(text);
  flush_out();
  const auto emit = [&](std::string_view piece) {
    if (o.json) return;
    write_out(piece);
    flush_out();
  };
  std::optional<LiveLine> live;
  if (o.stats) {
    live.emplace(!o.json);
    options.watch = [&](const Timings& t) {
      if (live->due()) live->show(generation_text(session, t, static_cast<int64_t>(ids.size()), o.generate.n_predict));
    };
  }
  const Generated g = generate(session, ids, options, emit, [&] { return interrupt.requested(); });

  live.reset();
  nlohmann::json json;
  if (o.json) {
    json = result_json(session, ids, g);
  } else {
    write_out("\n");
    flush_out();
  }
  if (g.ending == Ending::context_full) {
    log::info("\nstopped: the context of {} tokens is full; -c gives a longer one", session.engine().n_ctx());
  }
  log::info("\n{:>16} = {}", "seed", g.seed);
  print_timings(g.timings, session.model().weight_bytes());
  print_density(session);
  print_division(session, g.timings);
  print_skipped(session, o);
  const auto comparison = compare(session, o, ids, g);  // after the density, which it would add to
  print_memory(session);
  print_peak_memory();
  if (o.json) {
    json["against_dense"] = comparison ? offline::summary_json(*comparison) : nlohmann::json(nullptr);
    write_json(json);
    flush_out();
  }
  if (g.ending == Ending::interrupted) throw CLI::RuntimeError(kInterruptedStatus);
}

void add_seed_option(CLI::App& sub, RunOptions& o) {
  sub.add_option("-s,--seed", o.seed, "Seed of the random numbers; -1: a random one, printed at the end")
      ->type_name("UINT")
      ->capture_default_str()
      ->group("Sampling");
}

}  // namespace

void register_run(CLI::App& app) {
  auto o = std::make_shared<RunOptions>();
  CLI::App* sub = app.add_subcommand("run", "Generate text from a prompt");
  add_prompt_options(*sub, o->prompt);
  sub->add_flag("--no-display-prompt", o->no_display_prompt, "Print the generated text without the prompt")
      ->group("Prompt");
  auto* chat =
      sub->add_flag("--chat,--conversation", o->chat, "Wrap the prompt in the model's chat template")->group("Prompt");
  sub->add_option("--chat-template", o->chat_template,
                  "Use this chat template: chatml, llama2, llama3, mistral, or Jinja2 text (default: the model's)")
      ->needs(chat)
      ->group("Prompt");
  sub->add_option("--system-prompt", o->system_prompt, "System message of the chat")
      ->type_name("TEXT")
      ->needs(chat)
      ->group("Prompt");
  sub->add_option("-n,--predict,--n-predict", o->generate.n_predict,
                  "Tokens to generate; -1: until the model ends the text or the context is full")
      ->check(CLI::Range(int64_t{-1}, int64_t{1} << 40))
      ->type_name("N")
      ->capture_default_str()
      ->group("Ending");
  sub->add_option("--stop,--reverse-prompt", o->generate.stops,
                  "End before this text appears; may be given several times")
      ->type_name("TEXT")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->group("Ending");
  sub->add_flag("--ignore-eos", o->generate.ignore_eos, "Never draw an end-of-text token")->group("Ending");
  add_seed_option(*sub, *o);
  add_sampling_options(*sub, o->generate.sampler);
  sub->add_option("--compare-dense", o->compare_dense,
                  "Afterwards compute up to N of the generated tokens again with every neuron, and print how far the "
                  "run was from that")
      ->check(CLI::PositiveNumber)
      ->type_name("N")
      ->group("General");
  sub->add_flag("--stats", o->stats,
                "While it works, show progress, tokens/s, the GPU's share of the active neurons and the time that is "
                "left, in one line of the terminal")
      ->group("General");
  sub->add_flag("--json", o->json, "Print one JSON object at the end instead of the text as it comes")
      ->group("General");
  add_model_options(*sub, o->model);
  sub->footer(
      "Ctrl-C ends the text cleanly, with the timings and exit status 130; a second one kills.\n"
      "Example: hearth run -m models/hearth-demo.gguf -p \"Once upon a time\" -n 200 --temp 0.7 --seed 1");
  sub->callback([o] { run(*o); });
}

}  // namespace hearth::tools
