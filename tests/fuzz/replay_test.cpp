// Runs the fuzz targets without a fuzzer: each input of the corpus as it is, cut, and with seeded mutations.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <random>

#include "core/error.h"
#include "fuzz/target.h"
#include "support/paths.h"
#include "support/random.h"

namespace hearth {
namespace {

constexpr int kMutations = 200;

std::vector<std::string> corpus(const std::string& target) {
  std::vector<std::string> inputs;
  for (const auto& entry :
       std::filesystem::directory_iterator(test::source_dir() / "tests" / "fuzz" / "corpus" / target)) {
    std::ifstream in(entry.path(), std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  std::sort(inputs.begin(), inputs.end());  // the order of a directory is not defined
  return inputs;
}

// True when the target accepted the input, false when it threw Error; anything else fails the test.
bool accepts(fuzz::Target target, const std::string& input) {
  try {
    target(std::as_bytes(std::span(input)));
    return true;
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
    return false;
  }
}

std::string mutate(std::string s, std::mt19937& rng) {
  for (int64_t n = test::random_int(rng, 1, 4); n > 0 && !s.empty(); --n) {
    const auto at = static_cast<size_t>(test::random_int(rng, 0, static_cast<int64_t>(s.size()) - 1));
    switch (test::random_int(rng, 0, 3)) {
      case 0:
        s[at] = static_cast<char>(s[at] ^ (1 << test::random_int(rng, 0, 7)));
        break;
      case 1:
        s[at] = static_cast<char>(test::random_int(rng, 0, 255));
        break;
      case 2:
        s.resize(at);
        break;
      default:
        s.insert(at, s.substr(at, static_cast<size_t>(test::random_int(rng, 1, 16))));
        break;
    }
  }
  return s;
}

class FuzzReplay : public testing::TestWithParam<std::string> {};

TEST_P(FuzzReplay, CorpusAndItsMutations) {
  const fuzz::Target target = fuzz::targets().at(GetParam());
  const std::vector<std::string> inputs = corpus(GetParam());
  ASSERT_FALSE(inputs.empty()) << "tests/fuzz/corpus/" << GetParam() << " has no inputs";
  int accepted = 0;
  std::mt19937 rng(1);
  for (const std::string& input : inputs) {
    accepted += accepts(target, input) ? 1 : 0;
    for (int i = 0; i < kMutations; ++i) accepts(target, mutate(input, rng));
  }
  EXPECT_GT(accepted, 0) << "a corpus needs sound inputs too: mutations of those reach deepest";
}

std::vector<std::string> target_names() {
  std::vector<std::string> names;
  for (const auto& [name, target] : fuzz::targets()) names.push_back(name);
  return names;
}

// Registrations run before main(), in any order: generators are evaluated later, at InitGoogleTest.
INSTANTIATE_TEST_SUITE_P(Targets, FuzzReplay, testing::ValuesIn(target_names()),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace hearth
