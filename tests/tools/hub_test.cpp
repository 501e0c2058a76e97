// hearth pull, list, rm and -hf, with a hub on this machine.
#include <cstdlib>

#include "tools/cli.h"

#include "program.h"
#include "support/fake_hub.h"

namespace hearth::test {
namespace {

namespace fs = std::filesystem;

class HubProgram : public ::testing::Test {
 protected:
  void SetUp() override {
    setenv("HF_HOME", dir_.path().c_str(), 1);
    setenv("HF_ENDPOINT", hub_.endpoint().c_str(), 1);
    hub_.add("demo-Q4_0.gguf", slurp(source_dir() / "models" / "hearth-demo.gguf"));
  }
  void TearDown() override {
    for (const char* name : {"HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE"}) unsetenv(name);
  }
  fs::path folder() const { return dir_ / "hub" / "models--owner--model-GGUF"; }

  TempDir dir_;
  FakeHub hub_;
};

TEST_F(HubProgram, PullsListsAndRemoves) {
  const Outcome pulled = hearth({"pull", kRepository});
  ASSERT_EQ(pulled.status, 0) << pulled.err;
  const std::string path = (folder() / "snapshots" / kCommit / "demo-Q4_0.gguf").string();
  EXPECT_EQ(pulled.out, path + "\n");
  EXPECT_NE(pulled.err.find("downloading demo-Q4_0.gguf"), std::string::npos) << pulled.err;
  EXPECT_EQ(pulled.err.find('\r'), std::string::npos) << "progress is for terminals";
  EXPECT_EQ(hearth({"pull", "-q", kRepository}).err, "");

  const Outcome table = hearth({"list"});
  for (const char* word : {"repository", "owner/model-GGUF", "demo-Q4_0.gguf", "Q4_0", "MiB"})
    EXPECT_NE(table.out.find(word), std::string::npos) << table.out;
  const auto json = nlohmann::json::parse(hearth({"list", "--json"}).out);
  ASSERT_EQ(json["models"].size(), 1u);
  EXPECT_EQ(json["models"][0]["path"], path);
  EXPECT_EQ(json["models"][0]["size"], fs::file_size(path));
  EXPECT_EQ(json["models"][0]["commit"], kCommit);

  EXPECT_EQ(hearth({"rm", kRepository}).status, 1) << "no terminal to ask";
  EXPECT_TRUE(fs::exists(path));
  EXPECT_EQ(hearth({"rm", kRepository + ":q4_0", "--yes"}).status, 0);
  EXPECT_FALSE(fs::exists(folder()));
  EXPECT_NE(hearth({"list"}).err.find("no model is in the cache"), std::string::npos);
  EXPECT_TRUE(fails_with(hearth({"rm", "--yes", kRepository}), "is not in the cache"));
}

TEST_F(HubProgram, AModelRunsByItsName) {
  const std::string demo = (source_dir() / "models" / "hearth-demo.gguf").string();
  const std::vector<std::string> rest = {"-p", "Once upon a time", "-n", "8", "--temp", "0", "--device", "cpu", "-q"};
  const auto run = [&](const std::string& flag, const std::string& model) {
    std::vector<std::string> args = {"run", flag, model};
    args.insert(args.end(), rest.begin(), rest.end());
    return hearth(args);
  };
  const Outcome by_file = run("-m", demo), by_name = run("-hf", kRepository + ":Q4_0");
  ASSERT_EQ(by_name.status, 0) << by_name.err;
  EXPECT_EQ(by_name.out, by_file.out);
  EXPECT_EQ(by_name.err, "") << "-q holds for the download, too";
  const size_t asked = hub_.hub_log().size();
  setenv("HF_HUB_OFFLINE", "1", 1);
  EXPECT_EQ(run("--hf-repo", kRepository).out, by_file.out);
  EXPECT_EQ(hub_.hub_log().size(), asked);
  unsetenv("HF_HUB_OFFLINE");
  setenv("HF_ENDPOINT", "http://127.0.0.1:1", 1);
  const Outcome alone = run("-hf", kRepository);
  EXPECT_EQ(alone.out, by_file.out);
  EXPECT_NE(alone.err.find("warning: no connection"), std::string::npos) << alone.err;
}

TEST_F(HubProgram, ErrorsAreOneLine) {
  EXPECT_TRUE(fails_with(hearth({"pull", "nonsense"}), "OWNER/NAME"));
  EXPECT_TRUE(fails_with(hearth({"pull", kRepository + ":Q9_X"}), "demo-Q4_0.gguf ("));
  EXPECT_TRUE(fails_with(hearth({"pull", "no/thing"}), "has no 'no/thing'"));
  EXPECT_TRUE(fails_with(hearth({"run", "-p", "x"}), "--model is required"));
  EXPECT_TRUE(fails_with(hearth({"run", "-hf", kRepository, "-m", "x", "-p", "x"}), "excludes"));
  EXPECT_TRUE(fails_with(hearth({"run", "-hf", kRepository, "-hf", kRepository, "-p", "x"}), "one model"));
  EXPECT_TRUE(fails_with(hearth({"plan", "-hf", kRepository, "--no-such-flag"}), "--no-such-flag"));
  EXPECT_EQ(hub_.n_downloads, 0) << "a wrong command downloads nothing";
  setenv("HF_HUB_OFFLINE", "1", 1);
  EXPECT_TRUE(fails_with(hearth({"predictor", "eval", "-hf", kRepository, "-f", "x"}), "not complete in the cache"));
  EXPECT_TRUE(fails_with(hearth({"bench", "-hf", kRepository}), "not complete in the cache"));
}

TEST_F(HubProgram, CtrlCKeepsWhatCame) {
  hub_.stall_after = 1 << 20;
  Program program({"pull", kRepository});
  const fs::path incomplete = folder() / "blobs" / (hub_.files.at("demo-Q4_0.gguf").etag + ".incomplete");
  std::error_code absent;
  for (int i = 0; i < 6000 && !(fs::file_size(incomplete, absent) >= (1 << 19) && !absent); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  program.signal(SIGINT);
  const Outcome o = program.wait();
  EXPECT_EQ(o.status, 130);
  EXPECT_NE(o.err.find("interrupted"), std::string::npos) << o.err;
  EXPECT_TRUE(fs::exists(incomplete));
  EXPECT_NE(hearth({"list"}).err.find("unfinished"), std::string::npos);
  const Outcome again = hearth({"pull", kRepository});
  EXPECT_EQ(again.status, 0) << again.err;
  EXPECT_NE(again.err.find("are there"), std::string::npos) << again.err;
}

TEST(HubFlags, EverySubcommandThatTakesAModelTakesItsName) {
  const auto app = tools::make_app();
  int n = 0;
  const std::function<void(const CLI::App&)> check = [&](const CLI::App& sub) {
    if (sub.get_option_no_throw("--model") != nullptr) {
      EXPECT_NE(sub.get_option_no_throw("--hf-repo"), nullptr) << sub.get_name();
      ++n;
    }
    for (const CLI::App* below : sub.get_subcommands([](const CLI::App*) { return true; })) check(*below);
  };
  check(*app);
  EXPECT_GE(n, 15);
}

}  // namespace
}  // namespace hearth::test
