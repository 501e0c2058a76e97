#include "offline/quantize/plan.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <regex>
#include <tuple>

#include "core/error.h"
#include "model/config.h"

namespace hearth::offline {
namespace {

constexpr std::string_view kDown = ".ffn_down", kDownT = ".ffn_down_t", kWeight = ".weight";
constexpr std::string_view kDownTBias = "ffn_down_t.bias", kDownBias = "ffn_down.bias";
constexpr std::string_view kEmbedding = "token_embd.weight", kHead = "output.weight";

// Matrices that stay what they are: small ones on which much depends, and positions, of which a token adds one row.
constexpr std::array<std::string_view, 9> kKept = {"position_embd.weight",
                                                   "token_types.weight",
                                                   "ffn_gate_inp.weight",
                                                   "ffn_gate_inp_shexp.weight",
                                                   "attn_rel_b.weight",
                                                   "ssm_conv1d",
                                                   "per_layer_model_proj",
                                                   "altup",
                                                   "laurel"};

// What follows "blk.N.ffn_down" or "blk.N.ffn_down_t" in the name of a down projection: nothing, or which experts'.
std::optional<std::string_view> down_suffix(std::string_view name, std::string_view down) {
  const size_t at = name.find(down);
  if (at == std::string_view::npos || !name.ends_with(kWeight)) return std::nullopt;
  const std::string_view suffix = name.substr(at + down.size(), name.size() - kWeight.size() - at - down.size());
  const bool one_expert =
      suffix.size() > 1 && suffix[0] == '.' && suffix.find_first_not_of("0123456789", 1) == std::string_view::npos;
  if (suffix.empty() || suffix == "_exps" || suffix == "_shexp" || one_expert) return suffix;
  return std::nullopt;
}
std::string renamed_down(std::string_view name, std::string_view from, std::string_view to) {
  return std::string(name.substr(0, name.find(from))).append(to).append(*down_suffix(name, from)).append(kWeight);
}

// A matrix whose rows are converted; the others (norms, biases, tables of the RoPE) hold few values that matter much.
bool is_matrix(const gguf::TensorInfo& t) {
  return t.ne.size() >= 2 && t.name.ends_with(".weight") && t.name.find("_norm") == std::string::npos;
}
bool is_kept(std::string_view name) {
  return std::ranges::any_of(kKept, [&](std::string_view piece) { return name.find(piece) != std::string_view::npos; });
}

bool is_predictor(std::string_view name) {
  return name.starts_with("blk.") && (name.ends_with(".fc1.weight") || name.ends_with(".fc2.weight"));
}
bool below_8_bits(DType type) {
  return traits(type).block_bytes < traits(type).block_size;
}

// TensorTypeRule, compiled.
class TypeRules {
 public:
  explicit TypeRules(const std::vector<TensorTypeRule>& rules) {
    for (const TensorTypeRule& rule : rules) {
      try {
        rules_.push_back({rule, std::regex(rule.pattern)});
      } catch (const std::regex_error& e) {
        fail("--tensor-type '{}' is no valid regular expression: {}", rule.pattern, e.what());
      }
    }
  }
  // A rule also counts as used where an earlier one decides.
  std::optional<DType> type_of(const std::string& in_name, const std::string& out_name) {
    std::optional<DType> type;
    for (Compiled& c : rules_) {
      if (!std::regex_search(in_name, c.regex) && !std::regex_search(out_name, c.regex)) continue;
      c.used = true;
      if (!type) type = c.rule.type;
    }
    return type;
  }
  void check_all_used(const gguf::File& file) const {
    for (const Compiled& c : rules_) {
      if (c.used) continue;
      fail("--tensor-type '{}' matches no matrix of '{}'; `hearth inspect` lists their names", c.rule.pattern,
           file.path().string());
    }
  }

 private:
  struct Compiled {
    TensorTypeRule rule;
    std::regex regex;
    bool used = false;
  };
  std::vector<Compiled> rules_;
};

class Planner {
 public:
  Planner(const gguf::File& file, const QuantizeOptions& options)
      : file_(file), options_(options), type_rules_(options.tensor_types) {}

  QuantizePlan plan() && {
    if (options_.head_type && file_.find_tensor(kHead) == nullptr) {
      fail("'{}' has no output.weight: its head is tied to the embedding, use --embd-type for both",
           file_.path().string());
    }
    if (!options_.importance.empty()) plan_.importance = Importance::read(options_.importance);
    choose_down_layout();
    for (const gguf::TensorInfo& t : file_.tensors()) plan_.jobs.push_back(in_layout(t));
    choose_types();
    for (Job& job : plan_.jobs) {
      fit(job);
      if (!job.copy()) check_convertible(job);
      if (plan_.importance) weigh(job);
    }
    report_fallbacks();
    check_importance_used();
    return std::move(plan_);
  }

 private:
  void choose_down_layout() {
    const bool already =
        std::ranges::any_of(file_.tensors(), [](const gguf::TensorInfo& t) { return is_transposed_down(t.name); });
    if (options_.down != DownLayout::automatic) {
      plan_.down_transposed = options_.down == DownLayout::transposed;
      plan_.down_reason = "asked for";
    } else if (already) {
      plan_.down_transposed = true;
      plan_.down_reason = "as in the input";
    } else {
      try {
        const model::FfnDescription ffn = model::describe_ffn(file_);
        // Prompts on the CPU are faster with experts' down projections as files store them, and GPUs need them so.
        const bool experts = std::ranges::any_of(file_.tensors(), [](const gguf::TensorInfo& t) {
          return !down_suffix(t.name, kDown).value_or("").empty();
        });
        plan_.down_transposed = ffn.sparse() && !experts;
        plan_.down_reason = experts ? "the FFNs are experts" : fmt::format("the FFN is {}: {}", ffn.family, ffn.reason);
      } catch (const Error& e) {
        plan_.down_reason = fmt::format("the FFN's kind is unknown: {}", e.what());
      }
    }
  }

  // The output's tensor, but for its type.
  Job in_layout(const gguf::TensorInfo& t) const {
    Job job{.in = &t, .name = t.name, .type = t.traits->type, .ne = t.ne};
    const bool transposed = plan_.down_transposed;
    if (is_down(t.name) && t.ne.size() >= 2 && is_transposed_down(t.name) != transposed) {
      job.name = transposed ? renamed_down(t.name, kDown, kDownT) : renamed_down(t.name, kDownT, kDown);
      job.transpose = true;
      std::swap(job.ne[0], job.ne[1]);
    } else if (!transposed && t.name.ends_with(kDownTBias)) {
      job.name = t.name.substr(0, t.name.size() - kDownTBias.size()).append(kDownBias);
    }
    return job;
  }

  void choose_types() {
    MixModel model = MixModel::of(file_);
    // The rules ask because of the down matrices, and transposed ones have none.
    model.importance = plan_.importance.has_value() && !plan_.down_transposed;
    std::vector<MixTensor> tensors;
    for (const Job& job : plan_.jobs) tensors.push_back({job.name, job.ne});
    const std::vector<DType> by_mix = mix_types(options_.type, model, tensors);
    for (size_t i = 0; i < plan_.jobs.size(); ++i) plan_.jobs[i].type = wanted_type(plan_.jobs[i], by_mix[i]);
    type_rules_.check_all_used(file_);
  }

  DType wanted_type(const Job& job, DType by_mix) {
    const DTypeTraits& source = *job.in->traits;
    // Vectors stay exact; integers (indices) and types hearth cannot read stay what they are.
    if (!is_matrix(*job.in)) return source.computable() ? DType::f32 : source.type;
    if (is_kept(job.name)) return source.type;
    const std::optional<DType> by_rule = type_rules_.type_of(job.in->name, job.name);
    std::optional<DType> by_flag;
    if (job.name == kEmbedding) by_flag = options_.embedding_type;
    if (job.name == kHead) by_flag = options_.head_type;
    if (is_predictor(job.name)) by_flag = options_.predictor_type;
    if (by_flag || by_rule) return by_flag ? *by_flag : *by_rule;
    if (!is_predictor(job.name) || !below_8_bits(by_mix)) return by_mix;
    return source.quantized() && below_8_bits(source.type) ? source.type : DType::q8_0;
  }

  void fit(Job& job) {
    const DType fitting = fitting_type(job.type, job.ne[0], job.in->traits->type);
    if (fitting == job.type) return;
    Fallback& f = fallbacks_[{job.type, fitting, job.ne[0]}];
    if (f.count++ == 0) f.first = job.name;
    job.type = fitting;
  }

  void report_fallbacks() {
    for (const auto& [key, f] : fallbacks_) {
      const auto& [wanted, fitting, cols] = key;
      const std::string what = f.count == 1 ? f.first : fmt::format("{} matrices ({}, ...)", f.count, f.first);
      plan_.fallbacks.push_back(fmt::format("{} in {}: rows of {} are no multiple of {}'s {}", what,
                                            traits(fitting).name, cols, traits(wanted).name,
                                            traits(wanted).block_size));
    }
  }

  // Throws Error when the input's values cannot or may not be converted.
  void check_convertible(const Job& job) const {
    const DTypeTraits& from = *job.in->traits;
    const char* to = traits(job.type).name;
    if (!from.computable()) {
      fail("'{}': tensor '{}' is {}, which hearth cannot convert to {}; start from an f32, f16 or bf16 file",
           file_.path().string(), job.in->name, from.name, to);
    }
    if (!from.quantized() || options_.allow_requantize) return;
    if (job.transpose) {
      fail(
          "'{}': writing the {} tensor '{}' {} needs requantising; pass {} to keep its layout, --allow-requantize to "
          "accept the loss, or start from an f16 file",
          file_.path().string(), from.name, job.in->name, is_transposed_down(job.name) ? "transposed" : "untransposed",
          is_transposed_down(job.name) ? "--standard-down" : "no --standard-down");
    }
    fail(
        "'{}': tensor '{}' is quantised already ({}); pass --allow-requantize to convert it to {} all the same, or "
        "start from an f16 file",
        file_.path().string(), job.in->name, from.name, to);
  }

  // The columns' importance, where the type makes use of it. A transposed down matrix has none (QuantizeOptions).
  void weigh(Job& job) {
    if (job.copy() || !is_matrix(*job.in) || is_transposed_down(job.name)) return;
    if (traits(job.type).from_float_weighted == nullptr) return;
    job.importance = plan_.importance->means(job.name);
    const auto expected = static_cast<size_t>(job.n_rows() / job.ne[1] * job.ne[0]);
    if (job.importance.empty()) {
      // Nobody collects it of embeddings, which are looked up, nor by default of heads; nor of predictors.
      if (job.name != kEmbedding && job.name != kHead && !is_predictor(job.name)) plan_.unweighted.push_back(job.name);
    } else if (job.importance.size() != expected) {
      fail("'{}' has {} values for '{}', expected {}: it is of another model", options_.importance.string(),
           job.importance.size(), job.name, expected);
    }
  }

  void check_importance_used() const {
    const bool used = std::ranges::any_of(plan_.jobs, [](const Job& job) { return !job.importance.empty(); });
    if (used || plan_.unweighted.empty()) return;
    fail("'{}' knows none of the matrices of '{}' ({}, ...): it is of another model", options_.importance.string(),
         file_.path().string(), plan_.unweighted.front());
  }

  struct Fallback {
    int count = 0;
    std::string first;
  };

  const gguf::File& file_;
  const QuantizeOptions& options_;
  TypeRules type_rules_;
  std::map<std::tuple<DType, DType, int64_t>, Fallback> fallbacks_;  // by wanted type, fitting type, length of rows
  QuantizePlan plan_;
};

}  // namespace

bool is_transposed_down(std::string_view name) {
  return down_suffix(name, kDownT).has_value();
}
bool is_down(std::string_view name) {
  return down_suffix(name, kDown).has_value() || is_transposed_down(name);
}

QuantizePlan plan_quantization(const gguf::File& file, const QuantizeOptions& options) {
  return Planner(file, options).plan();
}

}  // namespace hearth::offline
