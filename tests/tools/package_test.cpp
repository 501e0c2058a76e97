// tools/package: what it asks of CMake and CPack, for which architectures. Programs stand in for nvcc, cmake and cpack.
// tools/package-check: what it says of packages that are not there.
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
  EXPECT_TRUE(fails_with(run("--no-cuda --maintainer Nobody"), "'Nobody', expected NAME <ADDRESS>"));
}

TEST_F(Package, NamesWhoeverAnswersForIt) {
  const auto maintainer = [&](const std::string& before, const std::string& flags) {
    fs::remove(dir_ / "calls");
    const Outcome o = shell(before + " PATH='" + (dir_ / "bin").string() + "':\"$PATH\" '" +
                                (dir_ / "tools" / "package").string() + "' --no-cuda " + flags,
                            dir_);
    EXPECT_EQ(o.status, 0) << o.err;
    const std::string all = calls(), name = "-DHEARTH_MAINTAINER=";
    const size_t at = all.find(name) + name.size();
    return all.substr(at, all.find('>', at) + 1 - at);
  };
  const std::string known = "DEBFULLNAME='Ada L' DEBEMAIL=ada@example.org";
  EXPECT_EQ(maintainer("DEBFULLNAME= DEBEMAIL=", ""), "A local build of hearth <root@localhost>");
  EXPECT_EQ(maintainer(known, ""), "Ada L <ada@example.org>");
  EXPECT_EQ(maintainer(known, "--maintainer 'B <b@c>'"), "B <b@c>");
}

class PackageCheck : public Package {
 protected:
  PackageCheck() {
    fs::copy_file(tool("package-check"), dir_ / "tools" / "package-check");
    for (const char* tool : {"mmdebstrap", "git"}) write_program(dir_ / "bin" / tool, "exit 1\n");
  }
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "package-check is for root";
  }
  Outcome check(const std::string& flags) {
    return shell("PATH='" + (dir_ / "bin").string() + "':\"$PATH\" '" + (dir_ / "tools" / "package-check").string() +
                     "' " + flags,
                 dir_);
  }
};

TEST_F(PackageCheck, SaysOnceThatPackagesAreAbsent) {
  const std::string given = (dir_ / "given").string();
  EXPECT_TRUE(fails_with(check("trixie --packages '" + given + "'"), "there is no folder " + given + "/trixie"));
  fs::create_directories(dir_ / "given" / "trixie");
  EXPECT_TRUE(fails_with(check("trixie --packages '" + given + "'"), "expected one file hearth_*.deb in "));
  std::ofstream(dir_ / "given" / "trixie" / "hearth_1_amd64.deb") << "x";
  EXPECT_TRUE(fails_with(check("trixie --packages '" + given + "'"), "expected one file hearth-*.tar.gz in "));
}

}  // namespace
}  // namespace hearth::test
