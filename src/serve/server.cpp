#include "serve/server.h"

#include <sys/socket.h>

#include <algorithm>

#include "core/log.h"
#include "serve/page.h"

namespace hearth::serve {
namespace {

constexpr time_t kReadSeconds = 20, kWriteSeconds = 20, kKeepAliveSeconds = 5;

std::optional<text::ChatTemplate> chat_template(const text::Tokenizer& tokenizer, const std::string& wanted) {
  if (wanted.empty() && tokenizer.chat_template().empty()) return std::nullopt;
  return text::ChatTemplate::of(tokenizer, wanted);
}

// The key of "Authorization: Bearer KEY" or "x-api-key: KEY"; empty without one.
std::string key_of(const httplib::Request& request) {
  constexpr std::string_view kBearer = "Bearer ";
  const std::string authorization = request.get_header_value("Authorization");
  if (authorization.starts_with(kBearer)) return authorization.substr(kBearer.size());
  return request.get_header_value("x-api-key");
}

Protocol protocol_of(const std::string& path) {
  if (path.starts_with("/api/")) return Protocol::ollama;
  return path.starts_with("/v1/messages") ? Protocol::anthropic : Protocol::openai;
}

}  // namespace

bool equal_keys(std::string_view a, std::string_view b) {
  unsigned different = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < a.size(); ++i) {
    different |= static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b.empty() ? 0 : b[i % b.size()]);
  }
  return different == 0;
}

// httplib's, with room for more clients that knock at the same time than the 5 it is built with.
class Server::Listener : public httplib::Server {
 public:
  void widen() { (void)::listen(svr_sock_, kBacklog); }

 private:
  static constexpr int kBacklog = 512;
};

Server::Server(Scheduler& scheduler, const text::Tokenizer& tokenizer, ModelFacts model, ServerOptions options)
    : model_(std::move(model)),
      options_(std::move(options)),
      api_{scheduler, tokenizer, model_, options_, chat_template(tokenizer, options_.chat_template), now_seconds()},
      listener_(std::make_unique<Listener>()),
      http_(*listener_) {
  add_limits();
  add_keys();
  add_log();
  http_.Get("/", [](const httplib::Request&, httplib::Response& response) {
    // Nothing from elsewhere, and no script but the page's own.
    response.set_header(
        "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'");
    response.set_header("X-Content-Type-Options", "nosniff");
    response.set_content(kPage.data(), kPage.size(), "text/html; charset=utf-8");
  });
  add_openai(http_, api_);
  add_responses(http_, api_);
  add_anthropic(http_, api_);
  add_ollama(http_, api_);
  add_native(http_, api_);
  if (!options_.cors.empty()) {
    http_.Options(R"(.*)", [](const httplib::Request&, httplib::Response& response) {
      response.set_header("Access-Control-Allow-Methods", "GET, POST");
      response.set_header("Access-Control-Allow-Headers", "Content-Type, Authorization, x-api-key, anthropic-version");
      response.status = 204;
    });
  }
}

Server::~Server() {
  stop();
}

void Server::add_limits() {
  http_.new_task_queue = [n = options_.most_connections] { return new httplib::ThreadPool(static_cast<size_t>(n)); };
  http_.set_payload_max_length(options_.most_body);
  http_.set_read_timeout(kReadSeconds);
  http_.set_write_timeout(kWriteSeconds);
  http_.set_keep_alive_timeout(kKeepAliveSeconds);
  http_.set_tcp_nodelay(true);
  http_.set_error_handler([](const httplib::Request& request, httplib::Response& response) {
    if (!response.body.empty()) return;
    const int status = response.status;
    const std::string what = status == 404   ? fmt::format("there is no {} {}", request.method, request.path)
                             : status == 413 ? std::string("the body is too large")
                                             : fmt::format("the request cannot be answered (status {})", status);
    respond_error(response, protocol_of(request.path),
                  ApiError(status, status == 404 ? "not_found_error" : "invalid_request_error", what));
  });
}

void Server::add_keys() {
  http_.set_pre_routing_handler([this](const httplib::Request& request, httplib::Response& response) {
    using Result = httplib::Server::HandlerResponse;
    if (!options_.cors.empty()) response.set_header("Access-Control-Allow-Origin", options_.cors);
    const bool open =
        request.path == "/" || request.path == "/health" || request.path == "/v1/health" || request.method == "OPTIONS";
    if (options_.api_keys.empty() || open) return Result::Unhandled;
    const std::string key = key_of(request);
    bool known = false;
    for (const std::string& k : options_.api_keys) known |= equal_keys(key, k);
    if (known) return Result::Unhandled;
    const char* type =
        protocol_of(request.path) == Protocol::anthropic ? "authentication_error" : "invalid_request_error";
    respond_error(response, protocol_of(request.path),
                  ApiError(401, type, key.empty() ? "this server needs an API key" : "the API key is wrong"));
    return Result::Handled;
  });
}

// Headers are never logged: they have keys. What a client wrote is escaped, so that it makes no lines of its own.
void Server::add_log() {
  if (options_.log == RequestLog::none) return;
  http_.set_logger([this](const httplib::Request& request, const httplib::Response& response) {
    const auto quoted = [](const std::string& s) {
      return Json(s).dump(-1, ' ', true, Json::error_handler_t::replace);
    };
    const bool with_body = options_.log == RequestLog::prompts && !request.body.empty();
    log::info("{} {} {}{}{}", request.method, quoted(request.path), response.status, with_body ? " " : "",
              with_body ? quoted(request.body) : "");
  });
}

int Server::bind(const std::string& host, int port) {
  if (port == 0) {
    const int bound = http_.bind_to_any_port(host);
    if (bound <= 0) fail("no port of '{}' can be listened on", host);
    listener_->widen();
    return bound;
  }
  if (!http_.bind_to_port(host, port)) {
    fail("port {} of '{}' cannot be listened on: it is taken, or not allowed; choose another with --port", port, host);
  }
  listener_->widen();
  return port;
}

void Server::start() {
  thread_ = std::thread([this] { http_.listen_after_bind(); });
}

void Server::stop() {
  if (!thread_.joinable()) return;
  while (!http_.is_running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // it is about to
  http_.stop();
  thread_.join();
}

}  // namespace hearth::serve
