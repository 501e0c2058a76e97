// `hearth chat`: a conversation in the terminal.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>

#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "text/chat.h"
#include "tools/commands.h"
#include "tools/generate.h"
#include "tools/interrupt.h"
#include "tools/line_editor.h"
#include "tools/output.h"
#include "tools/sampling.h"

namespace hearth::tools {
namespace {

using Json = nlohmann::ordered_json;

struct ChatOptions {
  ModelOptions model;
  GenerateOptions generate;
  std::string chat_template, system_prompt;
};

constexpr const char* kHelp =
    "/system TEXT   begin anew with this system message; without TEXT: with none\n"
    "/reset         begin anew\n"
    "/retry         answer the last message again\n"
    "/save FILE     write the conversation as JSON; /load FILE reads it back\n"
    "/set           show how tokens are drawn; /set NAME VALUE changes temp, top-k, top-p, min-p, repeat-penalty, n\n"
    "/stats         what the engine has counted\n"
    "/exit          end (Ctrl-D, too)\n"
    "A line that ends with \\ goes on in the next one. Ctrl-C ends an answer.\n";

class Chat {
 public:
  explicit Chat(const ChatOptions& options)
      : options_(options),
        session_(options.model),
        tokenizer_(session_.require_tokenizer("chat")),
        template_(text::ChatTemplate::of(tokenizer_, options.chat_template)),
        system_(options.system_prompt) {
    reset();
  }

  void run() {
    if (editor_.on_terminal()) log::info("a line that ends with \\ goes on; /help lists the commands, Ctrl-D ends");
    while (std::optional<std::string> message = read()) {
      if (message->empty()) continue;
      if (*message == "/exit" || *message == "/quit") return;
      try {
        if ((*message)[0] == '/') {
          command(*message);
        } else {
          messages_.push_back({{"role", "user"}, {"content", *message}});
          answer();
        }
      } catch (const Error& e) {
        if (!editor_.on_terminal()) throw;  // nobody is there to do it otherwise
        log::write(log::Level::quiet, "error: ", e.what());
      }
    }
    if (editor_.on_terminal()) write_out("\n");
  }

 private:
  // A message: lines as long as they end with a backslash.
  std::optional<std::string> read() {
    std::string message;
    for (std::string prompt = "> ";; prompt = ". ") {
      std::optional<std::string> line = editor_.read(prompt);
      if (!line) return message.empty() ? std::nullopt : std::optional(message);
      message += *line;
      if (message.empty() || message.back() != '\\') return message;
      message.back() = '\n';
    }
  }

  void reset() {
    messages_ = Json::array();
    if (!system_.empty()) messages_.push_back({{"role", "system"}, {"content", system_}});
  }

  void answer() {
    std::vector<int32_t> ids = template_.encode(tokenizer_, messages_);
    engine::Sequence& text = session_.text();
    // The part that the cache has stays; one token at least is evaluated, for its logits.
    known_.resize(static_cast<size_t>(text.n_past()));
    const size_t most = std::min(known_.size(), ids.size() - 1);
    const auto same =
        std::mismatch(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(most), known_.begin()).first - ids.begin();
    const engine::DensityStats before = session_.engine().density();
    text.truncate(same);
    known_.resize(static_cast<size_t>(same));
    Generated g;
    {
      const InterruptGuard interrupt;
      try {
        g = generate(
            session_, std::span(ids).subspan(static_cast<size_t>(same)), options_.generate,
            [](std::string_view piece) {
              write_out(piece);
              flush_out();
            },
            [&] { return interrupt.requested(); });
      } catch (const Error&) {
        messages_.erase(messages_.end() - 1);  // so that a shorter one may follow
        throw;
      }
    }
    write_out("\n");
    flush_out();
    known_ = std::move(ids);
    known_.insert(known_.end(), g.ids.begin(), g.ids.end());
    messages_.push_back({{"role", "assistant"}, {"content", g.text}});
    tell(g, session_.engine().density().since(before));
  }

  // The last line of an answer.
  void tell(const Generated& g, const engine::DensityStats& counted) {
    const Timings& t = g.timings;
    std::string line =
        t.eval > 0 ? fmt::format("{:.1f} tokens/s", static_cast<double>(t.n_eval) / t.eval) : "one token";
    const double density = counted.density(), host = counted.host_share();
    if (!std::isnan(density)) line += fmt::format(", density {:.1f} %", 100 * density);
    if (!std::isnan(host) && session_.planned()) line += fmt::format(", {:.1f} % of it on the GPU", 100 * (1 - host));
    line += fmt::format(", context {} of {}", session_.text().n_past(), session_.engine().n_ctx());
    if (g.ending != Ending::end_of_generation) line += fmt::format(" ({})", to_string(g.ending));
    log::info("[{}]", line);
  }

  void command(const std::string& line) {
    std::istringstream words(line);
    std::string name, rest;
    words >> name >> std::ws;
    std::getline(words, rest);
    if (name == "/help") return write_out(kHelp);
    if (name == "/system") return system_ = rest, reset();
    if (name == "/reset") return reset();
    if (name == "/retry") return retry();
    if (name == "/save") return save(rest);
    if (name == "/load") return load(rest);
    if (name == "/set") return set(rest);
    if (name == "/stats") return stats();
    fail("there is no command {}; /help lists them", name);
  }

  void retry() {
    while (!messages_.empty() && messages_.back()["role"] == "assistant") messages_.erase(messages_.end() - 1);
    if (messages_.empty() || messages_.back()["role"] != "user") fail("there is no message to answer again");
    answer();
  }

  void save(const std::string& path) const {
    if (path.empty()) fail("/save needs a file's name");
    std::ofstream out(path, std::ios::binary);
    out << Json{{"messages", messages_}}.dump(1, ' ', false, Json::error_handler_t::replace) << "\n";
    if (!out.flush()) fail("'{}' cannot be written", path);
    log::info("{} messages are in '{}'", messages_.size(), path);
  }

  void load(const std::string& path) {
    if (path.empty()) fail("/load needs a file's name");
    Json loaded;
    try {
      loaded = Json::parse(read_text_file(path)).at("messages");
    } catch (const Json::exception& e) {
      fail("'{}' is no conversation that /save wrote: {}", path, e.what());
    }
    const bool sound = loaded.is_array() && std::all_of(loaded.begin(), loaded.end(), [](const Json& m) {
                         return m.is_object() && m.contains("role") && m["role"].is_string() && m.contains("content") &&
                                m["content"].is_string();
                       });
    if (!sound) fail("'{}' is no conversation that /save wrote: messages need a role and a content", path);
    messages_ = std::move(loaded);
    log::info("{} messages", messages_.size());
  }

  void set(const std::string& rest) {
    text::SamplerParams s = options_.generate.sampler;
    if (rest.empty()) {
      return write_out(fmt::format("temp {}, top-k {}, top-p {}, min-p {}, repeat-penalty {}, n {}\n", s.temp, s.top_k,
                                   s.top_p, s.min_p, s.repeat_penalty, options_.generate.n_predict));
    }
    std::istringstream words(rest);
    std::string name;
    double value = 0;
    if (!(words >> name >> value)) fail("/set needs a name and a number");
    if (name == "temp") {
      s.temp = static_cast<float>(value);
    } else if (name == "top-k") {
      s.top_k = static_cast<int32_t>(std::clamp(value, -1.0, 1e9));
    } else if (name == "top-p") {
      s.top_p = static_cast<float>(value);
    } else if (name == "min-p") {
      s.min_p = static_cast<float>(value);
    } else if (name == "repeat-penalty") {
      s.repeat_penalty = static_cast<float>(value);
    } else if (name == "n") {
      options_.generate.n_predict = static_cast<int64_t>(std::clamp(value, -1.0, 1e12));
    } else {
      fail("there is no '{}' to set; /help lists what there is", name);
    }
    text::Sampler{s};  // refuses what is out of range
    options_.generate.sampler = s;
  }

  void stats() {
    const engine::DensityStats& d = session_.engine().density();
    const double density = d.density(), host = d.host_share();
    write_out(fmt::format("context: {} of {} tokens; pages free: {} of {}\n", session_.text().n_past(),
                          session_.engine().n_ctx(), session_.engine().pages().n_free(),
                          session_.engine().pages().n_pages()));
    if (!std::isnan(density)) write_out(fmt::format("density: {:.2f} % over {} tokens\n", 100 * density, d.steps));
    if (!std::isnan(host) && session_.planned())
      write_out(fmt::format("on the GPU: {:.2f} % of the active neurons\n", 100 * (1 - host)));
  }

  ChatOptions options_;
  Session session_;
  const text::Tokenizer& tokenizer_;
  text::ChatTemplate template_;
  std::string system_;
  LineEditor editor_;
  Json messages_;
  std::vector<int32_t> known_;  // what is in the cache
};

}  // namespace

void register_chat(CLI::App& app) {
  auto o = std::make_shared<ChatOptions>();
  CLI::App* sub = app.add_subcommand("chat", "Talk with the model in the terminal");
  sub->add_option("--chat-template", o->chat_template,
                  "Use this chat template: chatml, llama2, llama3, mistral, or Jinja2 text (default: the model's)")
      ->group("Chat");
  sub->add_option("--system-prompt", o->system_prompt, "System message")->type_name("TEXT")->group("Chat");
  sub->add_option("-n,--predict,--n-predict", o->generate.n_predict,
                  "Tokens of an answer at most; -1: until the model ends it or the context is full")
      ->check(CLI::Range(int64_t{-1}, int64_t{1} << 40))
      ->type_name("N")
      ->capture_default_str()
      ->group("Chat");
  sub->add_option("-s,--seed", o->generate.sampler.seed, "Seed of the random numbers (default: a random one)")
      ->group("Sampling");
  add_sampling_options(*sub, o->generate.sampler);
  add_model_options(*sub, o->model);
  sub->footer(
      "/help in a conversation lists its commands. Without a terminal every line of standard input is a message.\n"
      "Example: hearth chat -m models/hearth-demo.gguf --chat-template chatml");
  sub->callback([o] { Chat(*o).run(); });
}

}  // namespace hearth::tools
