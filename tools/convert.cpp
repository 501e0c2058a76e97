// `hearth convert`: a Hugging Face directory, or a PowerInfer file, becomes a GGUF file.
#include "offline/convert/convert.h"

#include <unistd.h>

#include <memory>
#include <string>

#include "core/error.h"
#include "core/log.h"
#include "offline/convert/hf_config.h"
#include "offline/convert/powerinfer.h"
#include "offline/quantize/mix.h"
#include "tools/commands.h"
#include "tools/common.h"
#include "tools/figures.h"

namespace hearth::tools {
namespace {

struct ConvertFlags {
  std::string directory, out, type = "f16", ffn, pre;
  int n_threads = 0;
  bool quiet = false, verbose = false;
};

// One line on the terminal, rewritten in place; nothing when stderr is a file or a pipe.
class ProgressLine {
 public:
  void show(const convert::Progress& p) {
    if (!terminal_) return;
    const uint64_t percent = p.bytes_total > 0 ? 100 * p.bytes_done / p.bytes_total : 100;
    const std::string text =
        fmt::format("{:3}%  {} of {}  {}", percent, human_bytes(p.bytes_done), human_bytes(p.bytes_total), p.tensor);
    fmt::print(stderr, "\r\x1b[K{}", text);
    std::fflush(stderr);
    shown_ = true;
  }
  void clear() {
    if (shown_) fmt::print(stderr, "\r\x1b[K");
    shown_ = false;
  }
  ~ProgressLine() { clear(); }

 private:
  bool terminal_ = isatty(STDERR_FILENO) != 0;
  bool shown_ = false;
};

void run_convert(const ConvertFlags& flags) {
  set_logging(flags.quiet, flags.verbose);
  convert::Options options;
  const auto type = parse_dtype(flags.type);
  if (!type && offline::parse_file_type(flags.type)) {
    fail("--type {} is a mix; convert to f16, then `hearth quantize IN OUT {}`", flags.type, flags.type);
  }
  if (!type) fail("--type {} is not known; {} are", flags.type, computable_names());
  options.type = *type;
  if (!flags.ffn.empty()) options.ffn = flags.ffn;
  if (!flags.pre.empty()) options.pre = flags.pre;
  options.n_threads = flags.n_threads;
  ProgressLine progress;
  options.on_progress = [&](const convert::Progress& p) { progress.show(p); };
  options.on_notice = [&](std::string_view text) {
    progress.clear();
    log::info("note: {}", text);
  };
  const convert::Summary s = convert::is_powerinfer_file(flags.directory)
                                 ? convert::convert_powerinfer(flags.directory, flags.out, options)
                                 : convert::convert_checkpoint(flags.directory, flags.out, options);
  progress.clear();
  log::info("{}: architecture {}, FFN activation {}, {} tensors, {}", flags.out, s.architecture, s.activation,
            s.n_tensors, human_bytes(s.file_bytes));
}

}  // namespace

void register_convert(CLI::App& app) {
  auto* sub = app.add_subcommand("convert", "Convert a Hugging Face model directory, or a PowerInfer file, to GGUF");
  const auto flags = std::make_shared<ConvertFlags>();
  sub->add_option("INPUT", flags->directory,
                  "Directory with config.json, safetensors and a tokenizer; or a PowerInfer file (*.powerinfer.gguf), "
                  "whose predictors go to the sidecar")
      ->required()
      ->type_name("FILE");
  sub->add_option("-o,--output", flags->out, "GGUF file to write")->required()->type_name("FILE");
  sub->add_option(
         "--type", flags->type,
         "Type of the matrices: " + computable_names() +
             " (a PowerInfer file keeps its own). Mixes like Q4_K_M are made of f16 files by `hearth quantize`")
      ->capture_default_str();
  sub->add_option("--ffn", flags->ffn,
                  "The FFN's activation where config.json does not tell: relu, fat_relu, relu2, silu, gelu, gelu_tanh, "
                  "or drelu (relu on "
                  "gate and up)");
  sub->add_option("--pre", flags->pre,
                  "Pre-tokenizer (a name of tokenizer.ggml.pre) where tokenizer.json's is not recognised");
  add_thread_option(*sub, flags->n_threads);
  add_logging_options(*sub, flags->quiet, flags->verbose);
  sub->footer("Supported architectures: " + convert::supported_architectures() +
              ".\nQuantised files keep ffn_down as other programs expect it; `hearth quantize` writes it "
              "transposed, for sparse use.\nExample: hearth convert path/to/checkpoint -o model.gguf --type f16");
  sub->callback([flags] { run_convert(*flags); });
}

}  // namespace hearth::tools
