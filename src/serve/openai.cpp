// OpenAI's /v1/models, /v1/chat/completions and /v1/completions.
#include "serve/api.h"

namespace hearth::serve {
namespace {

constexpr int64_t kMostChoices = 16;

struct Ask {
  bool chat = true, include_usage = false;
  std::string id, model;
  int64_t created = 0;
};

Json chat_logprobs(const text::Tokenizer& tokenizer, const std::vector<Piece>& pieces) {
  Json content = Json::array();
  for (const Piece& p : pieces) {
    if (!p.drawn) continue;
    Json token = token_json(tokenizer, *p.drawn);
    token["top_logprobs"] = Json::array();
    for (const TokenProbability& t : p.top) token["top_logprobs"].push_back(token_json(tokenizer, t));
    content.push_back(std::move(token));
  }
  return content.empty() ? Json() : Json{{"content", content}, {"refusal", nullptr}};
}

Json completion_logprobs(const text::Tokenizer& tokenizer, const std::vector<Piece>& pieces, size_t offset) {
  Json j = {{"tokens", Json::array()},
            {"token_logprobs", Json::array()},
            {"top_logprobs", Json::array()},
            {"text_offset", Json::array()}};
  for (const Piece& p : pieces) {
    if (!p.drawn) continue;
    j["tokens"].push_back(token_json(tokenizer, *p.drawn)["token"]);
    j["token_logprobs"].push_back(p.drawn->log_probability);
    Json top = Json::object();
    for (const TokenProbability& t : p.top)
      top[token_json(tokenizer, t)["token"].get<std::string>()] = t.log_probability;
    j["top_logprobs"].push_back(std::move(top));
    j["text_offset"].push_back(offset);
    offset += p.text.size();
  }
  return j["tokens"].empty() ? Json() : j;
}

class OpenAiStream : public StreamFormat {
 public:
  OpenAiStream(const Api& api, Ask ask, size_t n) : tokenizer_(api.tokenizer), ask_(std::move(ask)), offsets_(n) {}

  std::string begin() override {
    std::string all;
    for (size_t i = 0; ask_.chat && i < offsets_.size(); ++i) {
      all += server_sent(chunk({choice(i, {{"role", "assistant"}, {"content", ""}}, nullptr, nullptr)}));
    }
    return all;
  }
  std::string piece(size_t i, const Piece& p) override {
    if (p.text.empty() && !p.drawn) return {};
    Json c;
    if (ask_.chat) {
      c = choice(i, {{"content", p.text}}, chat_logprobs(tokenizer_, {p}), nullptr);
    } else {
      c = text_choice(i, p.text, completion_logprobs(tokenizer_, {p}, offsets_[i]), nullptr);
    }
    offsets_[i] += p.text.size();
    return server_sent(chunk({std::move(c)}));
  }
  std::string end(size_t i, const End& e) override {
    const Json reason = finish_reason(e.finish);
    return server_sent(
        chunk({ask_.chat ? choice(i, {{"content", ""}}, nullptr, reason) : text_choice(i, "", nullptr, reason)}));
  }
  std::string finish(const std::vector<End>& ends) override {
    std::string all;
    if (ask_.include_usage) {
      Json last = chunk({});
      last["usage"] = usage(ends);
      all = server_sent(last);
    }
    return all + "data: [DONE]\n\n";
  }
  std::string error(const std::string& message) override {
    return server_sent(
        Json{{"error", {{"message", message}, {"type", "server_error"}, {"param", nullptr}, {"code", nullptr}}}});
  }

 private:
  Json chunk(std::vector<Json> choices) const {
    Json c = {{"id", ask_.id},
              {"object", ask_.chat ? "chat.completion.chunk" : "text_completion"},
              {"created", ask_.created},
              {"model", ask_.model},
              {"choices", choices}};
    if (ask_.include_usage) c["usage"] = nullptr;
    return c;
  }
  static Json choice(size_t i, Json delta, Json logprobs, Json reason) {
    return {{"index", i}, {"delta", delta}, {"logprobs", logprobs}, {"finish_reason", reason}};
  }
  static Json text_choice(size_t i, const std::string& text, Json logprobs, Json reason) {
    return {{"index", i}, {"text", text}, {"logprobs", logprobs}, {"finish_reason", reason}};
  }

  const text::Tokenizer& tokenizer_;
  Ask ask_;
  std::vector<size_t> offsets_;
};

Json whole(const Api& api, const Ask& ask, const std::vector<Answer>& answers) {
  Json choices = Json::array();
  std::vector<End> ends;
  for (size_t i = 0; i < answers.size(); ++i) {
    const Answer& a = answers[i];
    Json c = {{"index", i}};
    if (ask.chat) {
      c["message"] = {{"role", "assistant"}, {"content", a.text}, {"refusal", nullptr}};
      c["logprobs"] = chat_logprobs(api.tokenizer, a.pieces);
    } else {
      c["text"] = a.text;
      c["logprobs"] = completion_logprobs(api.tokenizer, a.pieces, 0);
    }
    c["finish_reason"] = finish_reason(a.end.finish);
    choices.push_back(std::move(c));
    ends.push_back(a.end);
  }
  return {{"id", ask.id},           {"object", ask.chat ? "chat.completion" : "text_completion"},
          {"created", ask.created}, {"model", ask.model},
          {"choices", choices},     {"usage", usage(ends)}};
}

int64_t choices(const Fields& f) {
  const int64_t n = f.integer("n", 1);
  if (n < 1 || n > kMostChoices) bad_request(fmt::format("'n' is {}; 1 to {} was expected", n, kMostChoices), "n");
  return n;
}

// Each prompt n times; of one prompt, the seeds are seed, seed + 1, …
void answer(const Api& api, const Fields& f, bool chat, const Task& task, std::vector<std::vector<int32_t>> prompts,
            httplib::Response& response) {
  const int64_t n = choices(f);
  std::vector<Task> tasks;
  for (auto& prompt : prompts) {
    for (int64_t i = 0; i < n; ++i) {
      tasks.push_back(task);
      tasks.back().prompt = prompt;
      if (task.sampler.seed) tasks.back().sampler.seed = *task.sampler.seed + static_cast<uint64_t>(i);
    }
  }
  Ask ask{.chat = chat,
          .include_usage = false,
          .id = new_id(chat ? "chatcmpl-" : "cmpl-"),
          .model = api.model.id,
          .created = now_seconds()};
  const bool stream = f.boolean("stream", false);
  if (const Json* o = f.find("stream_options")) ask.include_usage = Fields(*o).boolean("include_usage", false);
  std::vector<JobPtr> jobs = submit_all(api.scheduler, std::move(tasks));
  if (stream) {
    const size_t n_texts = jobs.size();
    return respond_stream(response, "text/event-stream", std::move(jobs),
                          std::make_unique<OpenAiStream>(api, ask, n_texts));
  }
  respond(response, std::move(jobs),
          [&api, ask](const std::vector<Answer>& answers) { return whole(api, ask, answers); });
}

void refuse_common(const Fields& f) {
  f.refuse("tools", "tools");
  f.refuse("functions", "tools");
  f.refuse("grammar", "grammars");
  f.refuse("json_schema", "grammars");
  f.refuse("audio", "sound");
  f.refuse("store", "stored answers");
  if (const Json* format = f.find("response_format"))
    Fields(*format).refuse("type", "response formats other than text");
}

void chat_completions(const Api& api, const httplib::Request& request, httplib::Response& response) {
  const Json body = parse_body(request);
  const Fields f(body);
  api.check_model(f);
  refuse_common(f);
  const Json* messages = f.find("messages");
  if (messages == nullptr) bad_request("'messages' is missing", "messages");
  Task task = api.task(f, f.find("max_completion_tokens") != nullptr ? "max_completion_tokens" : "max_tokens");
  if (f.boolean("logprobs", false)) {
    const int64_t top = f.integer("top_logprobs", 0);
    if (top < 0 || top > 20)
      bad_request(fmt::format("'top_logprobs' is {}; 0 to 20 was expected", top), "top_logprobs");
    task.n_top = static_cast<int>(top);
  }
  Json extra = Json::object();
  if (const Json* kwargs = f.find("chat_template_kwargs")) {
    if (!kwargs->is_object()) bad_request("'chat_template_kwargs' must be an object", "chat_template_kwargs");
    extra = *kwargs;
  }
  if (f.find("reasoning_effort") != nullptr) extra["reasoning_effort"] = f.string("reasoning_effort");
  answer(api, f, true, task, {api.chat_prompt(api.messages(*messages), extra)}, response);
}

// A text, token ids, or a list of either.
std::vector<std::vector<int32_t>> prompts_of(const Api& api, const Json& prompt) {
  const auto one = [&](const Json& p) { return api.prompt(p, "a text, token ids, or a list of them"); };
  if (!prompt.is_array() || prompt.empty() || prompt[0].is_number()) return {one(prompt)};
  if (static_cast<int64_t>(prompt.size()) > kMostChoices)
    bad_request("a request may have at most 16 prompts", "prompt");
  std::vector<std::vector<int32_t>> all;
  for (const Json& p : prompt) all.push_back(one(p));
  return all;
}

void completions(const Api& api, const httplib::Request& request, httplib::Response& response) {
  const Json body = parse_body(request);
  const Fields f(body);
  api.check_model(f);
  refuse_common(f);
  f.refuse("suffix", "texts between two others");
  f.refuse("echo", "echoes of the prompt");
  const Json* prompt = f.find("prompt");
  if (prompt == nullptr) bad_request("'prompt' is missing", "prompt");
  if (f.integer("best_of", 1) > choices(f)) not_done("best_of");
  Task task = api.task(f, "max_tokens");
  if (f.find("logprobs") != nullptr) {
    const int64_t top = f.integer("logprobs", 0);
    if (top < 0 || top > 20) bad_request(fmt::format("'logprobs' is {}; 0 to 20 was expected", top), "logprobs");
    task.n_top = static_cast<int>(top);
  }
  answer(api, f, false, task, prompts_of(api, *prompt), response);
}

}  // namespace

void add_openai(httplib::Server& server, const Api& api) {
  const auto model = [&api] {
    return Json{{"id", api.model.id},
                {"object", "model"},
                {"created", api.started},
                {"owned_by", "hearth"},
                {"meta",
                 {{"n_ctx", api.scheduler.n_ctx()},
                  {"n_ctx_train", api.model.n_ctx_train},
                  {"n_embd", api.model.n_embd},
                  {"n_params", api.model.n_parameters},
                  {"size", api.model.n_bytes}}}};
  };
  server.Get("/v1/models", guarded(Protocol::openai, [model](const auto&, auto& response) {
               respond_json(response, {{"object", "list"}, {"data", Json::array({model()})}});
             }));
  server.Get(R"(/v1/models/(.+))", guarded(Protocol::openai, [&api, model](const auto& request, auto& response) {
               const Json wanted = {{"model", request.matches[1].str()}};
               api.check_model(Fields(wanted));
               respond_json(response, model());
             }));
  server.Post("/v1/chat/completions", guarded(Protocol::openai, [&api](const auto& request, auto& response) {
                chat_completions(api, request, response);
              }));
  server.Post("/v1/completions", guarded(Protocol::openai, [&api](const auto& request, auto& response) {
                completions(api, request, response);
              }));
  for (const char* path : {"/v1/embeddings", "/embeddings", "/embedding"}) {
    server.Post(path, guarded(Protocol::openai, [](const auto&, auto&) { not_done("embeddings"); }));
  }
  server.Post(R"(/v1/images/.*)", guarded(Protocol::openai, [](const auto&, auto&) { not_done("images"); }));
  server.Post(R"(/v1/audio/.*)", guarded(Protocol::openai, [](const auto&, auto&) { not_done("sound"); }));
}

}  // namespace hearth::serve
