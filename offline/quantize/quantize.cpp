#include "offline/quantize/quantize.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <mutex>

#include "core/error.h"
#include "offline/quantize/plan.h"

namespace hearth::offline {
namespace {

constexpr uint32_t kQuantizationVersion = 2;     // ggml's GGML_QNT_VERSION: the block layouts of core/dtype.h
constexpr size_t kChunkBytes = size_t{4} << 20;  // of output, a piece of work for one thread
constexpr int64_t kTileCols = 64;                // input columns that one thread transposes at a time

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

// Row r of the output from f32 to the job's type. `check` is scratch of a row's floats.
void store_row(const gguf::File& file, const Job& job, int64_t r, const float* row, std::byte* out, float* check) {
  const int64_t n = job.ne[0];
  bool finite = true;
  const float largest = largest_magnitude(row, n, &finite);
  if (!finite) {
    fail("'{}': tensor '{}' has a value that is not finite (infinity or NaN): the file is damaged",
         file.path().string(), job.in->name);
  }
  const DTypeTraits& to = traits(job.type);
  quantize_row(job.type, row, job.importance_of(r), out, n);
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
      store_row(file, job, r, row.data(), out.data() + static_cast<size_t>(r - begin) * out_row, check.data());
    }
    writer.write(job.out, static_cast<size_t>(begin) * out_row, out);
  });
}

// Columns [begin, end) of a matrix of the input become rows of `tile`: tile[c - begin][r] = in[r][c].
void load_transposed(const gguf::File& file, const gguf::TensorInfo& t, int64_t matrix, int64_t begin, int64_t end,
                     float* tile) {
  constexpr int64_t strip = 16;  // input rows at a time: a cache line of each row of the tile
  const int64_t rows = t.ne[1], width = end - begin;
  const size_t row_size = row_bytes(t.traits->type, t.cols()), first = row_bytes(t.traits->type, begin);
  const std::byte* in = file.data(t).data() + static_cast<size_t>(matrix * rows) * row_size;
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
  const int64_t cols = job.ne[0], rows = job.ne[1], matrices = job.n_rows() / rows;  // of the output
  const size_t out_row = row_bytes(job.type, cols);
  // Whole blocks of a quantised input, whose blocks lie along its rows.
  const int64_t grain = std::max<int64_t>(kTileCols, job.in->traits->block_size);
  file.will_need(*job.in);  // the tiles jump through the file
  const int64_t each = (rows + grain - 1) / grain;
  Pieces(team).run(matrices * each, 1, [&](int64_t piece, int64_t) {
    const int64_t matrix = piece / each, begin = piece % each * grain, end = std::min(begin + grain, rows);
    const int64_t first = matrix * rows;
    std::vector<float> tile(static_cast<size_t>((end - begin) * cols)), check(static_cast<size_t>(cols));
    std::vector<std::byte> out(static_cast<size_t>(end - begin) * out_row);
    load_transposed(file, *job.in, matrix, begin, end, tile.data());
    for (int64_t r = begin; r < end; ++r) {
      store_row(file, job, first + r, tile.data() + (r - begin) * cols,
                out.data() + static_cast<size_t>(r - begin) * out_row, check.data());
    }
    writer.write(job.out, static_cast<size_t>(first + begin) * out_row, out);
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

void write_header(const gguf::File& file, const QuantizeOptions& options, QuantizePlan& plan, gguf::Writer& writer) {
  for (const gguf::KeyValue& kv : file.metadata()) {
    if (!kv.key.starts_with("split.")) writer.set(kv.key, kv.value);  // the output is one file
  }
  // Whatever integer type it has in the input.
  if (file.find("general.alignment") != nullptr)
    writer.set("general.alignment", static_cast<uint32_t>(file.alignment()));
  writer.set("general.file_type", options.type.file_type);
  writer.set("general.quantization_version", kQuantizationVersion);
  if (plan.importance) {  // llama.cpp's keys
    writer.set("quantize.imatrix.file", options.importance.string());
    if (!plan.importance->datasets.empty()) writer.set("quantize.imatrix.dataset", plan.importance->datasets.front());
    writer.set("quantize.imatrix.entries_count", static_cast<uint32_t>(plan.importance->matrices.size()));
    if (plan.importance->chunk_count > 0) writer.set("quantize.imatrix.chunks_count", plan.importance->chunk_count);
  }
  for (Job& job : plan.jobs) job.out = writer.add_tensor(job.name, job.type, job.ne);
  writer.begin();
}

QuantizeReport report_of(const gguf::File& file, QuantizePlan& plan) {
  QuantizeReport report;
  report.bytes_in = file.total_bytes();
  report.down_transposed = plan.down_transposed;
  report.down_reason = std::move(plan.down_reason);
  report.fallbacks = std::move(plan.fallbacks);
  report.unweighted = std::move(plan.unweighted);
  for (const Job& job : plan.jobs) {
    report.tensors.push_back({job.name, job.in->traits->type, job.type, job.in->bytes, job.bytes()});
    report.n_down += is_down(job.name) ? 1 : 0;
    report.n_weighted += job.importance.empty() ? 0 : 1;
    ++(job.copy() ? report.n_copied : report.n_converted);
  }
  return report;
}

}  // namespace

QuantizeReport quantize(const std::filesystem::path& in, const std::filesystem::path& out,
                        const QuantizeOptions& options, ThreadTeam& team) {
  const gguf::File file = gguf::File::open(in);
  refuse_overwriting_input(file, out);
  QuantizePlan plan = plan_quantization(file, options);
  QuantizeReport report = report_of(file, plan);
  if (options.dry_run) return report;
  gguf::Writer writer(out);
  write_header(file, options, plan, writer);
  check_free_space(out, writer.file_bytes());
  report.bytes_out = writer.file_bytes();

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
    } else {
      job.transpose ? convert_transposed(file, job, writer, team) : convert_rows(file, job, writer, team);
    }
    file.dont_need(*job.in);
    progress.bytes_done += writer.tensor_bytes(job.out);
  }
  writer.finish();
  return report;
}

}  // namespace hearth::offline
