#pragma once
// A headless Chromium, driven over its DevTools protocol through a pipe: JSON messages that end with a zero byte.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "support/paths.h"

namespace hearth::test {

using Json = nlohmann::ordered_json;

// The first of Chromium's usual names that PATH has.
inline std::optional<std::string> find_chromium() {
  const char* path = std::getenv("PATH");
  for (const char* name : {"chromium", "chromium-browser", "google-chrome"}) {
    std::istringstream folders(path == nullptr ? "" : path);
    for (std::string folder; std::getline(folders, folder, ':');) {
      const std::string file = folder + "/" + name;
      if (access(file.c_str(), X_OK) == 0) return file;
    }
  }
  return std::nullopt;
}

class Browser {
 public:
  explicit Browser(const std::string& program) {
    int in[2], out[2];  // what it reads as descriptor 3, and writes as 4
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) fail("no pipe can be made");
    const int reads = fcntl(in[0], F_DUPFD_CLOEXEC, 10), writes = fcntl(out[1], F_DUPFD_CLOEXEC, 10);
    const std::string profile = "--user-data-dir=" + (dir_ / "profile").string();
    std::vector<std::string> words = {program,        "--headless=new", "--no-sandbox", "--remote-debugging-pipe",
                                      "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", profile, "about:blank"};
    std::vector<char*> arguments;
    for (std::string& w : words) arguments.push_back(w.data());
    arguments.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, reads, 3);
    posix_spawn_file_actions_adddup2(&actions, writes, 4);
    posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
    const int error = posix_spawn(&pid_, program.c_str(), &actions, &attributes, arguments.data(), environ);
    posix_spawnattr_destroy(&attributes), posix_spawn_file_actions_destroy(&actions);
    for (const int fd : {in[0], out[1], reads, writes}) close(fd);
    to_ = in[1], from_ = out[0];
    if (error != 0) fail("'{}' cannot be started: {}", program, std::strerror(error));
  }
  ~Browser() {
    close(to_), close(from_);
    kill(-pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Browser(const Browser&) = delete;
  Browser& operator=(const Browser&) = delete;

  // Sends a command and returns its result; what happens meanwhile goes to events. Throws Error when the browser refuses the
  // command, or does not answer within a minute.
  Json call(const std::string& method, const Json& parameters = Json::object(), const std::string& session = {}) {
    Json message = {{"id", ++last_id_}, {"method", method}, {"params", parameters}};
    if (!session.empty()) message["sessionId"] = session;
    const std::string text = message.dump() + '\0';
    for (size_t at = 0; at < text.size();) {
      const ssize_t n = write(to_, text.data() + at, text.size() - at);
      if (n <= 0) fail("the browser is gone");
      at += static_cast<size_t>(n);
    }
    while (true) {
      Json answer = receive(method);
      if (answer.value("id", int64_t{0}) != last_id_) {
        events.push_back(std::move(answer));
      } else if (answer.contains("error")) {
        fail("the browser refuses {}: {}", method, answer["error"].dump());
      } else {
        return answer["result"];
      }
    }
  }

  std::vector<Json> events;

 private:
  Json receive(const std::string& method) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (true) {
      if (const size_t end = received_.find('\0'); end != std::string::npos) {
        Json message = Json::parse(received_.substr(0, end));
        received_.erase(0, end + 1);
        return message;
      }
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      pollfd waits{from_, POLLIN, 0};
      if (left.count() <= 0 || poll(&waits, 1, static_cast<int>(left.count())) <= 0) fail("no answer to {}", method);
      char buffer[65536];
      const ssize_t n = read(from_, buffer, sizeof buffer);
      if (n <= 0) fail("the browser ended before it answered {}", method);
      received_.append(buffer, static_cast<size_t>(n));
    }
  }

  TempDir dir_;
  pid_t pid_ = -1;
  int to_ = -1, from_ = -1;
  int64_t last_id_ = 0;
  std::string received_;
};

class Tab {
 public:
  Tab(Browser& browser, const std::string& url) : browser_(browser) {
    const Json target = browser.call("Target.createTarget", {{"url", "about:blank"}});
    target_ = target["targetId"];
    session_ = browser.call("Target.attachToTarget", {{"targetId", target_}, {"flatten", true}})["sessionId"];
    for (const char* domain : {"Page.enable", "Runtime.enable", "Log.enable", "Network.enable"}) call(domain);
    call("Page.navigate", {{"url", url}});
  }

  Json call(const std::string& method, const Json& parameters = Json::object()) {
    return browser_.call(method, parameters, session_);
  }
  // The value of a JavaScript expression. Throws Error when it throws.
  Json eval(const std::string& expression) {
    const Json r = call("Runtime.evaluate",
                        {{"expression", expression}, {"returnByValue", true}, {"awaitPromise", true}, {"userGesture", true}});
    if (r.contains("exceptionDetails")) fail("'{}' throws {}", expression, r["exceptionDetails"].dump());
    return r["result"].contains("value") ? r["result"]["value"] : Json();
  }
  // Until the expression is true, for at most a minute.
  bool wait(const std::string& expression) {
    for (int i = 0; i < 1200; ++i) {
      if (eval("!!(" + expression + ")") == true) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    return false;
  }
  void type(const std::string& text) { call("Input.insertText", {{"text", text}}); }
  void press(const std::string& key, int code, int modifiers = 0) {
    Json event = {{"type", "keyDown"}, {"key", key}, {"code", key}, {"windowsVirtualKeyCode", code}, {"modifiers", modifiers}};
    if (key == "Enter") event["text"] = "\r";
    call("Input.dispatchKeyEvent", event);
    event["type"] = "keyUp";
    call("Input.dispatchKeyEvent", event);
  }
  void bring_to_front() { call("Page.bringToFront"); }
  // Width in CSS pixels; "light" or "dark".
  void show_as(int width, const char* scheme) {
    call("Emulation.setDeviceMetricsOverride",
         {{"width", width}, {"height", 800}, {"deviceScaleFactor", 1}, {"mobile", width < 600}});
    call("Emulation.setEmulatedMedia",
         {{"features", Json::array({Json{{"name", "prefers-color-scheme"}, {"value", scheme}}})}});
  }
  std::string screenshot_base64() { return call("Page.captureScreenshot", {{"format", "png"}})["data"]; }

 private:
  Browser& browser_;
  std::string target_, session_;
};

}  // namespace hearth::test
