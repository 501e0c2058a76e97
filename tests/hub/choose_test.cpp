// Which file a name means, as llama.cpp chooses; and names that are refused.
#include "hub/choose.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "expect_error.h"
#include "hub/digest.h"
#include "hub/settings.h"

namespace hearth::test {
namespace {

using hub::choose;
using hub::models_among;

std::vector<hub::ModelFiles> models(const std::vector<std::string>& paths) {
  std::vector<hub::RepositoryFile> files;
  for (const std::string& path : paths) files.push_back({path, 3 << 20, ""});
  return models_among(files);
}
std::string chosen(const std::vector<std::string>& paths, const std::string& wanted) {
  return choose(models(paths), {"owner/name", wanted}).model.path();
}

const std::vector<std::string> kUsual = {"README.md",     "m-BF16.gguf",   "m-F16.gguf",        "m-IQ4_XS.gguf",
                                         "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0.gguf",       "mmproj-F16.gguf",
                                         "imatrix.gguf",  "m.sparse.gguf", "mtp-m-Q4_K_M.gguf", "UD/m-UD-Q4_K_XL.gguf"};

TEST(Choose, TakesTheTypeInAnyCase) {
  EXPECT_EQ(chosen(kUsual, "q8_0"), "m-Q8_0.gguf");
  EXPECT_EQ(chosen(kUsual, "F16"), "m-F16.gguf") << "and not BF16, and no mmproj";
  EXPECT_EQ(chosen(kUsual, "Q4_K_XL"), "UD/m-UD-Q4_K_XL.gguf");
  EXPECT_EQ(chosen(kUsual, "ud-q4_k_xl"), "UD/m-UD-Q4_K_XL.gguf");
}

TEST(Choose, TakesTheFileByNameOrPath) {
  EXPECT_EQ(chosen(kUsual, "m-IQ4_XS.gguf"), "m-IQ4_XS.gguf");
  EXPECT_EQ(chosen(kUsual, "m-UD-Q4_K_XL.gguf"), "UD/m-UD-Q4_K_XL.gguf");
  EXPECT_EQ(chosen({"a/m.gguf", "m.gguf"}, "m.gguf"), "m.gguf");
}

TEST(Choose, WithoutATypeTakesTheUsualOnes) {
  EXPECT_EQ(chosen(kUsual, ""), "m-Q4_K_M.gguf");
  EXPECT_EQ(chosen({"m-F16.gguf", "m-Q8_0.gguf"}, ""), "m-Q8_0.gguf");
  const hub::Choice first = choose(models({"m-Q2_K.gguf", "m-F16.gguf"}), {"owner/name", ""});
  EXPECT_EQ(first.model.path(), "m-F16.gguf");
  EXPECT_NE(first.why.find("the first"), std::string::npos);
  EXPECT_EQ(choose(models({"m.gguf"}), {"owner/name", ""}).why, "");
}

TEST(Choose, TakesAllPartsOfASplitFile) {
  const auto all = models(
      {"Q4_K_M/m-Q4_K_M-00002-of-00002.gguf", "Q4_K_M/m-Q4_K_M-00001-of-00002.gguf", "m-Q8_0-00001-of-00002.gguf"});
  const hub::Choice c = choose(all, {"owner/name", "Q4_K_M"});
  ASSERT_EQ(c.model.parts.size(), 2u);
  EXPECT_EQ(c.model.parts[0].path, "Q4_K_M/m-Q4_K_M-00001-of-00002.gguf");
  EXPECT_EQ(c.model.parts[1].path, "Q4_K_M/m-Q4_K_M-00002-of-00002.gguf");
  EXPECT_EQ(c.model.size(), uint64_t{6} << 20);
  EXPECT_EQ(choose(all, {"owner/name", "m-Q4_K_M-00002-of-00002.gguf"}).model.parts.size(), 2u) << "any part means all";
  expect_error([&] { choose(all, {"owner/name", "Q8_0"}); }, {"holds no 'Q8_0'"});
  expect_error(
      [] {
        choose(models({"m-00001-of-00003.gguf", "m-00003-of-00003.gguf"}), {"owner/name", ""});
      },
      {"split file", "part 2 is missing"});
}

TEST(Choose, ListsTheChoicesWhenSeveralFit) {
  expect_error(
      [] {
        choose(models({"a-Q4_K_M.gguf", "b-Q4_K_M.gguf"}), {"owner/name", ""});
      },
      {"2 models", "Q4_K_M", "a-Q4_K_M.gguf (3.00 MiB)", "b-Q4_K_M.gguf"});
  EXPECT_EQ(chosen({"m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf"}, "Q4_K_M"), "m-Q4_K_M.gguf")
      << "the plain one of two variants";
  expect_error(
      [] {
        choose(models(kUsual), {"owner/name", "Q3_K_M"});
      },
      {"holds no 'Q3_K_M'", "m-Q8_0.gguf (3.00 MiB)"});
  expect_error([] { choose(models({"model.safetensors"}), {"owner/name", ""}); }, {"no GGUF"});
}

TEST(Choose, NamesTypes) {
  const auto all = models({"a-Q4_K_M-00001-of-00001.gguf", "b.Q8_0.gguf", "c-bf16.gguf", "demo.gguf",
                           "e-UD-IQ2_XXS.gguf", "f-MXFP4_MOE.gguf"});
  std::vector<std::string> types;
  for (const auto& m : all) types.push_back(m.type);
  EXPECT_EQ(types, (std::vector<std::string>{"Q4_K_M", "Q8_0", "BF16", "", "UD-IQ2_XXS", "MXFP4_MOE"}));
}

TEST(ModelName, IsOwnerAndName) {
  const hub::ModelName n = hub::parse_model_name("ggml-org/gemma-3.1_b-GGUF:Q8_0");
  EXPECT_EQ(n.repository, "ggml-org/gemma-3.1_b-GGUF");
  EXPECT_EQ(n.wanted, "Q8_0");
  for (const char* bad : {"", "name", "a/b/c", "../b", "a/..", "a/.b", "a--b/c", "a/b:", "/b", "a/", "a b/c", "a/b\n",
                          "a/-b", "a/b?x", "a/b%2e"})
    expect_error([&] { hub::parse_model_name(bad); }, {});
}

TEST(PlainPath, StaysInItsFolder) {
  for (const char* good : {"a", "a/b.gguf", "a b/c (1).gguf", "..a", "a..", "ü/ä"})
    EXPECT_TRUE(hub::is_plain_path(good)) << good;
  for (const char* bad : {"", "/a", "a/", "a//b", "../a", "a/../b", "a/..", ".", "./a", "a\nb", "a\x1b[31m", "a\\b"})
    EXPECT_FALSE(hub::is_plain_path(bad)) << bad;
  EXPECT_FALSE(hub::is_plain_path(std::string(300, 'a')));
}

TEST(Origin, IsSchemeHostAndPort) {
  EXPECT_EQ(hub::origin_of("https://HuggingFace.co/a/b?c"), "https://huggingface.co");
  EXPECT_EQ(hub::origin_of("http://127.0.0.1:81"), "http://127.0.0.1:81");
  for (const char* bad : {"", "file:///etc/passwd", "huggingface.co", "https://", "https://user@host/", "ftp://host"})
    EXPECT_EQ(hub::origin_of(bad), "") << bad;
}

// FIPS 180-2's example, and Git's empty blob.
TEST(Digest, IsOfTheStandards) {
  const std::string abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
  EXPECT_EQ(hub::checksum_of(abc), hub::Checksum::sha256);
  hub::Digest sha(hub::Checksum::sha256, 3);
  sha.add(std::string_view("zzz")), sha.restart(), sha.add(std::string_view("ab")), sha.add(std::string_view("c"));
  EXPECT_EQ(sha.finish(), abc);
  hub::Digest git(hub::Checksum::git_sha1, 0);
  EXPECT_EQ(git.finish(), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
  EXPECT_EQ(hub::checksum_of("etag-of-a-mirror"), hub::Checksum::none);
}

}  // namespace
}  // namespace hearth::test
