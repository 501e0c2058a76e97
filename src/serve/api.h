#pragma once
// Shared by every protocol's handlers: checked request bodies, prompts from messages, and answers that end with their client.
#include <httplib.h>

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "serve/scheduler.h"
#include "text/chat.h"

namespace hearth::serve {

using Json = nlohmann::ordered_json;
using JobPtr = std::shared_ptr<Job>;

// A request that is answered with an error: `status` is HTTP's, `type` OpenAI's.
struct ApiError : Error {
  ApiError(int status_, std::string type_, const std::string& message, std::string param_ = {})
      : Error(message), status(status_), type(std::move(type_)), param(std::move(param_)) {}
  int status;
  std::string type, param;
};
[[noreturn]] void bad_request(const std::string& message, const std::string& param = {});
[[noreturn]] void not_done(const std::string& what);  // 501

// The fields of a JSON object; absent and null are the same. Throws ApiError (400) when one is of another type.
class Fields {
 public:
  explicit Fields(const Json& object);
  const Json* find(const char* name) const;
  double number(const char* name, double otherwise) const;
  int64_t integer(const char* name, int64_t otherwise) const;
  bool boolean(const char* name, bool otherwise) const;
  std::string string(const char* name, const std::string& otherwise = {}) const;
  // 501 when it is there and says something: no empty list, false or "none".
  void refuse(const char* name, const char* what) const;

 private:
  const Json& object_;
};

struct ModelFacts {
  std::string id;    // what clients call it
  std::string path;  // as it was given
  std::string architecture, type_name;
  uint64_t n_parameters = 0, n_bytes = 0, n_embd = 0, n_ctx_train = 0;
  Json plan;  // a divided model's plan as the page shows it; null for others
};

// The lines that a server logs of each request: none; method, path and status; its body, with the prompt, too.
enum class RequestLog { none, requests, prompts };

struct ServerOptions {
  std::vector<std::string> api_keys;    // one of them is needed; empty: none is
  std::string cors;                     // the origin that browsers may come from; empty: the page's own alone
  text::SamplerParams sampler;          // what a request does not say
  std::string chat_template;            // instead of the model's; empty: the model's
  size_t most_body = size_t{16} << 20;  // bytes
  int most_connections = 128;           // at once; others wait for one to end
  RequestLog log = RequestLog::none;
};

// Everything that handlers use.
struct Api {
  Scheduler& scheduler;
  const text::Tokenizer& tokenizer;
  const ModelFacts& model;
  const ServerOptions& options;
  std::optional<text::ChatTemplate> chat;  // null: the model has none, and none was given
  int64_t started = 0;                     // seconds since 1970

  // 404 when a request wants another model.
  void check_model(const Fields& f) const;
  // Sampling and stop fields that the protocols have in common. `n_predict`: the field for the tokens at most.
  Task task(const Fields& f, const char* n_predict) const;
  // A text or token ids; with nothing in it, the token that begins texts. `expected`: what 400 says it must be.
  std::vector<int32_t> prompt(const Json& given, const char* expected) const;
  // Messages as a chat template wants them: contents as plain text. 501 for what is no text.
  Json messages(const Json& given) const;
  const text::ChatTemplate& require_chat() const;  // 400 when there is none
  std::string chat_text(const Json& messages, const Json& extra = Json::object()) const;
  std::vector<int32_t> chat_prompt(const Json& messages, const Json& extra = Json::object()) const;
};

Json parse_body(const httplib::Request& request);
std::string text_of_content(const Json& content);  // a string, or a list of text parts
std::string new_id(const char* prefix);
int64_t now_seconds();
std::string now_rfc3339();
Json usage(const std::vector<End>& ends);  // OpenAI's
Json token_json(const text::Tokenizer& tokenizer, const TokenProbability& p);
const char* finish_reason(Finish finish);  // OpenAI's

// --- answers ---

struct Answer {
  std::string text;
  std::vector<Piece> pieces;
  End end;
};
// Messages of a stream; every part may be empty.
class StreamFormat {
 public:
  virtual ~StreamFormat() = default;
  virtual std::string begin() { return {}; }
  virtual std::string piece(size_t text, const Piece& piece) = 0;
  virtual std::string end(size_t text, const End& end) = 0;
  virtual std::string finish(const std::vector<End>& ends) = 0;
  virtual std::string error(const std::string& message) = 0;
};
std::string server_sent(const Json& data);                            // "data: …"
std::string server_sent(const std::string& event, const Json& data);  // "event: …", "data: …"

// Submits the tasks; all of them or none.
std::vector<JobPtr> submit_all(Scheduler& scheduler, std::vector<Task> tasks);
std::vector<JobPtr> submit(Scheduler& scheduler, Task task);
// Answers when the texts are done, or as they come. A client that goes away cancels them.
void respond(httplib::Response& response, std::vector<JobPtr> jobs,
             std::function<Json(const std::vector<Answer>&)> make);
void respond_stream(httplib::Response& response, const char* content_type, std::vector<JobPtr> jobs,
                    std::unique_ptr<StreamFormat> format);
void respond_json(httplib::Response& response, const Json& json, int status = 200);

using Handler = std::function<void(const httplib::Request&, httplib::Response&)>;
// Runs a handler and turns what it throws into the protocol's error object.
enum class Protocol { openai, anthropic, ollama };
httplib::Server::Handler guarded(Protocol protocol, Handler handler);
void respond_error(httplib::Response& response, Protocol protocol, const ApiError& error);

void add_openai(httplib::Server& server, const Api& api);
void add_responses(httplib::Server& server, const Api& api);
void add_anthropic(httplib::Server& server, const Api& api);
void add_ollama(httplib::Server& server, const Api& api);
void add_native(httplib::Server& server, const Api& api);

}  // namespace hearth::serve
