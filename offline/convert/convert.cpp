#include "offline/convert/convert.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <mutex>
#include <vector>

#include "core/blocks.h"
#include "core/error.h"
#include "core/thread_team.h"
#include "gguf/gguf.h"
#include "offline/convert/hf_config.h"
#include "offline/convert/hf_tokenizer.h"
#include "offline/convert/safetensors.h"
#include "offline/convert/tensor_map.h"
#include "offline/quantize/mix.h"
#include "text/pretokenizer.h"

namespace hearth::convert {
namespace {

constexpr int64_t kPieceElements = int64_t{1} << 18;  // a thread's piece: 1 MiB as f32
constexpr int64_t kBlockPieces = 64;                  // pieces between two reports of progress
constexpr float kF16Max = 65504.0f;

// Copies rows of one tensor into another type and order. One per thread: it owns the buffers.
class RowConverter {
 public:
  RowConverter(const HfConfig& config, const MappedTensor& tensor, DType type)
      : config_(config),
        t_(tensor),
        type_(type),
        in_row_(tensor.scales != nullptr ? 0 : row_bytes(tensor.source->traits->type, tensor.cols)),
        out_row_(row_bytes(type, tensor.cols)),
        narrow_(type != DType::f32 && type != DType::bf16),
        part_rows_(tensor.n_stacked == 0 ? tensor.rows : tensor.rows / tensor.n_stacked) {}

  // Rows [begin, end) of the result; valid until the next call.
  std::span<const std::byte> convert(int64_t begin, int64_t end) {
    const auto n_rows = static_cast<size_t>(end - begin);
    if (t_.order == RowOrder::as_is && t_.each.empty() && !t_.strides && t_.source->traits->type == type_ && !narrow_ &&
        !t_.plus_one) {
      return t_.source->data.subspan(static_cast<size_t>(begin) * in_row_, n_rows * in_row_);
    }
    out_.resize(n_rows * out_row_);
    if (t_.scales != nullptr) {
      for (int64_t r = begin; r < end; ++r) join_blocks(r, out_.data() + static_cast<size_t>(r - begin) * out_row_);
      return out_;
    }
    floats_.resize(static_cast<size_t>(t_.cols));
    for (int64_t r = begin; r < end; ++r) {
      load(source_row(config_, t_.order, r));
      if (t_.plus_one) std::for_each(floats_.begin(), floats_.end(), [](float& x) { x += 1; });
      if (narrow_) check_range();
      traits(type_).from_float(floats_.data(), out_.data() + static_cast<size_t>(r - begin) * out_row_, t_.cols);
    }
    return out_;
  }

 private:
  // The first element of a row of the result, where one tensor of the checkpoint has several matrices; of MXFP4 its row.
  size_t first_element(int64_t row) const {
    const Strides& s = *t_.strides;
    return static_cast<size_t>(row / part_rows_ * s.matrix + row % part_rows_ * s.row + s.first);
  }

  // The codes of MXFP4, neighbours in a byte, with the exponent before them and as ggml orders them: the first half of
  // the block in the low nibbles. Nothing is rounded.
  void join_blocks(int64_t row, std::byte* out) const {
    const auto n_blocks = static_cast<size_t>(t_.cols / BlockMXFP4::size), from = first_element(row) * n_blocks;
    for (size_t b = 0; b < n_blocks; ++b) {
      BlockMXFP4 block;
      block.e = static_cast<uint8_t>(t_.scales->data[from + b]);
      const std::byte* const codes = t_.source->data.data() + (from + b) * sizeof block.qs;
      const auto code = [&](size_t i) { return static_cast<uint8_t>(codes[i / 2]) >> (i % 2 * 4) & 15; };
      for (size_t i = 0; i < sizeof block.qs; ++i) {
        block.qs[i] = static_cast<uint8_t>(code(i) | code(i + sizeof block.qs) << 4);
      }
      std::memcpy(out + b * sizeof block, &block, sizeof block);
    }
  }

  void gather(int64_t row) {
    const size_t width = in_row_ / static_cast<size_t>(t_.cols),
                 column = static_cast<size_t>(t_.strides->column) * width;
    aligned_.resize(in_row_ / sizeof(float) + 1);
    const std::byte* from = t_.source->data.data() + first_element(row) * width;
    auto* to = reinterpret_cast<std::byte*>(aligned_.data());
    for (int64_t c = 0; c < t_.cols; ++c, from += column, to += width) std::memcpy(to, from, width);
    t_.source->traits->to_float(aligned_.data(), floats_.data(), t_.cols);
  }

  void load(int64_t row) {
    if (t_.strides) return gather(row);
    const SafeTensor& from = t_.each.empty() ? *t_.source : *t_.each[static_cast<size_t>(row / part_rows_)];
    const std::byte* source = from.data.data() + static_cast<size_t>(row % part_rows_) * in_row_;
    if (reinterpret_cast<uintptr_t>(source) % alignof(float) != 0) {  // a header may have any length
      aligned_.resize(in_row_ / sizeof(float) + 1);
      std::memcpy(aligned_.data(), source, in_row_);
      source = reinterpret_cast<const std::byte*>(aligned_.data());
    }
    from.traits->to_float(source, floats_.data(), t_.cols);
  }

  // f16, and the f16 scales of the block formats, end at 65504. NaN fails the comparison too.
  void check_range() const {
    for (const float x : floats_) {
      if (!(std::fabs(x) <= kF16Max)) {
        fail("tensor {} holds the value {}, which {} cannot store; use --type bf16 or f32", t_.source->name, x,
             traits(type_).name);
      }
    }
  }

  const HfConfig& config_;
  const MappedTensor& t_;
  DType type_;
  size_t in_row_, out_row_;
  bool narrow_;
  int64_t part_rows_;  // of each tensor that it comes from
  std::vector<float> floats_, aligned_;
  std::vector<std::byte> out_;
};

class Conversion {
 public:
  Conversion(const std::filesystem::path& directory, const std::filesystem::path& out, const Options& options)
      : options_(options),
        config_(read_hf_config(directory, options.ffn)),
        checkpoint_(Checkpoint::open(directory)),
        tensors_(map_tensors(config_, checkpoint_, [this](std::string_view text) { notice(text); })),
        writer_(out),
        team_(options.n_threads) {
    write_metadata(directory);
  }

  Summary run() {
    for (const MappedTensor& t : tensors_) add(t);
    const std::vector<RopeFactors> factors = rope_factors(config_);
    std::vector<size_t> factor_tensors;
    for (const RopeFactors& f : factors) {
      factor_tensors.push_back(writer_.add_tensor(f.name, DType::f32, {std::ssize(f.factors)}));
    }
    writer_.begin();
    for (size_t i = 0; i < tensors_.size(); ++i) total_ += writer_.tensor_bytes(i);
    for (size_t i = 0; i < factors.size(); ++i) {
      writer_.write(factor_tensors[i], 0, std::as_bytes(std::span(factors[i].factors)));
    }
    for (size_t i = 0; i < tensors_.size(); ++i) write(i);
    writer_.finish();
    return {config_.arch, config_.activation, tensors_.size() + factors.size(), writer_.file_bytes()};
  }

 private:
  void notice(std::string_view text) const {
    if (options_.on_notice) options_.on_notice(text);
  }

  void write_metadata(const std::filesystem::path& directory) {
    write_config(config_, writer_);
    writer_.set("general.name", std::filesystem::weakly_canonical(directory).filename().string());
    writer_.set("general.file_type", traits(options_.type).file_type);
    writer_.set("general.quantization_version", uint32_t{2});
    write_vocabulary(
        read_hf_tokenizer(directory, config_, options_.pre, [this](std::string_view text) { notice(text); }), writer_);
  }

  static std::vector<int64_t> shape_of(const MappedTensor& t) {
    if (t.vector) return {t.rows};
    return t.n_stacked > 0 ? std::vector{t.cols, t.rows / t.n_stacked, t.n_stacked} : std::vector{t.cols, t.rows};
  }

  void add(const MappedTensor& t) {
    DType type = t.vector || t.keep_f32 ? DType::f32 : options_.type;
    if (t.scales != nullptr) {
      if (!kept_mxfp4_) notice("the experts stay in mxfp4, as the checkpoint has them");
      kept_mxfp4_ = true, type = DType::mxfp4;
    } else if (const DType fitting = offline::fitting_type(type, t.cols, t.source->traits->type); fitting != type) {
      notice(fmt::format("{} has {} columns, no multiple of {}'s block of {}: stored as {}", t.name, t.cols,
                         traits(type).name, traits(type).block_size, traits(fitting).name));
      type = fitting;
    }
    types_.push_back(type);
    writer_.add_tensor(t.name, type, shape_of(t));
  }

  // Blocks of rows, each shared out to the team in pieces of about kPieceElements.
  void write(size_t index) {
    const MappedTensor& t = tensors_[index];
    const int64_t piece = std::max<int64_t>(1, kPieceElements / t.cols);
    std::vector<RowConverter> converters(static_cast<size_t>(team_.size()), RowConverter(config_, t, types_[index]));
    const uint64_t row = row_bytes(types_[index], t.cols);
    for (int64_t first = 0; first < t.rows; first += piece * kBlockPieces) {
      const int64_t n = std::min(t.rows - first, piece * kBlockPieces);
      std::exception_ptr error;
      std::mutex error_mutex;
      team_.for_chunks(n, piece, [&](int64_t begin, int64_t end, int thread) {
        try {
          const auto data = converters[static_cast<size_t>(thread)].convert(first + begin, first + end);
          writer_.write(index, static_cast<uint64_t>(first + begin) * row, data);
        } catch (...) {  // work of the team must not throw
          const std::lock_guard lock(error_mutex);
          if (!error) error = std::current_exception();
        }
      });
      if (error) std::rethrow_exception(error);
      done_ += static_cast<uint64_t>(n) * row;
      if (options_.on_progress) options_.on_progress({t.name, done_, total_});
    }
    checkpoint_.dont_need(*t.source);
    if (t.scales != nullptr) checkpoint_.dont_need(*t.scales);
    for (const SafeTensor* part : t.each) checkpoint_.dont_need(*part);
  }

  const Options& options_;
  HfConfig config_;
  Checkpoint checkpoint_;
  std::vector<MappedTensor> tensors_;
  std::vector<DType> types_;  // of tensors_
  gguf::Writer writer_;
  ThreadTeam team_;
  uint64_t done_ = 0, total_ = 0;
  bool kept_mxfp4_ = false;
};

}  // namespace

Summary convert_checkpoint(const std::filesystem::path& directory, const std::filesystem::path& out,
                           const Options& options) {
  if (!std::filesystem::is_directory(directory)) {
    fail("'{}' is not a directory; expected a Hugging Face model directory", directory.string());
  }
  if (!traits(options.type).computable()) {
    fail("cannot convert to {}; expected one of {}", traits(options.type).name, computable_names());
  }
  if (options.pre && !text::PreTokenizer::knows(*options.pre)) fail("unknown pre-tokenizer '{}'", *options.pre);
  return Conversion(directory, out, options).run();
}

}  // namespace hearth::convert
