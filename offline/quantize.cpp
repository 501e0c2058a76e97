#include "offline/quantize.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <exception>
#include <mutex>

#include "core/error.h"
#include "model/config.h"

namespace hearth::offline {
namespace {

constexpr std::string_view kDown = "ffn_down.weight", kDownT = "ffn_down_t.weight";
constexpr std::string_view kDownTBias = "ffn_down_t.bias", kDownBias = "ffn_down.bias";
constexpr uint32_t kQuantizationVersion = 2;     // ggml's GGML_QNT_VERSION: the block layouts of core/dtype.h
constexpr size_t kChunkBytes = size_t{4} << 20;  // of output, a piece of work for one thread
constexpr int64_t kTileCols = 64;                // input columns that one thread transposes at a time

bool is_transposed_down(std::string_view name) {
  return name.ends_with(kDownT);
}
bool is_down(std::string_view name) {
  return name.ends_with(kDown) || is_transposed_down(name);
}

// A matrix whose rows are converted; the others (norms, biases, tables of the RoPE) hold few values that matter much.
bool is_matrix(const gguf::TensorInfo& t) {
  return t.ne.size() >= 2 && t.name.ends_with(".weight") && t.name.find("_norm") == std::string::npos;
}

bool is_predictor(std::string_view name) {
  return name.starts_with("blk.") && (name.ends_with(".fc1.weight") || name.ends_with(".fc2.weight"));
}

// One tensor of the output.
struct Job {
  const gguf::TensorInfo* in = nullptr;
  std::string name;
  DType type = DType::f32;
  std::vector<int64_t> ne;
  bool transpose = false;
  size_t out = 0;  // the writer's index
  bool copy() const { return !transpose && type == in->traits->type; }
};

struct Plan {
  std::vector<Job> jobs;
  std::vector<std::string> fallbacks;
  bool down_transposed = false;
  std::string down_reason;
};

void choose_down_layout(const gguf::File& file, DownLayout wanted, Plan& plan) {
  const bool already = std::any_of(file.tensors().begin(), file.tensors().end(),
                                   [](const gguf::TensorInfo& t) { return is_transposed_down(t.name); });
  if (wanted != DownLayout::automatic) {
    plan.down_transposed = wanted == DownLayout::transposed;
    plan.down_reason = "asked for";
  } else if (already) {
    plan.down_transposed = true;
    plan.down_reason = "as in the input";
  } else {
    try {
      const model::FfnDescription ffn = model::describe_ffn(file);
      plan.down_transposed = ffn.sparse();
      plan.down_reason = fmt::format("the FFN is {}: {}", ffn.family, ffn.reason);
    } catch (const Error& e) {
      plan.down_reason = fmt::format("the FFN's kind is unknown: {}", e.what());
    }
  }
}

DType wanted_type(const gguf::TensorInfo& t, const QuantizeOptions& options) {
  // Vectors stay exact; integers (indices) and types hearth cannot read stay what they are.
  if (!is_matrix(t)) return t.traits->computable() ? DType::f32 : t.traits->type;
  if (t.name == "position_embd.weight") return t.traits->type;  // one row is added a token: nothing to gain
  if (t.name == "token_embd.weight") return options.embedding_type.value_or(options.type);
  if (t.name == "output.weight") return options.head_type.value_or(options.type);
  if (is_predictor(t.name)) {
    const bool widen = options.type == DType::q4_0 && t.traits->type != DType::q4_0;
    return options.predictor_type.value_or(widen ? DType::q8_0 : options.type);
  }
  return options.type;
}

// Throws Error when the input's values cannot or may not be converted.
void check_convertible(const gguf::File& file, const Job& job, const QuantizeOptions& options) {
  const DTypeTraits& from = *job.in->traits;
  const char* to = traits(job.type).name;
  if (!from.computable()) {
    fail("'{}': tensor '{}' is {}, which hearth cannot convert to {}; start from an f32, f16 or bf16 file",
         file.path().string(), job.in->name, from.name, to);
  }
  if (!from.quantized() || options.allow_requantize) return;
  if (job.transpose) {
    fail(
        "'{}': writing the {} tensor '{}' {} needs requantising; pass {} to keep its layout, --allow-requantize to "
        "accept "
        "the loss, or start from an f16 file",
        file.path().string(), from.name, job.in->name, is_transposed_down(job.name) ? "transposed" : "untransposed",
        is_transposed_down(job.name) ? "--standard-down" : "no --standard-down");
  }
  fail(
      "'{}': tensor '{}' is quantised already ({}); pass --allow-requantize to convert it to {} all the same, or start "
      "from an "
      "f16 file",
      file.path().string(), job.in->name, from.name, to);
}

Job plan_tensor(const gguf::File& file, const gguf::TensorInfo& t, const QuantizeOptions& options, Plan& plan) {
  Job job{&t, t.name, wanted_type(t, options), t.ne};
  if (is_down(t.name) && t.ne.size() == 2 && is_transposed_down(t.name) != plan.down_transposed) {
    const std::string_view old_name = plan.down_transposed ? kDown : kDownT;
    job.name = t.name.substr(0, t.name.size() - old_name.size()).append(plan.down_transposed ? kDownT : kDown);
    job.transpose = true;
    std::swap(job.ne[0], job.ne[1]);
  } else if (!plan.down_transposed && t.name.ends_with(kDownTBias)) {
    job.name = t.name.substr(0, t.name.size() - kDownTBias.size()).append(kDownBias);
  }
  if (job.ne[0] % traits(job.type).block_size != 0) {
    const DType source = t.traits->type;
    const DType kept = source == DType::f32 || source == DType::bf16 ? source : DType::f16;
    plan.fallbacks.push_back(fmt::format("{} stays {}: its rows of {} are no multiple of {}'s {}", job.name,
                                         traits(kept).name, job.ne[0], traits(job.type).name,
                                         traits(job.type).block_size));
    job.type = kept;
  }
  if (!job.copy()) check_convertible(file, job, options);
  return job;
}

Plan make_plan(const gguf::File& file, const QuantizeOptions& options) {
  if (options.head_type && file.find_tensor("output.weight") == nullptr) {
    fail("'{}' has no output.weight: its head is tied to the embedding, use --embd-type for both",
         file.path().string());
  }
  Plan plan;
  choose_down_layout(file, options.down, plan);
  for (const gguf::TensorInfo& t : file.tensors()) plan.jobs.push_back(plan_tensor(file, t, options, plan));
  return plan;
}

// Work on many threads in which a piece may throw: the others stop early, and the first error is thrown again on the
// caller.
class Pieces {
 public:
  explicit Pieces(ThreadTeam& team) : team_(team) {}
  void run(int64_t n, int64_t grain, FunctionRef<void(int64_t begin, int64_t end)> work) {
    team_.for_chunks(n, grain, [&](int64_t begin, int64_t end, int) {
      if (failed_.load(std::memory_order_relaxed)) return;
      try {
        work(begin, end);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        if (!failed_.exchange(true)) error_ = std::current_exception();
      }
    });
    if (error_) std::rethrow_exception(error_);
  }

 private:
  ThreadTeam& team_;
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::exception_ptr error_;
};

float largest_magnitude(const float* x, int64_t n, bool* finite) {
  float largest = 0.0f;
  bool ok = true;
  for (int64_t i = 0; i < n; ++i) {
    const float a = std::fabs(x[i]);
    ok &= a <= std::numeric_limits<float>::max();  // false for infinity and NaN
    largest = std::max(largest, a);
  }
  *finite = ok;
  return largest;
}

// One row from f32 to the job's type. `check` is scratch of n floats.
void store_row(const gguf::File& file, const Job& job, const float* row, std::byte* out, int64_t n, float* check) {
  bool finite = true;
  const float largest = largest_magnitude(row, n, &finite);
  if (!finite) {
    fail("'{}': tensor '{}' has a value that is not finite (infinity or NaN): the file is damaged",
         file.path().string(), job.in->name);
  }
  const DTypeTraits& to = traits(job.type);
  to.from_float(row, out, n);
  constexpr float f16_max = 65504.0f;  // below it no 16-bit value or scale can overflow
  if (largest <= f16_max) return;
  to.to_float(out, check, n);
  largest_magnitude(check, n, &finite);
  if (!finite) {
    fail("'{}': tensor '{}' has the value {}, which {} cannot hold; use bf16 or f32", file.path().string(),
         job.in->name, largest, to.name);
  }
}

void convert_rows(const gguf::File& file, const Job& job, gguf::Writer& writer, ThreadTeam& team) {
  const int64_t cols = job.ne[0], rows = job.in->rows();
  const size_t in_row = row_bytes(job.in->traits->type, cols), out_row = row_bytes(job.type, cols);
  const std::byte* in = file.data(*job.in).data();
  const auto grain = static_cast<int64_t>(std::max<size_t>(1, kChunkBytes / out_row));
  Pieces(team).run(rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(cols)), check(row.size());
    std::vector<std::byte> out(static_cast<size_t>(end - begin) * out_row);
    for (int64_t r = begin; r < end; ++r) {
      job.in->traits->to_float(in + static_cast<size_t>(r) * in_row, row.data(), cols);
      store_row(file, job, row.data(), out.data() + static_cast<size_t>(r - begin) * out_row, cols, check.data());
    }
    writer.write(job.out, static_cast<size_t>(begin) * out_row, out);
  });
}

// Columns [begin, end) of the input matrix become rows of `tile`: tile[c - begin][r] = in[r][c].
void load_transposed(const gguf::File& file, const gguf::TensorInfo& t, int64_t begin, int64_t end, float* tile) {
  constexpr int64_t strip = 16;  // input rows at a time: a cache line of each row of the tile
  const int64_t rows = t.rows(), width = end - begin;
  const size_t row_size = row_bytes(t.traits->type, t.cols()), first = row_bytes(t.traits->type, begin);
  const std::byte* in = file.data(t).data();
  std::vector<float> piece(static_cast<size_t>(strip * width));
  for (int64_t r0 = 0; r0 < rows; r0 += strip) {
    const int64_t n = std::min(strip, rows - r0);
    for (int64_t r = 0; r < n; ++r) {
      t.traits->to_float(in + static_cast<size_t>(r0 + r) * row_size + first, piece.data() + r * width, width);
    }
    for (int64_t c = 0; c < width; ++c) {
      for (int64_t r = 0; r < n; ++r) tile[c * rows + r0 + r] = piece[static_cast<size_t>(r * width + c)];
    }
  }
}

void convert_transposed(const gguf::File& file, const Job& job, gguf::Writer& writer, ThreadTeam& team) {
  const int64_t cols = job.ne[0], rows = job.ne[1];  // of the output
  const size_t out_row = row_bytes(job.type, cols);
  // Whole blocks of a quantised input, whose blocks lie along its rows.
  const int64_t grain = std::max<int64_t>(kTileCols, job.in->traits->block_size);
  file.will_need(*job.in);  // the tiles jump through the file
  Pieces(team).run(rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> tile(static_cast<size_t>((end - begin) * cols)), check(static_cast<size_t>(cols));
    std::vector<std::byte> out(static_cast<size_t>(end - begin) * out_row);
    load_transposed(file, *job.in, begin, end, tile.data());
    for (int64_t r = begin; r < end; ++r) {
      store_row(file, job, tile.data() + (r - begin) * cols, out.data() + static_cast<size_t>(r - begin) * out_row,
                cols, check.data());
    }
    writer.write(job.out, static_cast<size_t>(begin) * out_row, out);
  });
}

void refuse_overwriting_input(const gguf::File& file, const std::filesystem::path& out) {
  for (const std::filesystem::path& part : file.part_paths()) {
    std::error_code ignored;  // `out` need not exist
    if (std::filesystem::equivalent(part, out, ignored)) {
      fail("the output '{}' is the input; give another name", out.string());
    }
  }
}

void check_free_space(const std::filesystem::path& out, uint64_t needed) {
  std::error_code ec;
  const auto directory = out.has_parent_path() ? out.parent_path() : std::filesystem::path(".");
  const auto space = std::filesystem::space(directory, ec);
  if (ec || space.available >= needed) return;  // where the system does not know, writing will tell
  fail("'{}' needs {:.2f} GiB, the disk has {:.2f} GiB free", out.string(), static_cast<double>(needed) / (1 << 30),
       static_cast<double>(space.available) / (1 << 30));
}

void write_header(const gguf::File& file, const QuantizeOptions& options, Plan& plan, gguf::Writer& writer) {
  for (const gguf::KeyValue& kv : file.metadata()) {
    if (!kv.key.starts_with("split.")) writer.set(kv.key, kv.value);  // the output is one file
  }
  // Whatever integer type it has in the input.
  if (file.find("general.alignment") != nullptr)
    writer.set("general.alignment", static_cast<uint32_t>(file.alignment()));
  writer.set("general.file_type", traits(options.type).file_type);
  writer.set("general.quantization_version", kQuantizationVersion);
  for (Job& job : plan.jobs) job.out = writer.add_tensor(job.name, job.type, job.ne);
  writer.begin();
}

}  // namespace

QuantizeReport quantize(const std::filesystem::path& in, const std::filesystem::path& out,
                        const QuantizeOptions& options, ThreadTeam& team) {
  const gguf::File file = gguf::File::open(in);
  refuse_overwriting_input(file, out);
  Plan plan = make_plan(file, options);
  gguf::Writer writer(out);
  write_header(file, options, plan, writer);
  check_free_space(out, writer.file_bytes());

  QuantizeReport report;
  report.bytes_in = file.total_bytes();
  report.bytes_out = writer.file_bytes();
  report.n_down = static_cast<int>(
      std::count_if(plan.jobs.begin(), plan.jobs.end(), [](const Job& job) { return is_down(job.name); }));
  report.down_transposed = plan.down_transposed;
  report.down_reason = std::move(plan.down_reason);
  report.fallbacks = std::move(plan.fallbacks);
  QuantizeProgress progress;
  progress.n_tensors = plan.jobs.size();
  for (const Job& job : plan.jobs) progress.bytes_total += writer.tensor_bytes(job.out);
  for (const Job& job : plan.jobs) {
    progress.tensor = job.out;
    progress.name = job.name;
    progress.from = job.in->traits->type;
    progress.to = job.type;
    if (options.progress) options.progress(progress);
    if (job.copy()) {
      writer.write(job.out, 0, file.data(*job.in));
      ++report.n_copied;
    } else {
      job.transpose ? convert_transposed(file, job, writer, team) : convert_rows(file, job, writer, team);
      ++report.n_converted;
    }
    file.dont_need(*job.in);
    progress.bytes_done += writer.tensor_bytes(job.out);
  }
  writer.finish();
  return report;
}

}  // namespace hearth::offline
