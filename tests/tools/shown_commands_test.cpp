// Every command that README and docs show is at least parsed by the program's own flags; those of the README, of
// tutorials and how-tos run, on small models in the place of the reader's.
#include <algorithm>
#include <chrono>
#include <cstdlib>

#include "core/error.h"
#include "gguf/gguf.h"
#include "shown_commands.h"
#include "support/tiny_model.h"
#include "tools/aliases.h"
#include "tools/cli.h"

#include "program.h"

namespace hearth::test {
namespace {

namespace fs = std::filesystem;
using Args = std::vector<std::string>;

std::vector<std::string> pages() {
  std::vector<std::string> found = {"README.md", "models/README.md"};
  for (const auto& entry : fs::recursive_directory_iterator(source_dir() / "docs")) {
    if (entry.path().extension() == ".md") found.push_back(fs::relative(entry.path(), source_dir()).generic_string());
  }
  return found;
}
// Made from --help: not commands but flags, and examples.
bool is_help(const std::string& page) {
  return page.rfind("docs/commands/", 0) == 0;
}

// Why hearth would refuse the line before it looks at any file; empty where it would not.
std::string refusal_of(Args args) {
  const auto app = tools::make_app();
  app->parse_complete_callback([] { throw CLI::Success(); });  // all is parsed, and no subcommand has run
  try {
    args.erase(args.begin());
    args = tools::expand_aliases(*app, std::move(args));
    std::reverse(args.begin(), args.end());
    app->parse(std::move(args));
  } catch (const CLI::ParseError& e) {
    return e.get_exit_code() == 0 ? "" : e.what();
  } catch (const Error& e) {
    return e.what();
  }
  return {};
}

CLI::App* subcommand(CLI::App& app, const std::string& name) {
  const auto found = app.get_subcommands([&](CLI::App* sub) { return sub->get_name() == name; });
  return found.empty() ? nullptr : found[0];
}

// The first flag that the named subcommand does not have; for commands in sentences, which leave out the rest.
std::string unknown_flag_of(const Args& args) {
  const auto app = tools::make_app();
  CLI::App* sub = app.get();
  for (const std::string& arg : args) {
    if (&arg == &args.front()) continue;
    if (CLI::App* const next = subcommand(*sub, arg)) sub = next;
    if (sub == app.get()) return arg;
    if (arg.size() < 2 || arg[0] != '-' || std::isdigit(static_cast<unsigned char>(arg[1]))) continue;
    if (sub->get_option_no_throw(arg) != nullptr) continue;
    Args alone = {args[1], arg};  // llama.cpp's names (-ngl)
    try {
      alone = tools::expand_aliases(*app, std::move(alone));
    } catch (const Error&) {
      return arg;
    }
    if (sub->get_option_no_throw(alone[1]) == nullptr) return arg;
  }
  return {};
}

// A script of the repository, or another program: what can be said without running it.
std::string problem_of(const Shown& shown) {
  const std::string& program = shown.args[0];
  if (program == "sudo") return problem_of({shown.where, shown.line, {shown.args.begin() + 1, shown.args.end()}});
  if (program == "hearth" || program.ends_with("/bin/hearth")) return refusal_of(shown.args);
  if (program.rfind("tools/", 0) == 0 || program == "docs/commands.sh") {
    const fs::path script = source_dir() / program;
    if (!fs::exists(script)) return "there is no such script";
    const std::string text = slurp(script);
    for (const std::string& arg : shown.args) {
      if (arg == "--") break;
      if (arg[0] == '-' && text.find(arg) == std::string::npos) return "it knows no " + arg;
    }
    return {};
  }
  if (program == "cmake") {
    const std::string presets = slurp(source_dir() / "CMakePresets.json");
    for (size_t i = 1; i + 1 < shown.args.size(); ++i) {
      if (shown.args[i] == "--preset" && presets.find('"' + shown.args[i + 1] + '"') == std::string::npos)
        return "there is no preset " + shown.args[i + 1];
    }
    return {};
  }
  if (program == "curl") {
    static const std::regex path(R"(http://[^/ ]+(/[\w/]+))");
    std::smatch m;
    if (!std::regex_search(shown.line, m, path)) return "no path in it";
    for (const auto& source : fs::directory_iterator(source_dir() / "src" / "serve")) {
      if (slurp(source.path()).find('"' + m[1].str() + '"') != std::string::npos) return {};
    }
    return "the server knows no " + m[1].str();
  }
  if (program.rfind("build/ci/tests/test_", 0) == 0) {
    return fs::exists(source_dir() / "tests" / program.substr(20)) ? "" : "there is no such folder of tests";
  }
  for (const char* other : {"export", "tail", "tar", "man", "podman", "llama-bench", "apt-get"}) {
    if (program == other) return {};
  }
  return "nobody knows the program '" + program + "'; a fence that is no command has a language (```text)";
}

TEST(ShownCommands, AreParsedByTheProgram) {
  size_t fenced = 0, in_sentences = 0, of_help = 0;
  for (const std::string& page : pages()) {
    const std::string text = slurp(source_dir() / page);
    for (const Shown& s : is_help(page) ? examples(page, text) : shown_commands(page, text)) {
      EXPECT_EQ(problem_of(s), "") << s.where << ": " << s.line;
      ++(is_help(page) ? of_help : fenced);
    }
    for (const Shown& s : inline_commands(page, text)) {
      EXPECT_EQ(unknown_flag_of(s.args), "") << s.where << ": " << s.line;
      ++in_sentences;
    }
  }
  EXPECT_GT(fenced, 60u);
  EXPECT_GT(of_help, 20u);
  EXPECT_GT(in_sentences, 60u);
}

TEST(ShownCommands, TheCheckBites) {
  const auto first = [](const std::string& block) {
    return problem_of(shown_commands("p", "```\n" + block + "\n```\n").at(0));
  };
  EXPECT_EQ(first("hearth run -m x.gguf -n 3   # comment"), "");
  EXPECT_EQ(first("$ hearth run -m x.gguf \\\n  -ngl 3\nsome output"), "");
  EXPECT_NE(first("hearth run -m x.gguf --no-such-flag"), "");
  EXPECT_NE(first("hearth run -n 3"), "");
  EXPECT_NE(first("hearth stroll"), "");
  EXPECT_NE(first("tools/stroll"), "");
  EXPECT_NE(first("tools/gpu-check --stroll"), "");
  EXPECT_NE(first("cmake --preset stroll"), "");
  EXPECT_NE(first("curl http://127.0.0.1:8080/v1/stroll"), "");
  EXPECT_NE(first("stroll"), "");
  EXPECT_TRUE(shown_commands("p", "```text\nstroll\n```\n").empty());
  EXPECT_EQ(unknown_flag_of({"hearth", "predictor", "fit", "--rank", "3", "-n"}), "-n");
  EXPECT_EQ(unknown_flag_of({"hearth", "stroll"}), "stroll");
  EXPECT_EQ(unknown_flag_of({"hearth", "run", "-ngl"}), "");
}

// Puts `value` behind the flag where it stands, by one of its names; appends it where it is not there and `always`.
void set(Args& args, const Args& names, const std::string& value, bool always = false) {
  for (size_t i = 0; i + 1 < args.size(); ++i) {
    if (std::find(names.begin(), names.end(), args[i]) == names.end()) continue;
    args[i + 1] = value;
    return;
  }
  if (always) args.insert(args.end(), {names[0], value});
}
bool has(const Args& args, const std::string& name) {
  return std::find(args.begin(), args.end(), name) != args.end();
}

// The same command, smaller: few tokens, the smallest shape, without a GPU, and with the chat template that a reader's
// model brings. The rest is as it is shown.
Args made_small(Args args) {
  const std::string sub = args[1];
  const bool divided = has(args, "--vram-budget") || has(args, "--plan");
  const bool runs = sub == "run" || sub == "serve" || sub == "bench";
  if (sub == "run") set(args, {"-n"}, "4", true);
  if (sub == "bench") set(args, {"-p"}, "8", true), set(args, {"-n"}, "2", true), set(args, {"-r"}, "1", true);
  if (sub == "serve") set(args, {"--port"}, "0", true), set(args, {"--host"}, "127.0.0.1");
  if (sub == "chat" && !has(args, "--chat-template")) args.insert(args.end(), {"--chat-template", "chatml"});
  if (sub == "synth") set(args, {"--shape"}, "tiny");
  if (sub == "profile" && !has(args, "--show")) set(args, {"--tokens"}, "512", true);
  if (sub == "predictor" && args[2] == "fit") {
    set(args, {"--method"}, "svd", true), set(args, {"--rank"}, "16", true), set(args, {"--type"}, "f16", true);
    set(args, {"--tokens"}, "1536", true);
  }
  if (sub == "tune") {
    set(args, {"--tokens"}, "256", true), set(args, {"--validation-tokens"}, "256", true);
    set(args, {"--window"}, "64", true);
    args.push_back("--no-measure");
  }
  if (sub == "plan" && !has(args, "--gpu-bw")) {
    args.insert(args.end(), {"--gpu-bw", "1008", "--cpu-bw", "70", "--pcie-bw", "25"});
  }
  if (runs && divided && !has(args, "--isa")) args.insert(args.end(), {"--isa", "reference"});
  if (runs && !divided && !has(args, "--device")) args.insert(args.end(), {"--device", "cpu"});
  return args;
}

// What readers are asked to have: models, texts, a checkpoint. Every page has its own.
class Reader {
 public:
  Reader() {
    fs::create_directories(dir_ / "models"), fs::create_directories(dir_ / "path" / "to");
    fs::copy(demo(), dir_ / "models" / "hearth-demo.gguf");
    fs::copy(data_dir() / "zoo" / "llama-relu-gqa", dir_ / "path" / "to" / "checkpoint", fs::copy_options::recursive);
    write_tiny_model(dir_ / "model-q4_k_m.gguf", {.type = DType::q8_0});
    write_powerinfer();
    std::ofstream(dir_ / "keys.txt") << "a-key\n";
    synthesise(
        "moe.gguf --arch qwen3moe --layers 2 --n-embd 128 --n-head 4 --n-ff-exp 32 --experts 8 --experts-used 2 "
        "--n-vocab 600 --type q8_0");
    // With predictors of its own, as one of the how-tos wants it, and a text of its words.
    synthesise("model.gguf --shape tiny --type f16 --predictor-rank 32 --text words");
    std::string text = slurp(dir_ / "words");
    for (size_t at = text.find(' ', 500); at != std::string::npos; at = text.find(' ', at + 500)) {
      text.replace(at, 1, "<|endoftext|>");
    }
    for (const char* name : {"texts.txt", "text.txt"}) std::ofstream(dir_ / name) << text;
  }
  Outcome run(const Args& args, bool serves = false) const {
    const fs::path before = fs::current_path();
    fs::current_path(dir_.path());
    Program program({args.begin() + 1, args.end()});
    fs::current_path(before);
    if (serves) {  // until it listens, then as Ctrl-C ends it
      for (int i = 0; i < 600 && program.err().find("listening on http://") == std::string::npos; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
      EXPECT_NE(program.err().find("listening on http://"), std::string::npos) << program.err();
      program.signal(SIGTERM);
    }
    return program.wait();
  }
  const TempDir& dir() const { return dir_; }

 private:
  static fs::path demo() { return source_dir() / "models" / "hearth-demo.gguf"; }
  void synthesise(const std::string& flags) const {
    std::string rest;
    const Outcome o = run(words_of("hearth synth -o " + flags, rest));
    EXPECT_EQ(o.status, 0) << o.err;
  }
  void write_powerinfer() const {
    const fs::path model = dir_ / "model.powerinfer.gguf";
    write_tiny_model(model, {.transposed_down = true, .predictor_rank = 32});
    std::fstream(model, std::ios::binary | std::ios::in | std::ios::out).write("PWRI", 4);
    gguf::Writer index(dir_ / "model.powerinfer.gguf.generated.gpuidx");
    index.set("general.architecture", std::string("generic.gpu_index"));
    std::vector<int32_t> hot(96);
    hot[0] = hot[7] = 1;
    const size_t first = index.add_tensor("blk.0.gpu_idx", DType::i32, {96});
    const size_t second = index.add_tensor("blk.1.gpu_idx", DType::i32, {96});
    index.begin();
    for (const size_t t : {first, second}) index.write(t, 0, std::as_bytes(std::span(hot)));
    index.finish();
  }
  TempDir dir_;
};

// Pages whose commands run, in their order. tools/walkthrough runs those of the other tutorial (docs_test.cpp).
class ShownCommandsRun : public testing::TestWithParam<const char*> {
 protected:
  static void SetUpTestSuite() {
    cache_ = new TempDir;  // machine.json
    setenv("XDG_CACHE_HOME", cache_->path().c_str(), 1);
  }
  static void TearDownTestSuite() { delete cache_; }
  inline static TempDir* cache_ = nullptr;
};
INSTANTIATE_TEST_SUITE_P(Docs, ShownCommandsRun,
                         testing::Values("README.md", "docs/how-to/divide.md", "docs/how-to/convert.md",
                                         "docs/how-to/serve.md", "docs/how-to/thresholds.md",
                                         "docs/how-to/powerinfer.md", "docs/how-to/measure.md",
                                         "docs/tutorial/mixture.md", "docs/reference/serve.md"),
                         [](const auto& p) {
                           std::string name = p.param;
                           std::replace_if(
                               name.begin(), name.end(), [](char c) { return !std::isalnum(c); }, '_');
                           return name;
                         });

TEST_P(ShownCommandsRun, OnSmallModels) {
  const Reader reader;
  size_t ran = 0;
  for (const Shown& s : shown_commands(GetParam(), slurp(source_dir() / GetParam()))) {
    if (s.args[0] != "hearth") continue;
    if (has(s.args, "-hf")) continue;  // asks the hub
    // The tables' commands of how-to/measure.md name models of 7B.
    if (has(s.args, "7b.gguf") || has(s.args, "d03.gguf") || has(s.args, "budgets.json")) continue;
    const auto begin = std::chrono::steady_clock::now();
    const Outcome o = reader.run(made_small(s.args), s.args[1] == "serve");
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    EXPECT_EQ(o.status, 0) << s.where << ": " << s.line << "\n" << o.err;
    if (took.count() > 2) std::printf("%.1f s: %s\n", took.count(), s.line.c_str());
    ++ran;
  }
  EXPECT_GT(ran, 0u);
}

}  // namespace
}  // namespace hearth::test
