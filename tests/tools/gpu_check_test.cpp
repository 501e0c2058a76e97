// tools/gpu-check without a GPU: programs on PATH stand in for the driver's, for CTest, compute-sanitizer and a build.
#include "scripts.h"

namespace hearth::test {
namespace {

constexpr const char* kDriver = R"sh(
case "$*" in
  *=name*) echo 'NVIDIA Test' ;;
  *=memory.free*) cat "$WORK/gpu_free" 2>/dev/null || echo 24000 ;;
  *) echo 'GPU 0: NVIDIA Test' ;;
esac
)sh";

constexpr const char* kDisk = R"sh(
echo Filesystem
echo "disk 0 0 $(cat "$WORK/disk_free" 2>/dev/null || echo 90000) 0% /"
)sh";

// A few GPU tests. The one that the file "slow" names hangs, once.
constexpr const char* kCtest = R"sh(
echo "ctest $*" >>"$WORK/calls"
if [[ " $* " == *" -N "* ]]; then
  case "$*" in
    *small*) echo '  Test #3: cuda-small.A'; echo '  Test #4: cuda-small.B' ;;
    *'cuda\.'*) echo '  Test  #1: cuda.A'; echo '  Test #12: cuda.B' ;;
    *) echo '  Test #5: gpu.A' ;;
  esac
  exit
fi
[[ $* =~ 0,0,0,([0-9,]*) ]]
IFS=, read -ra numbers <<<"${BASH_REMATCH[1]}"
for n in "${numbers[@]}"; do
  if grep -qx "$n" "$WORK/slow" 2>/dev/null; then rm "$WORK/slow"; sleep 60; fi
  outcome='   Passed '
  if grep -qx "$n" "$WORK/broken" 2>/dev/null; then outcome='***Failed '; fi
  if grep -qx "$n" "$WORK/absent" 2>/dev/null; then outcome='***Skipped '; fi
  echo "1/2 Test #$n: a.test .....$outcome  0.01 sec"
done
[[ ! -e $WORK/broken ]]
)sh";

constexpr const char* kSanitizer = R"sh(
echo "compute-sanitizer $*" >>"$WORK/calls"
echo '========= COMPUTE-SANITIZER'
for t in Suite.One Suite.Two/0; do
  if [[ $* == *":$t"* ]]; then continue; fi
  if [[ $t == Suite.Two/0 && -e $WORK/slow ]]; then rm "$WORK/slow"; sleep 60; fi
  echo "[       OK ] $t (3 ms)"
done
if [[ -e $WORK/found ]]; then
  echo '========= Invalid __global__ read of size 4 bytes'
  echo '========= ERROR SUMMARY: 1 error'
  exit 9
fi
echo '========= ERROR SUMMARY: 0 errors'
)sh";

constexpr const char* kHearth = R"sh(
echo "hearth $*" >>"$WORK/calls"
case $1 in
  doctor) printf 'CPU   a processor\nmemory reads       100.0 GB/s with 8 threads\nGPU 0   NVIDIA Test\n' ;;
  synth)
    while (($#)); do
      case $1 in -o | --text) echo model >"$2" ;; esac
      shift
    done
    ;;
  profile) echo sidecar >"${4%.gguf}.sparse.gguf" ;;
  bench)
    if [[ -e $WORK/no_bench ]]; then echo 'error: the GPU is gone' >&2; exit 1; fi
    echo '[{"n_prompt":0,"n_gen":64,"n_depth":0,"avg_ts":50.5,"stddev_ts":0.25,"floor_ts":101.0,"of_floor":0.5}]'
    ;;
esac
)sh";

class GpuCheck : public ::testing::Test {
 protected:
  GpuCheck() {
    write_program(dir_ / "path/nvidia-smi", kDriver);
    write_program(dir_ / "path/df", kDisk);
    write_program(dir_ / "path/ctest", kCtest);
    write_program(dir_ / "path/compute-sanitizer", kSanitizer);
    write_program(dir_ / "build/bin/hearth", kHearth);
    for (const char* name : {"test_cuda", "test_gpu"}) write_program(dir_ / "build/tests" / name, "exit 0\n");
  }

  Outcome check(const std::string& arguments) {
    const std::string work = dir_.path().string();
    return shell("export WORK='" + work + "' PATH='" + work + "/path':\"$PATH\" CUDA_HOME=/nonexistent && '" +
                     tool("gpu-check").string() + "' --build '" + work + "/build' --dir '" + work + "/results' " +
                     arguments,
                 dir_);
  }
  std::string calls() const { return slurp(dir_ / "calls"); }
  void set(const std::string& name, const std::string& text = "") { std::ofstream(dir_ / name) << text << '\n'; }
  void unset(const std::string& name) { std::filesystem::remove(dir_ / name); }
  size_t count(const std::string& text, const std::string& what) const {
    size_t n = 0;
    for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
    return n;
  }
  // The lines of stdout about one piece.
  static std::string about(const Outcome& o, const std::string& piece) {
    std::istringstream lines(o.out);
    std::string found;
    for (std::string line; std::getline(lines, line);)
      if (line.rfind(piece + " ", 0) == 0) found += line + "\n";
    return found;
  }

  TempDir dir_;
};

TEST_F(GpuCheck, QuickRunsEveryPieceOnceAndEndsWithTheCounts) {
  const Outcome first = check("quick");
  ASSERT_EQ(first.status, 0) << first.out << first.err;
  EXPECT_EQ(last_line(first.out), "18 passed, 0 failed");
  EXPECT_NE(about(first, "tests-cuda").find("2 tests passed, 0 failed, 0 skipped"), std::string::npos) << first.out;
  EXPECT_NE(first.out.find("memory reads       100.0 GB/s"), std::string::npos) << first.out;
  EXPECT_NE(first.out.find("| 1b-f16-divided         | tg64   |      50.5 |    0.2 |     101.0 |     50 % |"),
            std::string::npos)
      << first.out;
  const std::string ran = calls();
  EXPECT_EQ(count(ran, "compute-sanitizer --tool memcheck --error-exitcode 9 "), 1u) << ran;
  const Outcome again = check("quick");
  EXPECT_EQ(again.status, 0);
  EXPECT_EQ(again.out, first.out) << "what is known is told again";
  EXPECT_EQ(calls(), ran) << "and not run again";

  EXPECT_EQ(check("--again --piece doctor").status, 0);
  EXPECT_EQ(calls(), ran + "hearth doctor\n");
  EXPECT_EQ(check("--again").status, 0);
  EXPECT_EQ(count(calls(), "hearth synth"), 3u) << "models stay";
  EXPECT_EQ(count(calls(), "hearth bench"), 14u);
}

TEST_F(GpuCheck, FullRunsEverySanitizerAndTheCommandsOfThePerformancePage) {
  const Outcome o = check("full");
  if (o.out.find(" of memory, ") != std::string::npos) GTEST_SKIP() << "needs 12 GiB of memory";
  ASSERT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_EQ(last_line(o.out), "43 passed, 0 failed");
  for (const char* t : {"memcheck", "initcheck", "synccheck"})
    EXPECT_EQ(count(calls(), std::string("--tool ") + t), 2u) << t;
  for (int i = 0; i < 10; ++i)
    EXPECT_NE(calls().find("--gtest_filter=TenOf/GpuHybridPieces.OfAThousand/" + std::to_string(i) + "\n"),
              std::string::npos);
  EXPECT_NE(calls().find("--vram-budget 7.75 -c 128 -b 128 -p 0 -n 64 -r 2"), std::string::npos) << calls();
}

// The programs that stand in take any flag; the real ones know these.
TEST_F(GpuCheck, EveryFlagExists) {
  check("full");
  std::istringstream lines(calls());
  size_t checked = 0;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string program, subcommand;
    words >> program >> subcommand;
    if (program != "hearth") continue;
    const std::string help = hearth({subcommand, "--help"}).out;
    for (std::string word; words >> word;) {
      if (word[0] != '-') continue;
      EXPECT_TRUE(help.find(word + " ") != std::string::npos || help.find(word + ",") != std::string::npos)
          << "hearth " << subcommand << " has no " << word;
      ++checked;
    }
  }
  EXPECT_GT(checked, 50u);
}

TEST_F(GpuCheck, TestsThatWereCutOffGoOnWhereTheyStopped) {
  set("slow", "12");
  const Outcome o = check("--piece tests-cuda --piece-minutes 0.07");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_EQ(last_line(o.out), "2 passed, 0 failed");
  EXPECT_EQ(count(calls(), "-I 0,0,0,1,12 "), 1u) << calls();
  EXPECT_EQ(count(calls(), "-I 0,0,0,12 "), 1u) << calls();
  set("slow");
  const Outcome sanitized = check("--piece memcheck-operations --piece-minutes 0.07");
  EXPECT_EQ(sanitized.status, 0) << sanitized.out << sanitized.err;
  EXPECT_NE(about(sanitized, "memcheck-operations").find("passed"), std::string::npos) << sanitized.out;
  EXPECT_EQ(count(calls(), "GpuExperts*Route*:-:Suite.One\n"), 1u) << calls();
}

TEST_F(GpuCheck, WhatGetsNowhereFails) {
  set("slow", "1");
  const Outcome o = check("--piece tests-cuda --piece-minutes 0.02");
  EXPECT_EQ(o.status, 1);
  EXPECT_NE(about(o, "tests-cuda").find("failed    0."), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("nothing was finished in 0.02 minutes"), std::string::npos) << o.out;
}

TEST_F(GpuCheck, FailuresAreCountedAndKept) {
  set("broken", "12"), set("absent", "3"), set("found"), set("no_bench");
  const Outcome o = check("quick");
  EXPECT_EQ(o.status, 1);
  EXPECT_EQ(last_line(o.out), "9 passed, 9 failed");
  EXPECT_NE(o.out.find("1 tests passed, 1 failed, 0 skipped"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("1 tests passed, 0 failed, 1 skipped"), std::string::npos) << o.out;
  EXPECT_NE(about(o, "memcheck-operations").find("ERROR SUMMARY: 1 error"), std::string::npos) << o.out;
  EXPECT_NE(about(o, "bench-1b-f16-dense").find("the GPU is gone"), std::string::npos) << o.out;
  for (const char* name : {"broken", "absent", "found", "no_bench"}) unset(name);
  EXPECT_EQ(last_line(check("quick").out), "9 passed, 9 failed") << "a failure is a result";
  EXPECT_EQ(last_line(check("quick --again").out), "18 passed, 0 failed");
}

TEST_F(GpuCheck, ForWhatThereIsNoRoomIsSkipped) {
  set("gpu_free", "1000"), set("disk_free", "2400");
  const Outcome o = check("quick");
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(last_line(o.out), "9 passed, 0 failed, 9 skipped");
  EXPECT_NE(about(o, "model-1b-f16").find("needs 3.4 GiB of disk"), std::string::npos) << o.out;
  EXPECT_NE(about(o, "bench-1b-f16-dense").find("needs model-1b-f16"), std::string::npos) << o.out;
  unset("disk_free");
  const Outcome more = check("quick");
  EXPECT_EQ(last_line(more.out), "11 passed, 0 failed, 7 skipped");
  EXPECT_NE(about(more, "bench-1b-f16-dense").find("needs 3.0 GiB of GPU memory, 1.0 GiB are free"), std::string::npos)
      << more.out;
  EXPECT_NE(calls().find("--tokens 3500 --device cpu\n"), std::string::npos) << "the profile needs no GPU\n" << calls();
  unset("gpu_free");
  EXPECT_EQ(last_line(check("quick").out), "18 passed, 0 failed") << "skipped pieces are tried again";
}

TEST_F(GpuCheck, AGpuThatSharesTheHostsMemory) {
  set("gpu_free", "[N/A]");
  const Outcome o = check("--piece bench-1b-q4_0-dense");
  if (o.out.find(" of GPU memory, ") != std::string::npos) GTEST_SKIP() << "needs 3 GiB of memory";
  EXPECT_EQ(o.status, 0) << o.err;
}

TEST_F(GpuCheck, StopsWhenTheMinutesAreOver) {
  const Outcome none = check("quick --minutes 0");
  EXPECT_EQ(none.status, 2);
  EXPECT_EQ(last_line(none.out), "1 passed, 0 failed") << "the given build";
  EXPECT_NE(none.out.find("left for the next run: doctor tests-cuda"), std::string::npos) << none.out;
  EXPECT_EQ(calls(), "");
  EXPECT_EQ(check("quick --minutes 100").status, 0);
}

TEST_F(GpuCheck, OnePieceBringsWhatItNeeds) {
  const Outcome o = check("--piece bench-1b-f16-divided");
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(last_line(o.out), "4 passed, 0 failed");
  EXPECT_EQ(count(calls(), "hearth synth"), 1u);
  EXPECT_EQ(count(calls(), "hearth profile"), 1u);
  EXPECT_NE(about(o, "bench-1b-f16-divided").find("budget 1.5 GiB"), std::string::npos) << o.out;
}

TEST_F(GpuCheck, AnotherBuildIsCheckedAnew) {
  EXPECT_EQ(check("--piece doctor").status, 0);
  std::ofstream(dir_ / "build/tests/test_gpu", std::ios::app) << "# changed\n";
  EXPECT_EQ(check("--piece doctor").status, 0);
  EXPECT_EQ(count(calls(), "hearth doctor"), 2u);
}

TEST_F(GpuCheck, ListsItsPieces) {
  const Outcome o = check("full --list");
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_NE(o.out.find("racecheck-9             2 min"), std::string::npos) << o.out;
  EXPECT_EQ(calls(), "");
  const Outcome quick = check("--list");
  EXPECT_EQ(quick.out.find("racecheck"), std::string::npos) << quick.out;
}

TEST_F(GpuCheck, SaysWhatIsMissing) {
  const std::string script = tool("gpu-check").string();
  EXPECT_TRUE(fails_with(check("--piece all"), "there is no piece 'all'"));
  EXPECT_TRUE(fails_with(check("fast"), "unknown argument 'fast'"));
  EXPECT_TRUE(fails_with(check("--minutes soon"), "--minutes is 'soon'"));
  EXPECT_TRUE(fails_with(check("--build /nonexistent"), "lacks bin/hearth"));
  write_program(dir_ / "path/nvcc", "exit 1\n");
  write_program(dir_ / "path/nvidia-smi", "echo 'No devices were found'\nexit 6\n");
  EXPECT_TRUE(fails_with(check("quick"), "nvidia-smi finds no GPU: No devices were found"));
  // A PATH that has what the script needs, and neither the driver's program nor the toolkit.
  std::filesystem::create_directories(dir_ / "bare");
  for (const char* name : {"bash", "dirname", "awk", "cat", "env"})
    shell("ln -s \"$(command -v " + std::string(name) + ")\" '" + (dir_ / "bare").string() + "'", dir_);
  const std::string bare = "CUDA_HOME=/nonexistent PATH='" + (dir_ / "bare").string() + "' '" + script + "'";
  EXPECT_TRUE(fails_with(shell(bare, dir_), "there is no nvidia-smi"));
  write_program(dir_ / "bare/nvidia-smi", "echo GPU\n");
  EXPECT_TRUE(fails_with(shell(bare, dir_), "there is no nvcc"));
}

}  // namespace
}  // namespace hearth::test
