#pragma once
// Shared by the CPU devices: host memory with accounting, and copies that are plain memcpy.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/buffer.h"
#include "core/cold_rows.h"
#include "core/device.h"
#include "core/error.h"
#include "core/experts.h"
#include "core/hand_off.h"
#include "core/latent_attention.h"
#include "core/mailbox.h"
#include "core/panels.h"
#include "core/sparse_ffn.h"

namespace hearth::cpu {

class HostDevice : public Device,
                   public SparseFfn,
                   public ExpertFfn,
                   public LatentAttention,
                   public HandOffs,
                   public RowPrefetch,
                   public ColdRows {
 public:
  bool is_host() const override { return true; }
  SparseFfn* sparse_ffn() override { return this; }
  ExpertFfn* expert_ffn() override { return this; }
  LatentAttention* latent_attention() override { return this; }
  HandOffs* hand_offs() override { return this; }
  RowPrefetch* row_prefetch() override { return this; }
  ColdRows* cold_rows() override { return this; }

  std::vector<MemoryUse> memory() const override {
    std::vector<MemoryUse> uses;
    for (size_t i = 0; i < used_.size(); ++i) {
      if (used_[i] > 0) uses.push_back({static_cast<Purpose>(i), used_[i]});
    }
    return uses;
  }

  void upload(void* device, const void* host, size_t bytes) override { move(device, host, bytes); }
  void download(void* host, const void* device, size_t bytes) override { move(host, device, bytes); }
  void copy(void* to, const void* from, size_t bytes) override { move(to, from, bytes); }
  void fill_zero(void* device, size_t bytes) override {
    if (bytes > 0) std::memset(device, 0, bytes);
  }
  void synchronize() override {}

  // The matrix as it is. Throws Error for a type without kernels.
  Matrix adopt(const Matrix& host) override {
    const DTypeTraits& t = traits(host.type);
    if (host && !t.computable()) {
      fail("weights of type {} cannot be computed with; expected one of {}: quantise the model again", t.name,
           computable_names());
    }
    HEARTH_CHECK(host.layout == Layout::rows && host.cols % t.block_size == 0, "{} columns of type {}", host.cols,
                 t.name);
    return host;
  }
  Vector adopt(const Vector& host) override { return host; }
  size_t adopted_bytes(const Matrix&) const override { return 0; }

  std::unique_ptr<Mailbox> open_mailbox(int64_t capacity, int64_t max_ids) override {
    return std::make_unique<HostMailbox>(capacity, max_ids);
  }
  void post(Mailbox& mailbox, const float* x, int64_t n) override { host(mailbox).post(x, n); }
  void collect(Mailbox& mailbox, float* x, int64_t n) override { host(mailbox).collect(x, n); }

  // Mixtures as they are defined, in terms of products and of the dense FFN: expert by expert, token by token.
  void route(const Router& r, const Input& input, int64_t T, const ExpertChoice& choice) override {
    const Act in = rows_of(input, T);
    std::vector<float> logits(static_cast<size_t>(T * r.routing.n_expert)), shared(static_cast<size_t>(T));
    const MatmulPart part{.w = r.w, .bias = r.bias, .y = logits.data()};
    matmul({&part, 1}, in, T);
    const MatmulPart gate{.w = r.shared_gate, .y = shared.data()};
    if (r.shared_gate) matmul({&gate, 1}, in, T);
    for (int64_t t = 0; t < T; ++t) choose(r, logits.data(), r.shared_gate ? shared.data() : nullptr, t, choice);
  }
  void ffn_experts(const ExpertSet& set, const ExpertChoice& choice, const Input& input, int64_t T, float* y) override {
    const Act in = rows_of(input, T);
    if (set.n_active != nullptr) std::fill_n(set.n_active, T, 0);
    for (int64_t i = 0; i < T * choice.n_named; ++i) {
      const Expert& e = set.experts[static_cast<size_t>(choice.ids[i])];
      if (!e) continue;
      const int64_t t = i / choice.n_named, n_embd = e.ffn.gate.cols;
      const Act row = row_of(in, t, n_embd);
      std::vector<float> sum(static_cast<size_t>(n_embd));
      if (e.ffn.down_t && (set.n_active != nullptr || set.threshold > 0)) {
        int32_t n_active = 0;
        const SparseArgs sparse{.threshold = set.threshold, .n_active = &n_active};
        ffn_sparse(e.ffn, sparse, row, 1, e.down_bias, sum.data(), nullptr);
        if (set.n_active != nullptr) set.n_active[t] += n_active;
      } else if (set.threshold > 0) {
        ffn_above(e.ffn, set.threshold, row, e.down_bias, sum.data());
      } else {
        ffn_dense(e.ffn, row, 1, e.down_bias, sum.data(), nullptr);
      }
      for (int64_t c = 0; c < n_embd; ++c) y[t * n_embd + c] += choice.weights[i] * sum[static_cast<size_t>(c)];
    }
  }

  // Products by head as they are defined, one after the other.
  void head_products(const HeadProducts& p, int64_t T) override {
    const int64_t cols = p.w.cols, rows = p.rows();
    std::vector<float> in(static_cast<size_t>(T * cols)), out(static_cast<size_t>(T * rows));
    std::vector<std::byte> q8(is_quantized(p.w.type) ? static_cast<size_t>(T) * q8_bytes(cols) : 0);
    const Act act{in.data(), q8.empty() ? nullptr : q8.data()};
    for (int64_t h = 0; h < p.n_head; ++h) {
      const auto x = [&](int64_t t) { return p.x + (t * p.n_head + h) * p.x_stride(); };
      for (int64_t t = 0; t < T; ++t) std::copy_n(x(t), cols, in.data() + t * cols);
      quantize(act, T, cols);
      const MatmulPart part{.w = p.w.slice_rows(h * rows, rows), .y = out.data()};
      matmul({&part, 1}, act, T);
      for (int64_t t = 0; t < T; ++t) {
        float* const y = std::copy_n(x(t) + cols, p.n_tail, p.y + (t * p.n_head + h) * p.y_stride());
        std::copy_n(out.data() + t * rows, rows, y);
      }
    }
  }

  // A stand-in for a device: what predict() would hand over.
  void hint(const Predictor& p, Act in, const HintArgs& args) override {
    std::vector<int32_t> ids(static_cast<size_t>(p.n()));
    int32_t count = 0;
    PredictArgs all;
    all.n_own = p.n(), all.own = {ids.data(), &count, p.n()};
    predict(p, in, 1, all);
    const auto n_own = static_cast<int32_t>(args.n_own), skipped = n_own + static_cast<int32_t>(args.n_linked);
    const auto end = ids.begin() + count;
    ids.erase(end, ids.end());
    ids.erase(ids.begin(), std::lower_bound(ids.begin(), ids.end(), skipped));
    for (int32_t& id : ids) id -= n_own;
    host(*args.mailbox).post_hints(MailboxMarks::of(static_cast<int32_t>(p.n()), n_own, skipped), ids);
  }

  // Nothing is prefetched where nobody knows how.
  void fetch(const FfnShard&, std::span<const int32_t>, const Mailbox&) override {}
  void fetch_input(const FfnShard&, Act, const Mailbox&) override {}
  void fetch_experts(const ExpertSet&, const ExpertChoice&, const Mailbox&) override {}

  // The host's memory is the device's: nothing moves.
  void pin(void*, size_t) override {}
  void unpin(void*) override {}
  bool can_link(const FfnShard&) const override { return true; }
  size_t link_bytes(const FfnShard&) const override { return 0; }
  FfnShard link(const FfnShard& host, std::byte* /*memory*/) override { return host; }
  void open_staging(int n_slots, size_t) override { staged_.resize(static_cast<size_t>(n_slots)); }
  size_t staged_bytes(const FfnShard&) const override { return 0; }
  FfnShard stage(int, const FfnShard& host) override { return host; }
  size_t staged_bytes(const ExpertSet&, std::span<const int32_t>) const override { return 0; }
  // Panels are another device's.
  ExpertSet stage(int slot, const ExpertSet& host, std::span<const int32_t> ids) override {
    StagedExperts& s = staged_[static_cast<size_t>(slot)];
    s.experts.assign(host.experts.size(), {});
    s.unpacked.clear();
    for (const int32_t id : ids) {
      Expert& e = s.experts[static_cast<size_t>(id)] = host.experts[static_cast<size_t>(id)];
      for (Matrix* m : {&e.ffn.gate, &e.ffn.up, &e.ffn.down}) {
        if (m->layout == Layout::panels) *m = unpack_panels(*m, s.unpacked.emplace_back(m->bytes()).data());
      }
    }
    return {s.experts, host.shared};
  }
  void acquire(int) override {}
  void release(int) override {}

 protected:
  // The rows that an operation reads, normed first where that is asked for.
  Act rows_of(const Input& in, int64_t T) {
    if (in.normed()) norm(in.norm, in.x, T, in.act);
    return in.act;
  }

  // Token t's part of route(), from the logits of all tokens and of their shared gates.
  static void choose(const Router& r, const float* logits, const float* shared, int64_t t, const ExpertChoice& choice) {
    int32_t* const ids = choice.ids + t * choice.n_named;
    float* const weights = choice.weights + t * choice.n_named;
    choose_experts(r.routing, logits + t * r.routing.n_expert, r.correction, ids, weights);
    if (!r.shared) return;
    ids[r.routing.n_used] = static_cast<int32_t>(r.routing.n_expert);
    weights[r.routing.n_used] = shared != nullptr ? 1.0f / (1.0f + std::exp(-shared[t])) : 1.0f;
  }

  // Hands out the neurons that a predictor of n neurons names for token t of T, ascending, as `args` asks; changes them.
  // To be called for t = 0, 1, …
  static void hand_out(const PredictArgs& args, int64_t n, int64_t t, int64_t T, std::span<int32_t> named) {
    const auto store = [t](std::span<const int32_t> ids, const NeuronLists& to) {
      std::copy(ids.begin(), ids.end(), to.ids + t * to.stride);
      to.count[t] = static_cast<int32_t>(ids.size());
    };
    // Takes those below `bound` from the front.
    const auto take = [&](int64_t bound) {
      const auto end = std::lower_bound(named.begin(), named.end(), static_cast<int32_t>(bound));
      const auto taken = named.first(static_cast<size_t>(end - named.begin()));
      named = named.subspan(taken.size());
      return taken;
    };
    const auto own = take(args.n_own);
    if (args.n_own > 0) store(own, args.own);
    for (int32_t& id : named) id -= static_cast<int32_t>(args.n_own);
    const auto linked = take(args.n_linked);
    if (args.n_linked > 0) store(linked, args.linked);
    if (args.hand_off.mailbox == nullptr) return;
    HostMailbox& mailbox = host(*args.hand_off.mailbox);
    const auto n_own = static_cast<int32_t>(args.n_own);
    const auto marks = MailboxMarks::of(static_cast<int32_t>(n), n_own, n_own + static_cast<int32_t>(args.n_linked));
    if (t == 0) mailbox.post_input(args.hand_off.x, T * args.hand_off.n, marks);
    mailbox.post_neurons(t, marks, named);
  }

  // Row t of activations of n elements.
  Act row_of(Act a, int64_t t, int64_t n) const {
    return {a.x + t * n,
            a.q8 != nullptr ? static_cast<std::byte*>(a.q8) + static_cast<size_t>(t) * q8_bytes(n) : nullptr};
  }

  // The dense FFN of one token without the neurons whose |act(gate)| is at most `threshold`, for shards with down.
  virtual void ffn_above(const FfnShard&, float /*threshold*/, Act, Vector /*y_bias*/, float* /*y*/) {
    HEARTH_CHECK(false, "down projections are not transposed");
  }

  // The part of ffn_sparse() for neurons that another device would read over its link.
  void add_linked(const SparseArgs& sparse, Act in, int64_t T, float* y) {
    const LinkedNeurons& l = *sparse.linked;
    SparseArgs named;
    named.candidates = l.named, named.threshold = sparse.threshold, named.n_active = l.n_active;
    ffn_sparse(l.shard, named, in, T, {}, y, nullptr);
  }

  void* allocate_bytes(size_t bytes, Purpose purpose) override {
    HostBuffer buffer(bytes);
    void* data = buffer.data();
    if (data == nullptr) return nullptr;
    buffers_.emplace(data, std::move(buffer));
    used_[static_cast<size_t>(purpose)] += bytes;
    return data;
  }
  void release_bytes(void* data, size_t bytes, Purpose purpose) override {
    if (data == nullptr) return;
    HEARTH_CHECK(buffers_.erase(data) == 1);
    used_[static_cast<size_t>(purpose)] -= bytes;
  }

  // The part of ffn_sparse() for what the CPU answers.
  static void add_answer(Mailbox& mailbox, float* y, int64_t n) {
    HostMailbox& box = host(mailbox);
    box.can_publish(n) ? box.collect_published(y, n) : box.collect(y, n);
  }

  static HostMailbox& host(Mailbox& mailbox) {
    auto* h = dynamic_cast<HostMailbox*>(&mailbox);
    HEARTH_CHECK(h != nullptr, "a mailbox of another device");
    return *h;
  }

 private:
  static void move(void* to, const void* from, size_t bytes) {
    if (bytes > 0 && to != from) std::memmove(to, from, bytes);
  }

  struct StagedExperts {
    std::vector<Expert> experts;  // by id
    std::vector<HostBuffer> unpacked;
  };

  std::unordered_map<void*, HostBuffer> buffers_;
  std::vector<StagedExperts> staged_;  // by slot
  std::array<size_t, 6> used_{};       // bytes, by Purpose
};

}  // namespace hearth::cpu
