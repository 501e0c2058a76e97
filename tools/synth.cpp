// hearth synth: models of real shapes with prescribed activation sparsity.
#include "offline/synth.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <optional>

#include "core/error.h"
#include "core/log.h"
#include "offline/synth_vocab.h"
#include "tools/commands.h"

namespace hearth::tools {
namespace {

// Of a smallthinker's neurons, of which more are active than the default share of all activations allows.
constexpr double kExpertHotShare = 0.5;

struct Flags {
  std::string out, shape, arch, type = "f16", predictor_type, down, text;
  int64_t n_layer = 0, n_embd = 0, n_head = 0, n_head_kv = 0, n_ff = 0, n_vocab = 0, n_ctx = 0;
  int64_t n_expert = 0, n_expert_used = 0, n_embd_head = 0;
  int64_t text_tokens = 2048, words_per_topic = 64;
  int threads = 0;
  bool activation_given = false, density_given = false, hot_share_given = false;
  std::optional<double> expert_skew, expert_persistence;
  offline::SynthOptions options;
};

DType dtype_flag(const char* flag, const std::string& name) {
  if (const auto type = parse_dtype(name)) return *type;
  fail("unknown {} '{}'; expected one of {}", flag, name, computable_names());
}

// The named shape, or nothing, with what the other flags say.
offline::SynthShape shape_of(const Flags& f) {
  offline::SynthShape s;
  if (!f.shape.empty()) s = offline::find_synth_shape(f.shape);
  const bool custom = f.shape.empty();
  if (custom && (f.n_layer == 0 || f.n_embd == 0 || f.n_head == 0 || f.n_ff == 0)) {
    fail("give --shape, or all of --layers, --n-embd, --n-head and --n-ff");
  }
  if (!f.arch.empty()) s.arch = f.arch;
  if (f.n_layer != 0) s.n_layer = f.n_layer;
  if (f.n_embd != 0) s.n_embd = f.n_embd;
  if (f.n_head != 0) s.n_head = f.n_head;
  if (f.n_head_kv != 0) s.n_head_kv = f.n_head_kv;
  if (s.n_head_kv == 0) s.n_head_kv = s.n_head;
  if (f.n_ff != 0) s.n_ff = f.n_ff;
  if (f.n_embd_head != 0) s.n_embd_head = f.n_embd_head;
  if (f.n_expert != 0) s.n_expert = f.n_expert;
  if (f.n_expert_used != 0) s.n_expert_used = f.n_expert_used;
  s.n_vocab = f.n_vocab != 0 ? f.n_vocab : custom ? 32000 : s.n_vocab;
  s.n_ctx = f.n_ctx != 0 ? f.n_ctx : custom ? 4096 : s.n_ctx;
  return s;
}

offline::SynthOptions options_of(const Flags& f) {
  offline::SynthOptions o = f.options;
  o.shape = shape_of(f);
  o.type = dtype_flag("--type", f.type);
  o.expert_skew = f.expert_skew.value_or(o.shape.expert_skew);
  o.expert_persistence = f.expert_persistence.value_or(o.shape.expert_persistence);
  if (o.shape.n_expert > 0 && !f.hot_share_given) o.hot_share = kExpertHotShare;
  if (o.shape.n_expert > 0 && !f.activation_given) {
    o.dense = !f.density_given, o.activation = o.shape.default_activation();
  }
  // Four bits are too few for the predictor's sparse second matrix.
  const DType same = o.type == DType::q4_0 ? DType::q8_0 : o.type;
  o.predictor_type = f.predictor_type.empty() ? same : dtype_flag("--predictor-type", f.predictor_type);
  if (!f.down.empty() && f.down != "standard" && f.down != "transposed") {
    fail("unknown --down '{}'; expected standard or transposed", f.down);
  }
  const bool skips = o.shape.n_expert > 0 ? o.activation == "relu" : !o.dense;
  o.transposed_down = f.down.empty() ? skips : f.down == "transposed";
  return o;
}

void write_text(const Flags& f, const offline::SynthShape& shape) {
  std::string text;
  for (const int32_t id : offline::synthetic_text(shape.n_vocab, f.text_tokens, f.words_per_topic, f.options.seed)) {
    text += (text.empty() ? "" : " ") + offline::synth_word(id - offline::kFirstWord);
  }
  std::ofstream file(f.text);
  file << text << '\n';
  file.close();
  if (!file) fail("cannot write '{}'", f.text);
}

// A line on the terminal that is overwritten, ten times a second at most.
class ProgressLine {
 public:
  void operator()(uint64_t done, uint64_t total) {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < std::chrono::milliseconds(100)) return;
    last_ = now;
    const double seconds = std::chrono::duration<double>(now - start_).count();
    fmt::print(stderr, "\r{:3d} %  {:.2f} of {:.2f} GB, {:.0f} MB/s ", 100 * done / total,
               static_cast<double>(done) / 1e9, static_cast<double>(total) / 1e9,
               static_cast<double>(done) / 1e6 / seconds);
    std::fflush(stderr);
    shown_ = true;
  }
  ~ProgressLine() {
    if (shown_) std::fputs("\r\033[K", stderr);
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point last_{};
  bool shown_ = false;
};

void run_synth(const Flags& f) {
  const offline::SynthOptions options = options_of(f);
  offline::check_synth_options(options);
  ThreadTeam team(f.threads);
  offline::SynthReport report;
  {
    ProgressLine line;
    std::function<void(uint64_t, uint64_t)> progress;
    if (isatty(STDERR_FILENO) != 0) progress = std::ref(line);
    report = offline::write_synthetic(f.out, options, team, progress);
  }
  const double megabytes = static_cast<double>(report.bytes) / 1e6;
  log::info("{}: {:.0f} MB in {:.2f} s ({:.0f} MB/s, {:.0f} MB/s a thread, {} threads)", f.out, megabytes,
            report.seconds, megabytes / report.seconds, megabytes / report.seconds / team.size(), team.size());
  if (!options.dense) {
    log::info("density {:.4f}, the hottest 26 % of the neurons take {:.1f} % of the activations", report.density,
              100 * report.hot_share);
  }
  if (!f.text.empty()) write_text(f, options.shape);
}

void add_sizes(CLI::App& cmd, Flags& f) {
  cmd.add_option("--shape", f.shape,
                 "llama-7b, llama-13b, llama-70b, mistral-7b, opt-30b, falcon-40b, mixtral-8x7b, "
                 "qwen3-30b-a3b, gpt-oss-20b, smallthinker-21b or tiny");
  cmd.add_option("--arch", f.arch,
                 "llama, opt, falcon, qwen3moe, gpt-oss or smallthinker (default: the shape's, or llama)");
  cmd.add_option("--layers,--n-layer", f.n_layer, "number of layers")->check(CLI::PositiveNumber);
  cmd.add_option("--n-embd", f.n_embd, "embedding length, a multiple of 32")->check(CLI::PositiveNumber);
  cmd.add_option("--n-head", f.n_head, "attention heads")->check(CLI::PositiveNumber);
  cmd.add_option("--n-head-kv", f.n_head_kv, "key/value heads (default: the shape's, or --n-head)")
      ->check(CLI::PositiveNumber);
  cmd.add_option("--n-embd-head", f.n_embd_head, "elements of a head (default: --n-embd over --n-head)")
      ->check(CLI::PositiveNumber);
  cmd.add_option("--n-ff,--n-ff-exp", f.n_ff, "neurons of an FFN, or of an expert, a multiple of 32")
      ->check(CLI::PositiveNumber);
  cmd.add_option("--experts", f.n_expert, "experts of a layer, for a mixture")->check(CLI::PositiveNumber);
  cmd.add_option("--experts-used", f.n_expert_used, "of those, the ones that a token uses")->check(CLI::PositiveNumber);
  cmd.add_option("--n-vocab", f.n_vocab, "vocabulary size (default: the shape's, or 32000)")
      ->check(CLI::PositiveNumber);
  cmd.add_option("--n-ctx", f.n_ctx, "context length (default: the shape's, or 4096)")->check(CLI::PositiveNumber);
}

void add_statistics(CLI::App& cmd, Flags& f) {
  offline::SynthOptions& o = f.options;
  cmd.add_option("--density", o.density, "mean share of active neurons")->capture_default_str();
  cmd.add_option("--hot-share", o.hot_share,
                 "share of the activations that the hottest 26 % of the neurons take (of a mixture: 0.5)")
      ->capture_default_str();
  cmd.add_option("--predictor-rank", o.predictor_rank, "rows of an exact predictor (fc1, fc2); 0 = none")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  cmd.add_option("--predictor-type", f.predictor_type, "type of fc1 and fc2 (default: --type, q8_0 for q4_0)");
  cmd.add_option("--drift", o.drift,
                 "share of the residual's variance that the words of a topic have in common (0 to 0.9): the active set "
                 "stays while a text stays in a topic and changes slowly as it moves on")
      ->capture_default_str();
  cmd.add_flag("--dense", o.dense, "plain random weights: no control over the sparsity");
  cmd.add_option(
         "--expert-skew", f.expert_skew,
         "how unequally experts are liked: standard deviation over experts of a router's logits, over that over "
         "tokens (default: the shape's, or 0.5)")
      ->type_name("X");
  cmd.add_option(
         "--expert-persistence", f.expert_persistence,
         "how long experts stay chosen: share of the variance over tokens of a router's logits that the words of "
         "a topic have in common, 0 to 0.9 (default: the shape's, or 0)")
      ->type_name("X");
  cmd.add_option("--activation", o.activation,
                 "relu, or silu with --dense; where it is not given, mixtures have their architecture's, and are dense "
                 "unless a smallthinker's --density is given")
      ->capture_default_str();
}

}  // namespace

void register_synth(CLI::App& app) {
  auto f = std::make_shared<Flags>();
  CLI::App* cmd =
      app.add_subcommand("synth", "Write a synthetic model of a real shape with prescribed activation sparsity");
  cmd->add_option("-o,--output", f->out, "file to write")->required()->type_name("FILE");
  add_sizes(*cmd, *f);
  cmd->add_option("--type", f->type, computable_names())->capture_default_str();
  add_statistics(*cmd, *f);
  cmd->add_option(
      "--down", f->down,
      "transposed (ffn_down_t, for sparse execution) or standard (as other programs read it; default with --dense, "
      "unless the experts of a mixture are relu)");
  cmd->add_option("-s,--seed", f->options.seed, "same seed, same file")->capture_default_str();
  cmd->add_option("-t,--threads", f->threads, "threads (default: physical cores)");
  cmd->add_option("--text", f->text, "also write a text of the model's words that moves from topic to topic");
  cmd->add_option("--text-tokens", f->text_tokens, "its length in tokens")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  cmd->add_option("--words-per-topic", f->words_per_topic, "tokens before it moves on")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  cmd->footer("Example: hearth synth --shape llama-7b --type q8_0 -o synthetic.gguf");
  cmd->callback([f, cmd] {
    f->activation_given = cmd->count("--activation") > 0 || cmd->count("--dense") > 0;
    f->density_given = cmd->count("--density") > 0, f->hot_share_given = cmd->count("--hot-share") > 0;
    run_synth(*f);
  });
}

}  // namespace hearth::tools
