// The cache folder: what is found in it without a network, listed, removed.
#include "hub/cache.h"

#include <sys/stat.h>

#include <cstdlib>
#include <fstream>

#include "expect_error.h"
#include "support/fake_hub.h"

namespace hearth::test {
namespace {

namespace fs = std::filesystem;

class HubCache : public HubTest {
 protected:
  hub::Pulled resolve(const std::string& name = kRepository) {
    return hub::resolve(hub::parse_model_name(name), settings_, {[](auto&&...) {}, [](uint64_t) {}, [] {}});
  }
  hub::Cache cache() const { return hub::Cache(settings_.cache); }
  void remove(const std::string& name) { cache().remove(cache().plan_removal(hub::parse_model_name(name))); }
};

TEST_F(HubCache, OfflineTakesWhatIsThere) {
  settings_.offline = true;
  expect_error([&] { resolve(); }, {"not complete in the cache", "`hearth pull`"});
  expect_error([&] { pull(); }, {"HF_HUB_OFFLINE"});
  settings_.offline = false;
  const fs::path path = pull().path;
  const size_t asked = hub_.hub_log().size();
  settings_.offline = true;
  EXPECT_EQ(resolve().path, path);
  EXPECT_EQ(resolve(kRepository + ":q4_k_m").path, path);
  expect_error([&] { resolve(kRepository + ":Q8_0"); }, {"owner/model-GGUF:Q8_0", "not complete"});
  EXPECT_EQ(hub_.hub_log().size(), asked) << "nobody was asked";
}

TEST_F(HubCache, WithoutAHubTakesWhatIsThere) {
  const std::string good = settings_.endpoint;
  settings_.endpoint = "http://127.0.0.1:1";
  expect_error([&] { resolve(); }, {"no connection"});
  settings_.endpoint = good;
  const fs::path path = pull().path;
  settings_.endpoint = "http://127.0.0.1:1";
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(resolve().path, path);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("warning: no connection"), std::string::npos) << said;
  EXPECT_NE(said.find("using what is in the cache"), std::string::npos) << said;
  settings_.endpoint = good;
  for (const int status : {503, 404, 401}) {  // it is asked once
    hub_.refusal = status, hub_.refusals = 1;
    EXPECT_EQ(resolve().path, path) << status;
    EXPECT_EQ(hub_.refusals, 0);
  }
}

TEST_F(HubCache, ANewVersionIsBroughtAndTheOldOneStays) {
  const fs::path old = pull().path;
  const std::string changed = random_bytes(1000, 5);
  hub_.add("model-Q4_K_M.gguf", changed);
  hub_.commit = std::string(40, 'd');
  const fs::path now = resolve().path;
  EXPECT_NE(now, old);
  const hub::Contents c = cache().contents();
  ASSERT_EQ(c.models.size(), 2u);
  EXPECT_TRUE(c.models[0].current);
  EXPECT_EQ(c.models[0].path, now);
  EXPECT_EQ(c.models[0].model.size(), 1000u);
  EXPECT_FALSE(c.models[1].current);
  EXPECT_EQ(c.models[1].path, old);
  settings_.offline = true;
  EXPECT_EQ(resolve().path, now) << "the current one";
}

TEST_F(HubCache, AnIncompleteSplitFileIsNotTaken) {
  hub_.add("m-Q8_0-00001-of-00002.gguf", "one");
  hub_.add("m-Q8_0-00002-of-00002.gguf", "two");
  const fs::path path = pull(kRepository + ":Q8_0").path;
  fs::remove(path.parent_path() / "m-Q8_0-00002-of-00002.gguf");
  settings_.offline = true;
  expect_error([&] { resolve(kRepository + ":Q8_0"); }, {"not complete"});
  const hub::Contents c = cache().contents();
  ASSERT_EQ(c.models.size(), 1u);
  EXPECT_EQ(c.models[0].model.missing, 2u);
  settings_.offline = false;
  EXPECT_EQ(resolve(kRepository + ":Q8_0").path, path);
  EXPECT_EQ(cache().contents().models[0].model.missing, 0u);
}

TEST_F(HubCache, ListsWhatIsThere) {
  EXPECT_TRUE(cache().contents().models.empty());
  pull();
  hub_.add("model-Q8_0.gguf", "eight");
  pull(kRepository + ":Q8_0");
  std::ofstream(folder() / "snapshots" / kCommit / "config.json") << "{}";
  std::ofstream(blob("abc.incomplete")) << "half";
  fs::create_directories(settings_.cache / "datasets--owner--texts" / "snapshots" / kCommit);
  fs::create_symlink("nowhere", folder() / "snapshots" / kCommit / "broken-Q2_K.gguf");
  const hub::Contents c = cache().contents();
  ASSERT_EQ(c.models.size(), 2u);
  EXPECT_EQ(c.models[0].repository, kRepository);
  EXPECT_EQ(c.models[0].model.type, "Q4_K_M");
  EXPECT_EQ(c.models[0].model.size(), bytes_.size());
  EXPECT_GT(c.models[0].when, 1'600'000'000);
  EXPECT_EQ(c.models[1].model.path(), "model-Q8_0.gguf");
  EXPECT_EQ(c.n_others, 1u);
  EXPECT_EQ(c.other_bytes, 2u);
  ASSERT_EQ(c.unfinished.size(), 1u);
  EXPECT_EQ(c.unfinished[0].size, 4u);
}

TEST_F(HubCache, RemovesAModelAndTheBytesNobodyNeeds) {
  pull();
  hub_.add("model-Q8_0.gguf", "eight");
  hub_.add("copy-Q8_0.gguf", "eight");  // the same bytes
  pull(kRepository + ":model-Q8_0.gguf");
  pull(kRepository + ":copy-Q8_0.gguf");
  const fs::path snapshot = folder() / "snapshots" / kCommit;
  std::ofstream(snapshot / "model-Q4_K_M.sparse.gguf") << "side";
  const hub::Removal r = cache().plan_removal({kRepository, "q4_k_m"});
  EXPECT_EQ(r.bytes, bytes_.size() + 4);
  EXPECT_EQ(r.files.size(), 2u) << "with its sidecar";
  remove(kRepository + ":q4_k_m");
  EXPECT_FALSE(fs::exists(fs::symlink_status(snapshot / "model-Q4_K_M.gguf")));
  EXPECT_FALSE(fs::exists(snapshot / "model-Q4_K_M.sparse.gguf"));
  EXPECT_FALSE(fs::exists(blob(sha256(bytes_))));
  remove(kRepository + ":model-Q8_0.gguf");
  EXPECT_TRUE(fs::exists(snapshot / "copy-Q8_0.gguf")) << "its blob is still needed";
  expect_error([&] { remove(kRepository + ":Q4_K_M"); }, {"holds no 'Q4_K_M'"});
  remove(kRepository + ":Q8_0");
  EXPECT_FALSE(fs::exists(folder())) << "nothing is left of it";
  expect_error([&] { remove(kRepository); }, {"not in the cache"});
}

TEST_F(HubCache, ARemovalOfAllTakesOldVersionsAndUnfinishedFiles) {
  pull();
  hub_.add("model-Q4_K_M.gguf", "new");
  hub_.commit = std::string(40, 'd');
  pull();
  std::ofstream(blob("abc.incomplete")) << "half";
  remove(kRepository);
  EXPECT_FALSE(fs::exists(folder()));
  EXPECT_TRUE(cache().contents().models.empty());
}

TEST_F(HubCache, NothingIsRemovedWhileItIsBrought) {
  pull();
  const auto lock = hub::FileLock::try_lock(cache().lock(kRepository, sha256(bytes_)));
  ASSERT_NE(lock, nullptr);
  EXPECT_EQ(hub::FileLock::try_lock(cache().lock(kRepository, sha256(bytes_))), nullptr);
  expect_error([&] { remove(kRepository); }, {"another process", "nothing was removed"});
  expect_error([&] { remove(kRepository + ":Q4_K_M"); }, {"another process"});
  EXPECT_TRUE(fs::exists(blob(sha256(bytes_))));
}

// huggingface_hub keeps large blobs in a store of its own beside the repositories, and links to them.
TEST_F(HubCache, ABlobMayBeALink) {
  pull();
  fs::create_directories(settings_.cache / "blobs" / "ab");
  fs::rename(blob(sha256(bytes_)), settings_.cache / "blobs" / "ab" / "abc");
  fs::create_symlink("../../blobs/ab/abc", blob(sha256(bytes_)));
  EXPECT_EQ(pull().new_bytes, 0u);
  EXPECT_EQ(cache().contents().models.at(0).model.size(), bytes_.size());
  remove(kRepository + ":Q4_K_M");
  EXPECT_TRUE(fs::exists(settings_.cache / "blobs" / "ab" / "abc")) << "the store is huggingface_hub's";
}

class Environment : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : kNames) unsetenv(name);
    setenv("HOME", dir_.path().c_str(), 1);
  }
  void TearDown() override {
    for (const char* name : kNames) unsetenv(name);
    setenv("HOME", home_.c_str(), 1);
  }
  static constexpr const char* kNames[] = {
      "HF_HOME",       "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME",       "HF_TOKEN",
      "HF_TOKEN_PATH", "HF_ENDPOINT",  "HF_HUB_OFFLINE",        "TRANSFORMERS_OFFLINE", "HUGGING_FACE_HUB_TOKEN",
      "SSL_CERT_FILE"};
  TempDir dir_;
  const std::string home_ = std::getenv("HOME") != nullptr ? std::getenv("HOME") : "/";
};

TEST_F(Environment, IsThatOfTheHub) {
  using hub::Settings;
  EXPECT_EQ(Settings::from_environment().endpoint, "https://huggingface.co");
  EXPECT_EQ(Settings::from_environment().cache, dir_ / ".cache" / "huggingface" / "hub");
  EXPECT_EQ(Settings::from_environment().token, "");
  EXPECT_FALSE(Settings::from_environment().offline);
  setenv("XDG_CACHE_HOME", "/x", 1);
  EXPECT_EQ(Settings::from_environment().cache, "/x/huggingface/hub");
  setenv("HF_HOME", "~/h", 1);
  EXPECT_EQ(Settings::from_environment().cache, dir_ / "h" / "hub");
  fs::create_directories(dir_ / "h");
  std::ofstream(dir_ / "h" / "token") << " hf_of_the_file\n";
  EXPECT_EQ(Settings::from_environment().token, "hf_of_the_file");
  setenv("HF_TOKEN", "hf_of_the_variable", 1);
  EXPECT_EQ(Settings::from_environment().token, "hf_of_the_variable");
  setenv("HF_TOKEN", "hf_a\nHost: evil", 1);
  expect_error([] { Settings::from_environment(); }, {"HF_TOKEN is no token"});
  unsetenv("HF_TOKEN");
  setenv("HF_HUB_CACHE", "/c", 1);
  EXPECT_EQ(Settings::from_environment().cache, "/c");
  setenv("HF_ENDPOINT", "http://mirror:8080/", 1);
  EXPECT_EQ(Settings::from_environment().endpoint, "http://mirror:8080");
  setenv("HF_ENDPOINT", "mirror", 1);
  expect_error([] { Settings::from_environment(); }, {"HF_ENDPOINT is 'mirror'"});
  unsetenv("HF_ENDPOINT");
  for (const char* yes : {"1", "true", "ON"}) {
    setenv("HF_HUB_OFFLINE", yes, 1);
    EXPECT_TRUE(Settings::from_environment().offline) << yes;
  }
  setenv("HF_HUB_OFFLINE", "0", 1);
  EXPECT_FALSE(Settings::from_environment().offline);
}

}  // namespace
}  // namespace hearth::test
