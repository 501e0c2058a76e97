// An installed program works where `cmake --install` puts it, and starts without a CUDA library.
#include <regex>

#include "scripts.h"

namespace hearth::test {
namespace {

namespace fs = std::filesystem;

TEST(Install, TheProgramFindsTheBundledModelBesideItself) {
  TempDir dir;
  const fs::path build = fs::path(HEARTH_BINARY).parent_path().parent_path(), prefix = dir / "any where";
  const Outcome installed = shell("cmake --install '" + build.string() + "' --prefix '" + prefix.string() + "'", dir);
  ASSERT_EQ(installed.status, 0) << installed.out << installed.err;
  for (const char* file : {"share/bash-completion/completions/hearth", "share/fish/vendor_completions.d/hearth.fish",
                           "share/zsh/site-functions/_hearth", "share/doc/hearth/LICENSE", "share/doc/hearth/copyright",
                           "share/hearth/hearth-demo.gguf"}) {
    EXPECT_GT(fs::file_size(prefix / file), 500u) << file;
  }
  const fs::path man = prefix / "share" / "man" / "man1";
  EXPECT_TRUE(fs::exists(man / "hearth-run.1.gz") || fs::exists(man / "hearth-run.1"));
  const std::string program = "cd / && '" + (prefix / "bin" / "hearth").string() + "' ";
  const std::string model = (prefix / "share" / "hearth" / "hearth-demo.gguf").string();
  const Outcome asked = shell(program + "run -p Once", dir);
  EXPECT_TRUE(fails_with(asked, "to try hearth give -m " + model));
  const Outcome story = shell(program + "run -p Once -n 4 --temp 0 --device cpu -m '" + model + "'", dir);
  EXPECT_EQ(story.status, 0) << story.err;
  EXPECT_GT(story.out.size(), std::string("Once").size());
}

TEST(Install, WhereNoModelIsBundledNoneIsNamed) {
  EXPECT_TRUE(fails_with(hearth({"run", "-p", "Once"}), "--model is required; see `hearth run --help`"));
}

TEST(Install, NoCudaLibraryIsNeededToStart) {
  TempDir dir;
  const Outcome needed = shell("ldd " HEARTH_BINARY, dir);
  ASSERT_EQ(needed.status, 0) << needed.err;
  EXPECT_NE(needed.out.find("libc.so"), std::string::npos) << needed.out;
  EXPECT_FALSE(std::regex_search(needed.out, std::regex("libcu(da|blas|dart)|libnv"))) << needed.out;
}

}  // namespace
}  // namespace hearth::test
