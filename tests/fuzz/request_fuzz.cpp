// Any bytes as the body of a POST: the first one names the path. Whatever it is, the answer is one that a client understands, and
// no page of the cache is left behind.
#include <array>
#include <thread>

#include "core/error.h"
#include "cpu/cpu.h"
#include "fuzz/target.h"
#include "serve/api.h"
#include "support/paths.h"
#include "support/tiny_model.h"

namespace {

using namespace hearth;

constexpr std::array kPaths = {
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/api/chat",            "/api/generate",   "/api/show",     "/completion",  "/tokenize",
    "/detokenize",          "/apply-template", "/v1/embeddings"};

// A connection whose other side has sent everything and takes everything.
class Memory : public httplib::Stream {
 public:
  explicit Memory(std::string in) : in_(std::move(in)) {}
  bool is_readable() const override { return true; }
  bool is_writable() const override { return true; }
  ssize_t read(char* to, size_t size) override {
    const size_t n = in_.copy(to, size, at_);
    at_ += n;
    return static_cast<ssize_t>(n);
  }
  ssize_t write(const char* from, size_t size) override {
    out.append(from, size);
    return static_cast<ssize_t>(size);
  }
  void get_remote_ip_and_port(std::string&, int&) const override {}
  void get_local_ip_and_port(std::string&, int&) const override {}
  socket_t socket() const override { return INVALID_SOCKET; }

  std::string out;

 private:
  std::string in_;
  size_t at_ = 0;
};

class Http : public httplib::Server {
 public:
  std::string answer(std::string request) {
    Memory memory(std::move(request));
    bool closed = false;
    process(*this, memory, closed);
    return memory.out;
  }

 private:
  // Debian 12's release of the library has not asked for both sides' addresses yet; Debian 13's does.
  template <typename Self>
  static void process(Self& self, Memory& memory, bool& closed) {
    if constexpr (requires { self.process_request(memory, true, closed, nullptr); }) {
      self.process_request(memory, true, closed, nullptr);
    } else {
      self.process_request(memory, "", 0, "", 0, true, closed, nullptr);
    }
  }
};

// A tiny model behind all interfaces, for as long as the process runs.
class Service {
 public:
  Service() {
    serve::add_openai(http_, api_), serve::add_responses(http_, api_), serve::add_anthropic(http_, api_);
    serve::add_ollama(http_, api_), serve::add_native(http_, api_);
  }
  ~Service() {
    scheduler_.stop({});
    thread_.join();
  }
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  void ask(const std::string& path, std::string_view body) {
    const std::string out =
        http_.answer(fmt::format("POST {} HTTP/1.1\r\nContent-Length: {}\r\n\r\n{}", path, body.size(), body));
    const int status = out.starts_with("HTTP/1.1 ") ? std::stoi(out.substr(9, 3)) : 0;
    HEARTH_CHECK(status == 200 || status == 400 || status == 404 || status == 501);
    if (status != 200) (void)serve::Json::parse(out.substr(out.find("\r\n\r\n") + 4)).at("error");
    serve::SchedulerStats stats = scheduler_.stats();
    for (int i = 0; i < 10'000 && (!stats.running.empty() || stats.n_waiting > 0); ++i) {  // cancelled ones end with a step
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      stats = scheduler_.stats();
    }
    HEARTH_CHECK(stats.running.empty() && stats.n_waiting == 0);
    HEARTH_CHECK(stats.pages_free == stats.pages);  // a prompt is shorter than two pages, and none is kept
  }

 private:
  test::TempDir dir_;
  model::Model model_ = model::Model::load(test::write_tiny_model(
      dir_ / "m.gguf", {.n_layer = 1, .n_embd = 32, .n_ff = 48, .n_head = 2, .n_head_kv = 1, .n_ctx = 128}));
  std::unique_ptr<Device> device_ = cpu::make_reference_device();
  engine::Engine engine_{model_, *device_, {.n_sequences = 4}};
  std::unique_ptr<text::Tokenizer> tokenizer_ = text::Tokenizer::load(model_.file());
  serve::Scheduler scheduler_{engine_, *tokenizer_, {.n_parallel = 4, .n_queue = 512}};
  serve::ModelFacts facts_{.id = "m", .architecture = "llama"};
  serve::ServerOptions options_;
  serve::Api api_{scheduler_, *tokenizer_, facts_, options_, text::ChatTemplate::of(*tokenizer_, "chatml")};
  Http http_;
  std::thread thread_{[this] { scheduler_.run(); }};
};

}  // namespace

HEARTH_FUZZ_TARGET(request) {
  static Service service;
  if (data.empty()) return;
  const std::string_view body(reinterpret_cast<const char*>(data.data()) + 1, data.size() - 1);
  service.ask(kPaths[static_cast<size_t>(data[0]) % kPaths.size()], body);
}
