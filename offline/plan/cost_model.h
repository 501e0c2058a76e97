#pragma once
// The cost of a token on one machine: bandwidths, the share of them that real kernels reach, and fixed times. One plain
// struct, so that calibrating it is assigning to its fields. Where figures come from:
//   measured when first needed, and kept (machine.h)   bandwidths, cpu_flops; set_rates(): dense and sparse shares,
//                                                      fetched_speedup, times of a hand-off
//   of another machine, whose bandwidths are given     the figures below, and set_weights()
//   of the kernels, whatever the machine               their numbers; a kernel's time, link_efficiency, overlap_loss,
//                                                      token_seconds, host_embedding_seconds: as measured on an H200
//   of the model                                       foreseen_share, predicted_per_active, where nobody measured them
//
//   token  = token_seconds + embedding + sum over layers of (attention + ffn) + head
//   attention on the GPU: kernels + (weights + cache) / (gpu * dense);  on the CPU: handoff + the same / (cpu * dense)
//   where the GPU's bytes are few, they take bytes / gpu and short_kernel_seconds a kernel instead
//   ffn    = kernels + S + max(hot, cold) + overlap_loss * min(hot, cold) + (handoff, if a neuron is cold)
//     hot  = gathered rows on the GPU / (gpu * sparse), cold = gates / (cpu * dense) + gathered rows / (cpu * sparse)
//            with a predictor on the GPU, which may read a share of the cold rows itself (linked ones), most of the
//            hand-off is a part of the CPU's side: asking + max(handoff - asking + (1 - share) * rows / (cpu * sparse),
//            share * rows / (pcie * link)); with a share of 1 nobody asks the CPU, and the link has the host's memory
//            for itself
//     S    = what must be known before either side starts: the predictor; gates are part of either side's time
//     With look-ahead the GPU reads the next layer's predictor beside its own rows, and linked ones are counted as if
//     they came after it; the CPU fetches foreseen_share of its rows while the GPU attends and predicts, as far
//     as that time goes, and needs 1 / fetched_speedup of the time for these afterwards.
//   experts = router + hot, hot = kernels + rows / (gpu * dense), if all are on the GPU; else the GPU asks the CPU in every
//            layer, and waits where a token uses a cold expert: router + asking + hot, or with the chance of that, which
//            takes choices for independent, max(hot, handoff - asking + rows / (cpu * dense)) in place of hot; of experts whose neurons
//            the CPU skips, the rows of up and down that a token needs take rows / (cpu * sparse). Where experts are cut
//            every token asks, and the CPU reads the gates and active rows of the neurons that the GPU has not
//   head   on the GPU: kernels + weights / (gpu * dense);  on the CPU: handoff + weights / (cpu * dense)
// A layer whose attention and whole FFN are on the CPU needs one hand-off, not two; on the CPU alone it takes
// cpu_layer_seconds and its bytes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>

#include "core/device.h"
#include "core/dtype.h"
#include "engine/cold_stream.h"
#include "engine/share_out.h"
#include "offline/plan/shape.h"

namespace hearth::offline {

// As measured on one machine with one type of weights (rates.h); 0 = not measured.
struct KernelRates {
  double cpu_dense = 0, cpu_sparse = 0;  // bytes/s of one token: whole matrices; rows of a list of neurons
  double gpu_dense = 0, gpu_sparse = 0;
  double fetched_speedup = 0;
  double handoff_seconds = 0;  // GPU -> CPU -> GPU alone
};

struct CostModel {
  // Measured, bytes/s.
  double gpu_bandwidth = 1008e9;  // GPU memory, read
  double cpu_bandwidth = 70e9;    // host memory, read by the team that will run
  double pcie_bandwidth = 25e9;   // host to device
  double cpu_flops = 0.5e12;      // products of batches on the CPU, operations/s with the model's type of weights

  // Share of those that kernels reach: whole matrices (the CPU 83 % on 16 cores of a shared host, 88 % on 2), and rows
  // gathered by id.
  double gpu_dense_efficiency = 0.85, gpu_sparse_efficiency = 0.6, gpu_predictor_efficiency = 0.75;
  double cpu_dense_efficiency = 0.8, cpu_sparse_efficiency = 0.65;
  // The link's rate, by rows that the GPU gathers from host memory itself, and the share of the cold rows that it is given
  // (nullopt: as much as it reads while the CPU reads the others and hands its sum over, or all if that is sooner).
  double link_efficiency = 0.55;
  std::optional<double> link_share;

  // Whether plans may look ahead (engine::LayerPlacement::look_ahead); the share of the CPU's rows that this foresees
  // (92 % of a synthetic 7B's), and how much faster fetched rows are used than others are read (f16: lists of 120 and
  // 280 neurons on 14 threads take 0.4 times as long).
  bool look_ahead = true;
  double foreseen_share = 0.9, fetched_speedup = 2.2;

  // Share of the shorter side's time that is not hidden behind the longer one. Keeps work off the CPU that would only
  // shave a little off the GPU's.
  double overlap_loss = 0.1;

  // Fixed times, seconds, as measured on an H200 in the middle of a token: kernels that do little still take several
  // times a bare kernel's time.
  double kernel_seconds = 1.3e-6;  // one dependent kernel inside a graph
  // A kernel whose bytes are too few to hide its own steps takes this more: all on the GPU, a 7B's layer takes 25 us
  // beyond its bytes at the memory's full speed, in f16 as in Q8_0 and Q4_0 (docs/archive/performance-log.md).
  double short_kernel_seconds = 0.8e-6;
  double attention_kernels = 4;      // norm, QKV, rope + cache + attention, output product
  double ffn_kernels = 5;            // the FFN of a list, and the sum of its blocks' sums
  double gate_kernels = 3;           // gates of all neurons, and the list
  double predictor_kernels = 3;      // one, whose blocks wait for each other twice
  double router_kernels = 6;         // norm, products, and a choice that waits for all of them
  double expert_kernels = 6;         // gate and up, down, and their sum
  double head_kernels = 3;           // norm, head, argmax
  double handoff_seconds = 12e-6;    // GPU -> CPU -> GPU in the middle of a token, beyond the bytes (a bare one: 11)
  double asking_seconds = 4e-6;      // the part of it that the GPU spends by itself: to post, and to wait for words
  double token_seconds = 30e-6;      // launching the graph, sampling
  double cpu_layer_seconds = 20e-6;  // of a layer on the CPU alone beyond its bytes: a team begins and ends operations
  double host_embedding_seconds = 2.5e-6;  // one row of the table read over PCIe
  // In a layer whose experts are streamed the host first waits so long for the choice.
  double fetch_seconds = 60e-6;

  // Neurons that a predictor names, for each that is active, where that was not measured (LayerShape).
  double predicted_per_active = 1.4;

  // Batches of at least this many tokens are faster when the CPU's weights visit the GPU, which takes bytes / pcie,
  // than when the CPU multiplies them, which takes max(bytes / cpu, 2 operations a weight and token / cpu_flops).
  int64_t stream_tokens(double bytes_per_weight) const {
    constexpr int64_t kFewest = 8;  // fewer are the matrix-vector kernels' work, which do not read staged weights
    if (cpu_bandwidth <= pcie_bandwidth) return kFewest;
    const double tokens = bytes_per_weight / pcie_bandwidth * cpu_flops / 2;
    return std::max(kFewest, static_cast<int64_t>(std::ceil(std::min(tokens, 1e9))));
  }

  // How a prompt's batch shares out the CPU's experts. Both sides read the same memory: the CPU has what the link leaves.
  engine::ShareRates share_rates() const {
    const double link = std::min(pcie_bandwidth, cpu_bandwidth),
                 left = std::max(0.1 * cpu_bandwidth, cpu_bandwidth - link);
    return {fetch_seconds, 1 / link, std::max(cpu_dense(1), 1 / left), 2 / cpu_flops};
  }

  // Figures for a machine that nothing was measured on. Quantised weights are bound by arithmetic and latencies more
  // than by bytes, so that it brings little to have them in a cache: figures of kernels for them, from 7B runs at 2.5
  // to 4.7 GiB (H200, 16 Xeon cores). Q4_K is 4 % slower than Q4_0 there; a CPU of 140 GB/s reads its experts at 70.
  void set_weights(DType type) {
    if (type == DType::q8_0) fetched_speedup = 1.1;
    if (type != DType::q4_0 && type != DType::q4_k) return;
    gpu_dense_efficiency = 0.62, gpu_sparse_efficiency = 0.4;
    cpu_dense_efficiency = type == DType::q4_0 ? 0.4 : 0.5, cpu_sparse_efficiency = 0.28;
    fetched_speedup = 1;
  }

  // After the bandwidths, of which they become shares, and set_weights().
  void set_rates(const KernelRates& r) {
    const auto set_share = [](double& share, double rate, double bandwidth) {
      if (rate > 0) share = std::clamp(rate / bandwidth, 0.1, 1.0);
    };
    set_share(cpu_dense_efficiency, r.cpu_dense, cpu_bandwidth);
    set_share(cpu_sparse_efficiency, r.cpu_sparse, cpu_bandwidth);
    const double predictor_share = gpu_predictor_efficiency / gpu_dense_efficiency;
    set_share(gpu_dense_efficiency, r.gpu_dense, gpu_bandwidth);
    set_share(gpu_sparse_efficiency, r.gpu_sparse, gpu_bandwidth);
    gpu_predictor_efficiency = predictor_share * gpu_dense_efficiency;
    if (r.fetched_speedup > 0) fetched_speedup = std::clamp(r.fetched_speedup, 1.0, 4.0);
    if (r.handoff_seconds > 0) {
      handoff_seconds = r.handoff_seconds + 1e-6;  // in the middle of a token
      asking_seconds = handoff_seconds / 3;
    }
  }

  double overlapped(double hot, double cold) const { return std::max(hot, cold) + overlap_loss * std::min(hot, cold); }
  double gpu_dense(double bytes) const { return bytes / (gpu_bandwidth * gpu_dense_efficiency); }
  // Seconds that bytes add to kernels which read them one behind the other; at_rate: by their kind of access.
  double gpu_reads(double kernels, double bytes, double at_rate) const {
    return std::max(at_rate, kernels * short_kernel_seconds + bytes / gpu_bandwidth);
  }
  // The same with the kernels.
  double on_gpu(double kernels, double bytes, double at_rate) const {
    return kernels * kernel_seconds + gpu_reads(kernels, bytes, at_rate);
  }
  double gpu_predictor(double bytes) const {
    return on_gpu(predictor_kernels, bytes, bytes / (gpu_bandwidth * gpu_predictor_efficiency));
  }
  double gpu_sparse(double bytes) const { return bytes / (gpu_bandwidth * gpu_sparse_efficiency); }
  double cpu_dense(double bytes) const { return bytes / (cpu_bandwidth * cpu_dense_efficiency); }
  double cpu_sparse(double bytes) const { return bytes / (cpu_bandwidth * cpu_sparse_efficiency); }
  // Both read the same memory: what the CPU's gathering leaves of it is all that the link can have.
  double link_bandwidth(bool cpu_rests) const {
    const double left = cpu_bandwidth * (cpu_rests ? 1 : 1 - cpu_sparse_efficiency);
    return std::min(pcie_bandwidth * link_efficiency, left);
  }
  double linked(double bytes, bool cpu_rests) const { return bytes > 0 ? bytes / link_bandwidth(cpu_rests) : 0; }
};

// For a GPU that is not here: enough for the backend's lists, sums and workspaces on 132 multiprocessors.
uint64_t typical_scratch_bytes(const Limits& limits);

// GPU memory beyond the model's tensors.
struct GpuReserve {
  uint64_t context_bytes = uint64_t{300} << 20;  // CUDA context, kernels' code, cuBLAS (264 MiB on an H200)
  uint64_t margin_bytes = uint64_t{64} << 20;    // left free on purpose
  // Through which a prompt's cold weights are streamed; a plan takes more where two experts need it.
  uint64_t staging_bytes = engine::ColdStream::kSlots * engine::ColdStream::kSlotBytes;
  uint64_t alignment = 256;  // of every tensor
  // Bytes that Device::reserve() takes, and a row of n 8-bit activations: asked of the GPU's backend, where there
  // is a GPU (cuda::scratch_bytes()).
  std::function<uint64_t(const Limits&)> scratch_bytes = typical_scratch_bytes;
  std::function<uint64_t(int64_t)> q8_bytes = [](int64_t n) { return static_cast<uint64_t>(n + 32) * 5 / 4; };
  // Bytes of a matrix on the GPU (cuda/layout.h's adopted_bytes()), for shape_of().
  MatrixBytes matrix_bytes = bytes_in_file;
};

}  // namespace hearth::offline
