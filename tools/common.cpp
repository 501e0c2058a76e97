#include "tools/common.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>

#include "core/error.h"
#include "core/log.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "model/attach_predictors.h"
#include "model/predictors.h"
#include "model/sidecar.h"
#include "tools/figures.h"
#include "tools/hub_models.h"
#include "tools/system.h"

namespace hearth::tools {
namespace {

// `name` is one of the words that --isa allows.
cpu::Isa parse_isa(const std::string& name) {
  const cpu::Isa wanted = name == "avx512" ? cpu::Isa::avx512 : name == "avx2" ? cpu::Isa::avx2 : cpu::Isa::scalar;
  std::string usable;
  for (const cpu::Isa isa : cpu::available_isas()) {
    if (isa == wanted) return isa;
    usable += (usable.empty() ? "" : ", ") + std::string(cpu::to_string(isa));
  }
  fail("--isa {} cannot run on this machine; it can run {}", name, usable);
}

// -ngl of llama.cpp: how many layers go to the GPU. hearth places by neuron, so only "none" has the same meaning.
std::string device_of(const ModelOptions& options) {
  if (!options.gpu_layers) return options.device;
  if (*options.gpu_layers != "0") {
    log::info("-ngl {}: hearth does not place by layers; the model goes to the GPU as --device {} says",
              *options.gpu_layers, options.device);
    return options.device;
  }
  if (options.device == "cuda") fail("-ngl 0 means the CPU and --device cuda the GPU; give one of them");
  return "cpu";
}

uint64_t context_bytes(const Device& device) {
  for (const MemoryUse& use : device.memory()) {
    if (use.purpose == Purpose::context) return use.bytes;
  }
  return 0;
}

engine::EngineOptions engine_options(const ModelOptions& o) {
  engine::EngineOptions e;
  e.n_ctx = o.n_ctx;
  e.n_batch = o.n_batch, e.n_sequences = o.n_sequences;
  e.sparsity = engine::parse_sparsity(o.sparsity);
  e.look_ahead = !o.no_look_ahead;
  e.use_graph = !o.no_graph;
  e.on_stall = [](const std::string& why) {
    log::write(log::Level::quiet, "error: ", why);
    std::_Exit(1);  // what is stuck cannot be waited for, nor can anything that it uses be destroyed
  };
  return e;
}

}  // namespace

void add_logging_options(CLI::App& sub, bool& quiet, bool& verbose) {
  auto* q = sub.add_flag("-q,--quiet", quiet, "Print warnings and errors only on stderr")->group("General");
  sub.add_flag("-v,--verbose", verbose, "Print details on stderr")->group("General")->excludes(q);
  sub.get_help_ptr()->group("General");
}

void set_logging(bool quiet, bool verbose) {
  log::set_level(quiet ? log::Level::quiet : verbose ? log::Level::verbose : log::Level::normal);
}

void add_thread_option(CLI::App& sub, int& threads) {
  sub.add_option("-t,--threads", threads,
                 "CPU threads (default: physical cores that this process may use; beside a GPU, an eighth of them is "
                 "left alone)")
      ->check(CLI::Range(1, 1024))
      ->group("Hardware");
}

void add_predictor_option(CLI::App& sub, std::string& predictor) {
  sub.add_option("--predictor", predictor,
                 "none: leave the model's predictors unused. auto: those of the sidecar, else of the model's own file. "
                 "svd, mlp, gate-bits, powerinfer: the same, and it is an error if they are of another kind")
      ->check(CLI::IsMember({"none", "auto", "svd", "mlp", "gate-bits", "powerinfer"}))
      ->capture_default_str()
      ->group("Model");
}

void choose_predictors(model::Model& model, const model::Sidecar* sidecar, const std::string& wanted) {
  if (wanted == "none") return model.drop_predictors();
  if (sidecar != nullptr) model::attach_predictors(model, *sidecar);
  if (wanted == "auto") return;
  bool any = false;
  for (const model::LayerWeights& layer : model.weights().layers) {
    if (!layer.predictor.weights) continue;
    any = true;
    if (layer.predictor.method != wanted) {
      fail("--predictor {}: the predictors at hand are '{}'; make others with `hearth predictor fit --method {}`",
           wanted, layer.predictor.method, wanted);
    }
  }
  if (!any) fail("--predictor {}: this model has none; make them with `hearth predictor fit`", wanted);
}

void add_transpose_down(CLI::App& sub, TransposeDownOptions& o) {
  sub.add_flag(
         "--transpose-down", o.wanted,
         "Quantise ffn_down again, transposed, while loading, where another program's quantised file stores it "
         "untransposed, and transpose that of experts, of ReLU families or under a threshold: neurons can then be "
         "left out and divided; says what that changes")
      ->group("Model");
  std::vector<std::string> types;
  for (const DTypeTraits& t : all_traits()) {
    if (t.computable() && t.quantized()) types.emplace_back(t.name);
  }
  sub.add_option("--transpose-down-type", o.type,
                 "With --transpose-down: to this type, a better one for example "
                 "(default: each projection's own)")
      ->check(CLI::IsMember(types))
      ->type_name("TYPE")
      ->needs("--transpose-down")
      ->group("Model");
  sub.add_flag("--transpose-down-cache", o.cached,
               "With --transpose-down: keep what it makes in NAME.down_t.gguf beside the model, and take it from there")
      ->needs("--transpose-down")
      ->group("Model");
}

model::TransposeDown TransposeDownOptions::chosen() const {
  return {wanted, type.empty() ? std::nullopt : parse_dtype(type), cached};
}

void add_model_file_option(CLI::App& sub, std::string& model) {
  CLI::Option* file = sub.add_option("-m,--model", model, "Model file, GGUF (of a split model: any part)")
                          ->required()
                          ->type_name("FILE")
                          ->group("Model");
  add_hf_repo_option(sub, *file)->excludes(file);
}

void add_model_options(CLI::App& sub, ModelOptions& o) {
  add_model_file_option(sub, o.model);
  sub.add_option("-c,--ctx-size", o.n_ctx, "Context length in tokens (default: the model's, at most 4096)")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 30))
      ->group("Model");
  sub.add_option(
         "--activation", o.activation,
         "Take the FFN's activation to be relu, fat_relu, relu2, silu, gelu, gelu_tanh or drelu, whatever the file "
         "says")
      ->group("Model");
  add_transpose_down(sub, o.transpose_down);
  sub.add_option(
         "--sparsity", o.sparsity,
         "off: compute every neuron. exact: evaluate every gate, then only active neurons. predict: evaluate the gates "
         "that a predictor names. auto: with predictors, whichever of these is fastest here, measured once; without, "
         "exact where it loses nothing")
      ->check(CLI::IsMember({"off", "exact", "predict", "auto"}))
      ->capture_default_str()
      ->group("Model");
  sub.add_flag("--no-measure", o.no_measure,
               "With --sparsity auto, do not measure whether predictors are faster here: take them where there are any")
      ->group("Model");
  add_threshold_option(sub, o.sparse_threshold);
  add_predictor_option(sub, o.predictor);
  sub.add_option("-b,--batch-size", o.n_batch, "Prompt tokens evaluated at once")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str()
      ->group("Hardware");
  add_thread_option(sub, o.threads);
  sub.add_option("--device", o.device, "cpu, cuda, or auto: the GPU when there is one that holds the model")
      ->check(CLI::IsMember({"cpu", "cuda", "auto"}))
      ->capture_default_str()
      ->group("Hardware");
  sub.add_option("--gpu,--main-gpu", o.gpu, "Number of the GPU, as `hearth doctor` lists them")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->group("Hardware");
  sub.add_option("--gpu-layers,--n-gpu-layers", o.gpu_layers,
                 "Same as llama.cpp's -ngl: 0 means --device cpu; other values are read and change nothing, as hearth "
                 "does not place by layers")
      ->type_name("N")
      ->group("Hardware");
  sub.add_option("--vram-budget", o.vram_budget,
                 "GPU memory that may be used in all; what does not fit is computed by the CPU at the same time "
                 "(default: the whole model on the GPU where it fits)")
      ->type_name("GiB")
      ->group("Hardware");
  auto* plan = sub.add_option("--plan", o.plan, "Divide the model as this file says, written by `hearth plan --save`")
                   ->type_name("FILE")
                   ->group("Hardware");
  add_gpu_index_option(sub, o.gpu_index, "Hardware")->excludes(plan);
  add_link_share_option(sub, o.link_share, "Hardware");
  add_look_ahead_option(sub, o.no_look_ahead, "Hardware");
  sub.add_option("--sidecar", o.sidecar,
                 "Activation statistics and predictors (default: MODEL.sparse.gguf, where there is one)")
      ->type_name("FILE")
      ->group("Model");
  sub.add_option("--isa", o.isa,
                 "For debugging, CPU kernels to use: scalar, avx2, avx512 (default: the best of this machine), or "
                 "reference: plain loops in double precision, very slow; with --vram-budget or --plan these stand in "
                 "for a GPU")
      ->check(CLI::IsMember({"scalar", "avx2", "avx512", "reference"}))
      ->group("Hardware");
  sub.add_option("--stream-tokens", o.stream_tokens,
                 "Of a divided model: batches of at least N prompt tokens stream the CPU's weights to the GPU (of a "
                 "mixture some of the experts that they choose), smaller ones are computed where the weights are; 0: "
                 "all are (default: where this machine's measured speeds cross)")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 30))
      ->type_name("N")
      ->group("Hardware");
  auto* mmap =
      sub.add_flag("--mmap", o.mmap,
                   "Weights that the CPU reads: use them where the file is mapped, which starts sooner and takes "
                   "no memory that others cannot have")
          ->group("Hardware");
  sub.add_flag(
         "--no-mmap", o.no_mmap,
         "Weights that the CPU reads: copy them to memory in huge pages, where they are read up to a quarter faster "
         "(default: when they take at most half of the memory that is available)")
      ->excludes(mmap)
      ->group("Hardware");
  sub.add_option("--host-memory", o.host_memory,
                 "Host memory that may be used; weights that do not fit it are read from the disk (default: what is "
                 "available)")
      ->check(CLI::PositiveNumber)
      ->type_name("GiB")
      ->group("Hardware");
  sub.add_flag("--no-graph", o.no_graph, "For debugging: launch GPU operations one by one instead of as a CUDA graph")
      ->group("Hardware");
  add_logging_options(sub, o.quiet, o.verbose);
}

namespace {

bool is_divided(const ModelOptions& o) {
  return o.vram_budget || o.plan || o.gpu_index;
}

// Beside a GPU its driver needs a core now and then, and the team is as slow as its slowest member: on 16 cores, 14
// threads gave 7 % more tokens a second than 16.
int n_threads(const ModelOptions& o) {
  if (o.threads != 0 || !is_divided(o)) return o.threads;
  const int cores = cpu_topology().physical;
  return cores - cores / 8;
}

}  // namespace

Session::Session(const ModelOptions& options) {
  set_logging(options.quiet, options.verbose);
  const auto begin = std::chrono::steady_clock::now();
  team_ = std::make_unique<ThreadTeam>(n_threads(options));
  model_ = std::make_unique<model::Model>(
      model::Model::load(options.model, {options.activation, options.transpose_down.chosen()}));
  sidecar_ = model::Sidecar::find(model_->file(), model_->config(), options.sidecar);
  choose_predictors(*model_, sidecar(), options.predictor);
  const bool predicts = options.sparsity == "auto" || options.sparsity == "predict";
  thresholds_ = choose_thresholds(*model_, sidecar(), options.sparse_threshold, predicts);
  start_fastest(options);
  warn_of_disk(options);
  load_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (const model::RequantizationError& e = model_->requantization_error(); e.squared > 0)
    log::info("down projections quantised again, transposed: {:.2f} % off (root mean square)", 100 * e.relative());
  const model::Config& c = model_->config();
  log::info("hearth {}: {}; {} {} {}, {}, {}; context {}; sparsity {} ({})", HEARTH_VERSION, device().name(), c.arch,
            human_count(model_->parameters()), model_->type_name(), human_bytes(model_->weight_bytes()), c.ffn.family,
            engine_->n_ctx(), engine::to_string(engine_->sparsity()), sparsity_reason(options));
  if (engine_->n_ctx() > c.n_ctx_train) {
    log::warn(
        "the context of {} is longer than the {} tokens that this model was trained for: later text may make no sense",
        engine_->n_ctx(), c.n_ctx_train);
  }
  log::debug("{}: {} layers, n_embd {}, n_ff {}, {} heads ({} for keys and values) of {}, vocabulary {}; FFN {}: {}",
             c.name, c.n_layer, c.n_embd, c.n_ff, c.n_head, c.n_head_kv, c.head_dim, c.n_vocab, c.ffn.family,
             c.ffn.reason);
}

void Session::start(const ModelOptions& options) {
  const std::string wanted = device_of(options);
  if (is_divided(options)) {
    const bool stand_in = options.isa == "reference";
    if (!stand_in && (wanted == "cpu" || options.isa)) {
      fail(
          "--vram-budget, --plan and --gpu-index divide a model between GPU and CPU; leave out --device cpu and --isa");
    }
    return start_divided(options);
  }
  if (wanted == "cpu") return start_on_cpu(options);
  if (options.isa) {
    if (wanted == "cuda") fail("--isa chooses CPU kernels and --device cuda the GPU; give one of them");
    return start_on_cpu(options);
  }
  if (wanted == "auto" && !start_on_gpu(options)) return start_on_cpu(options);
  if (wanted != "cuda") return;
  gpu_ = options.gpu;
  device_ = cuda::make_device(options.gpu);
  try {
    make_engine(options);
  } catch (const Error& e) {
    fail("{}; on GPU {}: a shorter context (-c) or batch (-b) needs less memory, --device cpu none of the GPU's",
         e.what(), options.gpu);
  }
}

// --device auto: false, with the reason told, when the CPU has to do it.
bool Session::start_on_gpu(const ModelOptions& options) {
  std::string why;
  const std::vector<cuda::GpuInfo> gpus = cuda::list_gpus(&why);
  if (gpus.empty()) {
    log::info("no GPU is used: {}", why);
    return false;
  }
  for (const cuda::GpuInfo& gpu : gpus) {
    if (gpu.index != options.gpu) continue;
    if (model_->weight_bytes() > gpu.free_bytes) {
      log::info("the weights take {} and {} has {} free: the model is divided between GPU and CPU",
                human_bytes(model_->weight_bytes()), gpu.name, human_bytes(gpu.free_bytes));
      start_divided(options);
      return true;
    }
    try {
      gpu_ = gpu.index;
      device_ = cuda::make_device(gpu.index);
      make_engine(options);
      return true;
    } catch (const Error& e) {
      log::info("no GPU is used: {}", e.what());
      engine_.reset(), profiler_.reset(), device_.reset(), gpu_.reset();
      return false;
    }
  }
  fail("there is no GPU {}; `hearth doctor` lists the {} there are", options.gpu, gpus.size());
}

void Session::start_on_cpu(const ModelOptions& options) {
  if (options.isa == "reference") {
    device_ = cpu::make_reference_device();
  } else {
    device_ = cpu::make_device(*team_, options.isa ? std::optional(parse_isa(*options.isa)) : std::nullopt);
  }
  check_host_memory(options);
  make_engine(options);
}

void Session::start_divided(const ModelOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  const auto passed_ms = [&] {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  };
  (void)model_->prepare_sparse(thresholded());  // where it cannot be, the planner keeps layers whole
  const double prepared = passed_ms();
  const bool stand_in = options.isa == "reference";
  if (!stand_in) gpu_ = options.gpu;
  // The device first: what its context takes is then known, and counts towards the budget.
  device_ = stand_in ? cpu::make_reference_device() : cuda::make_device(options.gpu);
  host_device_ = cpu::make_device(*team_);
  const double opened = passed_ms();
  offline::PlanRequest request;
  request.n_ctx = options.n_ctx, request.n_batch = options.n_batch, request.n_sequences = options.n_sequences;
  request.sparsity = engine::parse_sparsity(options.sparsity);
  planned_ = plan_run(*model_, sidecar(),
                      {.vram_budget = options.vram_budget,
                       .plan_file = options.plan,
                       .gpu_index = options.gpu_index,
                       .thresholds = thresholds_.by_layer,
                       .request = request,
                       .machine = {.host_memory = options.host_memory,
                                   .link_share = options.link_share,
                                   .no_look_ahead = options.no_look_ahead,
                                   .gpu = options.gpu,
                                   .threads = options.threads},
                       .context_bytes = context_bytes(*device_),
                       .stand_in = stand_in});
  const int64_t planned_context = planned_->placement.n_ctx;
  if (options.n_ctx != 0 && options.n_ctx != planned_context) {
    fail("-c {} was asked for and the plan is for a context of {}; make another plan", options.n_ctx, planned_context);
  }
  const double planned = passed_ms();
  make_engine(options);
  log::debug("start: transposing {:.0f} ms, opening the devices {:.0f}, planning {:.0f}, placing the weights {:.0f}",
             prepared, opened - prepared, planned - opened, passed_ms() - planned);
}

// Whether the CPU runs from a copy of the weights.
bool Session::copies_weights(const ModelOptions& options) const {
  if ((!device_->is_host() && !planned_) || options.mmap) return false;
  const size_t bytes = model_->weight_bytes(), available = usable_host_memory(options.host_memory);
  if (options.no_mmap && bytes > available) {
    fail("--no-mmap takes {} of memory for the weights and {} is available; leave it out", human_bytes(bytes),
         human_bytes(available));
  }
  return options.no_mmap || bytes <= available / 2;
}

void Session::make_engine(const ModelOptions& options) {
  const auto profiled = [&](Device& inner, std::unique_ptr<engine::ProfilingDevice>& profiler) -> Device& {
    if (!options.profile) return inner;
    profiler = std::make_unique<engine::ProfilingDevice>(inner);
    profiler->enable(false);  // by who wants to see
    return *profiler;
  };
  Device& device = profiled(*device_, profiler_);
  engine::EngineOptions e = engine_options(options);
  e.layer_thresholds = thresholds_.by_layer;
  e.copy_weights = copies_weights(options);
  if (!planned_) {
    engine_ = std::make_unique<engine::Engine>(*model_, device, e);
    text_ = engine_->sequence();
    return;
  }
  e.n_ctx = planned_->placement.n_ctx;  // loading obeys the plan
  e.n_batch = planned_->placement.n_batch, e.n_sequences = planned_->placement.n_sequences;
  e.stream_tokens = options.stream_tokens.value_or(planned_->stream_tokens);
  e.share_rates = planned_->share_rates;
  const bool maps_experts = model_->config().experts && !e.copy_weights;
  if (maps_experts && options.stream_tokens.value_or(0) > 0) {
    fail(
        "--stream-tokens {} needs a copy of the CPU's experts, and they are read where the file is mapped; use "
        "--no-mmap, or leave --stream-tokens out",
        *options.stream_tokens);
  }
  if (maps_experts) {
    log::debug("experts are read where the file is mapped: the CPU computes its share of every batch");
  } else {
    log::debug("batches of {} tokens or more stream {} to the GPU", e.stream_tokens,
               model_->config().experts ? "some of the CPU's experts" : "the CPU's weights");
  }
  Device& host = profiled(*host_device_, host_profiler_);
  engine_ = std::make_unique<engine::Engine>(*model_, device, e, engine::Division{host, planned_->placement, *team_});
  text_ = engine_->sequence();
}

void Session::eval_all(std::span<const int32_t> ids,
                       FunctionRef<void(int64_t i, std::span<const float> logits)> visit) {
  const size_t at_once = approximates() ? static_cast<size_t>(kFewTokens) : ids.size();
  for (size_t first = 0; first < ids.size(); first += at_once) {
    engine_->eval_all(
        *text_, ids.subspan(first, std::min(at_once, ids.size() - first)),
        [&](int64_t i, std::span<const float> logits) { visit(static_cast<int64_t>(first) + i, logits); });
  }
}

const text::Tokenizer* Session::tokenizer() {
  const bool has_vocabulary = model_->file().find("tokenizer.ggml.tokens") != nullptr;
  if (!tokenizer_ && has_vocabulary) tokenizer_ = text::Tokenizer::load(model_->file());
  return tokenizer_.get();
}

const text::Tokenizer& Session::require_tokenizer(std::string_view wanted_for) {
  const text::Tokenizer* t = tokenizer();
  if (t == nullptr) {
    fail("'{}' has no vocabulary, which {} needs; give token ids where there is a flag for them, or another model",
         model_->file().path().string(), wanted_for);
  }
  return *t;
}

std::string Session::piece(int32_t id) {
  const text::Tokenizer* t = tokenizer();
  return t != nullptr && id < t->n_vocab() ? t->piece(id, true) : std::string();
}

}  // namespace hearth::tools
