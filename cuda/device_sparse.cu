// The operations of the CUDA device (device.cuh) that skip neurons, and its hand-offs to the CPU.
#include "cuda/device.cuh"

namespace hearth::cuda {
namespace {

CudaMailbox& own(Mailbox& mailbox) {
  auto* m = dynamic_cast<CudaMailbox*>(&mailbox);
  HEARTH_CHECK(m != nullptr, "a mailbox of another device");
  return *m;
}

}  // namespace

// --- hand-offs ---

std::unique_ptr<Mailbox> CudaDevice::open_mailbox(int64_t capacity, int64_t max_ids) {
  return CudaMailbox::open(gpu_, capacity, max_ids);
}

void CudaDevice::post(Mailbox& mailbox, const float* x, int64_t n) {
  own(mailbox).post(gpu_, x, n);
}

void CudaDevice::collect(Mailbox& mailbox, float* x, int64_t n) {
  own(mailbox).collect(gpu_, x, n);
  left_ = {};
}

// --- predictors ---

NameTarget CudaDevice::name_target(int64_t n, const PredictArgs& args, int64_t t, int64_t T) {
  HEARTH_CHECK(args.n_own >= 0 && args.n_linked >= 0 && args.n_own + args.n_linked <= n);
  NameTarget to;
  to.n = static_cast<int>(n), to.n_own = static_cast<int>(args.n_own), to.n_linked = static_cast<int>(args.n_linked);
  if (args.n_own > 0) to.own = token_mask(args.own, t);
  if (args.n_linked > 0) to.linked = token_mask(args.linked, t);
  const HandOff& h = args.hand_off;
  if (h.mailbox == nullptr) return to;
  to.post = own(*h.mailbox).post_target(t, h.n, n - args.n_own);
  to.x = h.x + t * h.n, to.n_x = h.n, to.is_last = t == T - 1;
  return to;
}

void CudaDevice::predict(const Predictor& p, const Input& in, int64_t T, const PredictArgs& args) {
  check_few(T);
  HEARTH_CHECK(p.n() <= round_up(limits_.n_ff, 32) && (!p.fc1 || p.fc1.rows <= limits_.n_ff));
  std::optional<InputNorm> norm;
  const bool fits = predict_fits(p);
  if (fits && p.fc1) {
    const Output output{scratch_.up, p.fc1.rows, p.fc1.rows};
    norm = norm_on_the_way(in, p.fc1, T, {&output, 1}, Reader::any);
  }
  if (!norm) norm_first(in, T);
  if (!fits) return predict_by_scores(p, in.act, T, args);
  const int64_t cols = p.fc1 ? p.fc1.cols : p.fc2.cols;
  for (int64_t t = 0; t < T; ++t) {
    const NameTarget to = name_target(p.n(), args, t, T);
    const InputNorm own_norm = norm ? norm->row(t) : InputNorm{};
    const InputNorm* const first = norm ? &own_norm : nullptr;
    const Act row = act_row(in.act, t, cols);
    if (predict_fused(gpu_, p, row, first, to, scratch_.exchange)) continue;
    cuda::predict(gpu_, p, row, first, to, scratch_.up);
  }
}

// By ordinary products.
void CudaDevice::predict_by_scores(const Predictor& p, Act in, int64_t T, const PredictArgs& args) {
  Act h = in;
  if (p.fc1) {
    const int64_t rank = p.fc1.rows;
    h = {scratch_.up, is_quantized(p.fc2.type) ? scratch_.hidden_q8 : nullptr};
    const MatmulPart first{.w = p.fc1, .bias = p.fc1_bias, .y = h.x};
    matmul({&first, 1}, in, T, nullptr);
    if (p.relu) relu(gpu_, h.x, T * rank);
    if (h.q8 != nullptr) quantize_rows(gpu_, h.x, T, rank, h.q8);
  }
  const MatmulPart second{.w = p.fc2, .y = scratch_.gate};
  matmul({&second, 1}, h, T, nullptr);
  for (int64_t t = 0; t < T; ++t) {
    name_by_scores(gpu_, scratch_.gate + t * p.n(), p.threshold.data, name_target(p.n(), args, t, T));
  }
}

// Beside the FFN: latency is most of what a predictor takes. It may come as late as it likes, except that its marks
// tell of the hand-off after the last one posted: later than the next predictor's end they would be of no use.
// Predictors whose scores are made by ordinary products would take longer than what the CPU gains.
void CudaDevice::hint(const Predictor& p, Act in, const HintArgs& args) {
  check_reserved(1);
  if (!predict_fits(p)) return;
  NameTarget to;
  to.n = static_cast<int>(p.n()), to.n_own = static_cast<int>(args.n_own);
  to.n_linked = static_cast<int>(args.n_linked);
  to.post = own(*args.mailbox).hint_target(p.n() - args.n_own);
  if (to.n_words() == 0) return;
  cuda::predict(side_->fork(gpu_), p, in, nullptr, to, scratch_.hint);
  hinted_ = true;
}

// --- the FFN ---

void CudaDevice::ffn_sparse(const FfnShard& s, const SparseArgs& sparse, const Input& in, int64_t T, Vector y_bias,
                            float* y, const NextNorm* next) {
  check_few(T);
  HEARTH_CHECK(s.down_t && !s.down, "sparse FFN needs down_t");
  HEARTH_CHECK(s.n() <= limits_.n_ff);
  HEARTH_CHECK(sparse.answer == nullptr, "the CPU answers, not the GPU");
  const bool exact = std::holds_alternative<ByGates>(sparse.candidates);
  HEARTH_CHECK(sparse.linked == nullptr || !exact);
  const bool in_words = sparse.collect == nullptr || sparse.collect->can_publish(T * s.down_t.cols);
  if (ffn_list_fits(gpu_, s, !exact) && (!exact || ffn_gates_fit(s.gate)) && in_words) {
    return ffn_masked(s, sparse, in, T, y_bias, y, next);
  }
  HEARTH_CHECK(sparse.linked == nullptr, "neurons in host memory need rows as can_link() asks for");
  norm_first(in, T);
  ffn_selected(s, sparse, in.act, T, y_bias, y);
  if (sparse.collect != nullptr) collect(*sparse.collect, y, T * s.down_t.cols);
  left_ = {};
}

// The gates of all neurons first, or those of the named ones on the way.
void CudaDevice::ffn_masked(const FfnShard& s, const SparseArgs& sparse, const Input& in, int64_t T, Vector y_bias,
                            float* y, const NextNorm* next) {
  FfnListArgs list{.threshold = sparse.threshold, .partial = scratch_.down, .n_active = sparse.n_active};
  if (const auto* named = std::get_if<NeuronLists>(&sparse.candidates); named != nullptr) {
    norm_first(in, T);
    list.named = *named;
  } else {
    const Output output{scratch_.gate, s.n(), s.n()};
    const auto norm = norm_on_the_way(in, s.gate, T, {&output, 1});
    if (!norm) norm_first(in, T);
    ffn_gates(gpu_, s, sparse.threshold, in.act, T, norm ? &*norm : nullptr, scratch_.gate, scratch_.mask);
    list.named = {reinterpret_cast<int32_t*>(scratch_.mask), nullptr, ceil_div(s.n(), 32)};
    list.values = scratch_.gate;
  }
  AnswerSource answer;
  if (sparse.collect != nullptr) answer = own(*sparse.collect).answer_source(), list.answer = &answer;
  const int64_t n = s.down_t.cols;
  const auto half = half_of(next, T, n);
  list.linked = sparse.linked, list.next = sparse.next, list.half = half ? &*half : nullptr;
  list.hinted = std::exchange(hinted_, false);
  ffn_list(gpu_, s, list, in.act, T, y_bias, y);
  left_ = half ? LeftNorm{y, half->weight, T, n} : LeftNorm{};
}

// Where those kernels cannot: token by token.
void CudaDevice::ffn_selected(const FfnShard& s, const SparseArgs& sparse, Act in, int64_t T, Vector y_bias, float* y) {
  const auto* named = std::get_if<NeuronLists>(&sparse.candidates);
  const SelectScratch to{scratch_.gate, scratch_.candidates, scratch_.counts,
                         scratch_.up,   scratch_.ids,        scratch_.counts + 1};
  for (int64_t t = 0; t < T; ++t) {
    ffn_select(gpu_, s, sparse.threshold, named != nullptr ? token_mask(*named, t) : nullptr,
               act_row(in, t, s.gate.cols), sparse.n_active != nullptr ? sparse.n_active + t : nullptr, to);
    down_listed_rows(gpu_, s.down_t, to.value, to.ids, to.count, y_bias, scratch_.down, scratch_.down_counters,
                     y + t * s.down_t.cols);
  }
}

}  // namespace hearth::cuda
