// hearth inspect FILE: what is in a GGUF file, and what hearth takes its FFN to be.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "core/error.h"
#include "gguf/gguf.h"
#include "model/config.h"
#include "offline/quantize/plan.h"
#include "tools/commands.h"

namespace hearth::tools {
namespace {

using nlohmann::ordered_json;

constexpr size_t kShownElements = 4;  // of an array
constexpr size_t kShownBytes = 72;    // of a string
constexpr size_t kArrayElementBytes = 24;

struct Options {
  std::string path;
  bool json = false;
};

// A file's string for a terminal: one line, no control characters, cut at `limit` bytes (not inside a UTF-8 character).
std::string printable(std::string_view s, size_t limit) {
  std::string out;
  for (size_t i = 0; i < s.size(); ++i) {
    const auto c = static_cast<unsigned char>(s[i]);
    const bool starts_character = (c & 0xC0) != 0x80;
    if (i >= limit && starts_character) return out + "…";
    if (c == '\n')
      out += "\\n";
    else if (c == '\t')
      out += "\\t";
    else if (c < 0x20 || c == 0x7F)
      out += fmt::format("\\x{:02x}", c);
    else
      out += s[i];
  }
  return out;
}

template <typename T>
std::string scalar_text(const T& v, size_t limit) {
  if constexpr (std::is_same_v<T, std::string>)
    return '"' + printable(v, limit) + '"';
  else
    return fmt::format("{}", v);
}

template <typename T>
std::string elements_text(const std::vector<T>& elements) {
  std::string text;
  for (size_t i = 0; i < std::min(elements.size(), kShownElements); ++i) {
    text += (i > 0 ? ", " : "") + scalar_text(static_cast<const T&>(elements[i]), kArrayElementBytes);
  }
  return text + (elements.size() > kShownElements ? ", …" : "");
}

std::string value_text(const gguf::Value& value) {
  return std::visit(
      [](const auto& v) -> std::string {
        if constexpr (std::is_same_v<std::remove_cvref_t<decltype(v)>, gguf::Array>) {
          return fmt::format("[{}] ({} elements)", std::visit([](const auto& e) { return elements_text(e); }, v),
                             gguf::size(v));
        } else {
          return scalar_text(v, kShownBytes);
        }
      },
      value);
}

std::string type_text(const gguf::Value& value) {
  const auto* array = std::get_if<gguf::Array>(&value);
  if (array == nullptr) return gguf::to_string(gguf::type_of(value));
  return fmt::format("{}[]", gguf::to_string(gguf::element_type(*array)));
}

// JSON has no infinities and no NaN: null stands for them.
template <typename T>
ordered_json scalar_json(const T& v) {
  if constexpr (std::is_floating_point_v<T>) {
    if (!std::isfinite(v)) return nullptr;
  }
  return v;
}

ordered_json value_json(const gguf::KeyValue& kv) {
  ordered_json j{{"key", kv.key}, {"type", type_text(kv.value)}};
  std::visit(
      [&](const auto& v) {
        if constexpr (std::is_same_v<std::remove_cvref_t<decltype(v)>, gguf::Array>) {
          j["count"] = gguf::size(v);
          ordered_json first = ordered_json::array();
          std::visit(
              [&](const auto& elements) {
                using T = typename std::remove_cvref_t<decltype(elements)>::value_type;
                for (size_t i = 0; i < std::min(elements.size(), kShownElements); ++i) {
                  first.push_back(scalar_json(static_cast<const T&>(elements[i])));
                }
              },
              v);
          j["first"] = std::move(first);
        } else {
          j["value"] = scalar_json(v);
        }
      },
      kv.value);
  return j;
}

struct TypeUse {
  int tensors = 0;
  uint64_t bytes = 0, elements = 0;
};

std::map<std::string, TypeUse> types_used(const gguf::File& file) {
  std::map<std::string, TypeUse> use;
  for (const gguf::TensorInfo& t : file.tensors()) {
    TypeUse& u = use[t.traits->name];
    ++u.tensors;
    u.bytes += t.bytes;
    u.elements += static_cast<uint64_t>(t.cols()) * static_cast<uint64_t>(t.rows());
  }
  return use;
}

// The FFN's description, or why there is none.
struct Ffn {
  model::FfnDescription description;
  model::ExpertsDescription experts = {};
  std::string unknown = {};
};

Ffn ffn_of(const gguf::File& file) {
  const bool has_ffn = std::any_of(file.tensors().begin(), file.tensors().end(),
                                   [](const gguf::TensorInfo& t) { return t.name.find(".ffn_") != std::string::npos; });
  if (!has_ffn) return {.description = {}, .unknown = "the file has no FFN tensors"};
  try {
    return {model::describe_ffn(file), model::read_experts(file, file.require<std::string>("general.architecture"))};
  } catch (const Error& e) {
    return {.description = {}, .unknown = e.what()};
  }
}

const char* gating_name(Gating gating) {
  switch (gating) {
    case Gating::softmax:
      return "softmax";
    case Gating::sigmoid:
      return "sigmoid";
    case Gating::selected_softmax:
      return "softmax of the selected";
  }
  return "?";
}

ordered_json experts_json(const model::ExpertsDescription& e) {
  const Routing& r = e.routing;
  return {{"count", r.n_expert},
          {"used", r.n_used},
          {"n_ff", e.n_ff},
          {"n_ff_shared", e.n_ff_shared},
          {"dense_layers", e.n_dense_layers},
          {"gating", gating_name(r.gating)},
          {"normalized", r.normalize},
          {"scale", r.scale},
          {"groups", r.n_groups},
          {"groups_used", r.n_groups_used}};
}

std::string experts_text(const model::ExpertsDescription& e) {
  const Routing& r = e.routing;
  std::string text = fmt::format("{} of {} neurons each, {} used; weights by {}{}", r.n_expert, e.n_ff, r.n_used,
                                 gating_name(r.gating), r.normalize ? ", normalised" : "");
  if (r.scale != 1.0f) text += fmt::format(", times {}", r.scale);
  if (r.n_groups > 1) text += fmt::format("; from {} of {} groups", r.n_groups_used, r.n_groups);
  if (e.n_ff_shared > 0) text += fmt::format("; a shared one of {} neurons", e.n_ff_shared);
  if (e.n_dense_layers > 0) text += fmt::format("; the first {} layer(s) are dense", e.n_dense_layers);
  return text;
}

const char* down_layout(const gguf::File& file) {
  bool standard = false, transposed = false;
  for (const gguf::TensorInfo& t : file.tensors()) {
    if (offline::is_down(t.name)) (offline::is_transposed_down(t.name) ? transposed : standard) = true;
  }
  if (standard && transposed) return "mixed";
  return transposed ? "transposed" : standard ? "standard" : "none";
}

void print_json(const gguf::File& file) {
  ordered_json j;
  j["file"] = file.path().string();
  j["format"] = file.powerinfer() ? "PWRI" : "GGUF";
  j["version"] = file.version();
  j["alignment"] = file.alignment();
  j["parts"] = file.part_paths().size();
  j["file_bytes"] = file.total_bytes();
  j["metadata"] = ordered_json::array();
  for (const gguf::KeyValue& kv : file.metadata()) j["metadata"].push_back(value_json(kv));
  j["tensors"] = ordered_json::array();
  for (const gguf::TensorInfo& t : file.tensors()) {
    j["tensors"].push_back({{"name", t.name},
                            {"type", t.traits->name},
                            {"ne", t.ne},
                            {"bytes", t.bytes},
                            {"part", t.file},
                            {"offset", t.offset}});
  }
  uint64_t total = 0;
  j["types"] = ordered_json::object();
  for (const auto& [type, u] : types_used(file)) {
    j["types"][type] = {{"tensors", u.tensors}, {"elements", u.elements}, {"bytes", u.bytes}};
    total += u.bytes;
  }
  j["tensor_bytes"] = total;
  const Ffn ffn = ffn_of(file);
  if (ffn.unknown.empty()) {
    j["ffn"] = {{"family", ffn.description.family},
                {"activation", ffn.description.activation},
                {"reason", ffn.description.reason},
                {"down", down_layout(file)}};
    if (ffn.experts) j["experts"] = experts_json(ffn.experts);
  } else {
    j["ffn"] = {{"family", nullptr}, {"reason", ffn.unknown}};
  }
  // Strings of a file need not be UTF-8; JSON must be.
  fmt::print("{}\n", j.dump(2, ' ', false, ordered_json::error_handler_t::replace));
}

void print_text(const gguf::File& file) {
  constexpr double mib = 1 << 20;
  fmt::print("{}: {} v{}, {} part(s), {:.1f} MiB, alignment {}\n", file.path().string(),
             file.powerinfer() ? "PWRI" : "GGUF", file.version(), file.part_paths().size(),
             static_cast<double>(file.total_bytes()) / mib, file.alignment());
  fmt::print("\nmetadata ({} keys)\n", file.metadata().size());
  for (const gguf::KeyValue& kv : file.metadata()) {
    fmt::print("  {:<42} {:<9} {}\n", kv.key, type_text(kv.value), value_text(kv.value));
  }
  fmt::print("\ntensors ({}), [columns, rows]\n", file.tensors().size());
  for (const gguf::TensorInfo& t : file.tensors()) {
    fmt::print("  {:<42} {:<9} {:<20} {:>14} bytes\n", t.name, t.traits->name,
               fmt::format("[{}]", fmt::join(t.ne, ", ")), t.bytes);
  }
  fmt::print("\ntypes\n");
  TypeUse total;
  for (const auto& [type, u] : types_used(file)) {
    fmt::print("  {:<9} {:>6} tensors {:>14} elements {:>14} bytes\n", type, u.tensors, u.elements, u.bytes);
    total.tensors += u.tensors;
    total.elements += u.elements;
    total.bytes += u.bytes;
  }
  fmt::print("  {:<9} {:>6} tensors {:>14} elements {:>14} bytes\n", "total", total.tensors, total.elements,
             total.bytes);
  const Ffn ffn = ffn_of(file);
  if (ffn.unknown.empty()) {
    fmt::print("\nFFN: {}, activation {}, ffn_down {}\n  because {}\n", ffn.description.family,
               ffn.description.activation, down_layout(file), ffn.description.reason);
    if (ffn.experts) fmt::print("experts: {}\n", experts_text(ffn.experts));
  } else {
    fmt::print("\nFFN: unknown\n  because {}\n", ffn.unknown);
  }
}

}  // namespace

void register_inspect(CLI::App& app) {
  const auto o = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("inspect", "Show a GGUF file's metadata, tensors, and FFN family");
  sub->add_option("FILE", o->path, "GGUF file (any part of a split one)")->required()->type_name("FILE");
  sub->add_flag("--json", o->json, "print JSON; arrays are cut to their first elements");
  sub->footer("Example: hearth inspect model.gguf --json");
  sub->callback([o] {
    const gguf::File file = gguf::File::open(o->path);
    o->json ? print_json(file) : print_text(file);
  });
}

}  // namespace hearth::tools
