// `hearth perplexity`: how well a model predicts a text.
#include <cstring>
#include <filesystem>
#include <memory>

#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "offline/tune/metrics.h"
#include "tools/commands.h"
#include "tools/common.h"
#include "tools/figures.h"
#include "tools/output.h"
#include "tools/progress.h"

namespace hearth::tools {
namespace {

using offline::NllMean;
using offline::Window;

struct PerplexityOptions {
  ModelOptions model;
  std::optional<std::string> file, ids_file, ids_type;
  int64_t window = 0;  // 0: the context
  int64_t stride = 0;  // 0: the window
  bool json = false;
};

template <typename T>
std::vector<int32_t> read_ids(const std::string& path) {
  const MappedFile file(path);
  const auto bytes = file.bytes();
  if (bytes.size() % sizeof(T) != 0) {
    fail("'{}' has {} bytes, which is no multiple of {}; is --ids-type u{} right?", path, bytes.size(), sizeof(T),
         8 * sizeof(T));
  }
  std::vector<int32_t> ids(bytes.size() / sizeof(T));
  for (size_t i = 0; i < ids.size(); ++i) {
    T id;
    std::memcpy(&id, bytes.data() + i * sizeof(T), sizeof(T));
    if (static_cast<uint64_t>(id) > INT32_MAX) fail("'{}': token id {} at {} is out of range", path, id, i);
    ids[i] = static_cast<int32_t>(id);
  }
  return ids;
}

std::vector<int32_t> read_ids(const PerplexityOptions& o) {
  const bool u32 = o.ids_type ? *o.ids_type == "u32" : std::filesystem::path(*o.ids_file).extension() == ".u32";
  return u32 ? read_ids<uint32_t>(*o.ids_file) : read_ids<uint16_t>(*o.ids_file);
}

void check_ids(const std::vector<int32_t>& ids, int64_t n_vocab) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= n_vocab) fail("token id {} at {} is out of range, expected 0 to {}", ids[i], i, n_vocab - 1);
  }
}

// Evaluates one window from an empty context and adds its targets' likelihoods.
void score_window(Session& session, std::span<const int32_t> ids, std::optional<int32_t> bos, const Window& w,
                  NllMean& mean) {
  std::vector<int32_t> inputs;
  if (bos) inputs.push_back(*bos);
  const auto text = ids.subspan(static_cast<size_t>(w.begin), static_cast<size_t>(w.n_inputs));
  inputs.insert(inputs.end(), text.begin(), text.end());
  const int64_t skipped = static_cast<int64_t>(inputs.size()) - w.n_targets;  // scored by an earlier window
  session.text().truncate(0);
  session.eval_all(inputs, [&](int64_t i, std::span<const float> logits) {
    if (i < skipped) return;
    mean.add(offline::negative_log_likelihood(logits, ids[static_cast<size_t>(w.first_target + i - skipped)]));
  });
}

void perplexity(PerplexityOptions o) {
  if (!o.file && !o.ids_file) fail("there is nothing to evaluate; give a text with -f or token ids with --ids-file");
  if (o.window > 0 && o.model.n_ctx == 0) o.model.n_ctx = o.window;  // a longer context would stay empty
  Session session(o.model);
  if (session.approximates())
    log::info("large batches leave no neurons out, so tokens are evaluated a few at a time; --sparsity off is faster");
  engine::Engine& engine = session.engine();
  std::vector<int32_t> ids;
  std::optional<int32_t> bos;
  if (o.ids_file) {
    ids = read_ids(o);
  } else {
    const text::Tokenizer& tokenizer = session.require_tokenizer("perplexity -f");
    ids = tokenizer.encode(read_text_file(*o.file), {.add_special = false});
    if (tokenizer.add_bos()) bos = tokenizer.bos();
  }
  check_ids(ids, engine.config().n_vocab);
  const int64_t window = o.window > 0 ? o.window : engine.n_ctx();
  if (window > engine.n_ctx()) fail("--window {} is longer than the context of {}", window, engine.n_ctx());
  const int64_t stride = o.stride > 0 ? o.stride : window;
  const std::vector<Window> windows =
      offline::make_windows(static_cast<int64_t>(ids.size()), window, stride, bos.has_value());

  NllMean mean;
  {
    Progress progress(static_cast<int64_t>(windows.size()));
    for (size_t i = 0; i < windows.size(); ++i) {
      score_window(session, ids, bos, windows[i], mean);
      progress.update(static_cast<int64_t>(i) + 1,
                      fmt::format("perplexity {:.3f} ± {:.3f}", mean.perplexity(), mean.perplexity_error()));
    }
  }
  if (o.json) {
    write_json({{"tokens", mean.n()},
                {"windows", windows.size()},
                {"window", window},
                {"stride", stride},
                {"bos", bos.has_value()},
                {"nll", mean.mean()},
                {"nll_standard_error", mean.standard_error()},
                {"perplexity", mean.perplexity()},
                {"perplexity_standard_error", mean.perplexity_error()}});
  } else {
    write_out(fmt::format("perplexity = {:.4f} ± {:.4f} (nll {:.5f} ± {:.5f}, {} tokens in {} windows of {})\n",
                          mean.perplexity(), mean.perplexity_error(), mean.mean(), mean.standard_error(), mean.n(),
                          windows.size(), window));
  }
  print_memory(session);
  print_peak_memory();
}

}  // namespace

void register_perplexity(CLI::App& app) {
  auto o = std::make_shared<PerplexityOptions>();
  CLI::App* sub = app.add_subcommand("perplexity", "Measure how well a model predicts a text");
  auto* file = sub->add_option("-f,--file", o->file, "Text to evaluate")->type_name("FILE")->group("Text");
  auto* ids = sub->add_option("--ids-file", o->ids_file, "Token ids to evaluate instead: little-endian numbers")
                  ->type_name("FILE")
                  ->group("Text")
                  ->excludes(file);
  sub->add_option("--ids-type", o->ids_type, "Their type, u16 or u32 (default: u32 for names ending in .u32, else u16)")
      ->check(CLI::IsMember({"u16", "u32"}))
      ->needs(ids)
      ->group("Text");
  sub->add_option("--window", o->window, "Tokens evaluated together, each window from an empty context (default: -c)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->type_name("TOKENS")
      ->group("Text");
  sub->add_option("--stride,--ppl-stride", o->stride,
                  "Tokens from one window to the next; a smaller one gives every token more context and takes longer "
                  "(default: the window)")
      ->check(CLI::PositiveNumber)
      ->type_name("TOKENS")
      ->group("Text");
  sub->add_flag("--json", o->json, "Print JSON: nll and perplexity with their standard errors")->group("General");
  add_model_options(*sub, o->model);
  sub->footer(
      "Every token but the first is predicted once, from the tokens before it in its window. A model that wants a "
      "BOS "
      "token gets it at the start of every window of text.\n"
      "Example: hearth perplexity -m model.gguf -f text.txt --window 512");
  sub->callback([o] { perplexity(*o); });
}

}  // namespace hearth::tools
