// PowerInfer's activation counts: real ones, hand-made ones, and hostile ones.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <numeric>

#include "core/error.h"
#include "offline/profile/import.h"
#include "offline/profile/torch_tensor.h"
#include "offline/profile/zip.h"
#include "support/errors.h"
#include "support/paths.h"
#include "support/random.h"

namespace hearth::offline {
namespace {

using test::message_of;

uint32_t crc32_of(const std::string& data) {
  uint32_t c = 0xFFFFFFFFu;
  for (const char b : data) {
    c ^= static_cast<uint8_t>(b);
    for (int bit = 0; bit < 8; ++bit) c = (c & 1) != 0 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
  }
  return ~c;
}

template <typename T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// A zip archive of stored members, as torch.save() writes it.
std::string make_zip(const std::vector<std::pair<std::string, std::string>>& members, uint16_t method = 0) {
  std::string out, directory;
  for (const auto& [name, data] : members) {
    const auto at = static_cast<uint32_t>(out.size());
    const auto size = static_cast<uint32_t>(data.size());
    const auto common = [&](std::string& s) {
      put<uint16_t>(s, 0), put<uint16_t>(s, method), put<uint32_t>(s, 0), put<uint32_t>(s, crc32_of(data));
      put<uint32_t>(s, size), put<uint32_t>(s, size), put<uint16_t>(s, static_cast<uint16_t>(name.size()));
      put<uint16_t>(s, 0);
    };
    put<uint32_t>(out, 0x04034b50), put<uint16_t>(out, 0), common(out);
    out += name + data;
    put<uint32_t>(directory, 0x02014b50), put<uint32_t>(directory, 0), common(directory);
    put<uint16_t>(directory, 0), put<uint16_t>(directory, 0), put<uint16_t>(directory, 0), put<uint32_t>(directory, 0);
    put<uint32_t>(directory, at);
    directory += name;
  }
  const auto at = static_cast<uint32_t>(out.size());
  out += directory;
  put<uint32_t>(out, 0x06054b50), put<uint32_t>(out, 0);
  put<uint16_t>(out, static_cast<uint16_t>(members.size())), put<uint16_t>(out, static_cast<uint16_t>(members.size()));
  put<uint32_t>(out, static_cast<uint32_t>(directory.size())), put<uint32_t>(out, at), put<uint16_t>(out, 0);
  return out;
}

struct Pickled {
  std::string type = "LongStorage", function = "torch._utils\n_rebuild_tensor_v2\n";
  int32_t elements = 5, offset = 0, size = 5, stride = 1;
  std::string before;  // instructions after PROTO
};
std::string text_op(const std::string& s) {
  std::string out = "X";
  put<uint32_t>(out, static_cast<uint32_t>(s.size()));
  return out + s;
}
std::string int_op(int32_t v) {
  std::string out = "J";
  put(out, v);
  return out;
}
std::string make_pickle(const Pickled& p) {
  return "\x80\x02" + p.before + "c" + p.function + "q\x01((" + text_op("storage") + "ctorch\n" + p.type + "\n" +
         text_op("0") + text_op("cpu") + int_op(p.elements) + "tQ" + int_op(p.offset) + int_op(p.size) + "\x85" +
         int_op(p.stride) + "\x85\x89" + "ccollections\nOrderedDict\n)RtR.";
}
template <typename T>
std::string raw(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}
std::string make_tensor(const Pickled& p, const std::string& data) {
  return make_zip({{"a/data.pkl", make_pickle(p)}, {"a/data/0", data}, {"a/version", "3\n"}});
}
std::vector<int64_t> parse(const std::string& image) {
  return read_torch_vector(std::as_bytes(std::span(image)), "test.pt");
}
const std::vector<int64_t> kFive = {7, 0, 1LL << 40, 3, 12};

TEST(ProfileImport, ReadsTensors) {
  EXPECT_EQ(parse(make_tensor({}, raw(kFive))), kFive);
  EXPECT_EQ(parse(make_tensor({.offset = 1, .size = 3}, raw(kFive))), (std::vector<int64_t>{0, 1LL << 40, 3}));
  EXPECT_EQ(parse(make_tensor({.type = "IntStorage", .elements = 2, .size = 2}, raw(std::vector<int32_t>{-1, 9}))),
            (std::vector<int64_t>{-1, 9}));
}

TEST(ProfileImport, RefusesOtherPickles) {
  const auto refused = [&](const Pickled& p, const char* part) {
    const std::string message = message_of([&] { parse(make_tensor(p, raw(kFive))); });
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  refused({.type = "FloatStorage"}, "torch.FloatStorage");
  refused({.function = "os\nsystem\n"}, "calls os.system");
  refused({.elements = 4}, "beyond its storage");
  refused({.elements = 6}, "has 6 elements and its data 5");
  refused({.offset = 1}, "beyond its storage");
  refused({.offset = -1}, "beyond its storage");
  refused({.size = -1}, "beyond its storage");
  refused({.stride = 2}, "not contiguous");
  refused({.before = "]"}, "instruction 0x5d");
  refused({.before = "0"}, "instruction 0x30");
  refused({.before = "R"}, "takes more than it made");
  refused({.before = "t"}, "lacks a mark");
  refused({.before = std::string("h\x07")}, "did not keep");
  refused({.before = std::string(5000, '(')}, "larger than any saved tensor");
  refused({.before = std::string(2000, '(')}, "more values than");
  EXPECT_NE(message_of([] { parse(make_zip({{"a/data.pkl", ""}})); }).find("ends early"), std::string::npos);
  EXPECT_NE(message_of([] { parse(make_zip({{"a/other", "x"}})); }).find("no data.pkl"), std::string::npos);
  EXPECT_NE(message_of([] {
              parse(make_zip({{"a/data.pkl", make_pickle({})}}));
            }).find("lacks the data"),
            std::string::npos);
}

TEST(ProfileImport, RefusesOtherArchives) {
  EXPECT_NE(message_of([] { parse("not a zip archive at all, but long enough"); }).find("no zip archive"),
            std::string::npos);
  EXPECT_NE(message_of([] { parse(""); }).find("no zip archive"), std::string::npos);
  EXPECT_NE(message_of([] { parse(make_zip({{"a/data.pkl", "x"}}, 8)); }).find("compressed"), std::string::npos);
  std::string flipped = make_tensor({}, raw(kFive));
  flipped[flipped.find("a/data/0") + 9] ^= 1;
  EXPECT_NE(message_of([&] { parse(flipped); }).find("checksum"), std::string::npos);
}

// Cut anywhere, or with any byte changed, it is read or refused, and never crashes.
TEST(ProfileImport, SurvivesDamage) {
  const std::string whole = make_tensor({}, raw(kFive));
  for (size_t n = 0; n < whole.size(); ++n) EXPECT_THROW(parse(whole.substr(0, n)), Error) << n;
  std::mt19937 rng(13);
  int refused = 0;
  for (size_t at = 0; at < whole.size(); ++at) {
    for (int round = 0; round < 8; ++round) {
      std::string damaged = whole;
      damaged[at] = static_cast<char>(test::random_int(rng, 0, 255));
      try {
        EXPECT_EQ(parse(damaged), kFive);  // a byte that does not matter
      } catch (const Error&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, static_cast<int>(whole.size()));
}

// The pickle's own damage, with a right checksum: no byte may lead anywhere but to a vector or a message.
TEST(ProfileImport, SurvivesHostilePickles) {
  std::mt19937 rng(17);
  const std::string pickle = make_pickle({});
  for (int round = 0; round < 20000; ++round) {
    std::string hostile = pickle;
    for (int64_t changes = test::random_int(rng, 1, 4); changes > 0; --changes) {
      const auto at = static_cast<size_t>(test::random_int(rng, 0, static_cast<int64_t>(hostile.size()) - 1));
      if (test::random_int(rng, 0, 3) == 0)
        hostile.erase(at, 1);
      else
        hostile[at] = static_cast<char>(test::random_int(rng, 0, 255));
      if (hostile.empty()) break;
    }
    try {
      EXPECT_LE(parse(make_zip({{"a/data.pkl", hostile}, {"a/data/0", raw(kFive)}})).size(), 10u);
    } catch (const Error&) {
    }
  }
}

class ProfileImportDirectory : public testing::Test {
 protected:
  void write(const std::string& name, const std::vector<int64_t>& counts) const {
    const auto n = static_cast<int32_t>(counts.size());
    std::ofstream(dir_ / name, std::ios::binary) << make_tensor({.elements = n, .size = n}, raw(counts));
  }
  model::Sidecar sidecar(size_t layers) const { return {"f", "m", 8, std::vector<int64_t>(layers, 2)}; }
  test::TempDir dir_;
};

TEST_F(ProfileImportDirectory, OrdersByNumber) {
  for (int64_t l = 0; l < 12; ++l) write(fmt::format("activation_{}.pt", l), {l, 100 + l});
  std::ofstream(dir_ / "LICENSE") << "text";
  std::ofstream(dir_ / "activation_x.pt") << "not a layer";
  model::Sidecar s = sidecar(12);
  import_powerinfer(dir_.path(), std::nullopt, s);
  for (uint64_t l = 0; l < 12; ++l) EXPECT_EQ(s.statistics.layers[l].active, (std::vector<uint64_t>{l, 100 + l}));
  EXPECT_EQ(s.statistics.tokens, 111u);  // the most active neuron is taken as always active
  EXPECT_TRUE(s.statistics.tokens_estimated);
  import_powerinfer(dir_.path(), 1000, s);
  EXPECT_EQ(s.statistics.tokens, 1000u);
  EXPECT_FALSE(s.statistics.tokens_estimated);
  EXPECT_NE(message_of([&] { import_powerinfer(dir_.path(), 50, s); }).find("--tokens 50"), std::string::npos);
}

TEST_F(ProfileImportDirectory, SaysWhatIsWrong) {
  const auto message = [&](size_t layers) {
    model::Sidecar s = sidecar(layers);
    return message_of([&] { import_powerinfer(dir_.path(), std::nullopt, s); });
  };
  EXPECT_NE(message(2).find("has no activation_N.pt"), std::string::npos);
  write("activation_0.pt", {1, 2});
  write("activation_2.pt", {1, 2});
  EXPECT_NE(message(3).find("lacks activation_1.pt"), std::string::npos);
  write("activation_1.pt", {1, -2});
  EXPECT_NE(message(3).find("-2 times"), std::string::npos);
  write("activation_1.pt", {1, 2, 3});
  EXPECT_NE(message(3).find("layer 1 has 3 neurons"), std::string::npos);
  write("activation_1.pt", {1, 2});
  EXPECT_NE(message(4).find("3 layers and the model 4"), std::string::npos);
  write("activation_01.pt", {1, 2});
  EXPECT_NE(message(3).find("layer 1 twice"), std::string::npos);
  model::Sidecar s = sidecar(1);
  EXPECT_NE(message_of([&] { import_powerinfer(dir_ / "absent", std::nullopt, s); }).find("cannot read"),
            std::string::npos);
}

TEST(ProfileImport, RealCountsOfReluLlama) {
  HEARTH_NEEDS_SHARED("profiles/relullama-7b-activation");
  const auto counts = read_powerinfer_counts(test::shared_dir() / "profiles" / "relullama-7b-activation");
  ASSERT_EQ(counts.size(), 32u);
  for (const auto& c : counts) ASSERT_EQ(c.size(), 11008u);
  // Read with Python: the first counts of layer 0, and the largest of layers 2 and 10, which a sort by name would swap.
  EXPECT_EQ(counts[0][0], 0x4928u);
  EXPECT_EQ(counts[0][1], 0x4a34u);
  EXPECT_EQ(*std::max_element(counts[2].begin(), counts[2].end()), 365325u);
  EXPECT_EQ(*std::max_element(counts[10].begin(), counts[10].end()), 365126u);
  const uint64_t sum = std::accumulate(counts[1].begin(), counts[1].end(), uint64_t{0});
  EXPECT_NEAR(static_cast<double>(sum) / 11008, 41145.976, 0.001);
}

}  // namespace
}  // namespace hearth::offline
