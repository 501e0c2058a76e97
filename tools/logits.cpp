// `hearth logits`: what the model thinks of the next token, number by number.
#include <algorithm>
#include <memory>
#include <numeric>

#include "core/error.h"
#include "tools/commands.h"
#include "tools/common.h"
#include "tools/output.h"
#include "tools/prompt.h"

namespace hearth::tools {
namespace {

struct LogitsOptions {
  ModelOptions model;
  PromptOptions prompt;
  std::vector<int32_t> ids;
  int64_t top = 10;
  bool all = false;
  bool all_positions = false;
  bool json = false;
};

// The ids of the n largest logits, largest first, equal ones by id. NaN comes last.
std::vector<int32_t> top_ids(std::span<const float> logits, int64_t n) {
  std::vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto key = [&](int32_t id) {
    const float x = logits[static_cast<size_t>(id)];
    return std::isnan(x) ? -INFINITY : x;
  };
  const auto count = std::min<int64_t>(n, static_cast<int64_t>(ids.size()));
  std::partial_sort(ids.begin(), ids.begin() + count, ids.end(),
                    [&](int32_t a, int32_t b) { return key(a) != key(b) ? key(a) > key(b) : a < b; });
  ids.resize(static_cast<size_t>(count));
  return ids;
}

// Prints the positions one by one as they are evaluated: every logit of a long text would not fit into memory.
class Printer {
 public:
  Printer(Session& session, const LogitsOptions& options, const std::vector<int32_t>& ids)
      : session_(session), options_(options), ids_(ids) {
    if (!options_.json) return;
    write_out("{\"ids\":" + nlohmann::json(ids_).dump() + (options_.all_positions ? ",\"positions\":[" : ","));
  }

  void position(int64_t i, std::span<const float> logits) {
    const std::vector<int32_t> top = top_ids(logits, options_.all ? static_cast<int64_t>(logits.size()) : options_.top);
    options_.json ? position_json(i, top, logits) : position_text(i, top, logits);
  }

  void finish() {
    if (options_.json) write_out(options_.all_positions ? "]}\n" : "}\n");
    flush_out();
  }

 private:
  void position_json(int64_t i, const std::vector<int32_t>& top, std::span<const float> logits) {
    nlohmann::json list = nlohmann::json::array();
    for (const int32_t id : top) {
      list.push_back(
          {{"id", id}, {"logit", json_number(logits[static_cast<size_t>(id)])}, {"text", session_.piece(id)}});
    }
    const std::string text = list.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    if (!options_.all_positions) return write_out("\"top\":" + text);
    write_out(fmt::format("{}{{\"position\":{},\"id\":{},\"top\":{}}}", i > 0 ? ",\n" : "\n", i,
                          ids_[static_cast<size_t>(i)], text));
  }

  void position_text(int64_t i, const std::vector<int32_t>& top, std::span<const float> logits) {
    write_out(fmt::format("position {}, after {} {}\n", i, ids_[static_cast<size_t>(i)],
                          quoted(ids_[static_cast<size_t>(i)])));
    for (const int32_t id : top) {
      write_out(fmt::format("{:>8} {:>12.5f} {}\n", id, logits[static_cast<size_t>(id)], quoted(id)));
    }
  }

  std::string quoted(int32_t id) {
    return nlohmann::json(session_.piece(id)).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }

  Session& session_;
  const LogitsOptions& options_;
  const std::vector<int32_t>& ids_;
};

void logits(const LogitsOptions& o) {
  Session session(o.model);
  std::vector<int32_t> ids = o.ids;
  if (ids.empty()) ids = session.require_tokenizer("logits without --ids").encode(read_prompt(o.prompt));
  if (ids.empty()) fail("there is no token to evaluate; give --ids 1,2,3 or a prompt that is not empty");
  Printer printer(session, o, ids);
  if (o.all_positions || session.approximates()) {
    const auto last = static_cast<int64_t>(ids.size()) - 1;
    session.eval_all(ids, [&](int64_t i, std::span<const float> row) {
      if (o.all_positions || i == last) printer.position(i, row);
    });
  } else {
    printer.position(static_cast<int64_t>(ids.size()) - 1, session.engine().eval(session.text(), ids));
  }
  printer.finish();
}

}  // namespace

void register_logits(CLI::App& app) {
  auto o = std::make_shared<LogitsOptions>();
  CLI::App* sub = app.add_subcommand("logits", "Print the logits of the next token");
  add_prompt_options(*sub, o->prompt);
  sub->add_option("--ids", o->ids, "Token ids instead of a text, separated by commas")
      ->delimiter(',')
      ->type_name("ID,ID,...")
      ->group("Prompt")
      ->excludes("--prompt")
      ->excludes("--file");
  auto* top = sub->add_option("--top", o->top, "Print the K largest logits")
                  ->check(CLI::PositiveNumber)
                  ->type_name("K")
                  ->capture_default_str()
                  ->group("Output");
  sub->add_flag("--all", o->all, "Print every logit, the largest first")->excludes(top)->group("Output");
  sub->add_flag("--all-positions", o->all_positions, "For every position, not just the last one")->group("Output");
  sub->add_flag("--json", o->json,
                "Print JSON: {\"ids\":[...],\"top\":[{\"id\":...,\"logit\":...,\"text\":...}]}; with --all-positions "
                "{\"ids\":[...],\"positions\":[{\"position\":...,\"id\":...,\"top\":[...]}]}")
      ->group("Output");
  add_model_options(*sub, o->model);
  sub->footer("Example: hearth logits -m model.gguf --ids 943,547,259,500 --top 5 --json");
  sub->callback([o] { logits(*o); });
}

}  // namespace hearth::tools
