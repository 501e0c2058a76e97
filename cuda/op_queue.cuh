#pragma once
// The GPU's stream with operations held back: the norm or the rotary embedding of a single token costs a kernel that
// does next to nothing, and the kernel that reads its result can do it on the way. It is held until the next operation,
// which either takes it over or finds it enqueued first: whoever asks for the Gpu gets everything before enqueued.
//
// Readers with quantised weights can do the norm only if the kernel that made its input, too, knows of it (it leaves
// the norm's result but for the factor 1 / rms). So a maker whose kernel can (a product, or the last kernel of a sparse
// FFN) is held until it is known whether a norm of its result follows, and with that norm until it is known who reads
// it:
//
//   maker, norm, quantised reader   maker leaves half of the norm, reader
//   maker, norm, other reader       maker, reader (with the norm if it can by itself)
//   maker, norm, anything else      maker, norm, anything else
//   maker, anything else            maker, anything else
//
// Lists of neurons are held while the kernel that made their mask was the last: the FFN finds its shares in the mask
// sooner than that kernel would have had the lists ready.
#include <functional>
#include <optional>
#include <utility>

#include "cuda/kernels.cuh"
#include "cuda/neuron_lists.cuh"
#include "cuda/staged_input.cuh"

namespace hearth::cuda {

class OpQueue {
 public:
  OpQueue() = default;
  explicit OpQueue(const Gpu& gpu) : gpu_(gpu) {}

  // To enqueue on.
  operator const Gpu&() {
    flush();
    return gpu_;
  }
  const Gpu& properties() const { return gpu_; }

  // Memory of kUnscaledNormBytes for what products leave for norms. Before the first product.
  void set_scratch(void* memory) {
    auto* bytes = static_cast<std::byte*>(memory);
    unscaled_ = {bytes, reinterpret_cast<float*>(bytes + q8_row_bytes(kMaxNormColumns))};
  }

  // Enqueues what is held back.
  void flush();
  // A kernel that makes y [n] and can leave half of y's norm: held back, then enqueued with or without (null) that.
  void make(const float* y, int64_t n, Maker enqueue);
  // Products as matvec(), with the norm that was held back for them if they can do it; held back themselves, or
  // enqueued.
  void matvec(std::span<const MatmulPart> parts, Act in, int64_t T);
  // A norm or rotary embedding of T tokens: held back if another operation could take it over, else enqueued.
  void norm(const NormArgs& args, const float* x, int64_t T, Act out);
  void rope_kv(const RopeKvArgs& args, int64_t T);

  // The held norm, if its result is `in` of n elements and the kernel that reads it may do it: one that writes nothing
  // (`outputs`) where the norm's own input is.
  struct Output {
    const float* data;
    int64_t n;
  };
  std::optional<InputNorm> take_norm(Act in, int64_t n, std::span<const Output> outputs);
  // The same for readers with rows of w and others of its type: with quantised w, from the half that the maker leaves.
  // Products need that half, and as many rows (elements of `outputs`) as columns to write the norm's result; other
  // readers can do without.
  enum class Reader { product, any };
  std::optional<InputNorm> take_norm(Act in, const Matrix& w, std::span<const Output> outputs,
                                     Reader reader = Reader::product);
  // The held rotary embedding, if `args` and `out` are the attention that it belongs to.
  std::optional<RopeKvArgs> take_rope(const AttentionArgs& args, int64_t T, Act out);
  // Deferred lists, whose mask the kernel makes that was enqueued last.
  void hold(const NeuronLists& lists) { lists_ = lists; }
  std::optional<NeuronLists> take_lists() { return std::exchange(lists_, std::nullopt); }

 private:
  struct Made {
    const float* y;
    int64_t n;
    Maker enqueue;
  };
  struct Norm {
    NormArgs args;
    const float* x;
    Act out;
  };
  bool may_take_norm(Act in, int64_t n, std::span<const Output> outputs) const;
  void flush_made(const OutputNorm* half = nullptr);

  Gpu gpu_;
  UnscaledNorm unscaled_;
  // In the order in which they were issued; only a maker and a norm are ever held at the same time.
  std::optional<Made> made_;
  std::optional<Norm> norm_;
  std::optional<RopeKvArgs> rope_;
  std::optional<NeuronLists> lists_;
};

}  // namespace hearth::cuda
