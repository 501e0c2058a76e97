// Ollama's /api/chat, generate, tags, show, ps and version.
#include "serve/api.h"

namespace hearth::serve {
namespace {

int64_t nanoseconds(double seconds) {
  return static_cast<int64_t>(seconds * 1e9);
}

// A part of an answer, or all of it; `end` with the last.
Json reply(const std::string& model, bool chat, const std::string& text, const End* end) {
  Json j = {{"model", model}, {"created_at", now_rfc3339()}};
  if (chat) {
    j["message"] = {{"role", "assistant"}, {"content", text}};
  } else {
    j["response"] = text;
  }
  j["done"] = end != nullptr;
  if (end == nullptr) return j;
  j["done_reason"] = finish_reason(end->finish);
  j["total_duration"] = nanoseconds(end->queue_seconds + end->prompt_seconds + end->generate_seconds);
  j["load_duration"] = 0;
  j["prompt_eval_count"] = end->n_prompt;
  j["prompt_eval_duration"] = nanoseconds(end->prompt_seconds);
  j["eval_count"] = end->n_generated;
  j["eval_duration"] = nanoseconds(end->generate_seconds);
  return j;
}

class LineStream : public StreamFormat {
 public:
  LineStream(std::string model, bool chat) : model_(std::move(model)), chat_(chat) {}
  std::string piece(size_t, const Piece& p) override {
    return p.text.empty() ? "" : line(reply(model_, chat_, p.text, nullptr));
  }
  std::string end(size_t, const End& e) override { return line(reply(model_, chat_, "", &e)); }
  std::string finish(const std::vector<End>&) override { return {}; }
  std::string error(const std::string& what) override { return line({{"error", what}}); }

 private:
  static std::string line(const Json& j) { return j.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n"; }
  std::string model_;
  bool chat_;
};

Task task_of(const Api& api, const Fields& f) {
  const Json* given = f.find("options");
  const Json options = given != nullptr ? *given : Json::object();
  const Fields o(options);
  if (const int64_t n_ctx = o.integer("num_ctx", 0); n_ctx > api.scheduler.n_ctx()) {
    bad_request(
        fmt::format("'num_ctx' is {} and this server's context is {}; leave it out, or start the server with -c {}",
                    n_ctx, api.scheduler.n_ctx(), n_ctx));
  }
  Task task = api.task(o, "num_predict");
  if (o.integer("num_predict", -1) == 0) task.n_predict = 0;
  return task;
}

void answer(const Api& api, const Fields& f, bool chat, Task task, httplib::Response& response) {
  const bool stream = f.boolean("stream", true);
  std::vector<JobPtr> jobs = submit(api.scheduler, std::move(task));
  const std::string model = api.model.id;
  if (stream) {
    return respond_stream(response, "application/x-ndjson", std::move(jobs), std::make_unique<LineStream>(model, chat));
  }
  respond(response, std::move(jobs),
          [model, chat](const std::vector<Answer>& a) { return reply(model, chat, a[0].text, &a[0].end); });
}

void refuse_common(const Fields& f) {
  f.refuse("tools", "tools");
  f.refuse("format", "response formats");
  f.refuse("images", "images");
  f.refuse("think", "thinking apart from the text");
}

// An empty request loads the model, which is loaded.
bool only_loads(const Api& api, bool chat, bool nothing, httplib::Response& response) {
  if (!nothing) return false;
  Json j = reply(api.model.id, chat, "", nullptr);
  j["done"] = true, j["done_reason"] = "load";
  respond_json(response, j);
  return true;
}

void chat(const Api& api, const httplib::Request& request, httplib::Response& response) {
  const Json body = parse_body(request);
  const Fields f(body);
  api.check_model(f);
  refuse_common(f);
  const Json* messages = f.find("messages");
  if (only_loads(api, true, messages == nullptr || *messages == Json::array(), response)) return;
  Task task = task_of(api, f);
  task.prompt = api.chat_prompt(api.messages(*messages));
  answer(api, f, true, std::move(task), response);
}

void generate(const Api& api, const httplib::Request& request, httplib::Response& response) {
  const Json body = parse_body(request);
  const Fields f(body);
  api.check_model(f);
  refuse_common(f);
  f.refuse("suffix", "texts between two others");
  f.refuse("template", "templates of a request's own");
  f.refuse("context", "contexts as token ids");
  const std::string prompt = f.string("prompt"), system = f.string("system");
  if (only_loads(api, false, prompt.empty(), response)) return;
  Task task = task_of(api, f);
  if (f.boolean("raw", false) || !api.chat) {  // a model without a chat template goes on with the text
    task.prompt = api.tokenizer.encode(system.empty() ? prompt : system + "\n" + prompt);
  } else {
    Json messages = Json::array();
    if (!system.empty()) messages.push_back({{"role", "system"}, {"content", system}});
    messages.push_back({{"role", "user"}, {"content", prompt}});
    task.prompt = api.chat_prompt(messages);
  }
  answer(api, f, false, std::move(task), response);
}

Json details(const Api& api) {
  return {{"parent_model", ""},
          {"format", "gguf"},
          {"family", api.model.architecture},
          {"families", Json::array({api.model.architecture})},
          {"parameter_size", fmt::format("{:.1f}M", static_cast<double>(api.model.n_parameters) / 1e6)},
          {"quantization_level", api.model.type_name}};
}

Json entry(const Api& api) {
  return {{"name", api.model.id + ":latest"}, {"model", api.model.id + ":latest"}, {"modified_at", now_rfc3339()},
          {"size", api.model.n_bytes},        {"digest", std::string(64, '0')},  // files are not hashed
          {"details", details(api)}};
}

}  // namespace

void add_ollama(httplib::Server& server, const Api& api) {
  const auto get = [&server](const char* path, Handler handler) {
    server.Get(path, guarded(Protocol::ollama, std::move(handler)));
  };
  const auto post = [&server](const char* path, Handler handler) {
    server.Post(path, guarded(Protocol::ollama, std::move(handler)));
  };
  post("/api/chat", [&api](const auto& request, auto& response) { chat(api, request, response); });
  post("/api/generate", [&api](const auto& request, auto& response) { generate(api, request, response); });
  get("/api/version", [](const auto&, auto& response) { respond_json(response, {{"version", "0.1.0"}}); });
  get("/api/tags", [&api](const auto&, auto& response) {
    respond_json(response, {{"models", Json::array({entry(api)})}});
  });
  get("/api/ps", [&api](const auto&, auto& response) {
    Json model = entry(api);
    model["expires_at"] = "2318-01-01T00:00:00Z", model["size_vram"] = 0,
    model["context_length"] = api.scheduler.n_ctx();
    respond_json(response, {{"models", Json::array({model})}});
  });
  post("/api/show", [&api](const auto& request, auto& response) {
    const Json body = parse_body(request);
    api.check_model(Fields(body));
    Json info = {{"general.architecture", api.model.architecture}, {"general.parameter_count", api.model.n_parameters}};
    info[api.model.architecture + ".context_length"] = api.model.n_ctx_train;
    info[api.model.architecture + ".embedding_length"] = api.model.n_embd;
    respond_json(response, {{"modelfile", ""},
                            {"parameters", ""},
                            {"template", api.chat ? api.chat->source() : std::string()},
                            {"modified_at", now_rfc3339()},
                            {"details", details(api)},
                            {"model_info", info},
                            {"capabilities", Json::array({"completion"})}});
  });
  for (const char* path : {"/api/embed", "/api/embeddings"})
    post(path, [](const auto&, auto&) { not_done("embeddings"); });
  for (const char* path : {"/api/pull", "/api/push", "/api/create", "/api/copy"}) {
    post(path, [](const auto&, auto&) { not_done("changes to its models"); });
  }
}

}  // namespace hearth::serve
