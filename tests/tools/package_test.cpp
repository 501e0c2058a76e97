// tools/package: what it asks of CMake and CPack, for which architectures. Programs stand in for nvcc, cmake and cpack.
#include "scripts.h"

namespace hearth::test {
namespace {

namespace fs = std::filesystem;

class Package : public ::testing::Test {
 protected:
  // A root with the scripts alone, so that nothing is written into this one.
  Package() {
    fs::create_directories(dir_ / "tools");
    for (const char* script : {"package", "setup.sh"}) fs::copy_file(tool(script), dir_ / "tools" / script);
    const std::string log = (dir_ / "calls").string();
    write_program(dir_ / "bin" / "cmake", "echo \"cmake $*\" >>" + log + "\n");
    write_program(dir_ / "bin" / "cpack", "echo \"cpack $*\" >>" + log + R"sh(
made=${!#}
mkdir -p "$made"
case " $* " in
  *" DEB "*) touch "$made/hearth_1_amd64.deb" ;;
  *) touch "$made/hearth-1-Linux.tar.gz" ;;
esac
)sh");
    for (const char* tool : {"dpkg-shlibdeps", "objdump", "file"}) write_program(dir_ / "bin" / tool, "exit 1\n");
  }
  void nvcc_knows(const std::string& codes) { write_program(dir_ / "bin" / "nvcc", "printf '" + codes + "'\n"); }
  Outcome run(const std::string& flags) {
    return shell(
        "PATH='" + (dir_ / "bin").string() + "':\"$PATH\" '" + (dir_ / "tools" / "package").string() + "' " + flags,
        dir_);
  }
  std::string calls() const { return slurp(dir_ / "calls"); }

  TempDir dir_;
};

TEST_F(Package, IsForEveryArchitectureThatNvccKnowsFromTuringOn) {
  nvcc_knows("sm_70\\nsm_75\\nsm_87\\nsm_90\\nsm_90a\\n");
  const Outcome o = run("");
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_NE(calls().find("-DHEARTH_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=75-real;90 "), std::string::npos) << calls();
  EXPECT_NE(o.err.find("nvcc does not know architecture 120"), std::string::npos) << o.err;
}

TEST_F(Package, BundlesLibrariesInTheArchiveAlone) {
  const Outcome o = run("--no-cuda --output '" + (dir_ / "out").string() + "'");
  ASSERT_EQ(o.status, 0) << o.err;
  const std::string all = calls();
  const size_t deb = all.find("-DHEARTH_BUNDLE=OFF"), archive = all.find("-DHEARTH_BUNDLE=ON");
  ASSERT_NE(deb, std::string::npos) << all;
  ASSERT_NE(archive, std::string::npos) << all;
  EXPECT_LT(deb, all.find("-G DEB"));
  EXPECT_LT(all.find("-G DEB"), archive);
  EXPECT_LT(archive, all.find("-G TGZ"));
  EXPECT_EQ(all.find("HEARTH_CUDA=ON"), std::string::npos);
  EXPECT_TRUE(fs::exists(dir_ / "out" / "hearth_1_amd64.deb"));
  EXPECT_TRUE(fs::exists(dir_ / "out" / "hearth-1-Linux.tar.gz"));
}

TEST_F(Package, RefusesAProgramThatNamesTheFolderItWasBuiltIn) {
  write_program(dir_ / "build" / "package" / "bin" / "hearth", "# " + dir_.path().string() + "/src/core/error.cpp\n");
  EXPECT_TRUE(fails_with({run("--no-cuda").status, "", last_line(run("--no-cuda").err) + "\n"}, "names the folder"));
}

TEST_F(Package, FlagsAreChecked) {
  EXPECT_TRUE(fails_with(run("--bogus"), "unknown argument '--bogus'"));
  EXPECT_TRUE(fails_with(run("--output"), "--output needs a value"));
  EXPECT_TRUE(fails_with(run("--no-cuda --architectures 90"), "exclude each other"));
}

}  // namespace
}  // namespace hearth::test
