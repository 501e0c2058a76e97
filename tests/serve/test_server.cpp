// The HTTP interfaces over a real socket: what clients of OpenAI, Anthropic, Ollama and llama.cpp rely on, and what a stranger
// may send.
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <sstream>

#include "core/log.h"
#include "serve/server.h"
#include "serving.h"

namespace hearth::test {
namespace {

using serve::Json;

class Http : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { serving_ = new Serving({.n_parallel = 16, .n_queue = 32}); }
  static void TearDownTestSuite() { delete serving_; }

  void start(serve::ServerOptions options = {.chat_template = "chatml"}) {
    options.sampler.seed = 1;
    server_ = std::make_unique<serve::Server>(serving_->scheduler(), serving_->tokenizer(),
                                              serve::ModelFacts{.id = "demo", .architecture = "llama"}, options);
    port_ = server_->bind("127.0.0.1", 0);
    server_->start();
  }
  void SetUp() override { start(); }

  httplib::Client client() const {
    httplib::Client c("127.0.0.1", port_);
    c.set_read_timeout(60);
    return c;
  }
  struct Reply {
    int status = 0;
    std::string body, type;
    Json json() const { return Json::parse(body); }
  };
  Reply post(const std::string& path, const std::string& body, const httplib::Headers& headers = {}) const {
    const auto r = client().Post(path, headers, body, "application/json");
    if (!r) {
      ADD_FAILURE() << path << ": " << httplib::to_string(r.error());
      return {};
    }
    return {r->status, r->body, r->get_header_value("Content-Type")};
  }
  Reply post(const std::string& path, const Json& body, const httplib::Headers& headers = {}) const {
    return post(path, body.dump(), headers);
  }
  Reply get(const std::string& path, const httplib::Headers& headers = {}) const {
    const auto r = client().Get(path, headers);
    return r ? Reply{r->status, r->body, r->get_header_value("Content-Type")} : Reply{};
  }
  // The data of a stream's events.
  static std::vector<Json> events(const std::string& body) {
    std::vector<Json> all;
    std::istringstream lines(body);
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with("data: {")) all.push_back(Json::parse(line.substr(6)));
    }
    return all;
  }
  static Json chat(const std::string& content, int n = 8) {
    Json body = {{"model", "demo"}, {"max_tokens", n}, {"temperature", 0}, {"ignore_eos", true}};
    body["messages"] = Json::array({Json{{"role", "user"}, {"content", content}}});
    return body;
  }

  static inline Serving* serving_ = nullptr;
  std::unique_ptr<serve::Server> server_;
  int port_ = 0;
};

TEST_F(Http, ChatCompletions) {
  const Reply whole = post("/v1/chat/completions", chat("Tell a story"));
  ASSERT_EQ(whole.status, 200) << whole.body;
  const Json j = whole.json();
  EXPECT_EQ(j["object"], "chat.completion");
  EXPECT_EQ(j["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(j["choices"][0]["message"]["role"], "assistant");
  EXPECT_EQ(j["usage"]["completion_tokens"], 8);

  Json body = chat("Tell a story");
  body["stream"] = true, body["stream_options"] = {{"include_usage", true}};
  const Reply streamed = post("/v1/chat/completions", body);
  EXPECT_EQ(streamed.type, "text/event-stream");
  EXPECT_TRUE(streamed.body.ends_with("data: [DONE]\n\n"));
  const std::vector<Json> chunks = events(streamed.body);
  ASSERT_GE(chunks.size(), 4u);
  std::string text;
  EXPECT_EQ(chunks[0]["choices"][0]["delta"]["role"], "assistant");
  for (size_t i = 0; i + 1 < chunks.size(); ++i) {
    EXPECT_EQ(chunks[i]["id"], chunks[0]["id"]);
    EXPECT_EQ(chunks[i]["object"], "chat.completion.chunk");
    ASSERT_TRUE(chunks[i]["choices"][0]["delta"]["content"].is_string()) << chunks[i];
    text += chunks[i]["choices"][0]["delta"]["content"].get<std::string>();
    EXPECT_EQ(chunks[i]["choices"][0]["finish_reason"].is_null(), i + 2 < chunks.size());
    EXPECT_TRUE(chunks[i]["usage"].is_null());
  }
  EXPECT_EQ(chunks[chunks.size() - 2]["choices"][0]["finish_reason"], "length");
  EXPECT_TRUE(chunks.back()["choices"].empty());
  EXPECT_EQ(chunks.back()["usage"]["completion_tokens"], 8);
  EXPECT_EQ(text, j["choices"][0]["message"]["content"].get<std::string>());
}

TEST_F(Http, ChoicesSeedsLogprobsAndCachedTokens) {
  Json body = chat("Tell a story", 5);
  body["temperature"] = 1.0, body["seed"] = 5, body["n"] = 2, body["logprobs"] = true, body["top_logprobs"] = 2;
  const Json two = post("/v1/chat/completions", body).json();
  ASSERT_EQ(two["choices"].size(), 2u);
  EXPECT_NE(two["choices"][0]["message"]["content"], two["choices"][1]["message"]["content"]);
  const Json& tokens = two["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(tokens.size(), 5u);
  EXPECT_EQ(tokens[0]["top_logprobs"].size(), 2u);
  EXPECT_LE(tokens[0]["logprob"], 0);
  EXPECT_TRUE(tokens[0]["bytes"].is_array());
  body["n"] = 1;
  EXPECT_EQ(post("/v1/chat/completions", body).json()["choices"][0]["message"], two["choices"][0]["message"]);

  std::string story;
  for (int i = 0; i < 20; ++i) story += "The dog met a cat and they went on. ";
  const Json first = post("/v1/completions", Json{{"prompt", story}, {"max_tokens", 1}}).json();
  const Json second = post("/v1/completions", Json{{"prompt", story}, {"max_tokens", 1}}).json();
  EXPECT_GE(second["usage"]["prompt_tokens_details"]["cached_tokens"], 128);
  EXPECT_EQ(first["choices"][0]["text"], second["choices"][0]["text"]);
}

TEST_F(Http, CompletionsTakeTextIdsAndLists) {
  const Json body = {{"prompt", "Once upon a time"}, {"max_tokens", 6}, {"temperature", 0}, {"logprobs", 1}};
  const Json text = post("/v1/completions", body).json();
  EXPECT_EQ(text["object"], "text_completion");
  EXPECT_EQ(text["choices"][0]["logprobs"]["tokens"].size(), 6u);
  Json ids = body, list = body;
  ids["prompt"] = serving_->tokenizer().encode("Once upon a time");
  list["prompt"] = {"Once upon a time", "The dog"};
  EXPECT_EQ(post("/v1/completions", ids).json()["choices"][0]["text"], text["choices"][0]["text"]);
  const Json both = post("/v1/completions", list).json();
  ASSERT_EQ(both["choices"].size(), 2u);
  EXPECT_EQ(both["choices"][0]["text"], text["choices"][0]["text"]);
  Json stop = body;
  const std::string whole = text["choices"][0]["text"];
  stop["stop"] = whole.substr(3, 4);
  const Json stopped = post("/v1/completions", stop).json();
  EXPECT_EQ(stopped["choices"][0]["text"], whole.substr(0, 3));
  EXPECT_EQ(stopped["choices"][0]["finish_reason"], "stop");
  Json biased = body;
  biased["logit_bias"] = {{"600", 100}}, biased["max_tokens"] = 3;
  const std::string piece = serving_->tokenizer().piece(600);
  EXPECT_EQ(post("/v1/completions", biased).json()["choices"][0]["text"], piece + piece + piece);
}

TEST_F(Http, Responses) {
  const Json body = {{"model", "demo"},        {"input", "Tell a story"}, {"instructions", "Be brief."},
                     {"max_output_tokens", 5}, {"temperature", 0},        {"ignore_eos", true}};
  const Json j = post("/v1/responses", body).json();
  EXPECT_EQ(j["object"], "response");
  EXPECT_EQ(j["status"], "incomplete");
  EXPECT_EQ(j["usage"]["output_tokens"], 5);
  Json streaming = body;
  streaming["stream"] = true;
  const std::vector<Json> all = events(post("/v1/responses", streaming).body);
  ASSERT_GE(all.size(), 8u);
  EXPECT_EQ(all.front()["type"], "response.created");
  EXPECT_EQ(all.back()["type"], "response.incomplete");
  std::string text;
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i]["sequence_number"], i);
    if (all[i]["type"] == "response.output_text.delta") text += all[i]["delta"].get<std::string>();
  }
  EXPECT_EQ(text, j["output"][0]["content"][0]["text"].get<std::string>());
}

TEST_F(Http, AnthropicMessages) {
  Json body = chat("Tell a story", 6);
  body["system"] = Json::array({Json{{"type", "text"}, {"text", "Be brief."}}});
  const Json j = post("/v1/messages", body).json();
  EXPECT_EQ(j["type"], "message");
  EXPECT_EQ(j["stop_reason"], "max_tokens");
  EXPECT_EQ(j["usage"]["output_tokens"], 6);
  const std::string text = j["content"][0]["text"];
  body["stream"] = true;
  const std::vector<Json> all = events(post("/v1/messages", body).body);
  EXPECT_EQ(all.front()["type"], "message_start");
  EXPECT_EQ(all.back()["type"], "message_stop");
  std::string streamed;
  for (const Json& e : all) {
    if (e["type"] == "content_block_delta") streamed += e["delta"]["text"].get<std::string>();
  }
  EXPECT_EQ(streamed, text);
  body["stream"] = false, body["stop_sequences"] = Json::array({text.substr(2, 3)});
  const Json stopped = post("/v1/messages", body).json();
  EXPECT_EQ(stopped["stop_reason"], "stop_sequence");
  EXPECT_EQ(stopped["stop_sequence"], text.substr(2, 3));
  EXPECT_GT(post("/v1/messages/count_tokens", body).json()["input_tokens"], 10);
  body.erase("max_tokens");
  const Reply bad = post("/v1/messages", body);
  EXPECT_EQ(bad.status, 400);
  EXPECT_EQ(bad.json()["error"]["type"], "invalid_request_error");
}

TEST_F(Http, Ollama) {
  Json body = chat("Tell a story");
  body["options"] = {{"num_predict", 6}, {"temperature", 0}, {"ignore_eos", true}};
  const Reply streamed = post("/api/chat", body);
  EXPECT_EQ(streamed.type, "application/x-ndjson");
  std::istringstream lines(streamed.body);
  std::string text;
  Json last;
  for (std::string line; std::getline(lines, line);) {
    last = Json::parse(line);
    text += last["message"]["content"].get<std::string>();
  }
  EXPECT_EQ(last["done"], true);
  EXPECT_EQ(last["done_reason"], "length");
  EXPECT_EQ(last["eval_count"], 6);
  body["stream"] = false;
  EXPECT_EQ(post("/api/chat", body).json()["message"]["content"], text);
  const Json raw = {{"model", "demo:latest"},
                    {"prompt", "Once upon"},
                    {"raw", true},
                    {"stream", false},
                    {"options", {{"num_predict", 3}}}};
  EXPECT_EQ(post("/api/generate", raw).json()["eval_count"], 3);
  EXPECT_EQ(get("/api/tags").json()["models"][0]["name"], "demo:latest");
  EXPECT_EQ(get("/api/ps").json()["models"].size(), 1u);
  EXPECT_TRUE(get("/api/version").json().contains("version"));
  EXPECT_EQ(post("/api/show", Json{{"model", "demo"}}).json()["details"]["family"], "llama");
  EXPECT_TRUE(post("/api/show", Json{{"model", "other"}}).json()["error"].is_string());
}

TEST_F(Http, LlamaCpp) {
  EXPECT_EQ(get("/health").json()["status"], "ok");
  EXPECT_EQ(get("/props").json()["total_slots"], 16);
  EXPECT_EQ(get("/slots").json().size(), 16u);
  EXPECT_NE(get("/metrics").body.find("hearth:tokens_predicted_total"), std::string::npos);
  const Json c =
      post("/completion", Json{{"prompt", "Once upon"}, {"n_predict", 4}, {"temperature", 0}, {"n_probs", 2}}).json();
  EXPECT_EQ(c["tokens_predicted"], 4);
  EXPECT_EQ(c["tokens"].size(), 4u);
  EXPECT_EQ(c["completion_probabilities"][0]["top_logprobs"].size(), 2u);
  EXPECT_EQ(c["stop_type"], "limit");
  const Json ids = post("/tokenize", Json{{"content", "Once upon a time"}}).json()["tokens"];
  EXPECT_EQ(post("/detokenize", Json{{"tokens", ids}}).json()["content"], "Once upon a time");
  Json messages = chat("Hi");
  EXPECT_EQ(post("/apply-template", messages).json()["prompt"],
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_TRUE(get("/hearth/stats").json()["pages"].is_number());
  const Reply page = get("/");
  EXPECT_EQ(page.status, 200);
  EXPECT_EQ(page.type, "text/html; charset=utf-8");
  EXPECT_EQ(get("/v1/models").json()["data"][0]["id"], "demo");
  EXPECT_EQ(get("/v1/models/demo").status, 200);
  EXPECT_EQ(get("/v1/models/other").status, 404);
}

TEST_F(Http, WhatIsNotDoneIsSaid) {
  Json body = chat("Hi");
  body["tools"] = Json::array({Json{{"type", "function"}}});
  for (const char* path : {"/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"}) {
    const Reply r = post(path, body);
    EXPECT_EQ(r.status, 501) << path;
    EXPECT_NE(r.body.find("does not do tools yet"), std::string::npos) << r.body;
  }
  Json image = chat("Hi");
  image["messages"][0]["content"] = Json::array({Json{{"type", "image_url"}, {"image_url", {{"url", "x"}}}}});
  EXPECT_EQ(post("/v1/chat/completions", image).status, 501);
  Json format = chat("Hi");
  format["response_format"] = {{"type", "json_object"}};
  EXPECT_EQ(post("/v1/chat/completions", format).status, 501);
  EXPECT_EQ(post("/completion", Json{{"prompt", "x"}, {"grammar", "root ::= x"}}).status, 501);
  EXPECT_EQ(post("/v1/embeddings", Json{{"input", "x"}}).status, 501);
  EXPECT_EQ(post("/api/embed", Json{{"input", "x"}}).status, 501);
}

TEST_F(Http, MalformedBodiesAreRefusedWithTheProtocolsError) {
  const std::vector<std::string> bodies = {
      "",
      "{",
      "[]",
      "null",
      "\"x\"",
      "5",
      "{\"messages\": 5}",
      "{\"messages\": []}",
      "{\"messages\": [5]}",
      "{\"messages\": [{\"role\": \"robot\", \"content\": \"x\"}]}",
      "{\"messages\": [{\"role\": 5, \"content\": \"x\"}]}",
      "{\"messages\": [{\"role\": \"user\", \"content\": 5}]}",
      "{\"messages\": [{\"role\": \"user\", \"content\": [5]}]}",
      "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"temperature\": \"hot\"}",
      "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"temperature\": -1}",
      "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"max_tokens\": 1.5}",
      "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"max_tokens\": -7}",
      "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"stop\": [\"\"]}",
      "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"stop\": 5}",
      "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"n\": 1000}",
      "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"logit_bias\": {\"a\": 1}}",
      "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"top_p\": 7}",
      "{\"messages\": [{\"role\": \"user\", \"content\": \"\xFF\xFE\"}]}",
      std::string(100000, '['),
      "{\"prompt\": [-1]}",
      "{\"prompt\": [99999999999]}",
      "{\"prompt\": {}}"};
  for (const std::string& body : bodies) {
    const Reply r = post("/v1/chat/completions", body);
    EXPECT_EQ(r.status, 400) << body.substr(0, 100);
    EXPECT_TRUE(r.json()["error"]["message"].is_string());
  }
  for (const std::string& body : {std::string("{\"prompt\": [-1]}"), std::string("{\"prompt\": [99999999999]}"),
                                  std::string("{\"prompt\": {}}")}) {
    EXPECT_EQ(post("/v1/completions", body).status, 400) << body;
  }
  Json other = chat("Hi");
  other["model"] = "gpt-7";
  const Reply unknown = post("/v1/chat/completions", other);
  EXPECT_EQ(unknown.status, 404);
  EXPECT_EQ(unknown.json()["error"]["code"], "model_not_found");
  std::string words;
  for (int i = 0; i < 600; ++i) words += "dog ";
  const Reply too_long = post("/v1/chat/completions", chat(words));
  EXPECT_EQ(too_long.status, 400);
  EXPECT_NE(too_long.body.find("the context holds 512"), std::string::npos);
  EXPECT_EQ(get("/nowhere").status, 404);
  EXPECT_TRUE(get("/nowhere").json()["error"]["message"].is_string());
}

// A body of the largest size is refused, or read, in a time that nobody notices.
TEST_F(Http, LargeBodiesCostLittle) {
  std::string keys = "{\"prompt\": \"x\"", nested = "{\"prompt\": ";
  for (int i = 0; keys.size() < (size_t{15} << 20); ++i) keys += fmt::format(",\"{}\":0", i);
  nested += std::string(size_t{7} << 20, '[') + std::string(size_t{7} << 20, ']') + "}";
  const auto begin = std::chrono::steady_clock::now();
  const Reply many = post("/v1/completions", keys + "}");
  EXPECT_EQ(many.status, 400);
  EXPECT_NE(many.body.find("too many keys"), std::string::npos) << many.body;
  const Reply deep = post("/v1/completions", nested);
  EXPECT_EQ(deep.status, 400);
  EXPECT_NE(deep.body.find("levels inside each other"), std::string::npos) << deep.body;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 20s);
}

TEST_F(Http, KeysAreAskedFor) {
  server_.reset();
  start({.api_keys = {"secret", "other"}, .chat_template = "chatml"});
  for (const char* key : {"", "Bearer ", "Bearer secre", "Bearer secrets", "Bearer wrong!", "secret"}) {
    httplib::Headers headers;
    if (*key != '\0') headers.emplace("Authorization", key);
    const Reply r = post("/v1/chat/completions", chat("Hi", 1), headers);
    EXPECT_EQ(r.status, 401) << key;
    EXPECT_EQ(r.json()["error"]["code"], "invalid_api_key");
  }
  EXPECT_EQ(post("/v1/chat/completions", chat("Hi", 1), {{"Authorization", "Bearer secret"}}).status, 200);
  EXPECT_EQ(post("/v1/messages", chat("Hi", 1), {{"x-api-key", "other"}}).status, 200);
  EXPECT_EQ(get("/health").status, 200);
  EXPECT_EQ(get("/slots").status, 401);
  EXPECT_TRUE(serve::equal_keys("a", "a") && serve::equal_keys("", ""));
  EXPECT_FALSE(serve::equal_keys("a", "") || serve::equal_keys("", "a") || serve::equal_keys("ab", "a") ||
               serve::equal_keys("aa", "a"));
}

TEST_F(Http, PromptsAreLoggedWhenAskedForAlone) {
  const log::Level level = log::level();
  log::set_level(log::Level::normal);
  for (const auto& [kind, lines, prompts] :
       {std::tuple(serve::RequestLog::none, false, false), std::tuple(serve::RequestLog::requests, true, false),
        std::tuple(serve::RequestLog::prompts, true, true)}) {
    server_.reset();
    start({.api_keys = {"secret-key"}, .chat_template = "chatml", .log = kind});
    testing::internal::CaptureStderr();
    const httplib::Headers key = {{"Authorization", "Bearer secret-key"}};
    EXPECT_EQ(post("/v1/chat/completions", chat("a private\nquestion", 1), key).status, 200);
    EXPECT_EQ(post("/v1/chat/completions", std::string("no \x1b[31m JSON"), key).status, 400);
    server_.reset();  // its threads have logged
    const std::string logged = testing::internal::GetCapturedStderr();
    EXPECT_EQ(logged.find("POST \"/v1/chat/completions\" 200") != std::string::npos, lines) << logged;
    EXPECT_EQ(logged.find("POST \"/v1/chat/completions\" 400") != std::string::npos, lines) << logged;
    EXPECT_EQ(logged.find("a private") != std::string::npos, prompts) << logged;
    EXPECT_EQ(logged.find("secret-key"), std::string::npos) << logged;
    EXPECT_EQ(logged.find('\x1b'), std::string::npos) << logged;
    EXPECT_EQ(std::count(logged.begin(), logged.end(), '\n'), lines ? 2 : 0) << logged;
  }
  log::set_level(level);
}

TEST_F(Http, PagesOfAClosedConnectionAreFree) {
  for (const bool stream : {true, false}) {
    Json body = chat("Tell a story", 400);
    body["stream"] = stream;
    std::atomic<int> received = 0;
    std::thread reader([&] {
      httplib::Client c = client();
      httplib::Request request;
      request.method = "POST", request.path = "/v1/chat/completions", request.body = body.dump();
      request.headers = {{"Content-Type", "application/json"}};
      c.set_read_timeout(0, stream ? 60'000'000 : 100'000);  // the one that is not streamed gives up
      request.content_receiver = [&](const char*, size_t, uint64_t, uint64_t) { return ++received < 3; };
      (void)c.send(request);
    });
    reader.join();
    ASSERT_TRUE(serving_->settles()) << stream;
  }
  EXPECT_LT(serving_->scheduler().stats().n_generated, 600) << "the answers of 400 tokens were not made to their ends";
}

TEST_F(Http, OneTextWhateverTheNeighbours) {
  Json body = chat("Tell a story about a dog", 32);
  body["temperature"] = 0.9, body["seed"] = 11;
  const std::string alone = post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"];
  std::vector<std::thread> neighbours;
  for (int i = 0; i < 15; ++i) {
    neighbours.emplace_back([&, i] {
      Json other = chat(std::string(static_cast<size_t>(20 * i + 1), 'x'), 40);
      other["temperature"] = 1.0, other["seed"] = i;
      EXPECT_EQ(post("/v1/chat/completions", other).status, 200);
    });
  }
  EXPECT_EQ(post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"], alone);
  for (std::thread& t : neighbours) t.join();
}

TEST_F(Http, AFullQueueIsTold) {
  std::vector<std::thread> clients;
  std::atomic<int> ok = 0, busy = 0;
  for (int i = 0; i < 80; ++i) {
    clients.emplace_back([&] {
      httplib::Client c = client();
      const auto r = c.Post("/v1/chat/completions", chat("Tell a story", 60).dump(), "application/json");
      if (!r) return (void)(ADD_FAILURE() << httplib::to_string(r.error()));
      if (r->status == 200) ++ok;
      if (r->status == 503 && !r->get_header_value("Retry-After").empty()) ++busy;
    });
  }
  for (std::thread& t : clients) t.join();
  EXPECT_EQ(ok + busy, 80);
  EXPECT_GE(ok, 48);
}

}  // namespace
}  // namespace hearth::test
