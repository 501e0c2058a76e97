// `hearth serve`: the model behind OpenAI's, Anthropic's, Ollama's and llama.cpp's HTTP interfaces, and a page.
#include "serve/server.h"

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <sstream>
#include <thread>

#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "tools/commands.h"
#include "tools/common.h"
#include "tools/figures.h"
#include "tools/sampling.h"

namespace hearth::tools {
namespace {

struct ServeOptions {
  ModelOptions model;
  serve::ServerOptions server;
  serve::SchedulerOptions scheduler;
  std::string host = "127.0.0.1";
  int port = 8080;
  std::string alias, key_file, log = "none";
  int grace = 30;  // seconds
};

volatile std::sig_atomic_t g_asked_to_end = 0;  // a signal handler can reach nothing else
void on_end(int) {
  g_asked_to_end = 1;
}

// Calls `end` once SIGTERM or SIGINT came; the second one kills as usual.
class EndGuard {
 public:
  explicit EndGuard(std::function<void()> end) {
    g_asked_to_end = 0;
    struct sigaction action {};
    action.sa_handler = on_end;
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    sigaction(SIGTERM, &action, nullptr);
    sigaction(SIGINT, &action, nullptr);
    watcher_ = std::jthread([end = std::move(end)](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        if (g_asked_to_end != 0) return end();
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
    });
  }
  ~EndGuard() {
    std::signal(SIGTERM, SIG_DFL);
    std::signal(SIGINT, SIG_DFL);
  }
  EndGuard(const EndGuard&) = delete;
  EndGuard& operator=(const EndGuard&) = delete;

 private:
  std::jthread watcher_;
};

void read_keys(ServeOptions& o) {
  if (o.key_file.empty()) return;
  std::istringstream lines(read_text_file(o.key_file));
  for (std::string line; std::getline(lines, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (!line.empty() && line[0] != '#') o.server.api_keys.push_back(line);
  }
  if (o.server.api_keys.empty()) fail("'{}' has no API key; one a line was expected", o.key_file);
}

// The share of a divided model's neurons on the GPU, by layer.
serve::Json plan_json(Session& session) {
  if (!session.planned()) return nullptr;
  const double n_ff = static_cast<double>(session.engine().config().n_ff);
  serve::Json shares = serve::Json::array();
  for (const engine::LayerPlacement& layer : session.planned()->placement.layers) {
    shares.push_back(static_cast<double>(layer.gpu_bucket.size()) / n_ff);
  }
  return {{"layers", shares}};
}

// The CPU computes each token of a larger pass by itself, unless it chooses a kernel by how many there are: products of floats, and
// of an expert with the tokens that chose it.
bool may_join_prompts(Session& session) {
  if (session.planned() || session.on_gpu() || session.model().config().experts) return false;
  const auto& tensors = session.model().file().tensors();
  return std::all_of(tensors.begin(), tensors.end(),
                     [](const gguf::TensorInfo& t) { return t.rows() == 1 || is_quantized(t.traits->type); });
}

serve::ModelFacts facts(Session& session, const ServeOptions& o) {
  const model::Model& m = session.model();
  const model::Config& c = m.config();
  const std::string stem = std::filesystem::path(o.model.model).stem().string();
  return {.id = o.alias.empty() ? stem : o.alias,
          .path = o.model.model,
          .architecture = c.arch,
          .type_name = m.type_name(),
          .n_parameters = m.parameters(),
          .n_bytes = m.weight_bytes(),
          .n_embd = static_cast<uint64_t>(c.n_embd),
          .n_ctx_train = static_cast<uint64_t>(c.n_ctx_train),
          .plan = plan_json(session)};
}

void serve_model(ServeOptions o) {
  read_keys(o);
  text::Sampler{o.server.sampler};  // refuse bad flags before the model is loaded
  o.model.n_sequences = o.scheduler.n_parallel;
  if (o.log != "none") o.server.log = o.log == "prompts" ? serve::RequestLog::prompts : serve::RequestLog::requests;
  Session session(o.model);
  const text::Tokenizer& tokenizer = session.require_tokenizer("serve");
  if (session.planned() && session.planned()->placement.n_sequences < o.scheduler.n_parallel) {
    fail("the plan is for {} sequences and --parallel is {}; make another plan",
         session.planned()->placement.n_sequences, o.scheduler.n_parallel);
  }
  o.scheduler.join_prompts = may_join_prompts(session);
  serve::Scheduler scheduler(session.engine(), tokenizer, o.scheduler);
  serve::Server server(scheduler, tokenizer, facts(session, o), o.server);
  const int port = server.bind(o.host, o.port);
  const bool loopback = o.host == "127.0.0.1" || o.host == "localhost" || o.host == "::1";
  if (!loopback && o.server.api_keys.empty()) {
    log::warn("everybody who reaches {}:{} may use this server; --api-key asks for a key", o.host, port);
  }
  if (!server.has_chat()) {
    log::info("the model has no chat template: chats are refused unless --chat-template names one");
  }
  server.start();
  log::info("listening on http://{}:{} (up to {} texts at once, {} more may wait)", o.host, port,
            o.scheduler.n_parallel, o.scheduler.n_queue);
  const EndGuard guard([&] {
    log::info("ending: what runs has {} s to finish", o.grace);
    scheduler.stop(std::chrono::seconds(o.grace));
  });
  scheduler.run();
  server.stop();
}

}  // namespace

void register_serve(CLI::App& app) {
  auto o = std::make_shared<ServeOptions>();
  CLI::App* sub =
      app.add_subcommand("serve", "Answer over HTTP: OpenAI's, Anthropic's and Ollama's interfaces, and a page");
  sub->add_option("--host", o->host, "Address to listen on; 0.0.0.0: every one of this machine's")
      ->capture_default_str()
      ->group("Server");
  sub->add_option("--port", o->port, "Port to listen on; 0: any that is free")
      ->check(CLI::Range(0, 65535))
      ->capture_default_str()
      ->group("Server");
  sub->add_option("--api-key", o->server.api_keys, "Answer only requests with this key; may be given several times")
      ->type_name("KEY")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->group("Server");
  sub->add_option("--api-key-file", o->key_file, "Read such keys from a file, one a line")
      ->type_name("FILE")
      ->group("Server");
  sub->add_option("--cors", o->server.cors,
                  "Let pages of this origin use the server, https://example.org or * (default: its own page)")
      ->type_name("ORIGIN")
      ->group("Server");
  sub->add_option("--alias", o->alias, "What clients call the model (default: the file's name)")
      ->type_name("NAME")
      ->group("Server");
  sub->add_option("--parallel", o->scheduler.n_parallel,
                  "Texts that run at once; the cache has room for as many contexts")
      ->check(CLI::Range(int64_t{1}, int64_t{256}))
      ->capture_default_str()
      ->group("Server");
  sub->add_option("--queue", o->scheduler.n_queue, "Requests that may wait besides; more are answered with 503")
      ->check(CLI::Range(int64_t{1}, int64_t{100000}))
      ->capture_default_str()
      ->group("Server");
  sub->add_option("--log", o->log,
                  "Log each request: requests (method, path, status), prompts (its body, too), or none")
      ->check(CLI::IsMember({"none", "requests", "prompts"}))
      ->capture_default_str()
      ->group("Server");
  sub->add_option("--grace", o->grace, "Seconds that what runs has to finish after SIGTERM or Ctrl-C")
      ->check(CLI::Range(0, 3600))
      ->capture_default_str()
      ->group("Server");
  sub->add_option("--chat-template", o->server.chat_template,
                  "Use this chat template: chatml, llama2, llama3, mistral, or Jinja2 text (default: the model's)")
      ->group("Server");
  add_sampling_options(*sub, o->server.sampler);
  add_model_options(*sub, o->model);
  sub->footer(
      "The flags say what a request leaves open about sampling. Ctrl-C or SIGTERM ends the server once what "
      "runs is done.\n"
      "Example: hearth serve -m models/hearth-demo.gguf --chat-template chatml --parallel 8");
  sub->callback([o] { serve_model(*o); });
}

}  // namespace hearth::tools
