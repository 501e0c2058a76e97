// `hearth serve`, `chat`, `tokenize` and `detokenize` as programs.
#include <httplib.h>

#include <nlohmann/json.hpp>

#include "program.h"

namespace hearth::test {
namespace {

using nlohmann::json;

std::string demo() {
  return (source_dir() / "models" / "hearth-demo.gguf").string();
}

// What the program wrote on stderr, which begins with where it listens.
int port_of(const std::string& log) {
  const std::string mark = "listening on http://127.0.0.1:";
  const size_t at = log.find(mark);
  return at == std::string::npos ? 0 : std::stoi(log.substr(at + mark.size()));
}

int wait_for_port(const Program& program) {
  for (int i = 0; i < 6000; ++i) {
    if (const int port = port_of(program.err())) return port;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return 0;
}

TEST(Serve, FinishesWhatRunsWhenItIsAskedToEnd) {
  Program program({"serve", "-m", demo(), "--device", "cpu", "--port", "0", "--parallel", "2", "--mmap"});
  const int port = wait_for_port(program);
  ASSERT_GT(port, 0) << program.err();
  std::string text;
  std::thread client([&] {
    httplib::Client c("127.0.0.1", port);
    c.set_read_timeout(60);
    const auto r = c.Post("/v1/completions", R"({"prompt": "Once upon", "max_tokens": 300, "ignore_eos": true})",
                          "application/json");
    if (r && r->status == 200) text = json::parse(r->body)["choices"][0]["text"];
  });
  httplib::Client watcher("127.0.0.1", port);
  for (int i = 0; i < 6000; ++i) {
    const auto r = watcher.Get("/hearth/stats");
    if (r && json::parse(r->body)["running"] == 1) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  program.signal(SIGTERM);
  client.join();
  const Outcome o = program.wait();
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_GT(text.size(), 300u) << "the text that ran was finished";
  EXPECT_NE(o.err.find("no chat template"), std::string::npos) << o.err;
  EXPECT_EQ(o.err.find("Once upon"), std::string::npos) << "prompts are not logged";
}

TEST(Serve, RefusesInOneLine) {
  EXPECT_TRUE(
      fails_with(hearth({"serve", "-m", demo(), "--device", "cpu", "-q", "--port", "0", "--chat-template", "nonsense"}),
                 "is no chat template"));
  EXPECT_TRUE(fails_with(
      hearth({"serve", "-m", demo(), "--device", "cpu", "-q", "--host", "no.such.host.invalid", "--port", "81"}),
      "cannot be listened on"));
  TempDir dir;
  std::ofstream(dir / "keys") << "# none\n";
  EXPECT_TRUE(fails_with(hearth({"serve", "-m", demo(), "--api-key-file", (dir / "keys").string()}), "has no API key"));
}

TEST(Chat, TalksWithoutATerminal) {
  const std::vector<std::string> args = {"chat",   "-m", demo(), "--device", "cpu", "--chat-template",
                                         "chatml", "-n", "12",   "--temp",   "0"};
  const Outcome o = hearth(args, "Tell a story\n/stats\n/retry\n");
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_NE(o.out.find("context: "), std::string::npos) << o.out;
  EXPECT_NE(o.err.find("tokens/s, density "), std::string::npos) << o.err;
  const std::string answer = o.out.substr(0, o.out.find("context: "));
  EXPECT_NE(o.out.find(answer, o.out.rfind("density: ")), std::string::npos) << "greedy: the same again\n" << o.out;

  TempDir dir;
  const std::string file = (dir / "talk.json").string();
  const Outcome saved = hearth(args, "/system Be brief.\nTell a \\\nstory\n/save " + file + "\n");
  EXPECT_EQ(saved.status, 0) << saved.err;
  const json talk = json::parse(slurp(file));
  ASSERT_EQ(talk["messages"].size(), 3u);
  EXPECT_EQ(talk["messages"][1]["content"], "Tell a \nstory");
  const Outcome loaded = hearth(args, "/load " + file + "\n/retry\n");
  EXPECT_EQ(loaded.out, saved.out);
  EXPECT_TRUE(fails_with(hearth({"chat", "-m", demo(), "-q", "--device", "cpu"}), "no chat template"));
  const Outcome wrong = hearth(args, "/nothing\n");
  EXPECT_EQ(wrong.status, 1);
  EXPECT_NE(wrong.err.find("there is no command /nothing"), std::string::npos) << wrong.err;
}

TEST(Tokenize, ThereAndBack) {
  const Outcome ids = hearth({"tokenize", "-m", demo(), "-p", "Once upon a time", "--ids"});
  EXPECT_EQ(ids.status, 0) << ids.err;
  EXPECT_EQ(hearth({"detokenize", "-m", demo()}, ids.out).out, "Once upon a time\n");
  const json pieces = json::parse(hearth({"tokenize", "-m", demo(), "-p", "Once upon", "--json"}).out);
  EXPECT_EQ(pieces[1]["piece"], " upon");
  EXPECT_NE(hearth({"tokenize", "-m", demo(), "-p", "Once"}).out.find("\"Once\""), std::string::npos);
  EXPECT_TRUE(fails_with(hearth({"detokenize", "-m", demo(), "x"}), "is no token id"));
  EXPECT_TRUE(fails_with(hearth({"detokenize", "-m", demo(), "99999999"}), "out of range"));
}

TEST(Hearth, AlonePrintsItsHelp) {
  const Outcome o = hearth({});
  EXPECT_EQ(o.status, 0);
  EXPECT_NE(o.out.find("Subcommands:"), std::string::npos);
}

}  // namespace
}  // namespace hearth::test
