#include "offline/quantize/mix.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>

namespace hearth::offline {
namespace {

// Sets of mixes.
constexpr unsigned kQ2K = 1 << 0, kQ2KS = 1 << 1, kQ3KS = 1 << 2, kQ3KM = 1 << 3, kQ3KL = 1 << 4, kQ4KS = 1 << 5;
constexpr unsigned kQ4KM = 1 << 6, kQ5KS = 1 << 7, kQ5KM = 1 << 8, kQ6K = 1 << 9, kIQ4NL = 1 << 10, kIQ4XS = 1 << 11;
constexpr unsigned kExpertsMXFP4 = 1 << 12;
constexpr unsigned kAll = ~0U;

constexpr std::array kMixes = {
    Mix{"Q2_K", 10, DType::q2_k, kQ2K},
    Mix{"Q2_K_S", 21, DType::q2_k, kQ2KS},
    Mix{"Q3_K_S", 11, DType::q3_k, kQ3KS},
    Mix{"Q3_K_M", 12, DType::q3_k, kQ3KM},
    Mix{"Q3_K_L", 13, DType::q3_k, kQ3KL},
    Mix{"Q4_K_S", 14, DType::q4_k, kQ4KS},
    Mix{"Q4_K_M", 15, DType::q4_k, kQ4KM},
    Mix{"Q5_K_S", 16, DType::q5_k, kQ5KS},
    Mix{"Q5_K_M", 17, DType::q5_k, kQ5KM},
    Mix{"Q6_K", 18, DType::q6_k, kQ6K},
    Mix{"IQ4_NL", 25, DType::iq4_nl, kIQ4NL},
    Mix{"IQ4_XS", 30, DType::iq4_xs, kIQ4XS},
    Mix{"MXFP4_MOE", 38, DType::mxfp4, kExpertsMXFP4},
};

// A tensor's part, for the rules.
enum class Part { embedding, head, attn_v, attn_k, attn_output, down, experts, other };

// A rule of Falcon alone, or of every other model.
enum class Arch { any, falcon, not_falcon };

// A rule's other condition. Layer i of n counts the layers that have such a tensor.
enum class When {
  always,
  first_2,             // i < 2
  first_4,             // i < 4
  first_8th,           // i < n / 8
  first_8th_unguided,  // the same, and there is no importance matrix
  first_16th,          // i < n / 16
  more_bits,           // the first and the last eighth, and every third layer between
  shared_kv,           // 4 query heads or more share each key and value head: attn_v is small
  experts_8,           // 8 experts: attention is a small part of the model
};

struct Rule {
  unsigned mixes;
  Part part;
  DType type;
  When when = When::always;
  Arch arch = Arch::any;
};

// The first rule that fits decides; where none does, the mix's base type.
constexpr std::array kRules = {
    Rule{kExpertsMXFP4, Part::embedding, DType::q8_0},
    Rule{kExpertsMXFP4, Part::other, DType::q8_0},

    Rule{kExpertsMXFP4, Part::head, DType::q8_0},
    Rule{kAll, Part::head, DType::q8_0, When::always, Arch::falcon},
    Rule{kAll, Part::head, DType::q6_k},

    Rule{kAll, Part::attn_v, DType::q8_0, When::experts_8},
    Rule{kQ2K, Part::attn_v, DType::q4_k, When::shared_kv},
    Rule{kQ2K, Part::attn_v, DType::q3_k},
    Rule{kQ2KS, Part::attn_v, DType::q4_k, When::shared_kv},
    Rule{kQ3KM, Part::attn_v, DType::q5_k, When::first_2},
    Rule{kQ3KM, Part::attn_v, DType::q4_k},
    Rule{kQ3KL, Part::attn_v, DType::q5_k},
    Rule{kQ4KS, Part::attn_v, DType::q5_k, When::first_4},
    Rule{kQ4KM | kQ5KM, Part::attn_v, DType::q6_k, When::more_bits},
    Rule{kIQ4NL | kIQ4XS, Part::attn_v, DType::q5_k, When::shared_kv},

    Rule{kAll, Part::attn_k, DType::q8_0, When::experts_8},

    Rule{kQ3KL, Part::attn_output, DType::q4_k, When::always, Arch::falcon},
    Rule{kQ2K | kQ3KS | kQ3KM | kQ4KS | kQ4KM | kIQ4NL | kIQ4XS, Part::attn_output, DType::q5_k, When::experts_8,
         Arch::not_falcon},
    Rule{kQ3KL, Part::attn_output, DType::q3_k, When::experts_8, Arch::not_falcon},
    Rule{kQ2K, Part::attn_output, DType::q3_k, When::always, Arch::not_falcon},
    Rule{kQ3KM, Part::attn_output, DType::q4_k, When::always, Arch::not_falcon},
    Rule{kQ3KL, Part::attn_output, DType::q5_k, When::always, Arch::not_falcon},

    Rule{kQ2K, Part::down, DType::q3_k},
    Rule{kQ2KS, Part::down, DType::q4_k, When::first_8th},
    Rule{kQ3KM, Part::down, DType::q5_k, When::first_16th},
    Rule{kQ3KM, Part::down, DType::q4_k, When::more_bits, Arch::falcon},
    Rule{kQ3KM, Part::down, DType::q4_k, When::always, Arch::not_falcon},
    Rule{kQ3KL, Part::down, DType::q4_k, When::always, Arch::falcon},
    Rule{kQ3KL, Part::down, DType::q5_k},
    Rule{kQ4KS, Part::down, DType::q5_k, When::first_8th, Arch::not_falcon},
    Rule{kQ4KM, Part::down, DType::q6_k, When::first_16th, Arch::falcon},
    Rule{kQ4KM, Part::down, DType::q5_k, When::more_bits, Arch::falcon},
    Rule{kQ4KM, Part::down, DType::q6_k, When::more_bits, Arch::not_falcon},
    Rule{kQ5KM, Part::down, DType::q6_k, When::more_bits},
    Rule{kIQ4NL | kIQ4XS, Part::down, DType::q5_k, When::first_8th_unguided},
};

// The types of rows that blocks of 256 do not divide.
struct Narrower {
  DType from, to;
};
constexpr std::array kNarrower = {
    Narrower{DType::q2_k, DType::q4_0}, Narrower{DType::q3_k, DType::q4_0}, Narrower{DType::q4_k, DType::q5_0},
    Narrower{DType::q5_k, DType::q5_1}, Narrower{DType::q6_k, DType::q8_0}, Narrower{DType::iq4_xs, DType::iq4_nl},
};

bool same_name(std::string_view a, std::string_view b) {
  return std::ranges::equal(
      a, b, {}, [](unsigned char c) { return std::tolower(c); }, [](unsigned char c) { return std::tolower(c); });
}

// N of "blk.N. ...", else -1.
int64_t layer_of(std::string_view name) {
  int64_t layer = -1;
  if (name.starts_with("blk.")) std::from_chars(name.data() + 4, name.data() + name.size(), layer);
  return layer;
}

Part part_of(const MixTensor& t, const Mix& mix, bool tied) {
  const auto has = [&](std::string_view piece) { return t.name.find(piece) != std::string::npos; };
  if (t.name == "output.weight") return Part::head;
  if (t.name == "token_embd.weight" || t.name == "per_layer_token_embd.weight") {
    return tied ? Part::head : Part::embedding;
  }
  if (mix.bit == kExpertsMXFP4) return t.ne.size() > 2 && t.ne[2] > 1 ? Part::experts : Part::other;
  if (has("attn_qkv.weight") || has("attn_kv_b.weight") || has("attn_v.weight")) return Part::attn_v;
  if (has("attn_k.weight")) return Part::attn_k;
  if (has("attn_output.weight")) return Part::attn_output;
  if (has("ffn_down") && t.name.ends_with(".weight")) return Part::down;
  return Part::other;
}

bool holds(When when, int64_t i, int64_t n, const MixModel& m) {
  switch (when) {
    case When::always:
      return true;
    case When::first_2:
      return i < 2;
    case When::first_4:
      return i < 4;
    case When::first_8th:
      return i < n / 8;
    case When::first_8th_unguided:
      return i < n / 8 && !m.importance;
    case When::first_16th:
      return i < n / 16;
    case When::more_bits:
      return i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2;
    case When::shared_kv:
      return m.n_head_kv > 0 && m.n_head / m.n_head_kv >= 4;
    case When::experts_8:
      return m.n_expert == 8;
  }
  return false;
}

// The models of llama.cpp's size class "70B": eight query heads share each small attn_v.
bool is_70b(const MixModel& m) {
  return m.n_layer == 80 && (m.arch == "qwen2" || (m.arch == "llama" && m.n_head != m.n_head_kv));
}

DType type_by_rules(const Mix& mix, const MixModel& model, const MixTensor& t, Part part, int64_t i, int64_t n) {
  // llama.cpp gives such heads 8 bits, and not fitting_type()'s choice.
  if (part == Part::head && t.ne[0] % traits(mix.base).block_size != 0) return DType::q8_0;
  const Arch arch = model.arch == "falcon" ? Arch::falcon : Arch::not_falcon;
  DType type = mix.base;
  for (const Rule& r : kRules) {
    const bool fits = (r.mixes & mix.bit) != 0 && r.part == part && (r.arch == Arch::any || r.arch == arch);
    if (!fits || !holds(r.when, i, n, model)) continue;
    type = r.type;
    break;
  }
  const bool few_bits = type == DType::q3_k || type == DType::q4_k;
  return part == Part::attn_v && few_bits && is_70b(model) ? DType::q5_k : type;
}

template <class Rows, class Name>
std::string joined(const Rows& rows, Name name) {
  std::string all;
  for (const auto& row : rows) {
    if (const std::string n = name(row); !n.empty()) all += (all.empty() ? "" : ", ") + n;
  }
  return all;
}

}  // namespace

FileType FileType::pure() const {
  FileType all = *this;
  all.mix = nullptr;
  return all;
}

std::optional<FileType> parse_file_type(std::string_view name) {
  for (const Mix& m : kMixes) {
    if (same_name(name, m.name)) return FileType(m);
  }
  if (const auto type = parse_dtype(name)) return FileType(*type);
  return std::nullopt;
}

std::string mix_names() {
  return joined(kMixes, [](const Mix& m) { return std::string(m.name); });
}

MixModel MixModel::of(const gguf::File& file) {
  MixModel m;
  m.arch = file.get<std::string>("general.architecture").value_or("");
  // A number, or one for each layer.
  const auto first = [&](const std::string& key) -> int64_t {
    const gguf::Value* value = file.find(m.arch + "." + key);
    if (value == nullptr) return 0;
    if (!std::holds_alternative<gguf::Array>(*value)) return file.get<int64_t>(m.arch + "." + key).value_or(0);
    const auto all = file.require<std::vector<int32_t>>(m.arch + "." + key);
    return all.empty() ? 0 : all.front();
  };
  m.n_layer = first("block_count");
  m.n_head = first("attention.head_count"), m.n_head_kv = first("attention.head_count_kv");
  if (m.n_head_kv == 0) m.n_head_kv = m.n_head;
  m.n_expert = first("expert_count");
  return m;
}

std::vector<DType> mix_types(const FileType& type, const MixModel& model, std::span<const MixTensor> tensors) {
  std::vector<DType> types(tensors.size(), type.base);
  if (type.mix == nullptr) return types;
  const bool tied = std::ranges::none_of(tensors, [](const MixTensor& t) { return t.name == "output.weight"; });
  std::vector<int64_t> v_layers;  // of every attn_v: hybrid models have fewer than layers
  for (const MixTensor& t : tensors) {
    if (part_of(t, *type.mix, tied) == Part::attn_v) v_layers.push_back(layer_of(t.name));
  }
  for (size_t k = 0; k < tensors.size(); ++k) {
    const Part part = part_of(tensors[k], *type.mix, tied);
    int64_t i = layer_of(tensors[k].name), n = model.n_layer;
    if (part == Part::attn_v) {
      n = static_cast<int64_t>(v_layers.size());
      i = std::ranges::count_if(v_layers, [&](int64_t other) { return other < i; });
    }
    types[k] = type_by_rules(*type.mix, model, tensors[k], part, i, n);
  }
  return types;
}

DType fitting_type(DType wanted, int64_t cols, DType source) {
  const auto fits = [&](DType t) { return cols % traits(t).block_size == 0; };
  if (fits(wanted)) return wanted;
  for (const Narrower& n : kNarrower) {
    if (n.from == wanted && fits(n.to)) return n.to;
  }
  return source == DType::bf16 ? DType::bf16 : DType::f16;
}

}  // namespace hearth::offline
