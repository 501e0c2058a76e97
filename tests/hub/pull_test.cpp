// Downloads from a hub that behaves well, and from one that does not: what is under its final name is always right.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <fstream>

#include "expect_error.h"
#include "support/fake_hub.h"

namespace hearth::test {
namespace {

namespace fs = std::filesystem;

std::string slurp(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void write(const fs::path& path, const std::string& bytes) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << bytes;
}
// Files and links below a folder.
std::vector<std::string> tree(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& e : fs::recursive_directory_iterator(folder)) {
    if (!e.is_directory()) names.push_back(fs::relative(e.path().parent_path(), folder) / e.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

using Pull = HubTest;

TEST_F(Pull, LeavesTheLayoutOfTheHub) {
  const hub::Pulled p = pull();
  EXPECT_EQ(p.path, folder() / "snapshots" / kCommit / "model-Q4_K_M.gguf");
  EXPECT_EQ(p.new_bytes, bytes_.size());
  EXPECT_TRUE(slurp(p.path) == bytes_);
  EXPECT_EQ(fs::read_symlink(p.path), fs::path("../../blobs") / sha256(bytes_));
  EXPECT_EQ(slurp(folder() / "refs" / "main"), kCommit);
  const std::string repo = "models--owner--model-GGUF/";
  EXPECT_EQ(tree(settings_.cache),
            (std::vector<std::string>{".locks/" + repo + sha256(bytes_) + ".lock", repo + "blobs/" + sha256(bytes_),
                                      repo + "refs/main", repo + "snapshots/" + kCommit + "/model-Q4_K_M.gguf"}));
}

TEST_F(Pull, ASecondOneBringsNothing) {
  pull();
  const hub::Pulled again = pull();
  EXPECT_EQ(again.new_bytes, 0u);
  EXPECT_EQ(hub_.n_downloads, 1);
}

TEST_F(Pull, ANewCommitWithTheSameBytesIsLinked) {
  pull();
  hub_.commit = std::string(40, 'c');
  const hub::Pulled p = pull();
  EXPECT_EQ(hub_.n_downloads, 1);
  EXPECT_TRUE(slurp(p.path) == bytes_);
  EXPECT_EQ(slurp(folder() / "refs" / "main"), hub_.commit);
  EXPECT_TRUE(fs::exists(folder() / "snapshots" / kCommit / "model-Q4_K_M.gguf"));
}

TEST_F(Pull, BringsAllPartsAndFolders) {
  const std::string one = random_bytes(5000, 2), two = random_bytes(7000, 3);
  hub_.add("Q8_0/m x-Q8_0-00001-of-00002.gguf", one);
  hub_.add("Q8_0/m x-Q8_0-00002-of-00002.gguf", two);
  hub_.add("mmproj-Q8_0.gguf", "not asked for");
  const hub::Pulled p = pull(kRepository + ":q8_0");
  EXPECT_EQ(p.path.filename(), "m x-Q8_0-00001-of-00002.gguf");
  EXPECT_TRUE(slurp(p.path) == one);
  EXPECT_TRUE(slurp(p.path.parent_path() / "m x-Q8_0-00002-of-00002.gguf") == two);
  EXPECT_EQ(fs::read_symlink(p.path), fs::path("../../../blobs") / sha256(one));
  EXPECT_EQ(hub_.n_downloads, 2);
}

TEST_F(Pull, FollowsARenamedRepository) {
  settings_.token = "hf_secret";
  const hub::Pulled p = pull("old/name");
  EXPECT_TRUE(slurp(p.path) == bytes_);
  EXPECT_EQ(p.path, settings_.cache / "models--old--name" / "snapshots" / kCommit / "model-Q4_K_M.gguf");
  EXPECT_NE(hub_.hub_log().front().find("auth=Bearer hf_secret"), std::string::npos) << "the same host";
}

TEST_F(Pull, AFileOfGitItselfIsCheckedToo) {
  hub_.files["small.gguf"] = {"GGUF and so on", git_sha1("GGUF and so on"), 14, false};
  EXPECT_EQ(slurp(pull(kRepository + ":small.gguf").path), "GGUF and so on");
  EXPECT_TRUE(fs::exists(blob(git_sha1("GGUF and so on"))));
  hub_.files["wrong.gguf"] = {"GGUF and so off", git_sha1("GGUF and so onn"), 15, false};
  expect_error([&] { pull(kRepository + ":wrong.gguf"); }, {"checksum"});
}

TEST_F(Pull, GoesOnAfterACut) {
  hub_.cut_after = 100'000;
  const hub::Pulled p = pull();
  EXPECT_TRUE(slurp(p.path) == bytes_);
  ASSERT_EQ(hub_.cdn_log().size(), 2u);
  EXPECT_NE(hub_.cdn_log()[1].find("range=bytes="), std::string::npos) << hub_.cdn_log()[1];
  EXPECT_EQ(notices_.size(), 1u);
}

TEST_F(Pull, GoesOnAfterAStall) {
  hub_.stall_after = 100'000;
  const hub::Pulled p = pull();
  EXPECT_TRUE(slurp(p.path) == bytes_);
  ASSERT_EQ(hub_.cdn_log().size(), 2u);
  EXPECT_NE(hub_.cdn_log()[1].find("range=bytes="), std::string::npos) << hub_.cdn_log()[1];
  ASSERT_EQ(notices_.size(), 1u);
  EXPECT_NE(notices_[0].find("stalls"), std::string::npos) << notices_[0];
}

TEST_F(Pull, ManyCutsAreNoFailureWhileBytesCome) {
  hub_.cut_always = true;
  hub_.cut_after = 20'000;
  EXPECT_TRUE(slurp(pull().path) == bytes_);
  EXPECT_GT(hub_.n_downloads, 5);
}

TEST_F(Pull, GivesUpWhenNothingComes) {
  hub_.cut_always = true;
  hub_.cut_after = 0;
  expect_error([&] { pull(); }, {"broke off"});
  EXPECT_EQ(hub_.n_downloads, settings_.attempts);
  EXPECT_FALSE(fs::exists(blob(sha256(bytes_))));
}

TEST_F(Pull, GoesOnFromAnOlderPull) {
  write(incomplete(), bytes_.substr(0, 123'456));
  const hub::Pulled p = pull();
  EXPECT_TRUE(slurp(p.path) == bytes_);
  EXPECT_EQ(p.new_bytes, bytes_.size() - 123'456);
  EXPECT_EQ(began_with_, std::vector<uint64_t>{123'456});
  ASSERT_EQ(hub_.cdn_log().size(), 1u);
  EXPECT_NE(hub_.cdn_log()[0].find("range=bytes=123456-"), std::string::npos);
}

TEST_F(Pull, ACompleteIncompleteFileIsCheckedAndKept) {
  write(incomplete(), bytes_);
  EXPECT_TRUE(slurp(pull().path) == bytes_);
  EXPECT_EQ(hub_.n_downloads, 0);
}

TEST_F(Pull, AnOlderPullWithWrongBytesIsForgotten) {
  write(incomplete(), std::string(100'000, 'x'));
  EXPECT_TRUE(slurp(pull().path) == bytes_);
  EXPECT_EQ(began_with_, (std::vector<uint64_t>{100'000, 0}));
  EXPECT_FALSE(fs::exists(incomplete()));
}

TEST_F(Pull, AnIncompleteFileThatIsTooLongIsForgotten) {
  write(incomplete(), bytes_ + "more");
  EXPECT_TRUE(slurp(pull().path) == bytes_);
  EXPECT_EQ(began_with_, std::vector<uint64_t>{0});
}

TEST_F(Pull, AServerWithoutRangesStartsAnew) {
  hub_.ignore_ranges = true;
  hub_.cut_after = 200'000;
  EXPECT_TRUE(slurp(pull().path) == bytes_);
  EXPECT_EQ(hub_.n_downloads, 2);
}

TEST_F(Pull, AWrongRangeIsRefused) {
  write(incomplete(), bytes_.substr(0, 1000));
  hub_.content_range = "bytes 0-299999/300000";
  expect_error([&] { pull(); }, {"goes on with 'bytes 0-"});
  EXPECT_FALSE(fs::exists(blob(sha256(bytes_))));
}

TEST_F(Pull, AWrongChecksumIsRefusedAndNothingKept) {
  hub_.files["model-Q4_K_M.gguf"].bytes[1000] ^= 1;
  expect_error([&] { pull(); }, {"model-Q4_K_M.gguf", "checksum", sha256(bytes_), "nothing was kept"});
  EXPECT_TRUE(fs::is_empty(folder() / "blobs"));
  EXPECT_TRUE(fs::is_empty(folder() / "snapshots"));
}

TEST_F(Pull, ALieAboutTheSizeIsRefused) {
  FakeFile& file = hub_.files["model-Q4_K_M.gguf"];
  file.bytes = bytes_ + "x";  // one byte more than listed
  expect_error([&] { pull(); }, {"300001 bytes", "lists 300000"});
  file.bytes = bytes_.substr(1);
  expect_error([&] { pull(); }, {"299999 bytes", "lists 300000"});
  file.bytes = bytes_, hub_.linked_size = "12";
  expect_error([&] { pull(); }, {"contradicts itself", "12"});
  hub_.linked_size = "", hub_.linked_etag = sha256("another");
  expect_error([&] { pull(); }, {"contradicts itself", sha256("another")});
  EXPECT_FALSE(fs::exists(blob(sha256(bytes_))));
}

TEST_F(Pull, AShorterFileThanListedNeverGetsItsName) {
  write(incomplete(), bytes_.substr(0, 1000));
  hub_.files["model-Q4_K_M.gguf"].bytes =
      bytes_.substr(0, 1000);  // the range is beyond it: 416, then a 200 that is short
  expect_error([&] { pull(); }, {"1000 bytes"});
  EXPECT_FALSE(fs::exists(blob(sha256(bytes_))));
}

TEST_F(Pull, RefusalsThatPassAreWaitedFor) {
  for (const int status : {500, 503, 429}) {
    hub_.refusal = status, hub_.refusals = 2;
    if (status == 429) hub_.retry_after.assign(1, '0');
    pull();
  }
  EXPECT_EQ(notices_.size(), 6u);
  hub_.refusals = 100;
  expect_error([&] { pull(); }, {"answers 429", "'owner/model-GGUF'"});
  hub_.refusals = 1, hub_.retry_after = "86400";
  expect_error([&] { pull(); }, {"come back in 86400 s"});
  hub_.refusals = 1, hub_.retry_after = "Fri, 01 Jan 2100 00:00:00 GMT";
  expect_error([&] { pull(); }, {"come back in"});
}

TEST_F(Pull, RefusalsThatStaySayWhatToDo) {
  const auto refused = [&](int status, const char* code) {
    hub_.refusal = status, hub_.refusals = 1, hub_.error_code = code;
    const std::string said = error_of_pull();
    EXPECT_EQ(hub_.refusals, 0);
    return said;
  };
  EXPECT_NE(refused(401, "").find("set HF_TOKEN"), std::string::npos);
  EXPECT_NE(refused(404, "RepoNotFound").find("has no 'owner/model-GGUF'"), std::string::npos);
  const std::string gated = refused(403, "GatedRepo");
  EXPECT_NE(gated.find("accept its licence at " + hub_.endpoint() + "/owner/model-GGUF"), std::string::npos) << gated;
  EXPECT_NE(gated.find("set HF_TOKEN"), std::string::npos) << gated;
  settings_.token = "hf_wrong";
  EXPECT_NE(refused(401, "").find("HF_TOKEN is valid"), std::string::npos);
  EXPECT_NE(refused(403, "GatedRepo").find("of the account that did"), std::string::npos);
  EXPECT_TRUE(notices_.empty()) << "none of these is worth another try";
}

TEST_F(Pull, TheTokenGoesToTheHubAlone) {
  settings_.token = "hf_secret";
  pull();
  ASSERT_GE(hub_.hub_log().size(), 3u);
  for (const std::string& line : hub_.hub_log())
    EXPECT_NE(line.find("auth=Bearer hf_secret"), std::string::npos) << line;
  ASSERT_EQ(hub_.cdn_log().size(), 1u);
  EXPECT_EQ(hub_.cdn_log()[0].find("hf_secret"), std::string::npos) << hub_.cdn_log()[0];
}

TEST_F(Pull, OnlyHttpIsFollowed) {
  for (const char* target : {"file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://127.0.0.1/"}) {
    hub_.redirect_to = target;
    expect_error([&] { pull(); }, {"an http or https address was expected"});
  }
  hub_.redirect_to = hub_.endpoint() + "/owner/model-GGUF/resolve/" + kCommit + "/model-Q4_K_M.gguf";  // itself
  expect_error([&] { pull(); }, {"more than 10 redirects"});
}

TEST_F(Pull, HostileNamesStayInTheCache) {
  const std::string etag = sha256(bytes_);
  nlohmann::json j = {{"sha", kCommit}, {"siblings", nlohmann::json::array()}};
  for (const char* name :
       {"../../../../evil.gguf", "/tmp/evil.gguf", "a/../../evil.gguf", "evil\x1b[2J.gguf", "", "a//evil.gguf"})
    j["siblings"].push_back({{"rfilename", name}, {"lfs", {{"sha256", etag}, {"size", 300000}}}});
  hub_.raw_listing = j.dump();
  expect_error([&] { pull(); }, {"no GGUF model"});
  j["siblings"] = {{{"rfilename", "model-Q4_K_M.gguf"}, {"lfs", {{"sha256", "../../../evil"}, {"size", 300000}}}}};
  hub_.raw_listing = j.dump();
  expect_error([&] { pull(); }, {"no GGUF model"});
  j["sha"] = "../../evil";
  hub_.raw_listing = j.dump();
  expect_error([&] { pull(); }, {"40 hexadecimal digits"});
  for (const char* text :
       {"", "[]", "{}", "<html>", "{\"sha\":1,\"siblings\":{}}", "{\"sha\":\"\",\"siblings\":[{}]}"}) {
    hub_.raw_listing = *text == '\0' ? " " : text;
    expect_error([&] { pull(); }, {"cannot be read"});
  }
  hub_.raw_listing.clear();
  hub_.files["model-Q4_K_M.gguf"].lfs = false;
  hub_.files["model-Q4_K_M.gguf"].etag = "../../evil";
  expect_error([&] { pull(); }, {});
  EXPECT_FALSE(fs::exists(settings_.cache)) << "nothing was worth a folder";
}

TEST_F(Pull, ADiskThatIsTooSmallIsToldBefore) {
  hub_.files["model-Q4_K_M.gguf"].listed_size = uint64_t{1} << 60;
  expect_error([&] { pull(); }, {"needs 1048576.00 TiB", "free"});
  EXPECT_EQ(hub_.n_downloads, 0);
}

TEST_F(Pull, NoNetworkIsOneLine) {
  settings_.endpoint = "http://127.0.0.1:1";
  expect_error([&] { pull(); }, {"no connection to http://127.0.0.1:1"});
  settings_.endpoint = "http://no-such-host.invalid";
  expect_error([&] { pull(); }, {"no connection to http://no-such-host.invalid"});
  EXPECT_TRUE(notices_.empty()) << "it has never answered: no use to wait";
}

TEST_F(Pull, AFaultOfTlsIsOneLine) {
  settings_.endpoint = "https" + hub_.endpoint().substr(4);  // it speaks plain HTTP
  expect_error([&] { pull(); }, {"no trusted connection to https://127.0.0.1", "ca-certificates"});
}

TEST_F(Pull, TlsTakesTrustedCertificatesAloneAndIsNotLeft) {
  const Certificate certificate;
  FakeHub secure(&certificate);
  secure.add("model-Q4_K_M.gguf", bytes_);
  settings_.endpoint = secure.endpoint();
  expect_error([&] { pull(); }, {"no trusted connection to " + secure.endpoint(), "certificate"});
  settings_.certificates = dir_ / "trusted.pem";
  expect_error([&] { pull(); }, {"no trusted connection"});  // there is no such file
  certificate.save(settings_.certificates);
  secure.redirect_to = hub_.cdn() + "/cdn/model-Q4_K_M.gguf";
  expect_error([&] { pull(); }, {"is not encrypted"});
  EXPECT_EQ(hub_.n_downloads, 0);
  secure.redirect_to = "";
  EXPECT_TRUE(slurp(pull().path) == bytes_);
}

TEST_F(Pull, TwoAtOnceBringItOnce) {
  hub::Settings second = settings_;
  std::vector<std::string> second_notices;
  second.notice = [&](const std::string& text) { second_notices.push_back(text); };
  std::atomic<bool> begun{false}, go{false};
  hub_.on_body = [&] {
    begun = true;
    while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  std::thread one([&] { pull(); });
  while (!begun) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  second.notice = [&](const std::string& text) {
    second_notices.push_back(text);
    go = true;  // it waits for the first one
  };
  const hub::Pulled p = hub::pull({kRepository, ""}, second, {[](auto&&...) {}, [](uint64_t) {}, [] {}});
  one.join();
  EXPECT_TRUE(slurp(p.path) == bytes_);
  EXPECT_EQ(hub_.n_downloads, 1);
  ASSERT_EQ(second_notices.size(), 1u);
  EXPECT_NE(second_notices[0].find("another process"), std::string::npos);
}

TEST_F(Pull, InterruptedItLeavesWhatTheNextOneGoesOnWith) {
  hub_.stall_after = 150'000;
  settings_.stall_time = std::chrono::seconds(60);
  settings_.cancelled = [&] { return fs::exists(incomplete()) && fs::file_size(incomplete()) > 100'000; };
  EXPECT_THROW(pull(), hub::Cancelled);
  EXPECT_FALSE(fs::exists(blob(sha256(bytes_))));
  settings_.cancelled = [] { return false; };
  EXPECT_TRUE(slurp(pull().path) == bytes_);
  EXPECT_GT(began_with_.back(), 100'000u);
}

TEST_F(Pull, AFullDiskIsOneLine) {
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);  // a write beyond the limit fails, as on a full disk
    const rlimit limit{100'000, 100'000};
    setrlimit(RLIMIT_FSIZE, &limit);
    const std::string said = error_of_pull();
    _exit(said.find("cannot write '") == 0 && said.find(".incomplete'") != std::string::npos ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(fs::exists(blob(sha256(bytes_))));
  EXPECT_TRUE(slurp(pull().path) == bytes_) << "with room again it goes on";
  EXPECT_EQ(began_with_.back(), 100'000u);
}

TEST_F(Pull, KilledAtAnyMomentTheNextOneIsRight) {
  const std::string large = random_bytes(8 << 20, 9);
  hub_.add("model-Q4_K_M.gguf", large);
  for (const int ms : {1, 3, 6, 10, 15, 20, 30, 50}) {
    const pid_t child = fork();
    if (child == 0) {
      error_of_pull();
      _exit(0);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    if (fs::exists(blob(sha256(large)))) {
      EXPECT_EQ(sha256(slurp(blob(sha256(large)))), sha256(large)) << "killed after " << ms << " ms";
    }
  }
  EXPECT_TRUE(slurp(pull().path) == large);
  EXPECT_FALSE(fs::exists(blob(sha256(large) + ".incomplete")));
}

}  // namespace
}  // namespace hearth::test
