// Predictors: scores of a layer's neurons, and the lists of those above their thresholds.
#include <bit>

#include "cpu/cpu_device.h"
#include "cpu/tiling.h"

namespace hearth::cpu {

void CpuDevice::sign_scores(const Predictor& p, const float* in, float* score) {
  const int64_t n_words = (p.n_signs + 31) / 32;
  auto* words = reinterpret_cast<uint32_t*>(scratch(lanes_, n_words));
  std::fill(words, words + n_words, 0u);
  for (int64_t c = 0; c < p.n_signs; ++c) words[c / 32] |= static_cast<uint32_t>(in[c] < 0) << (c % 32);
  team_.for_chunks(p.n(), kSelectRows, [&](int64_t begin, int64_t end, int) {
    for (int64_t k = begin; k < end; ++k) {
      int64_t differ = 0;
      for (int64_t i = 0; i < n_words; ++i) differ += std::popcount(words[i] ^ p.signs[k * n_words + i]);
      score[k] = static_cast<float>(p.n_signs - 2 * differ);
    }
  });
}

void CpuDevice::predict(const Predictor& p, Act in, const PredictArgs& args) {
  float* score = scratch(values_, p.n());
  if (p.signs != nullptr) {
    sign_scores(p, in.x, score);
  } else {
    Act h = in;
    if (p.fc1) {
      const int64_t rank = p.fc2.cols;
      h = {scratch(lanes_, rank), is_quantized(p.fc2.type) ? values_q8_.as<void>() : nullptr};
      const MatmulPart first{.w = p.fc1, .bias = p.fc1_bias, .y = h.x};
      matmul({&first, 1}, in, 1);
      if (p.relu) k_.activate(static_cast<int>(Activation::relu), 0.0f, h.x, nullptr, false, rank, h.x);
      quantize_rows(h, 1, rank);
    }
    const MatmulPart second{.w = p.fc2, .y = score};
    matmul({&second, 1}, h, 1);
  }
  const auto list = [&](int64_t begin, int64_t end, int32_t* ids) {
    int32_t n = 0;
    for (int64_t k = begin; k < end; ++k) {
      ids[n] = static_cast<int32_t>(k - begin);
      n += score[k] > p.threshold.data[k] ? 1 : 0;
    }
    return n;
  };
  // Room for one id more than the list holds: the loop above writes before it decides.
  auto* ids = reinterpret_cast<int32_t*>(scratch(ids_, p.n() + 1));
  const auto store = [&](int64_t begin, int64_t end, const NeuronList& to) {
    *to.count = list(begin, end, ids);
    std::copy_n(ids, *to.count, to.ids);
  };
  if (args.n_first > 0) store(0, args.n_first, args.first);
  const HandOff& h = args.hand_off;
  if (h.mailbox != nullptr) {
    const auto n = static_cast<size_t>(list(args.n_first, p.n(), ids));
    host(*h.mailbox).post(h.x, h.n, {ids, n});
  } else if (args.n_first < p.n()) {
    store(args.n_first, p.n(), args.rest);
  }
}

}  // namespace hearth::cpu
