// llama.cpp's server: /health, /props, /completion, /tokenize, /detokenize, /apply-template, /slots, /metrics; and /hearth/stats,
// which the page reads.
#include <cmath>

#include "serve/api.h"

namespace hearth::serve {
namespace {

Json timings(const End& e) {
  const auto per_second = [](int64_t n, double s) { return s > 0 ? Json(static_cast<double>(n) / s) : Json(); };
  const int64_t n_read = e.n_prompt - e.n_cached;
  return {{"cache_n", e.n_cached},
          {"prompt_n", n_read},
          {"prompt_ms", e.prompt_seconds * 1e3},
          {"prompt_per_second", per_second(n_read, e.prompt_seconds)},
          {"predicted_n", e.n_generated},
          {"predicted_ms", e.generate_seconds * 1e3},
          {"predicted_per_second", per_second(e.n_generated - 1, e.generate_seconds)}};
}

const char* stop_type(const End& e) {
  if (e.finish == Finish::end_of_text) return "eos";
  return e.finish == Finish::stop_string ? "word" : "limit";
}

Json last_part(const std::string& model, const std::string& text, const End& e) {
  return {{"index", 0},
          {"content", text},
          {"stop", true},
          {"model", model},
          {"tokens_predicted", e.n_generated},
          {"tokens_evaluated", e.n_prompt},
          {"tokens_cached", e.n_cached},
          {"stop_type", stop_type(e)},
          {"stopping_word", e.stop},
          {"truncated", false},
          {"seed", e.seed},
          {"timings", timings(e)}};
}

Json probabilities(const text::Tokenizer& tokenizer, const Piece& p) {
  const auto named = [&](const TokenProbability& t) {
    Json j = {{"id", t.id}};
    j.update(token_json(tokenizer, t));
    return j;
  };
  Json j = named(*p.drawn);
  j["top_logprobs"] = Json::array();
  for (const TokenProbability& t : p.top) j["top_logprobs"].push_back(named(t));
  return j;
}

class CompletionStream : public StreamFormat {
 public:
  CompletionStream(const text::Tokenizer& tokenizer, std::string model)
      : tokenizer_(tokenizer), model_(std::move(model)) {}
  std::string piece(size_t, const Piece& p) override {
    Json j = {{"index", 0}, {"content", p.text}, {"tokens", Json::array()}, {"stop", false}};
    if (p.id >= 0) j["tokens"].push_back(p.id);
    if (p.drawn) j["completion_probabilities"] = Json::array({probabilities(tokenizer_, p)});
    return server_sent(j);
  }
  std::string end(size_t, const End& e) override { return server_sent(last_part(model_, "", e)); }
  std::string finish(const std::vector<End>&) override { return {}; }
  std::string error(const std::string& what) override {
    return server_sent(Json{{"error", {{"message", what}, {"type", "server_error"}}}});
  }

 private:
  const text::Tokenizer& tokenizer_;
  std::string model_;
};

void completion(const Api& api, const httplib::Request& request, httplib::Response& response) {
  const Json body = parse_body(request);
  const Fields f(body);
  f.refuse("grammar", "grammars");
  f.refuse("json_schema", "grammars");
  f.refuse("image_data", "images");
  Task task = api.task(f, f.find("n_predict") != nullptr ? "n_predict" : "max_tokens");
  const Json* prompt = f.find("prompt");
  if (prompt == nullptr) bad_request("'prompt' is missing", "prompt");
  task.prompt = api.prompt(*prompt, "a text or a list of token ids");
  if (const int64_t n = f.integer("n_probs", 0); n > 0) task.n_top = static_cast<int>(std::min<int64_t>(n, 100));
  const bool stream = f.boolean("stream", false);
  std::vector<JobPtr> jobs = submit(api.scheduler, std::move(task));
  if (stream) {
    return respond_stream(response, "text/event-stream", std::move(jobs),
                          std::make_unique<CompletionStream>(api.tokenizer, api.model.id));
  }
  respond(response, std::move(jobs), [&api](const std::vector<Answer>& a) {
    Json j = last_part(api.model.id, a[0].text, a[0].end);
    j["tokens"] = Json::array();
    Json probs = Json::array();
    for (const Piece& p : a[0].pieces) {
      if (p.id >= 0) j["tokens"].push_back(p.id);
      if (p.drawn) probs.push_back(probabilities(api.tokenizer, p));
    }
    if (!probs.empty()) j["completion_probabilities"] = probs;
    return j;
  });
}

void tokenize(const Api& api, const httplib::Request& request, httplib::Response& response) {
  const Json body = parse_body(request);
  const Fields f(body);
  const std::vector<int32_t> ids = api.tokenizer.encode(
      f.string("content"),
      {.add_special = f.boolean("add_special", false), .parse_special = f.boolean("parse_special", true)});
  Json tokens = Json::array();
  for (const int32_t id : ids) {
    if (f.boolean("with_pieces", false)) {
      tokens.push_back({{"id", id}, {"piece", token_json(api.tokenizer, {id, 0})["token"]}});
    } else {
      tokens.push_back(id);
    }
  }
  respond_json(response, {{"tokens", tokens}});
}

void detokenize(const Api& api, const httplib::Request& request, httplib::Response& response) {
  const Json body = parse_body(request);
  const Fields f(body);
  const Json* tokens = f.find("tokens");
  if (tokens == nullptr || !tokens->is_array()) bad_request("'tokens' must be a list of token ids", "tokens");
  std::vector<int32_t> ids;
  for (const Json& id : *tokens) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= api.tokenizer.n_vocab()) {
      bad_request(fmt::format("'tokens' must be token ids, 0 to {}", api.tokenizer.n_vocab() - 1), "tokens");
    }
    ids.push_back(id.get<int32_t>());
  }
  text::Utf8Stream utf8;
  std::string text = utf8.push(api.tokenizer.decode(ids, true));
  text += utf8.flush();
  respond_json(response, {{"content", text}});
}

Json props(const Api& api) {
  const text::SamplerParams& s = api.options.sampler;
  const auto token = [&](std::optional<int32_t> id) { return id ? api.tokenizer.piece(*id, true) : std::string(); };
  return {{"default_generation_settings",
           {{"n_ctx", api.scheduler.n_ctx()},
            {"params",
             {{"temperature", s.temp},
              {"top_k", s.top_k},
              {"top_p", s.top_p},
              {"min_p", s.min_p},
              {"repeat_penalty", s.repeat_penalty},
              {"repeat_last_n", s.repeat_last_n}}}}},
          {"total_slots", api.scheduler.options().n_parallel},
          {"model_alias", api.model.id},
          {"model_path", api.model.path},
          {"modalities", {{"vision", false}, {"audio", false}}},
          {"chat_template", api.chat ? api.chat->source() : std::string()},
          {"bos_token", token(api.tokenizer.bos())},
          {"eos_token", token(api.tokenizer.eos())},
          {"build_info", "hearth"}};
}

Json slots(const Api& api) {
  const SchedulerStats stats = api.scheduler.stats();
  Json all = Json::array();
  for (int64_t i = 0; i < stats.n_parallel; ++i) {
    Json slot = {{"id", i}, {"n_ctx", api.scheduler.n_ctx()}, {"is_processing", i < std::ssize(stats.running)}};
    if (i < std::ssize(stats.running)) {
      const SlotStats& r = stats.running[static_cast<size_t>(i)];
      slot["id_task"] = r.task, slot["n_prompt"] = r.n_prompt, slot["n_past"] = r.n_past;
      slot["n_decoded"] = r.n_generated, slot["reads_prompt"] = r.prompt;
    }
    all.push_back(std::move(slot));
  }
  return all;
}

std::string metrics(const SchedulerStats& s) {
  std::string out;
  const auto add = [&](const char* name, const char* type, const char* help, double value) {
    out += fmt::format("# HELP hearth:{0} {2}\n# TYPE hearth:{0} {1}\nhearth:{0} {3}\n", name, type, help, value);
  };
  add("prompt_tokens_total", "counter", "Prompt tokens evaluated.", static_cast<double>(s.n_prompt));
  add("prompt_tokens_cached_total", "counter", "Prompt tokens whose pages were kept.", static_cast<double>(s.n_cached));
  add("prompt_seconds_total", "counter", "Time spent with prompts.", s.prompt_seconds);
  add("tokens_predicted_total", "counter", "Tokens generated.", static_cast<double>(s.n_generated));
  add("tokens_predicted_seconds_total", "counter", "Time spent with generating.", s.decode_seconds);
  add("n_decode_total", "counter", "Passes evaluated.", static_cast<double>(s.n_passes));
  add("requests_done_total", "counter", "Requests that have ended.", static_cast<double>(s.n_done));
  add("predicted_tokens_seconds", "gauge", "Tokens a second in all, of the last second.", s.tokens_per_second);
  add("requests_processing", "gauge", "Requests that run.", static_cast<double>(s.running.size()));
  add("requests_deferred", "gauge", "Requests that wait.", static_cast<double>(s.n_waiting));
  add("kv_cache_usage_ratio", "gauge", "Share of the cache's pages in use.",
      s.pages > 0 ? 1 - static_cast<double>(s.pages_free) / static_cast<double>(s.pages) : 0);
  return out;
}

Json stats_json(const Api& api) {
  const SchedulerStats s = api.scheduler.stats();
  const auto known = [](double x) { return std::isnan(x) ? Json() : Json(x); };
  return {{"model", api.model.id},
          {"n_ctx", api.scheduler.n_ctx()},
          {"running", s.running.size()},
          {"waiting", s.n_waiting},
          {"n_parallel", s.n_parallel},
          {"tokens_per_second", s.tokens_per_second},
          {"density", known(s.density)},
          {"hit_share", known(s.hit_share)},
          {"bytes", {{"device", s.device_bytes}, {"host", s.host_bytes}, {"link", s.link_bytes}}},
          {"pages", s.pages},
          {"pages_free", s.pages_free},
          {"pages_kept", s.pages_kept},
          {"kept_prompts", s.kept_prompts},
          {"generated", s.n_generated},
          {"prompt_tokens", s.n_prompt},
          {"cached_tokens", s.n_cached},
          {"chat", api.chat.has_value()},
          {"plan", api.model.plan}};
}

}  // namespace

void add_native(httplib::Server& server, const Api& api) {
  const auto get = [&server](const char* path, Handler handler) {
    server.Get(path, guarded(Protocol::openai, std::move(handler)));
  };
  const auto post = [&server](const char* path, Handler handler) {
    server.Post(path, guarded(Protocol::openai, std::move(handler)));
  };
  for (const char* path : {"/health", "/v1/health"}) {
    get(path, [](const auto&, auto& response) { respond_json(response, {{"status", "ok"}}); });
  }
  get("/props", [&api](const auto&, auto& response) { respond_json(response, props(api)); });
  get("/slots", [&api](const auto&, auto& response) { respond_json(response, slots(api)); });
  get("/metrics", [&api](const auto&, auto& response) {
    response.set_content(metrics(api.scheduler.stats()), "text/plain; version=0.0.4");
  });
  get("/hearth/stats", [&api](const auto&, auto& response) { respond_json(response, stats_json(api)); });
  for (const char* path : {"/completion", "/completions"}) {
    post(path, [&api](const auto& request, auto& response) { completion(api, request, response); });
  }
  post("/tokenize", [&api](const auto& request, auto& response) { tokenize(api, request, response); });
  post("/detokenize", [&api](const auto& request, auto& response) { detokenize(api, request, response); });
  post("/apply-template", [&api](const auto& request, auto& response) {
    const Json body = parse_body(request);
    const Json* messages = Fields(body).find("messages");
    if (messages == nullptr) bad_request("'messages' is missing", "messages");
    respond_json(response, {{"prompt", api.chat_text(api.messages(*messages))}});
  });
  for (const char* path : {"/infill", "/rerank", "/v1/rerank"})
    post(path, [](const auto&, auto&) { not_done("this"); });
}

}  // namespace hearth::serve
