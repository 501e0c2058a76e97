// hearth predictor: makes predictors of which neurons fire, and measures them.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "model/attach_predictors.h"
#include "model/model.h"
#include "model/predictors.h"
#include "model/sidecar.h"
#include "offline/predictor/choose.h"
#include "offline/predictor/compare.h"
#include "offline/predictor/evaluate.h"
#include "offline/predictor/fit_layers.h"
#include "text/tokenizer.h"
#include "tools/commands.h"
#include "tools/common.h"
#include "tools/interrupt.h"
#include "tools/output.h"
#include "tools/progress.h"

namespace hearth::tools {
namespace {

struct Options {
  std::string model, sidecar, device = "auto";
  std::vector<std::string> texts;
  std::optional<std::string> activation;
  int64_t tokens = 0, window = 512;
  float threshold = 0;
  SparseThreshold sparse_threshold;  // of eval
  int gpu = 0, threads = 0;
  bool json = false, quiet = false, verbose = false;
  // fit
  std::string method = "auto", rank = "auto", type = "auto", input = "ffn_input", read_by = "cpu";
  double recall = 0.99, sample_memory = 4;
  std::string layers = "all";
  // compare
  std::vector<std::string> tests, candidates;
  std::string directory;
  int64_t test_tokens = 8192;
};

std::filesystem::path sidecar_of(const Options& o) {
  return o.sidecar.empty() ? model::sidecar_path(o.model) : std::filesystem::path(o.sidecar);
}

std::unique_ptr<Device> make_device(const Options& o, ThreadTeam& team) {
  std::string why;
  if (o.device == "cuda" || (o.device == "auto" && !cuda::list_gpus(&why).empty())) return cuda::make_device(o.gpu);
  if (o.device == "auto") log::info("no GPU is used: {}", why);
  return cpu::make_device(team);
}

// What weights are computed with: the GPU where activations are gathered on one.
struct Fitting {
  std::unique_ptr<Device> host;  // of the host's products
  std::unique_ptr<Products> products;
};

Fitting make_fitting(const Options& o, ThreadTeam& team) {
  Fitting f;
  if (o.device == "cuda" || (o.device == "auto" && !cuda::list_gpus().empty())) {
    f.products = cuda::make_products(o.gpu);
  } else {
    f.host = cpu::make_device(team);
    f.products = std::make_unique<predictor::HostProducts>(*f.host, team);
  }
  log::info("fitting on {}", f.products->name());
  return f;
}

int64_t parse_rank(const std::string& text) {
  int64_t rank = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rank);
  if (error != std::errc() || end != text.data() + text.size() || rank < 1) {
    fail("--rank is '{}', expected a positive number or auto", text);
  }
  return rank;
}

DType parse_type(const std::string& name) {
  const auto type = parse_dtype(name);
  if (!type) fail("unknown type '{}'; expected f16, q8_0, q4_0 or auto", name);
  return *type;
}

[[noreturn]] void interrupted() {
  log::info("interrupted; nothing was written");
  throw CLI::RuntimeError(kInterruptedStatus);
}

offline::Corpus corpus_of(const Options& o, const model::Model& m, const std::vector<std::string>& files) {
  const auto tokenizer = text::Tokenizer::load(m.file());
  const std::vector<std::filesystem::path> paths(files.begin(), files.end());
  return offline::read_corpus(paths, *tokenizer, {.window = o.window, .heldout_every = 0});
}

// Runs texts through the model, for `compare`. Half the samples would make another predictor: Ctrl-C ends the program.
offline::Samples gather(const Options& o, model::Model& m, ThreadTeam& team, const std::vector<std::string>& files,
                        int64_t tokens, bool only_validate) {
  const offline::Corpus corpus = corpus_of(o, m, files);
  const std::unique_ptr<Device> device = make_device(o, team);
  offline::SampleOptions options;
  options.max_tokens = tokens, options.window = o.window, options.input = model::parse_predictor_input(o.input);
  options.only_validate = only_validate;
  log::info("gathering the inputs of {}'s FFNs on {}", m.config().name, device->name());
  const InterruptGuard interrupt;
  std::optional<Progress> progress;
  auto samples = offline::gather_samples(m, *device, corpus, options, [&](const offline::SampleProgress& p) {
    if (!progress) progress.emplace(p.tokens_total);
    progress->update(p.tokens_done, fmt::format("{:.0f} tokens/s", static_cast<double>(p.tokens_done) / p.seconds));
    return !interrupt.requested();
  });
  if (!samples) interrupted();
  return std::move(*samples);
}

offline::Candidate make_candidate(const std::string& method, const std::string& rank, const std::string& type) {
  offline::Candidate c;
  c.method = offline::parse_fit_method(method);
  c.type = type == "auto" ? DType::q8_0 : parse_type(type);
  if (c.method == offline::FitMethod::gate_bits) {
    if (type == "auto") c.type = DType::q4_0;
    return c;
  }
  c.rank = parse_rank(rank);
  return c;
}

// What --method, --rank and --type leave open.
std::vector<offline::Candidate> candidates_of(const Options& o, const model::Model& m) {
  const FfnShard& ffn = m.weights().layers.front().ffn;
  if (o.method == "gate-bits" || (o.method != "auto" && o.rank != "auto")) {
    return {make_candidate(o.method, o.rank, o.type)};
  }
  std::vector<offline::Candidate> all =
      offline::all_candidates(m.config().n_embd, ffn.n(), ffn.gate.type, o.method == "mlp");
  if (o.method != "auto") {
    const auto method = offline::parse_fit_method(o.method);
    std::erase_if(all, [&](const auto& c) { return c.method != method; });
  }
  if (o.rank != "auto") std::erase_if(all, [rank = parse_rank(o.rank)](const auto& c) { return c.rank != rank; });
  if (o.type != "auto") std::erase_if(all, [type = parse_type(o.type)](const auto& c) { return c.type != type; });
  if (all.empty()) fail("no predictor of this model is as --method, --rank and --type say, and smaller than its gate");
  return all;
}

// "3" or "0-7"
void parse_layers(const std::string& text, size_t n_layer, offline::FitPlan& plan) {
  size_t first = 0, last = n_layer - 1;
  if (text != "all") {
    const size_t dash = text.find('-');
    const auto number = [&](const std::string& part) {
      size_t value = 0;
      const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
      if (error != std::errc() || end != part.data() + part.size() || value >= n_layer) {
        fail("--layers is '{}', expected all, N or N-M with numbers from 0 to {}", text, n_layer - 1);
      }
      return value;
    };
    first = number(text.substr(0, dash));
    last = dash == std::string::npos ? first : number(text.substr(dash + 1));
    if (last < first) fail("--layers is '{}', expected the lower number first", text);
  }
  plan.first_layer = first, plan.n_layers = last - first + 1;
}

offline::FitPlan make_plan(const Options& o, const model::Model& m) {
  offline::FitPlan plan;
  plan.fit.recall = o.recall, plan.fit.threshold = o.threshold;
  plan.samples.max_tokens = o.tokens, plan.samples.window = o.window,
  plan.samples.input = model::parse_predictor_input(o.input);
  plan.candidates = candidates_of(o, m);
  plan.for_gpu = o.read_by == "gpu";
  plan.sample_bytes = static_cast<uint64_t>(o.sample_memory * (1 << 30));
  parse_layers(o.layers, m.weights().layers.size(), plan);
  return plan;
}

// Progress of a fit on stderr, and Ctrl-C.
class FitProgress final : public offline::FitListener {
 public:
  FitProgress(const offline::FitPlan& plan, size_t done) : plan_(plan), done_(done) {}
  void gathering(size_t first, size_t n, const offline::SampleProgress& p) override {
    if (!tokens_) {
      log::info("gathering the inputs of layers {} to {}", first, first + n - 1);
      if (p.tokens_before > 0) log::info("{} tokens were gathered by an earlier run", p.tokens_before);
      tokens_.emplace(p.tokens_total);
    }
    const double rate = static_cast<double>(p.tokens_done - p.tokens_before) / p.seconds;
    tokens_->update(p.tokens_done, fmt::format("{:.0f} tokens/s", rate));
    if (p.tokens_done == p.tokens_total) tokens_.reset();
  }
  void fitted(size_t layer, const offline::ChosenPredictor& chosen) override {
    const model::PredictorFigures& f = chosen.predictor.figures;
    if (!layers_) layers_.emplace(static_cast<int64_t>(plan_.n_layers));
    layers_->update(static_cast<int64_t>(++done_),
                    fmt::format("layer {}: {}, recall {:.2f} % of the loss, {:.2f} × the active neurons", layer,
                                chosen.candidate.name(), 100 * f.loss_recall, f.predicted_density / f.density));
    if (static_cast<double>(f.loss_recall) < plan_.fit.recall) {
      log::warn("layer {}: no predictor reaches a recall of {}; the best keeps {:.4f} of the loss", layer,
                plan_.fit.recall, f.loss_recall);
    }
  }
  bool keep_going() override { return !interrupt_.requested(); }

 private:
  const offline::FitPlan& plan_;
  size_t done_;
  std::optional<Progress> tokens_, layers_;
  InterruptGuard interrupt_;
};

void fit(const Options& o) {
  set_logging(o.quiet, o.verbose);
  model::Model m = model::Model::load(o.model, {o.activation});
  const std::filesystem::path path = sidecar_of(o);
  model::Sidecar sidecar = std::filesystem::exists(path) ? *model::Sidecar::find(m.file(), m.config(), path)
                                                         : model::Sidecar::empty_for(m.file(), m.config());
  const offline::FitPlan plan = make_plan(o, m);
  const offline::Corpus corpus = corpus_of(o, m, o.texts);
  offline::layers_at_once(m, corpus, plan);  // refuses before anything is written what cannot be
  for (const offline::Candidate& c : plan.candidates) offline::check_candidate(c, m.config().n_embd);
  ThreadTeam team(o.threads);
  const Fitting fitting = make_fitting(o, team);
  const offline::FitWork work(offline::FitWork::directory_for(path), offline::fit_key(m, corpus, plan), m);
  size_t done = 0;
  for (size_t l = plan.first_layer; l < plan.first_layer + plan.n_layers; ++l) done += work.has(l) ? 1 : 0;
  if (done > 0) log::info("{} of {} layers were fitted by an earlier run", done, plan.n_layers);
  {
    FitProgress progress(plan, done);
    const offline::FitHardware hardware{[&] { return make_device(o, team); }, *fitting.products, team};
    if (!offline::fit_layers(m, corpus, plan, work, hardware, progress)) {
      log::info("interrupted; the same command goes on from what '{}' holds", work.directory().string());
      throw CLI::RuntimeError(kInterruptedStatus);
    }
  }
  // Other layers keep the predictors that they have. Where there are none, old ones need not be readable.
  const bool keeps_others = plan.n_layers < m.weights().layers.size();
  if (keeps_others && sidecar.file != nullptr && model::has_predictors(*sidecar.file)) {
    for (const model::StoredPredictor& p : model::read_predictors(*sidecar.file, sidecar.n_embd, sidecar.n_ff)) {
      sidecar.new_predictors.push_back(offline::owned_copy(p));
    }
  }
  sidecar.new_predictors.resize(m.weights().layers.size());
  for (size_t l = plan.first_layer; l < plan.first_layer + plan.n_layers; ++l) sidecar.new_predictors[l] = work.load(l);
  sidecar.write(path);
  work.remove();
  log::info("{}: predictors of {} layers", path.string(), plan.n_layers);
  log::debug("products took at most {:.2f} GiB on {}", static_cast<double>(fitting.products->peak_bytes()) / (1 << 30),
             fitting.products->name());
}

void eval(const Options& o) {
  set_logging(o.quiet, o.verbose);
  model::Model m = model::Model::load(o.model, {o.activation});
  const std::filesystem::path path = sidecar_of(o);
  std::optional<model::Sidecar> sidecar;
  if (!o.sidecar.empty() || std::filesystem::exists(path)) {
    sidecar = model::Sidecar::find(m.file(), m.config(), path);
    model::attach_predictors(m, *sidecar);
  }
  const ChosenThresholds thresholds = choose_thresholds(m, sidecar ? &*sidecar : nullptr, o.sparse_threshold, true);
  const auto tokenizer = text::Tokenizer::load(m.file());
  std::vector<int32_t> ids;
  for (const std::string& file : o.texts) {
    const std::vector<int32_t> more = tokenizer->encode(read_text_file(file), {.add_special = false});
    ids.insert(ids.end(), more.begin(), more.end());
  }
  const std::optional<int32_t> bos = tokenizer->add_bos() ? tokenizer->bos() : std::nullopt;
  ThreadTeam team(o.threads);
  const auto dense = cpu::make_device(team), sparse = cpu::make_device(team);
  const InterruptGuard interrupt;
  std::optional<Progress> progress;
  const offline::EvaluationOptions options{o.window, o.tokens, thresholds.by_layer};
  const offline::Evaluation e =
      offline::evaluate_predictors(m, *dense, *sparse, ids, bos, options, [&](const offline::EvaluationProgress& p) {
        if (!progress) progress.emplace(p.tokens_total);
        progress->update(p.tokens_done, fmt::format("perplexity {:+.3f} %", 100 * p.comparison->perplexity_increase()));
        return !interrupt.requested();
      });
  progress.reset();
  if (o.json) {
    write_json(offline::evaluation_json(e));
  } else {
    write_out(offline::evaluation_table(e));
  }
  if (interrupt.requested()) throw CLI::RuntimeError(kInterruptedStatus);
}

// "METHOD[:RANK][:TYPE]"
offline::Candidate parse_candidate(const std::string& text) {
  const size_t first = text.find(':'), second = first == std::string::npos ? first : text.find(':', first + 1);
  const std::string method = text.substr(0, first);
  const bool ranked = method == "svd" || method == "mlp";
  const std::string rank = ranked && first != std::string::npos ? text.substr(first + 1, second - first - 1) : "";
  const size_t type = ranked ? second : first;
  return make_candidate(method, rank, type == std::string::npos ? "auto" : text.substr(type + 1));
}

void write_file(const std::filesystem::path& path, const std::string& text) {
  AtomicFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

void compare(const Options& o) {
  set_logging(o.quiet, o.verbose);
  model::Model m = model::Model::load(o.model, {o.activation});
  std::vector<offline::Candidate> candidates;
  for (const std::string& c : o.candidates) candidates.push_back(parse_candidate(c));
  if (candidates.empty()) candidates = candidates_of(o, m);
  ThreadTeam team(o.threads);
  const offline::Samples samples = gather(o, m, team, o.texts, o.tokens, false);
  std::vector<offline::NamedSamples> texts;
  for (const std::string& file : o.tests) {
    texts.push_back({std::filesystem::path(file).stem().string(), gather(o, m, team, {file}, o.test_tokens, true)});
  }
  const Fitting fitting = make_fitting(o, team);
  offline::FitOptions options;
  options.recall = o.recall, options.threshold = o.threshold;
  const InterruptGuard interrupt;
  std::optional<Progress> progress;
  const auto compared = offline::compare_candidates(m, samples, candidates, texts, options, *fitting.products, team,
                                                    [&](size_t done, size_t total, const std::string& what) {
                                                      if (!progress) progress.emplace(static_cast<int64_t>(total));
                                                      progress->update(static_cast<int64_t>(done), what);
                                                      return !interrupt.requested();
                                                    });
  progress.reset();
  if (!compared) interrupted();
  const nlohmann::json j = offline::to_json(*compared, texts);
  for (const offline::NamedSamples& text : texts) {
    if (o.directory.empty()) break;
    const std::filesystem::path stem = std::filesystem::path(o.directory) / ("predictors-" + text.name);
    write_file(stem.string() + ".svg",
               offline::recall_plot_svg(j, text.name, fmt::format("{}: predictors on {}", m.config().name, text.name)));
    write_file(stem.string() + ".md", offline::markdown_table(j, text.name, o.recall));
  }
  if (o.json) return write_json(j);
  for (const offline::NamedSamples& text : texts) {
    write_out(fmt::format("{}\n\n{}\n", text.name, offline::markdown_table(j, text.name, o.recall)));
  }
}

void add_common(CLI::App& sub, Options& o, const char* tokens) {
  add_model_file_option(sub, o.model);
  sub.add_option("--activation", o.activation, "Take the FFN's activation to be this, whatever the file says")
      ->group("Model");
  sub.add_option("-f,--file", o.texts, "Texts; documents are separated by <|endoftext|>")
      ->required()
      ->type_name("FILE")
      ->group("Text");
  sub.add_option("--tokens", o.tokens, tokens)->check(CLI::NonNegativeNumber)->capture_default_str()->group("Text");
  sub.add_option("-c,--ctx-size", o.window, "Longest piece of text evaluated at once, tokens")
      ->check(CLI::Range(int64_t{2}, int64_t{1} << 20))
      ->capture_default_str()
      ->group("Text");
  add_thread_option(sub, o.threads);
  add_logging_options(sub, o.quiet, o.verbose);
}

// Flags that say what predictors are made for.
void add_activity(CLI::App& sub, Options& o) {
  sub.add_option("--sparse-threshold", o.threshold, "A neuron is active when |act(gate)| exceeds this")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->group("Predictor");
}

void add_sidecar(CLI::App& sub, Options& o) {
  sub.add_option("--sidecar", o.sidecar, "Sidecar that keeps the predictors (default: MODEL.sparse.gguf)")
      ->type_name("FILE")
      ->group("Model");
}

void add_kind(CLI::App& sub, Options& o) {
  sub.add_option("--method", o.method, "svd, mlp, gate-bits, or auto: whichever costs least time a token")
      ->check(CLI::IsMember({"svd", "mlp", "gate-bits", "auto"}))
      ->capture_default_str()
      ->group("Predictor");
  sub.add_option("--rank", o.rank, "Rows of fc1, or auto")->capture_default_str()->group("Predictor");
  sub.add_option("--type", o.type, "Type of the weights: f16, q8_0, q4_0 or auto")
      ->capture_default_str()
      ->group("Predictor");
  sub.add_option("--recall", o.recall, "Share of the loss (|value| * ||down row||) to keep")
      ->check(CLI::Range(0.5, 0.999999))
      ->capture_default_str()
      ->group("Predictor");
  sub.add_option("--input", o.input, "Its input: ffn_input, or residual (before the norm)")
      ->check(CLI::IsMember({"ffn_input", "residual"}))
      ->capture_default_str()
      ->group("Predictor");
  sub.add_option("--device", o.device,
                 "Where activations are gathered and weights computed: cpu, cuda, or auto: the GPU when there is one")
      ->check(CLI::IsMember({"cpu", "cuda", "auto"}))
      ->capture_default_str()
      ->group("Hardware");
  sub.add_option("--gpu,--main-gpu", o.gpu, "Number of the GPU")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->group("Hardware");
}

void register_fit(CLI::App& top) {
  const auto o = std::make_shared<Options>();
  o->tokens = 24576;
  CLI::App* sub = top.add_subcommand("fit", "Make predictors from texts and keep them in the sidecar");
  add_common(*sub, *o,
             "Tokens to gather, spread over the texts; half are fitted on, a quarter each sets and checks "
             "thresholds (0: all)");
  add_sidecar(*sub, *o);
  add_kind(*sub, *o);
  add_activity(*sub, *o);
  sub->add_option("--for", o->read_by, "Whose bandwidth `auto` counts with: cpu or gpu")
      ->check(CLI::IsMember({"cpu", "gpu"}))
      ->capture_default_str()
      ->group("Predictor");
  sub->add_option("--layers", o->layers, "Only these: all, N, or N-M; the others keep what they have")
      ->capture_default_str()
      ->group("Predictor");
  sub->add_option(
         "--sample-memory", o->sample_memory,
         "GiB that gathered inputs may take, on disk beside the sidecar and mapped; when all layers' are more, "
         "the texts are run through the model several times")
      ->check(CLI::PositiveNumber)
      ->capture_default_str()
      ->group("Hardware");
  sub->footer(
      "Ctrl-C leaves the sidecar as it was; the same command goes on where it was, from SIDECAR.fit.\n"
      "Example: hearth predictor fit -m model.gguf -f books.txt --method svd --rank 256 --type q8_0");
  sub->callback([o] { fit(*o); });
}

void register_eval(CLI::App& top) {
  const auto o = std::make_shared<Options>();
  o->tokens = 16384;
  CLI::App* sub = top.add_subcommand("eval", "Measure a model's predictors on a text");
  add_common(*sub, *o, "Stop after this many tokens (0: all)");
  add_sidecar(*sub, *o);
  add_threshold_option(*sub, o->sparse_threshold);
  sub->add_flag("--json", o->json, "Print JSON")->group("General");
  sub->footer("Example: hearth predictor eval -m model.gguf -f heldout.txt");
  sub->callback([o] { eval(*o); });
}

void register_compare(CLI::App& top) {
  const auto o = std::make_shared<Options>();
  o->tokens = 24576;
  CLI::App* sub = top.add_subcommand("compare", "Compare kinds of predictors on texts they were not made from");
  add_common(*sub, *o, "Tokens to make them from, spread over the texts (0: all)");
  add_kind(*sub, *o);
  add_activity(*sub, *o);
  sub->add_option("--test", o->tests, "Texts to compare on")->required()->type_name("FILE")->group("Text");
  sub->add_option("--test-tokens", o->test_tokens, "Tokens of each, spread over the text (0: all)")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->group("Text");
  sub->add_option("--candidate", o->candidates,
                  "METHOD[:RANK][:TYPE], several; default: all that --method, --rank and --type leave open")
      ->group("Predictor");
  sub->add_option("-o,--output", o->directory, "Also write predictors-TEXT.md and .svg into this directory")
      ->check(CLI::ExistingDirectory)
      ->group("General");
  sub->add_flag("--json", o->json, "Print JSON, every wanted recall included")->group("General");
  sub->footer(
      "Example: hearth predictor compare -m model.gguf -f a.txt --test b.txt --candidate svd:128:q8_0 gate-bits:q4_0");
  sub->callback([o] { compare(*o); });
}

}  // namespace

void register_predictor(CLI::App& app) {
  CLI::App* top = app.add_subcommand("predictor", "Make and measure predictors of which neurons fire");
  top->require_subcommand(1);
  top->footer(
      "`hearth predictor fit --help` and so on explain each.\n"
      "Example: hearth predictor fit -m model.gguf -f books.txt");
  register_fit(*top);
  register_eval(*top);
  register_compare(*top);
}

}  // namespace hearth::tools
