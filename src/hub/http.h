#pragma once
// One HTTP request after another, with libcurl.
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "core/error.h"
#include "hub/settings.h"

namespace hearth::hub {

// The network or the server failed; later it may not.
class Unreachable : public Error {
 public:
  Unreachable(const std::string& what, bool may_pass, std::optional<std::chrono::seconds> pause = {})
      : Error(what), again(may_pass), after(pause) {}
  bool again;                                 // whether trying again soon may help
  std::optional<std::chrono::seconds> after;  // the server named a pause
};
// Settings::cancelled said so.
class Cancelled : public Error {
 public:
  Cancelled() : Error("interrupted") {}
};

struct Reply {
  int status = 0;
  std::string url;                                    // that answered
  std::map<std::string, std::string> headers;         // names in lower case
  std::string body;                                   // unless a sink took it
  std::string header(const std::string& name) const;  // empty: there is none
  bool ok() const { return status >= 200 && status < 300; }
};

class Http {
 public:
  explicit Http(const Settings& settings);
  ~Http();

  // Takes the body of a reply with status 200 or 206, piece by piece; what it throws ends the request.
  using Sink = std::function<void(const Reply&, std::span<const char>)>;
  // Redirects are followed, ten at most, from https to https only; the token goes to the endpoint's origin alone. A
  // redirect of head() to another origin that says what the file is (X-Linked-Etag) is returned. Throw Unreachable,
  // Cancelled, or Error when TLS is refused.
  Reply get(const std::string& url);
  Reply get(const std::string& url, uint64_t offset, const Sink& sink);
  Reply head(const std::string& url);

 private:
  struct Request;
  Reply follow(Request request);
  Reply perform(const Request& request);
  void set_options(const Request& request);
  [[noreturn]] void failed(int code, const std::string& url) const;

  const Settings& settings_;
  std::string origin_;  // of the endpoint
  std::unique_ptr<void, void (*)(void*)> curl_;
  std::string error_;
  bool reached_ = false;  // somebody has answered: what fails now may pass
};

}  // namespace hearth::hub
