// tools/compare: turns, medians, ratios and what it refuses. Programs that print given rates stand in for hearth and
// llama-bench; one test has the real hearth on both sides.
#include "scripts.h"
#include "support/tiny_model.h"

namespace hearth::test {
namespace {

// The program NAME notes its name and arguments in "turns", takes the next decode rate of the list in NAME.rates, and
// prints it; prompts are ten times as fast.
constexpr const char* kTurn = R"sh(
cd "$(dirname "$0")/$up" || exit
echo "$name $*" >>turns
n=$(cat $name.n 2>/dev/null || echo 0)
echo $((n + 1)) >$name.n
read -ra rates <$name.rates
rate=${rates[n]}
)sh";

constexpr const char* kHearth = R"sh(
[[ $1 != --version ]] || { echo 'hearth 0.1.0'; exit; }
turn "$@"
printf '[\n  {"n_prompt":16,"n_gen":0,"n_depth":0,"avg_ts":%s.0,"floor_ts":null},\n' "$((rate * 10))"
printf '  {"n_prompt":0,"n_gen":8,"n_depth":0,"avg_ts":%s,"floor_ts":9}\n]\n' "$rate"
)sh";

constexpr const char* kLlamaBench = R"sh(
[[ $1 != --version ]] || exit 1
[[ $1 != --help ]] || { echo 'usage: llama-bench [options]'; exit; }
turn "$@"
printf '[\n  {\n    "build_commit": "b1",\n    "n_prompt": 16,\n    "n_gen": 0,\n    "n_depth": 0,\n'
printf '    "avg_ts": %s.0,\n    "samples_ts": [ 1.5 ]\n  },\n' "$((rate * 10))"
printf '  {\n    "n_prompt": 0,\n    "n_gen": 8,\n    "n_depth": 0,\n    "avg_ts": %s\n  }\n]\n' "$rate"
)sh";

class Compare : public ::testing::Test {
 protected:
  Compare() { std::ofstream(dir_ / "m.gguf") << "GGUF"; }

  // `path`: NAME, or a program within the build folder NAME.
  void stand_in(const std::string& path, const std::string& rates, bool llama) {
    const std::string name = path.substr(0, path.find('/'));
    std::ofstream(dir_ / (name + ".rates")) << rates << '\n';
    const std::string up = name == path ? "." : "../..";
    write_program(dir_ / path,
                  "name=" + name + " up=" + up + "\nturn() {" + kTurn + "}\n" + (llama ? kLlamaBench : kHearth));
  }
  Outcome compare(const std::string& arguments) {
    return shell(
        "cd '" + dir_.path().string() + "' && rm -f turns *.n && '" + tool("compare").string() + "' " + arguments,
        dir_);
  }
  std::string turns() const { return slurp(dir_ / "turns"); }

  TempDir dir_;
};

TEST_F(Compare, TakesTurnsAndPrintsMediansSpreadAndRatios) {
  stand_in("a", "999 10 20 30 40 10", false);
  stand_in("b", "1 12 10 33 36 11", false);
  const Outcome o = compare("./a ./b m.gguf -p 16 -n 8 --csv all.csv");
  ASSERT_EQ(o.status, 0) << o.err;
  std::string order, line;
  for (std::istringstream lines(turns()); std::getline(lines, line);) order += line[0];
  EXPECT_EQ(order, "abababababab") << "one turn each to warm up, then five rounds";
  // 10 10 20 30 40 and 10 11 12 33 36; ratios 0.5 0.9 1.1 1.1 1.2.
  EXPECT_NE(
      o.out.find("| m.gguf | tg8          |     20.00 |         10.00..40.00 |     12.00 |         10.00..36.00 |  "
                 "0.600 |  1.100 |"),
      std::string::npos)
      << o.out;
  EXPECT_NE(o.out.find("| pp16         |    200.00 |"), std::string::npos) << o.out;
  const std::string csv = slurp(dir_ / "all.csv");
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 21) << csv;
  EXPECT_NE(csv.find("\"m.gguf\",tg8,B,3,33\n"), std::string::npos) << csv;
}

TEST_F(Compare, EvenRoundsTakeTheMiddleOfTheTwo) {
  stand_in("a", "1 10 20", false);
  stand_in("b", "1 20 20", false);
  const Outcome o = compare("./a ./b m.gguf -p 16 -n 8 -r 2");
  EXPECT_NE(o.out.find("|     15.00 |         10.00..20.00 |     20.00 |         20.00..20.00 |  1.333 |  1.500 |"),
            std::string::npos)
      << o.out << o.err;
}

TEST_F(Compare, FailsWhenBIsSlowerThanAllowed) {
  stand_in("a", "1 1000 1000 1000", false);
  stand_in("b", "1 980 980 980", false);
  EXPECT_EQ(compare("./a ./b m.gguf -r 3").status, 0);
  EXPECT_EQ(compare("./a ./b m.gguf -r 3 --max-slower 2").status, 0) << "two per cent are allowed";
  const Outcome o = compare("./a ./b m.gguf -r 3 --max-slower 1.9");
  EXPECT_EQ(o.status, 1);
  EXPECT_EQ(last_line(o.err), "error: B is slower than A by more than 1.9 % in 2 of 2 rows");
  EXPECT_NE(o.out.find("0.980 |  0.980 |"), std::string::npos) << "the table comes all the same\n" << o.out;
}

TEST_F(Compare, FlagsReachThoseWhomTheyAreFor) {
  stand_in("a/bin/hearth", "1 1 1", false);
  stand_in("b/bin/llama-bench", "1 2 2", true);
  const Outcome o =
      compare("a b m.gguf -p 16 -n 8 -r 1 -t 3 --sparsity off --flags-a '-d 0 -q' --flags-b '-ngl 0' -- --device cpu");
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_NE(turns().find("a bench -q --no-bandwidth -m m.gguf -p 16 -n 8 -r 1 -o json -t 3 --sparsity off --device cpu "
                         "-d 0 -q\nb -m m.gguf -p 16 -n 8 -r 1 -o json -t 3 -ngl 0\n"),
            std::string::npos)
      << turns();
  EXPECT_NE(o.out.find("(llama-bench) -ngl 0"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("|  2.000 |  2.000 |"), std::string::npos) << o.out;
}

TEST_F(Compare, KnowsLlamaBenchByWhatItSays) {
  stand_in("a", "1 1", false);
  stand_in("other", "1 1", true);
  const Outcome o = compare("./a ./other m.gguf -r 1");
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_NE(o.out.find("other (llama-bench)"), std::string::npos) << o.out;
}

TEST_F(Compare, SaysWhatIsWrong) {
  stand_in("a", "1 1", false);
  write_program(dir_ / "mute", "echo 'something else'\n");
  write_program(dir_ / "broken",
                "[[ $1 != --version ]] || { echo 'hearth 0.1.0'; exit; }\n"
                "echo 'error: the file is too short' >&2\nexit 1\n");
  write_program(dir_ / "empty", "[[ $1 != --version ]] || { echo 'hearth 0.1.0'; exit; }\necho '[]'\n");
  std::filesystem::create_directories(dir_ / "folder");
  const auto says = [&](const std::string& arguments, const std::string& what) {
    EXPECT_TRUE(fails_with(compare(arguments), what)) << arguments;
  };
  says("./a ./a", "at least one model");
  says("./a ./a absent.gguf", "there is no model 'absent.gguf'");
  says("./a ./absent m.gguf", "B, './absent', is neither a program nor a build folder");
  says("folder ./a m.gguf", "A, the folder 'folder', holds no bin/hearth");
  says("./a ./mute m.gguf", "B, './mute', is neither hearth nor llama-bench");
  says("./a ./a m.gguf -r 0", "-r is '0'");
  says("./a ./a m.gguf -p x", "-p is 'x'");
  says("./a ./a m.gguf -p 0 -n 0", "nothing to measure");
  says("./a ./a m.gguf -t", "-t needs a value");
  says("./a ./a m.gguf --max-slower much", "--max-slower is 'much'");
  says("./a ./a m.gguf --fast", "unknown flag '--fast'");
  for (const auto& [program, why] : {std::pair("broken", "failed on m.gguf: the file is too short"),
                                     std::pair("empty", "measured nothing on m.gguf")}) {
    const Outcome o = compare(std::string("./a ./") + program + " m.gguf -r 1");
    EXPECT_EQ(o.status, 1);
    EXPECT_NE(last_line(o.err).find(why), std::string::npos) << o.err;
  }
}

TEST_F(Compare, TwoRealBuilds) {
  const std::string model = (dir_ / "a tiny model.gguf").string();
  write_tiny_model(model);
  const Outcome o =
      compare(std::string(HEARTH_BINARY) + " " HEARTH_BINARY " '" + model + "' -p 8 -n 4 -r 1 -t 1 -- --device cpu");
  ASSERT_EQ(o.status, 0) << o.err;
  for (const char* text : {"| a tiny model.gguf | pp8 ", "| a tiny model.gguf | tg4 "})
    EXPECT_NE(o.out.find(text), std::string::npos) << text << " is missing in\n" << o.out;
}

}  // namespace
}  // namespace hearth::test
