// Anthropic's /v1/messages and /v1/messages/count_tokens.
#include "serve/api.h"

namespace hearth::serve {
namespace {

const char* stop_reason(const End& e) {
  if (e.finish == Finish::stop_string) return "stop_sequence";
  return e.finish == Finish::length || e.finish == Finish::context_full ? "max_tokens" : "end_turn";
}

Json stop_sequence(const End& e) {
  return e.finish == Finish::stop_string ? Json(e.stop) : Json();
}

// input_tokens are those that were not in the cache.
Json usage_json(int64_t n_prompt, int64_t n_cached, int64_t n_generated) {
  return {{"input_tokens", n_prompt - n_cached},
          {"cache_creation_input_tokens", 0},
          {"cache_read_input_tokens", n_cached},
          {"output_tokens", n_generated}};
}

Json message(const std::string& id, const std::string& model, Json content) {
  return {{"id", id},           {"type", "message"},      {"role", "assistant"},     {"model", model},
          {"content", content}, {"stop_reason", nullptr}, {"stop_sequence", nullptr}};
}

class MessagesStream : public StreamFormat {
 public:
  MessagesStream(std::string id, std::string model, int64_t n_prompt)
      : id_(std::move(id)), model_(std::move(model)), n_prompt_(n_prompt) {}

  std::string begin() override {
    Json m = message(id_, model_, Json::array());
    m["usage"] = usage_json(n_prompt_, 0, 0);  // what was cached is known at the end
    return event("message_start", {{"message", m}}) +
           event("content_block_start", {{"index", 0}, {"content_block", {{"type", "text"}, {"text", ""}}}}) +
           event("ping", {});
  }
  std::string piece(size_t, const Piece& p) override {
    if (p.text.empty()) return {};
    return event("content_block_delta", {{"index", 0}, {"delta", {{"type", "text_delta"}, {"text", p.text}}}});
  }
  std::string end(size_t, const End& e) override {
    return event("content_block_stop", {{"index", 0}}) +
           event("message_delta", {{"delta", {{"stop_reason", stop_reason(e)}, {"stop_sequence", stop_sequence(e)}}},
                                   {"usage", usage_json(e.n_prompt, e.n_cached, e.n_generated)}}) +
           event("message_stop", {});
  }
  std::string finish(const std::vector<End>&) override { return {}; }
  std::string error(const std::string& what) override {
    return event("error", {{"error", {{"type", "api_error"}, {"message", what}}}});
  }

 private:
  static std::string event(const std::string& type, const Json& data) {
    Json j = {{"type", type}};
    if (!data.is_null()) j.update(data);
    return server_sent(type, j);
  }

  std::string id_, model_;
  int64_t n_prompt_;
};

Json messages_of(const Fields& f) {
  const Json* given = f.find("messages");
  if (given == nullptr || !given->is_array()) bad_request("'messages' must be a list of messages", "messages");
  Json messages = Json::array();
  if (const Json* system = f.find("system")) messages.push_back({{"role", "system"}, {"content", *system}});
  for (const Json& m : *given) messages.push_back(m);
  return messages;
}

void create(const Api& api, const httplib::Request& request, httplib::Response& response) {
  const Json body = parse_body(request);
  const Fields f(body);
  api.check_model(f);
  f.refuse("tools", "tools");
  f.refuse("mcp_servers", "tools");
  if (const Json* thinking = f.find("thinking"); thinking != nullptr && Fields(*thinking).string("type") == "enabled") {
    not_done("thinking budgets");
  }
  if (f.integer("max_tokens", -1) < 1) bad_request("'max_tokens' is missing, or less than 1", "max_tokens");
  Json plain = body;
  if (body.contains("stop_sequences")) plain["stop"] = body["stop_sequences"];
  Task task = api.task(Fields(plain), "max_tokens");
  task.prompt = api.chat_prompt(api.messages(messages_of(f)));
  const int64_t n_prompt = std::ssize(task.prompt);
  const std::string id = new_id("msg_");
  const bool stream = f.boolean("stream", false);
  std::vector<JobPtr> jobs = submit(api.scheduler, std::move(task));
  if (stream) {
    return respond_stream(response, "text/event-stream", std::move(jobs),
                          std::make_unique<MessagesStream>(id, api.model.id, n_prompt));
  }
  respond(response, std::move(jobs), [id, model = api.model.id](const std::vector<Answer>& a) {
    const End& e = a[0].end;
    Json m = message(id, model, Json::array({{{"type", "text"}, {"text", a[0].text}}}));
    m["stop_reason"] = stop_reason(e), m["stop_sequence"] = stop_sequence(e);
    m["usage"] = usage_json(e.n_prompt, e.n_cached, e.n_generated);
    return m;
  });
}

}  // namespace

void add_anthropic(httplib::Server& server, const Api& api) {
  server.Post("/v1/messages", guarded(Protocol::anthropic,
                                      [&api](const auto& request, auto& response) { create(api, request, response); }));
  server.Post("/v1/messages/count_tokens", guarded(Protocol::anthropic, [&api](const auto& request, auto& response) {
                const Json body = parse_body(request);
                const Fields f(body);
                api.check_model(f);
                f.refuse("tools", "tools");
                respond_json(response, {{"input_tokens", api.chat_prompt(api.messages(messages_of(f))).size()}});
              }));
}

}  // namespace hearth::serve
