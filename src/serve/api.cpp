#include "serve/api.h"

#include <array>
#include <chrono>
#include <cmath>
#include <ctime>
#include <random>

namespace hearth::serve {

void bad_request(const std::string& message, const std::string& param) {
  throw ApiError(400, "invalid_request_error", message, param);
}

void not_done(const std::string& what) {
  throw ApiError(501, "not_implemented_error",
                 fmt::format("hearth does not do {} yet; leave it out of the request", what));
}

Fields::Fields(const Json& object) : object_(object) {
  if (!object.is_object()) bad_request(fmt::format("the body is {}; a JSON object was expected", object.type_name()));
}

const Json* Fields::find(const char* name) const {
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

namespace {

[[noreturn]] void wrong_type(const char* name, const Json& found, const char* expected) {
  bad_request(fmt::format("'{}' is of type {}; {} was expected", name, found.type_name(), expected), name);
}

}  // namespace

double Fields::number(const char* name, double otherwise) const {
  const Json* v = find(name);
  if (v == nullptr) return otherwise;
  if (!v->is_number()) wrong_type(name, *v, "a number");
  return v->get<double>();
}

int64_t Fields::integer(const char* name, int64_t otherwise) const {
  const Json* v = find(name);
  if (v == nullptr) return otherwise;
  if (v->is_number_float() && v->get<double>() == std::floor(v->get<double>()) && std::fabs(v->get<double>()) < 1e15) {
    return static_cast<int64_t>(v->get<double>());
  }
  if (!v->is_number_integer()) wrong_type(name, *v, "a whole number");
  if (v->is_number_unsigned() && v->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
    bad_request(fmt::format("'{}' is {}, which is too large", name, v->get<uint64_t>()), name);
  }
  return v->get<int64_t>();
}

bool Fields::boolean(const char* name, bool otherwise) const {
  const Json* v = find(name);
  if (v == nullptr) return otherwise;
  if (!v->is_boolean()) wrong_type(name, *v, "true or false");
  return v->get<bool>();
}

std::string Fields::string(const char* name, const std::string& otherwise) const {
  const Json* v = find(name);
  if (v == nullptr) return otherwise;
  if (!v->is_string()) wrong_type(name, *v, "a string");
  return v->get<std::string>();
}

void Fields::refuse(const char* name, const char* what) const {
  const Json* v = find(name);
  if (v == nullptr || ((v->is_array() || v->is_object() || v->is_string()) && v->empty())) return;
  if (*v == Json(false) || *v == Json("none") || *v == Json("text")) return;
  not_done(what);
}

void Api::check_model(const Fields& f) const {
  std::string wanted = f.string("model");
  if (wanted.ends_with(":latest")) wanted.resize(wanted.size() - 7);
  if (wanted.empty() || wanted == model.id) return;
  throw ApiError(404, "not_found_error",
                 fmt::format("the model '{}' is not here; this server has '{}'", wanted, model.id), "model");
}

namespace {

std::vector<std::string> stop_strings(const Json* stop) {
  if (stop == nullptr) return {};
  if (stop->is_string()) return {stop->get<std::string>()};
  std::vector<std::string> all;
  for (const Json& s : stop->is_array() ? *stop : Json::array({nullptr})) {
    if (!s.is_string()) bad_request("'stop' must be a string or a list of strings", "stop");
    all.push_back(s.get<std::string>());
  }
  if (all.size() > 16)
    bad_request(fmt::format("there are {} stop strings; at most 16 are possible", all.size()), "stop");
  return all;
}

std::vector<std::pair<int32_t, float>> read_logit_bias(const Json* bias) {
  std::vector<std::pair<int32_t, float>> all;
  if (bias == nullptr) return all;
  if (!bias->is_object()) bad_request("'logit_bias' must be an object of token ids and numbers", "logit_bias");
  for (const auto& [key, value] : bias->items()) {
    const bool number = !key.empty() && key.size() < 10 && key.find_first_not_of("0123456789") == std::string::npos;
    if (!number || !value.is_number())
      bad_request("'logit_bias' must be an object of token ids and numbers", "logit_bias");
    all.emplace_back(static_cast<int32_t>(std::stol(key)), value.get<float>());
  }
  return all;
}

}  // namespace

Task Api::task(const Fields& f, const char* n_predict) const {
  Task t;
  text::SamplerParams& s = t.sampler;
  s = options.sampler;
  s.temp = static_cast<float>(f.number("temperature", s.temp));
  s.top_p = static_cast<float>(f.number("top_p", s.top_p));
  s.min_p = static_cast<float>(f.number("min_p", s.min_p));
  const int64_t top_k = f.integer("top_k", s.top_k);
  s.top_k = top_k < 0 ? 0 : static_cast<int32_t>(std::min<int64_t>(top_k, INT32_MAX));
  s.frequency_penalty = static_cast<float>(f.number("frequency_penalty", s.frequency_penalty));
  s.presence_penalty = static_cast<float>(f.number("presence_penalty", s.presence_penalty));
  s.repeat_penalty = static_cast<float>(f.number("repeat_penalty", s.repeat_penalty));
  s.repeat_last_n =
      static_cast<int32_t>(std::clamp<int64_t>(f.integer("repeat_last_n", s.repeat_last_n), -2, INT32_MAX));
  s.logit_bias = read_logit_bias(f.find("logit_bias"));
  if (f.find("seed") != nullptr) {
    const int64_t seed = f.integer("seed", 0);
    if (seed != -1) s.seed = static_cast<uint64_t>(seed);  // -1: a random one, as llama.cpp and Ollama have it
  }
  t.n_predict = f.integer(n_predict, -1);
  if (t.n_predict < -1)
    bad_request(fmt::format("'{}' is {}; 1 or more was expected", n_predict, t.n_predict), n_predict);
  t.stops = stop_strings(f.find("stop"));
  t.ignore_eos = f.boolean("ignore_eos", false);
  return t;
}

std::vector<int32_t> Api::prompt(const Json& given, const char* expected) const {
  const auto refuse = [&] { bad_request(fmt::format("'prompt' must be {}", expected), "prompt"); };
  std::vector<int32_t> ids;
  if (given.is_string()) {
    ids = tokenizer.encode(given.get<std::string>());
  } else {
    if (!given.is_array()) refuse();
    for (const Json& id : given) {
      if (!id.is_number_integer()) refuse();
      const auto value = id.get<int64_t>();
      ids.push_back(value < 0 || value > INT32_MAX ? -1 : static_cast<int32_t>(value));
    }
  }
  if (ids.empty() && tokenizer.bos()) ids.push_back(*tokenizer.bos());
  return ids;
}

std::string text_of_content(const Json& content) {
  if (content.is_null()) return {};
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) bad_request("a message's content must be a string or a list of parts", "messages");
  std::string text;
  for (const Json& part : content) {
    if (part.is_string()) {
      text += part.get<std::string>();
      continue;
    }
    const Fields p(part);
    const std::string type = p.string("type");
    if (type != "text" && type != "input_text" && type != "output_text") {
      if (type.find("tool") != std::string::npos) not_done("tools");
      not_done(fmt::format("message parts of type '{}' (images, sound, files)", type));
    }
    text += p.string("text");
  }
  return text;
}

Json Api::messages(const Json& given) const {
  if (!given.is_array() || given.empty())
    bad_request("'messages' must be a list with at least one message", "messages");
  Json all = Json::array();
  for (const Json& m : given) {
    const Fields f(m);
    std::string role = f.string("role");
    if (role == "developer") role = "system";
    f.refuse("tool_calls", "tools");
    f.refuse("function_call", "tools");
    f.refuse("images", "images");
    if (role == "tool" || role == "function") not_done("tools");
    if (role != "system" && role != "user" && role != "assistant") {
      bad_request(fmt::format("a message's role is '{}'; system, user or assistant was expected", role), "messages");
    }
    Json message = {{"role", role}, {"content", text_of_content(m.contains("content") ? m["content"] : Json())}};
    if (f.find("reasoning_content") != nullptr) message["reasoning_content"] = f.string("reasoning_content");
    all.push_back(std::move(message));
  }
  return all;
}

const text::ChatTemplate& Api::require_chat() const {
  if (chat) return *chat;
  bad_request(fmt::format(
      "the model has no chat template; start the server with --chat-template ({}), or use /v1/completions",
      text::ChatTemplate::names()));
}

std::string Api::chat_text(const Json& messages, const Json& extra) const {
  return require_chat().apply(messages, {.extra = extra});
}

std::vector<int32_t> Api::chat_prompt(const Json& messages, const Json& extra) const {
  return require_chat().encode(tokenizer, messages, {.extra = extra});
}

Json parse_body(const httplib::Request& request) {
  constexpr int kMostDepth = 100;
  constexpr int64_t kMostWork = 100'000'000;  // an object's keys are compared with those before them
  std::vector<int64_t> keys(kMostDepth + 2);  // of the object at each depth
  int64_t work = 0;
  const auto look = [&](int depth, Json::parse_event_t event, const Json&) {
    if (depth > kMostDepth) bad_request(fmt::format("the body has more than {} levels inside each other", kMostDepth));
    if (event == Json::parse_event_t::object_start) keys[static_cast<size_t>(depth) + 1] = 0;
    if (event == Json::parse_event_t::key) work += keys[static_cast<size_t>(depth)]++;
    if (work > kMostWork) bad_request("an object of the body has too many keys");
    return true;
  };
  try {
    return Json::parse(request.body, look);
  } catch (const Json::exception& e) {
    bad_request(fmt::format("the body is no JSON: {}", e.what()));
  }
}

std::string new_id(const char* prefix) {
  static thread_local std::mt19937_64 random{std::random_device{}()};
  return fmt::format("{}{:016x}{:08x}", prefix, random(), random() & 0xFFFFFFFF);
}

int64_t now_seconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string now_rfc3339() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t t = std::chrono::system_clock::to_time_t(now);
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(now.time_since_epoch()).count() % 1'000'000;
  std::tm utc{};
  gmtime_r(&t, &utc);
  std::array<char, 32> text;
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%S", &utc);
  return fmt::format("{}.{:06}Z", text.data(), us);
}

Json usage(const std::vector<End>& ends) {
  int64_t generated = 0, prompt = 0, cached = 0;
  for (const End& e : ends)
    generated += e.n_generated, prompt = std::max(prompt, e.n_prompt), cached = std::max(cached, e.n_cached);
  return {{"prompt_tokens", prompt},
          {"completion_tokens", generated},
          {"total_tokens", prompt + generated},
          {"prompt_tokens_details", {{"cached_tokens", cached}}}};
}

Json token_json(const text::Tokenizer& tokenizer, const TokenProbability& p) {
  const std::string bytes = tokenizer.piece(p.id, true);
  text::Utf8Stream utf8;
  std::string text = utf8.push(bytes);
  text += utf8.flush();
  Json numbers = Json::array();
  for (const char c : bytes) numbers.push_back(static_cast<unsigned char>(c));
  return {{"token", text}, {"logprob", p.log_probability}, {"bytes", numbers}};
}

const char* finish_reason(Finish finish) {
  return finish == Finish::length || finish == Finish::context_full ? "length" : "stop";
}

}  // namespace hearth::serve
