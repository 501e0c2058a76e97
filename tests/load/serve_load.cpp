// Loads a server and prints what its clients saw; no part of the tests.
//   serve_load rate HOST:PORT [--clients 8] [--tokens 64] [--prompt 4] [--rounds 3]
//                                             so many texts at once, of any server that speaks OpenAI's completions
//   serve_load soak HEARTH MODEL [--clients 64] [--seconds 600]
//                                             starts `hearth serve`; a third of the clients go away, send rubbish or stall
#include <arpa/inet.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include <httplib.h>

#include <nlohmann/json.hpp>

#include "core/error.h"

namespace {

using namespace hearth;
using namespace std::chrono_literals;
using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

struct Address {
  std::string host;
  int port;
};

// What one client saw of one text.
struct Seen {
  int status = 0;
  bool whole = false;
  std::string text;
  int64_t n_tokens = 0;
  double first_ms = 0;          // to the first piece
  std::vector<double> gaps_ms;  // between pieces
};

// Streams a completion. `leave_after`: goes away after so many pieces; negative: stays.
Seen stream(const Address& to, const Json& body, int leave_after = -1) {
  Seen seen;
  std::string rest;
  int pieces = 0;
  const auto begin = Clock::now();
  auto last = begin;
  httplib::Client client(to.host, to.port);
  client.set_read_timeout(3600);  // a busy machine is no reason to give up
  client.set_tcp_nodelay(true);
  httplib::Request request;
  request.method = "POST", request.path = "/v1/completions", request.body = body.dump();
  request.headers = {{"Content-Type", "application/json"}};
  request.response_handler = [&](const httplib::Response& r) { return (seen.status = r.status) == 200; };
  request.content_receiver = [&](const char* data, size_t size, uint64_t, uint64_t) {
    rest.append(data, size);
    for (size_t end = 0; (end = rest.find("\n\n")) != std::string::npos; rest.erase(0, end + 2)) {
      const std::string line = rest.substr(0, end);
      if (line == "data: [DONE]") seen.whole = true;
      if (!line.starts_with("data: {")) continue;
      const Json j = Json::parse(line.substr(6));
      if (j.contains("usage") && j["usage"].is_object()) seen.n_tokens = j["usage"]["completion_tokens"];
      if (!j.contains("choices") || j["choices"].empty()) continue;
      const std::string text = j["choices"][0].value("text", "");
      if (text.empty()) continue;
      if (pieces++ == 0) {
        seen.first_ms = ms_since(begin);
      } else {
        seen.gaps_ms.push_back(ms_since(last));
      }
      last = Clock::now();
      seen.text += text;
    }
    return leave_after < 0 || pieces < leave_after;
  };
  (void)client.send(request);
  return seen;
}

Json completion(const Json& prompt, int64_t tokens) {
  return {{"prompt", prompt},     {"max_tokens", tokens}, {"temperature", 0},
          {"ignore_eos", true},   {"stream", true},       {"stream_options", {{"include_usage", true}}},
          {"cache_prompt", false}};
}

double percentile(std::vector<double>& values, double p) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(p / 100 * static_cast<double>(values.size())))];
}

void print_percentiles(const char* what, std::vector<double> values) {
  fmt::print("{:<28}{:>10.1f}{:>10.1f}{:>10.1f}{:>10}\n", what, percentile(values, 50), percentile(values, 95),
             percentile(values, 99), values.size());
}

// --- rate ---

// Prompts of `n_prompt` token ids that any vocabulary has, another for each text.
void rate(const Address& to, int clients, int64_t tokens, int64_t n_prompt, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    std::barrier together(clients + 1);
    std::vector<Seen> all(static_cast<size_t>(clients));
    std::vector<std::thread> threads;
    for (int i = 0; i < clients; ++i) {
      threads.emplace_back([&, i] {
        Json prompt = {1};
        for (int64_t t = 1; t < n_prompt; ++t) prompt.push_back(300 + (i * 31 + round * 7 + t * 13) % 500);
        const Json body = completion(prompt, tokens);
        together.arrive_and_wait();
        all[static_cast<size_t>(i)] = stream(to, body);
      });
    }
    together.arrive_and_wait();
    const auto begin = Clock::now();
    for (std::thread& t : threads) t.join();
    const double seconds = ms_since(begin) / 1e3;
    int64_t total = 0;
    std::vector<double> first;
    for (const Seen& s : all) {
      if (!s.whole) fail("a stream ended early, with status {}", s.status);
      total += s.n_tokens, first.push_back(s.first_ms);
    }
    fmt::print("{} texts of {} + {} tokens in {:.2f} s: {:.1f} tokens/s; first tokens after {:.0f} to {:.0f} ms\n", clients, n_prompt,
               tokens, seconds, static_cast<double>(total) / seconds, *std::min_element(first.begin(), first.end()),
               *std::max_element(first.begin(), first.end()));
  }
}

// --- soak ---

class Server {
 public:
  Server(std::string hearth, std::string model) {
    std::array<int, 2> err{};
    if (pipe(err.data()) != 0) fail("no pipe can be made");
    std::vector<std::string> words = {std::move(hearth), "serve",      "-m", std::move(model), "--chat-template", "chatml",
                                      "--port",          "0",          "-c", "512",            "--parallel",      "8"};
    std::vector<char*> arguments;
    for (std::string& w : words) arguments.push_back(w.data());
    arguments.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, err[1], 2);
    const int error = posix_spawn(&pid_, words[0].c_str(), &actions, nullptr, arguments.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    close(err[1]);
    if (error != 0) fail("'{}' cannot be started", words[0]);
    std::FILE* lines = fdopen(err[0], "r");
    std::array<char, 1000> line{};
    const std::string before = "listening on http://127.0.0.1:";
    while (std::fgets(line.data(), line.size(), lines) != nullptr) {
      const std::string text = line.data();
      if (const size_t at = text.find(before); at != std::string::npos) {
        port_ = std::stoi(text.substr(at + before.size()));
        break;
      }
    }
    if (port_ == 0) fail("the server did not come up");
    reader_ = std::thread([lines] {  // so that its log never blocks it
      std::array<char, 1000> rest{};
      while (std::fgets(rest.data(), rest.size(), lines) != nullptr) {
      }
      std::fclose(lines);
    });
  }
  ~Server() {
    kill(pid_, SIGTERM);
    waitpid(pid_, nullptr, 0);
    reader_.join();
  }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  Address address() const { return {"127.0.0.1", port_}; }
  double resident_mib() const {
    std::ifstream status(fmt::format("/proc/{}/status", pid_));
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("VmRSS:")) return std::stod(line.substr(6)) / 1024;
    }
    return 0;
  }
  Json stats() const {
    httplib::Client client("127.0.0.1", port_);
    client.set_read_timeout(60);
    const auto r = client.Get("/hearth/stats");
    return r ? Json::parse(r->body) : Json();
  }

 private:
  pid_t pid_ = 0;
  int port_ = 0;
  std::thread reader_;
};

std::string prompt_of(int number) {
  std::string text = fmt::format("Once upon a time, in the year {}, ", 1000 + number);
  for (int i = 0; i < number % 6 * 7; ++i) text += "there was a dog who went on and on, ";
  return text;
}

struct Tally {
  std::mutex mutex;
  std::map<std::string, std::string> texts;  // of each prompt, as it was seen first
  std::vector<double> first, gaps;
  int64_t done = 0, tokens = 0, busy = 0, lost = 0, different = 0;
  std::map<std::string, int64_t> hostile;
};

void ask_again_and_again(const Address& to, uint32_t seed, Clock::time_point end, Tally& tally) {
  std::mt19937 rng(seed);
  while (Clock::now() < end) {
    const std::string prompt = prompt_of(static_cast<int>(rng() % 24));
    const Seen seen = stream(to, completion(prompt, 32));
    if (seen.status == 503) std::this_thread::sleep_for(500ms);
    const std::lock_guard lock(tally.mutex);
    if (seen.status == 503) {
      ++tally.busy;
    } else if (!seen.whole || seen.n_tokens != 32) {
      ++tally.lost;
    } else {
      ++tally.done, tally.tokens += seen.n_tokens;
      if (tally.texts.try_emplace(prompt, seen.text).first->second != seen.text) ++tally.different;
      tally.first.push_back(seen.first_ms);
      tally.gaps.insert(tally.gaps.end(), seen.gaps_ms.begin(), seen.gaps_ms.end());
    }
  }
}

// Sends bytes and reads for a while, however little comes.
void send_raw(const Address& to, const std::string& bytes, std::chrono::seconds stay) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in where{};
  where.sin_family = AF_INET, where.sin_port = htons(static_cast<uint16_t>(to.port));
  inet_pton(AF_INET, to.host.c_str(), &where.sin_addr);
  if (connect(fd, reinterpret_cast<sockaddr*>(&where), sizeof where) == 0) {
    (void)send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    std::this_thread::sleep_for(stay);
  }
  close(fd);
}

void misbehave(const Address& to, uint32_t seed, Clock::time_point end, Tally& tally) {
  std::mt19937 rng(seed);
  while (Clock::now() < end) {
    std::string kind;
    const std::string body = completion(prompt_of(static_cast<int>(rng() % 24)), 200).dump();
    const std::string head = fmt::format("POST /v1/completions HTTP/1.1\r\nContent-Length: {}\r\n\r\n", body.size());
    switch (rng() % 5) {
      case 0:
        kind = "went away in the midst";
        (void)stream(to, Json::parse(body), 1 + static_cast<int>(rng() % 8));
        break;
      case 1: {
        kind = "sent rubbish";
        std::string rubbish(1 + rng() % 2000, '\0');
        for (char& c : rubbish) c = static_cast<char>(rng());
        send_raw(to, rubbish, 0s);
        break;
      }
      case 2: {
        kind = "sent a damaged body";
        std::string damaged = body;
        for (int i = 0; i < 3; ++i) damaged[rng() % damaged.size()] = static_cast<char>(rng());
        httplib::Client client(to.host, to.port);
        client.set_read_timeout(5);
        (void)client.Post("/v1/completions", damaged, "application/json");
        break;
      }
      case 3:
        kind = "stalled while sending";
        send_raw(to, (head + body).substr(0, head.size() + rng() % body.size()), std::chrono::seconds(5 + rng() % 20));
        break;
      default:
        kind = "never read its answer";
        send_raw(to, head + body, std::chrono::seconds(1 + rng() % 5));
        break;
    }
    {
      const std::lock_guard lock(tally.mutex);
      ++tally.hostile[kind];
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(200 + rng() % 300));
  }
}

// True when nothing was lost, no page is missing and memory stayed where it was.
bool soak(const std::string& hearth, const std::string& model, int clients, int seconds) {
  const Server server(hearth, model);
  Tally tally;
  const auto begin = Clock::now(), end = begin + std::chrono::seconds(seconds);
  std::vector<std::thread> threads;
  for (int i = 0; i < clients; ++i) {
    const auto run = i % 3 == 2 ? misbehave : ask_again_and_again;
    threads.emplace_back([&, run, i] { run(server.address(), static_cast<uint32_t>(i), end, tally); });
  }
  std::vector<double> resident;  // after the first minute, or tenth
  const auto settled = begin + std::min<Clock::duration>(60s, (end - begin) / 10);
  while (Clock::now() < end) {
    std::this_thread::sleep_for(std::min<Clock::duration>(5s, (end - begin) / 20));
    const double mib = server.resident_mib();
    if (Clock::now() > settled) resident.push_back(mib);
    std::fprintf(stderr, "%.0f s: %.1f MiB\n", ms_since(begin) / 1e3, mib);
  }
  for (std::thread& t : threads) t.join();
  const double took = ms_since(begin) / 1e3;
  Json stats = server.stats();
  for (int i = 0; i < 300 && (stats["running"] != 0 || stats["waiting"] != 0); ++i) {
    std::this_thread::sleep_for(100ms);
    stats = server.stats();
  }
  const int64_t leaked = stats["pages"].get<int64_t>() - stats["pages_free"].get<int64_t>() - stats["pages_kept"].get<int64_t>();
  const double least = *std::min_element(resident.begin(), resident.end()), most = *std::max_element(resident.begin(), resident.end());
  fmt::print("{} clients, {:.0f} s: {} texts whole, {} tokens ({:.1f} a second), {} answers 503\n", clients, took, tally.done,
             tally.tokens, static_cast<double>(tally.tokens) / took, tally.busy);
  for (const auto& [kind, n] : tally.hostile) fmt::print("  {} times a client {}\n", n, kind);
  fmt::print("lost: {}; other texts than before: {}; pages leaked: {} of {}; still running: {}\n", tally.lost, tally.different,
             leaked, stats["pages"].get<int64_t>(), stats["running"].get<int64_t>());
  fmt::print("resident memory after the first minute: {:.1f} to {:.1f} MiB, first {:.1f}, last {:.1f}\n", least, most,
             resident.front(), resident.back());
  // In the second half every page of the cache has been touched.
  const double grown = resident.back() - resident[resident.size() / 2];
  fmt::print("it grew by {:.1f} MiB in the second half\n", grown);
  fmt::print("{:<28}{:>10}{:>10}{:>10}{:>10}\n", "ms", "p50", "p95", "p99", "n");
  print_percentiles("to the first token", tally.first);
  print_percentiles("from token to token", tally.gaps);
  return tally.done > 0 && tally.lost == 0 && tally.different == 0 && leaked == 0 && stats["running"] == 0 && grown < 4;
}

Address parse_address(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) fail("'{}' is no address, expected HOST:PORT", text);
  return {text.substr(0, colon), std::stoi(text.substr(colon + 1))};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Loads a server and prints what its clients saw.");
  app.require_subcommand(1);
  std::string address, hearth_path, model;
  int clients = 8, rounds = 3, soakers = 64, seconds = 600;
  int64_t tokens = 64, n_prompt = 4;
  CLI::App* r = app.add_subcommand("rate", "Texts at once, all well-behaved");
  r->add_option("ADDRESS", address, "HOST:PORT")->required();
  r->add_option("--clients", clients)->check(CLI::Range(1, 1000));
  r->add_option("--tokens", tokens)->check(CLI::Range(1, 100000));
  r->add_option("--prompt", n_prompt, "Tokens of a prompt")->check(CLI::Range(1, 100000));
  r->add_option("--rounds", rounds)->check(CLI::Range(1, 1000));
  CLI::App* s = app.add_subcommand("soak", "A third of the clients misbehave");
  s->add_option("HEARTH", hearth_path, "The program")->required()->check(CLI::ExistingFile);
  s->add_option("MODEL", model)->required()->check(CLI::ExistingFile);
  s->add_option("--clients", soakers)->check(CLI::Range(3, 1000));
  s->add_option("--seconds", seconds)->check(CLI::Range(5, 100000));
  CLI11_PARSE(app, argc, argv);
  try {
    if (r->parsed()) return rate(parse_address(address), clients, tokens, n_prompt, rounds), 0;
    return soak(hearth_path, model, soakers, seconds) ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
