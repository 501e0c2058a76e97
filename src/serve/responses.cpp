// OpenAI's /v1/responses: text in, one message out.
#include "serve/api.h"

namespace hearth::serve {
namespace {

struct Ask {
  std::string id, message_id, model;
  int64_t created = 0;
  Json echoed;  // parameters as they were given
};

Json usage_json(const End& e) {
  return {{"input_tokens", e.n_prompt},
          {"input_tokens_details", {{"cached_tokens", e.n_cached}}},
          {"output_tokens", e.n_generated},
          {"output_tokens_details", {{"reasoning_tokens", 0}}},
          {"total_tokens", e.n_prompt + e.n_generated}};
}

Json part(const std::string& text) {
  return {{"type", "output_text"}, {"text", text}, {"annotations", Json::array()}, {"logprobs", Json::array()}};
}

Json message(const Ask& ask, const char* status, Json content) {
  return {{"id", ask.message_id}, {"type", "message"}, {"status", status}, {"role", "assistant"}, {"content", content}};
}

bool is_cut(const End& e) {
  return e.finish == Finish::length || e.finish == Finish::context_full;
}

// `end`: null while it is in progress.
Json response_json(const Ask& ask, const std::string& text, const End* end) {
  const char* status = end == nullptr ? "in_progress" : is_cut(*end) ? "incomplete" : "completed";
  Json j = {{"id", ask.id},
            {"object", "response"},
            {"created_at", ask.created},
            {"status", status},
            {"error", nullptr},
            {"incomplete_details", nullptr},
            {"model", ask.model},
            {"output", Json::array()},
            {"parallel_tool_calls", true},
            {"previous_response_id", nullptr},
            {"store", false},
            {"tool_choice", "auto"},
            {"tools", Json::array()},
            {"text", {{"format", {{"type", "text"}}}}},
            {"truncation", "disabled"},
            {"usage", nullptr}};
  j.update(ask.echoed);
  if (end == nullptr) return j;
  if (is_cut(*end)) j["incomplete_details"] = {{"reason", "max_output_tokens"}};
  j["output"].push_back(message(ask, is_cut(*end) ? "incomplete" : "completed", Json::array({part(text)})));
  j["usage"] = usage_json(*end);
  return j;
}

class ResponsesStream : public StreamFormat {
 public:
  explicit ResponsesStream(Ask ask) : ask_(std::move(ask)) {}

  std::string begin() override {
    // One by one: each takes the next sequence number.
    std::string all = event("response.created", {{"response", response_json(ask_, "", nullptr)}});
    all += event("response.in_progress", {{"response", response_json(ask_, "", nullptr)}});
    all += event("response.output_item.added",
                 {{"output_index", 0}, {"item", message(ask_, "in_progress", Json::array())}});
    return all += event("response.content_part.added", in_part({{"part", part("")}}));
  }
  std::string piece(size_t, const Piece& p) override {
    if (p.text.empty()) return {};
    text_ += p.text;
    return event("response.output_text.delta", in_part({{"delta", p.text}, {"logprobs", Json::array()}}));
  }
  std::string end(size_t, const End& e) override {
    const char* status = is_cut(e) ? "incomplete" : "completed";
    std::string all = event("response.output_text.done", in_part({{"text", text_}, {"logprobs", Json::array()}}));
    all += event("response.content_part.done", in_part({{"part", part(text_)}}));
    all += event("response.output_item.done",
                 {{"output_index", 0}, {"item", message(ask_, status, Json::array({part(text_)}))}});
    return all += event(is_cut(e) ? "response.incomplete" : "response.completed",
                        {{"response", response_json(ask_, text_, &e)}});
  }
  std::string finish(const std::vector<End>&) override { return {}; }
  std::string error(const std::string& what) override {
    return event("error", {{"code", "server_error"}, {"message", what}, {"param", nullptr}});
  }

 private:
  Json in_part(Json more) const {
    Json j = {{"item_id", ask_.message_id}, {"output_index", 0}, {"content_index", 0}};
    j.update(more);
    return j;
  }
  std::string event(const std::string& type, const Json& data) {
    Json j = {{"type", type}, {"sequence_number", number_++}};
    j.update(data);
    return server_sent(type, j);
  }

  Ask ask_;
  std::string text_;
  int64_t number_ = 0;
};

Json messages_of(const Fields& f) {
  Json messages = Json::array();
  if (f.find("instructions") != nullptr)
    messages.push_back({{"role", "system"}, {"content", f.string("instructions")}});
  const Json* input = f.find("input");
  if (input == nullptr) bad_request("'input' is missing", "input");
  if (input->is_string()) {
    messages.push_back({{"role", "user"}, {"content", *input}});
    return messages;
  }
  if (!input->is_array()) bad_request("'input' must be a text or a list of messages", "input");
  for (const Json& item : *input) {
    const std::string type = Fields(item).string("type", "message");
    if (type != "message") not_done(fmt::format("input items of type '{}'", type));
    messages.push_back({{"role", item.value("role", "user")}, {"content", item.value("content", Json())}});
  }
  return messages;
}

void responses(const Api& api, const httplib::Request& request, httplib::Response& response) {
  const Json body = parse_body(request);
  const Fields f(body);
  api.check_model(f);
  f.refuse("tools", "tools");
  f.refuse("previous_response_id", "stored answers");
  f.refuse("conversation", "stored answers");
  f.refuse("background", "answers in the background");
  if (const Json* text = f.find("text")) {
    if (const Json* format = Fields(*text).find("format"))
      Fields(*format).refuse("type", "response formats other than text");
  }
  Task task = api.task(f, "max_output_tokens");
  task.prompt = api.chat_prompt(api.messages(messages_of(f)));
  Ask ask{new_id("resp_"), new_id("msg_"), api.model.id, now_seconds(), Json::object()};
  for (const char* name : {"instructions", "max_output_tokens", "temperature", "top_p", "metadata"}) {
    ask.echoed[name] = body.contains(name) ? body[name] : Json();
  }
  const bool stream = f.boolean("stream", false);
  std::vector<JobPtr> jobs = submit(api.scheduler, std::move(task));
  if (stream)
    return respond_stream(response, "text/event-stream", std::move(jobs), std::make_unique<ResponsesStream>(ask));
  respond(response, std::move(jobs),
          [ask](const std::vector<Answer>& a) { return response_json(ask, a[0].text, &a[0].end); });
}

}  // namespace

void add_responses(httplib::Server& server, const Api& api) {
  server.Post("/v1/responses", guarded(Protocol::openai, [&api](const auto& request, auto& response) {
                responses(api, request, response);
              }));
}

}  // namespace hearth::serve
