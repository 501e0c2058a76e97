#pragma once
// The HTTP server: routes, keys, limits.
#include <memory>
#include <string>
#include <thread>

#include "serve/api.h"

namespace hearth::serve {

class Server {
 public:
  // The scheduler and the tokenizer must outlive it. Throws Error when the chat template is not sound.
  Server(Scheduler& scheduler, const text::Tokenizer& tokenizer, ModelFacts model, ServerOptions options);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Takes the port, 0: any that is free, and returns its number. Throws Error when it is taken.
  int bind(const std::string& host, int port);
  // Answers in threads of its own until stop().
  void start();
  // Takes no more connections and waits for those there are.
  void stop();
  bool has_chat() const { return api_.chat.has_value(); }

 private:
  void add_limits();
  void add_keys();
  void add_log();

  class Listener;

  const ModelFacts model_;
  const ServerOptions options_;
  Api api_;
  std::unique_ptr<Listener> listener_;
  httplib::Server& http_;
  std::thread thread_;
};

// Whether two keys are equal, in a time that depends on their lengths alone.
bool equal_keys(std::string_view a, std::string_view b);

}  // namespace hearth::serve
