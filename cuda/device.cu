// The CUDA device: core/device.h over one GPU and one stream.
#include "cuda/cuda.h"

#include <array>
#include <cstring>
#include <mutex>
#include <optional>

#include "core/device_clock.h"
#include "cuda/device_scratch.cuh"
#include "cuda/gemm.cuh"
#include "cuda/info.cuh"
#include "cuda/kernels.cuh"
#include "cuda/layout.h"
#include "cuda/mailbox.cuh"
#include "cuda/memory.cuh"
#include "cuda/op_queue.cuh"
#include "cuda/side_stream.cuh"
#include "cuda/sparse.cuh"
#include "cuda/staging.cuh"
#include "cuda/stamps.cuh"

namespace hearth::cuda {
namespace {

class CudaDevice final : public Device, public DeviceClock {
 public:
  CudaDevice(int gpu, const GpuShape& at_most);
  ~CudaDevice() override;

  std::string name() const override { return name_; }
  bool is_host() const override { return false; }
  std::vector<MemoryUse> memory() const override { return account_.uses(); }

  void upload(void* device, const void* host, size_t bytes) override;
  void download(void* host, const void* device, size_t bytes) override;
  void fill_zero(void* device, size_t bytes) override;
  void synchronize() override;
  void stamp() override {
    finish_hints();
    stamps_.stamp(stream_);
  }
  std::vector<double> read_stamps() override { return stamps_.read(); }
  Matrix adopt(const Matrix& host) override;
  Vector adopt(const Vector& host) override;
  size_t adopted_bytes(const Matrix& host) const override {
    return host ? adopted_layout(host.type, host.rows, host.cols).total_bytes : 0;
  }
  size_t q8_bytes(int64_t n) const override { return static_cast<size_t>(q8_row_bytes(n)); }
  void reserve(const Limits& limits) override;

  void embed(const Matrix& table, const int32_t* ids, const Matrix& positions, const int32_t* pos,
             int64_t position_offset, int64_t T, float* x) override {
    cuda::embed(gpu_, table, ids, positions, pos, position_offset, T, x);
  }
  void quantize(Act a, int64_t T, int64_t n) override {
    if (a.q8 != nullptr) quantize_rows(gpu_, a.x, T, n, a.q8);
  }
  void norm(const NormArgs& args, const float* x, int64_t T, Act out) override { gpu_.norm(args, x, T, out); }
  void matmul(std::span<const MatmulPart> parts, Act in, int64_t T) override;
  void rope_kv(const RopeKvArgs& args, int64_t T) override { gpu_.rope_kv(args, T); }
  void attention(const AttentionArgs& args, int64_t T, Act out) override;
  void ffn_dense(const FfnShard& shard, Act in, int64_t T, Vector y_bias, float* y) override;
  void predict(const Predictor& predictor, Act in, const PredictArgs& args) override;
  void hint(const Predictor& predictor, Act in, const HintArgs& args) override;
  void ffn_sparse(const FfnShard& shard, const SparseArgs& sparse, Act in, Vector y_bias, float* y) override;
  void argmax(const float* logits, int64_t n, int32_t* id) override {
    check_reserved(1);
    cuda::argmax(gpu_, logits, n, scratch_.argmax, id);
  }

  std::unique_ptr<Mailbox> open_mailbox(int64_t capacity, int64_t max_ids) override {
    return CudaMailbox::open(gpu_, capacity, max_ids);
  }
  void post(Mailbox& mailbox, const float* x, int64_t n) override { own(mailbox).post(gpu_, x, n); }
  void collect(Mailbox& mailbox, float* x, int64_t n) override { own(mailbox).collect(gpu_, x, n); }
  void pin(void* host, size_t bytes) override {
    CUDA_CHECK(cudaHostRegister(host, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
  }
  void unpin(void* host) override { cudaHostUnregister(host); }
  bool can_link(const FfnShard& host) const override {
    return host.gate && host.down_t && ffn_list_fits(gpu_.properties(), host, true);
  }
  size_t link_bytes(const FfnShard& host) const override;
  FfnShard link(const FfnShard& host, std::byte* memory) override;
  void open_staging(int n_slots, size_t bytes) override {
    HEARTH_CHECK(!staging_slots_, "open_staging() is called once");
    staging_memory_ = allocate(static_cast<size_t>(n_slots) * bytes, Purpose::scratch);
    staging_slots_.emplace(gpu_, staging_memory_.as<void>(), n_slots, bytes);
  }
  size_t staged_bytes(const FfnShard& host) const override { return Staging::bytes(host); }
  FfnShard stage(int slot, const FfnShard& host) override { return staging_slots_->stage(slot, host); }
  void acquire(int slot) override {
    gpu_.flush();
    staging_slots_->acquire(slot);
  }
  void release(int slot) override {
    gpu_.flush();
    staging_slots_->release(slot);
  }

  void use_from_this_thread() override { CUDA_CHECK(cudaSetDevice(gpu_.properties().index)); }

  bool supports_graphs() const override { return true; }
  void begin_capture() override;
  int end_capture() override;
  void launch(int graph) override;

 protected:
  void* allocate_bytes(size_t bytes, Purpose purpose) override;
  void release_bytes(void* data, size_t bytes, Purpose purpose) override;

 private:
  static CudaMailbox& own(Mailbox& mailbox) {
    auto* m = dynamic_cast<CudaMailbox*>(&mailbox);
    HEARTH_CHECK(m != nullptr, "a mailbox of another device");
    return *m;
  }
  void check_reserved(int64_t T) const;
  bool use_matvec(DType type, int64_t T) const {
    return T <= (is_quantized(type) ? kMatvecTokensQuantized : kMatvecTokens);
  }
  // Scratch for the lists of n neurons, and the hand-off's end of them.
  NeuronLists neuron_lists(int64_t n, int64_t n_first, const HandOff& hand_off);
  // The mask, and the lists unless they are deferred.
  void name_neurons(const Predictor& predictor, Act in, const NeuronLists& lists);
  void ffn_fused(const FfnShard& shard, const SparseArgs& sparse, Act in, Vector y_bias, float* y);
  Gemm& gemm() {  // it enqueues by itself
    gpu_.flush();
    return *gemm_;
  }
  void post_gates(const FfnShard& shard, const SparseArgs& sparse, Act in);
  // Enqueues what is held back; what follows waits for the hints, too.
  void finish_hints() { side_->join(gpu_); }
  // gate, up and activation into scratch; returns where the neurons' values are.
  Act ffn_hidden(const FfnShard& shard, Act in, int64_t T);

  OpQueue gpu_;  // whatever it is passed to enqueues after the operations before
  std::string name_;
  Stream stream_;
  Account account_;
  std::optional<Heap> heap_;
  std::optional<WeightArena> weights_;
  std::optional<Uploader> uploader_;
  std::optional<Gemm> gemm_;
  PinnedMemory staging_;  // for small copies: a ring for those to the device, then a buffer for those from it
  size_t staging_at_ = 0;
  std::optional<SideStream> side_;  // for hints, which nothing on this device waits for
  bool hinted_ = false;             // since the last FFN
  std::vector<GraphExec> graphs_;
  Stamps stamps_;

  DeviceBuffer staging_memory_;
  std::optional<Staging> staging_slots_;

  Limits limits_;
  DeviceBuffer storage_;
  DeviceScratch scratch_;
};

constexpr size_t kStagingBytes = size_t{1} << 20;

CudaDevice::CudaDevice(int gpu, const GpuShape& at_most) {
  const size_t context = activate(gpu);  // makes it current, too
  const size_t before = query_memory(gpu).free;
  cudaDeviceProp p{};
  CUDA_CHECK(cudaGetDeviceProperties(&p, gpu));
  name_ = p.name;
  stream_ = make_stream();
  gpu_ = OpQueue({gpu, stream_, std::min(p.multiProcessorCount, at_most.multiprocessors),
                  std::min(p.sharedMemPerBlockOptin, at_most.shared_per_block), static_cast<size_t>(p.l2CacheSize),
                  at_most.overlap && supports_overlap(gpu)});
  heap_.emplace(gpu, account_);
  weights_.emplace(gpu, account_);
  gemm_.emplace(gpu_);
  side_.emplace();
  staging_ = make_pinned(2 * kStagingBytes);
  // What the handles of this device took besides.
  const size_t after = query_memory(gpu).free;
  account_.add(Purpose::context, context + (before > after ? before - after : 0));
}

CudaDevice::~CudaDevice() {
  cudaSetDevice(gpu_.properties().index);
  cudaDeviceSynchronize();
  staging_slots_.reset();
  staging_memory_ = {};
  storage_ = {};
}

// --- memory ---

void* CudaDevice::allocate_bytes(size_t bytes, Purpose purpose) {
  void* data = heap_->allocate(bytes, purpose);
  fill_zero(data, bytes);
  return data;
}
void CudaDevice::release_bytes(void* data, size_t bytes, Purpose purpose) {
  finish_hints();
  cudaStreamSynchronize(stream_);
  heap_->release(data, bytes, purpose);
}

void CudaDevice::upload(void* device, const void* host, size_t bytes) {
  if (bytes == 0) return;
  gpu_.flush();
  if (bytes > kStagingBytes) {
    if (!uploader_) uploader_.emplace();
    return uploader_->copy(device, host, bytes, stream_);
  }
  // Through a ring of page-locked memory: the caller may reuse its own at once, and nothing waits until the ring is
  // full.
  const size_t size = (bytes + 63) / 64 * 64;
  if (staging_at_ + size > kStagingBytes) {
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    staging_at_ = 0;
  }
  std::byte* slot = static_cast<std::byte*>(static_cast<void*>(staging_)) + staging_at_;
  std::memcpy(slot, host, bytes);
  CUDA_CHECK(cudaMemcpyAsync(device, slot, bytes, cudaMemcpyHostToDevice, stream_));
  staging_at_ += size;
}

void CudaDevice::download(void* host, const void* device, size_t bytes) {
  if (bytes == 0) return synchronize();
  finish_hints();
  auto* buffer = static_cast<std::byte*>(static_cast<void*>(staging_)) + kStagingBytes;  // behind the ring
  for (size_t at = 0; at < bytes; at += kStagingBytes) {
    const size_t n = std::min(kStagingBytes, bytes - at);
    CUDA_CHECK(cudaMemcpyAsync(buffer, static_cast<const std::byte*>(device) + at, n, cudaMemcpyDeviceToHost, stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    std::memcpy(static_cast<std::byte*>(host) + at, buffer, n);
  }
  staging_at_ = 0;  // nothing is on its way any more
}

void CudaDevice::fill_zero(void* device, size_t bytes) {
  gpu_.flush();
  if (bytes > 0) CUDA_CHECK(cudaMemsetAsync(device, 0, bytes, stream_));
}
void CudaDevice::synchronize() {
  finish_hints();
  CUDA_CHECK(cudaStreamSynchronize(stream_));
}

Matrix CudaDevice::adopt(const Matrix& host) {
  if (!host) return host;
  const DTypeTraits& t = traits(host.type);
  if (!t.computable()) {
    fail("weights of type {} cannot be computed with; expected f32, f16, bf16, q8_0 or q4_0: quantise the model again",
         t.name);
  }
  HEARTH_CHECK(host.scales == nullptr && host.cols % t.block_size == 0, "{} columns of type {}", host.cols, t.name);
  const AdoptedLayout layout = adopted_layout(host.type, host.rows, host.cols);
  auto* data = static_cast<std::byte*>(weights_->allocate(layout.total_bytes));
  Matrix m = host;
  m.data = data;
  if (!t.quantized()) {
    upload(data, host.data, layout.data_bytes);
  } else {
    m.scales = data + layout.scales_offset;
    // Kernels read scales two at a time: what follows the last one is defined too.
    fill_zero(data + layout.total_bytes - kAlignment, kAlignment);
    if (!uploader_) uploader_.emplace();
    uploader_->copy_split(host, data, data + layout.scales_offset, stream_);
  }
  return m;
}

Vector CudaDevice::adopt(const Vector& host) {
  if (!host) return host;
  const size_t bytes = static_cast<size_t>(host.n) * sizeof(float);
  void* data = weights_->allocate(bytes);
  upload(data, host.data, bytes);
  return {static_cast<const float*>(data), host.n};
}

// Where this device sees pinned host memory.
template <typename T>
T* seen_by_device(T* host) {
  if (host == nullptr) return nullptr;
  cudaPointerAttributes at{};
  CUDA_CHECK(cudaPointerGetAttributes(&at, host));
  if (at.devicePointer == nullptr)
    fail("the GPU cannot read the host memory that neurons were placed in; use --link-share 0");
  return static_cast<T*>(at.devicePointer);
}

size_t CudaDevice::link_bytes(const FfnShard& host) const {
  size_t bytes = 0;
  for (const Matrix* m : {&host.gate, &host.up, &host.down_t}) {
    if (*m && is_quantized(m->type)) bytes += adopted_bytes(*m);
  }
  return bytes;
}

FfnShard CudaDevice::link(const FfnShard& host, std::byte* memory) {
  FfnShard s = host;
  for (Matrix* m : {&s.gate, &s.up, &s.down_t}) {
    if (!*m || !is_quantized(m->type)) {
      m->data = seen_by_device(m->data);
      continue;
    }
    const AdoptedLayout layout = adopted_layout(m->type, m->rows, m->cols);
    if (!uploader_) uploader_.emplace();
    uploader_->split(*m, memory, reinterpret_cast<f16_t*>(memory + layout.scales_offset));
    m->data = seen_by_device(memory), m->scales = seen_by_device(memory + layout.scales_offset);
    memory += layout.total_bytes;
  }
  for (Vector* v : {&s.gate_bias, &s.up_bias}) v->data = seen_by_device(v->data);
  return s;
}

void CudaDevice::reserve(const Limits& l) {
  HEARTH_CHECK(storage_.bytes() == 0, "reserve() is called once");
  storage_ = allocate(scratch_.place(gpu_, l, nullptr), Purpose::scratch);
  scratch_.place(gpu_, l, storage_.as<std::byte>());
  gpu_.set_scratch(scratch_.norm);
  if (l.max_tokens > kMatvecTokens) {
    gemm_->set_scratch(scratch_.gemm_workspace, scratch_.gemm_input, scratch_.gemm_slab);
  }
  limits_ = l;
}

void CudaDevice::check_reserved(int64_t T) const {
  HEARTH_CHECK(storage_.bytes() > 0 && T >= 1 && T <= limits_.max_tokens, "{} tokens, reserved for {}", T,
               limits_.max_tokens);
}

// --- operations ---

void CudaDevice::matmul(std::span<const MatmulPart> parts, Act in, int64_t T) {
  check_reserved(T);
  // Runs of parts of one type go together: one launch for q, k and v, and one conversion of their input.
  for (size_t first = 0; first < parts.size();) {
    const DType type = parts[first].w.type;
    const bool matvec = use_matvec(type, T);
    size_t n = 1;
    while (first + n < parts.size() && parts[first + n].w.type == type && !(matvec && n == kMaxParts)) ++n;
    const auto run = parts.subspan(first, n);
    if (matvec) {
      gpu_.matvec(run, in, T);
    } else {
      gemm().multiply(run, in.x, T);
    }
    first += n;
  }
}

void CudaDevice::attention(const AttentionArgs& a, int64_t T, Act out) {
  check_reserved(T);
  if (a.head_dim % 8 != 0 || a.head_dim > 256) {
    fail("heads of {} dimensions are not supported on the GPU, expected a multiple of 8 up to 256; use --device cpu",
         a.head_dim);
  }
  if (T <= kDecodeTokens) {
    const auto rope = gpu_.take_rope(a, T, out);
    return attention_decode(gpu_, a, T, scratch_.attention, scratch_.counters, out, rope ? &*rope : nullptr);
  }
  attention_prefill(gpu_, a, T, out.x);
  if (out.q8 != nullptr) quantize_rows(gpu_, out.x, T, a.n_head * a.head_dim, out.q8);
}

Act CudaDevice::ffn_hidden(const FfnShard& s, Act in, int64_t T) {
  const bool quantize = s.down && is_quantized(s.down.type) && use_matvec(s.down.type, T);
  const Act hidden{scratch_.gate, quantize ? scratch_.hidden_q8 : nullptr};
  if (T == 1 && ffn_fusable(s)) {
    const OpQueue::Output output{hidden.x, s.n()};
    const auto norm = gpu_.take_norm(in, s.gate, {&output, 1});
    ffn_gate_up(gpu_, s, in, hidden, norm ? &*norm : nullptr);
    return hidden;
  }
  const MatmulPart parts[] = {{.w = s.gate, .y = scratch_.gate}, {.w = s.up, .y = scratch_.up}};
  matmul({parts, s.up ? size_t{2} : size_t{1}}, in, T);
  ffn_combine(gpu_, s, scratch_.gate, s.up ? scratch_.up : nullptr, T, hidden.x);
  if (quantize) quantize_rows(gpu_, hidden.x, T, s.n(), hidden.q8);
  return hidden;
}

void CudaDevice::ffn_dense(const FfnShard& s, Act in, int64_t T, Vector y_bias, float* y) {
  check_reserved(T);
  HEARTH_CHECK(static_cast<bool>(s.down) != static_cast<bool>(s.down_t));
  HEARTH_CHECK(s.n() <= limits_.n_ff);
  const Act hidden = ffn_hidden(s, in, T);
  if (s.down) {
    const MatmulPart down{.w = s.down, .bias = y_bias, .y = y, .accumulate = true};
    matmul({&down, 1}, hidden, T);
  } else if (T == 1) {
    down_rows(gpu_, s.down_t, hidden.x, nullptr, nullptr, y_bias, scratch_.down, scratch_.down_counters, y);
  } else {
    gemm().multiply_transposed(s.down_t, hidden.x, T, y_bias, y);
  }
}

NeuronLists CudaDevice::neuron_lists(int64_t n, int64_t n_first, const HandOff& hand_off) {
  HEARTH_CHECK(n <= round_up(limits_.n_ff, 32) && n_first >= 0 && n_first <= n);
  if (n > kMaxMaskNeurons) {
    fail("a layer of {} neurons cannot be predicted or selected on the GPU, the most is {}; use --sparsity off", n,
         kMaxMaskNeurons);
  }
  NeuronLists lists;
  lists.n = static_cast<int>(n), lists.n_first = static_cast<int>(n_first);
  lists.mask = scratch_.mask, lists.arrived = scratch_.arrived;
  if (hand_off.mailbox != nullptr) {
    lists.post = own(*hand_off.mailbox).post_target(hand_off.n, n - n_first);
    lists.x = hand_off.x, lists.n_x = hand_off.n;
  }
  return lists;
}

void CudaDevice::predict(const Predictor& p, Act in, const PredictArgs& args) {
  check_reserved(1);
  HEARTH_CHECK(!p.fc1 || p.fc1.rows <= limits_.n_ff);
  NeuronLists lists = neuron_lists(p.n(), args.n_first, args.hand_off);
  if (args.n_first > 0) lists.first = args.first;
  if (!lists.posts() && args.n_first + args.n_linked < p.n()) lists.rest = args.rest;
  if (args.n_linked > 0) lists.n_linked = static_cast<int>(args.n_linked), lists.linked = args.linked;
  lists.deferred = lists.can_defer();
  name_neurons(p, in, lists);
  if (lists.deferred && (lists.first.ids != nullptr || lists.n_linked > 0)) gpu_.hold(lists.on_device());
}

void CudaDevice::name_neurons(const Predictor& p, Act in, const NeuronLists& lists) {
  if (predict_fits(p)) {
    const OpQueue::Output output{scratch_.up, p.fc1.rows};
    const auto norm = p.fc1 ? gpu_.take_norm(in, p.fc1, {&output, 1}, OpQueue::Reader::any) : std::nullopt;
    const InputNorm* n = norm ? &*norm : nullptr;
    if (cuda::predict_fused(gpu_, p, in, n, lists, scratch_.exchange)) {
      if (!lists.deferred) make_lists(gpu_, lists.on_device());
      return;
    }
    return cuda::predict(gpu_, p, in, n, lists, scratch_.up);
  }
  Act h = in;
  if (p.fc1) {
    h = {scratch_.up, is_quantized(p.fc2.type) ? scratch_.hidden_q8 : nullptr};
    const MatmulPart first{.w = p.fc1, .bias = p.fc1_bias, .y = h.x};
    matmul({&first, 1}, in, 1);
    if (p.relu) relu(gpu_, h.x, p.fc1.rows);
    if (h.q8 != nullptr) quantize_rows(gpu_, h.x, 1, p.fc1.rows, h.q8);
  }
  const MatmulPart second{.w = p.fc2, .y = scratch_.gate};
  matmul({&second, 1}, h, 1);
  list_scores(gpu_, scratch_.gate, p.threshold.data, lists);
}

// Beside the FFN: latency is most of what a predictor takes. It may come as late as it likes, except that its marks
// tell of the hand-off after the last one posted: later than the next predictor's end they would be of no use.
// Predictors whose scores are made by ordinary products would take longer than what the CPU gains.
void CudaDevice::hint(const Predictor& p, Act in, const HintArgs& args) {
  check_reserved(1);
  if (!predict_fits(p)) return;
  NeuronLists lists = neuron_lists(p.n(), args.n_first, {});
  lists.n_linked = static_cast<int>(args.n_linked);
  lists.post = own(*args.mailbox).hint_target(p.n() - args.n_first);
  if (lists.n_words() == 0) return;
  const auto held = gpu_.take_lists();
  const Gpu side = side_->fork(gpu_);
  if (held) gpu_.hold(*held);  // no kernel of the main stream comes between
  cuda::predict(side, p, in, nullptr, lists, scratch_.hint);
  hinted_ = true;
}

void CudaDevice::ffn_sparse(const FfnShard& s, const SparseArgs& sparse, Act in, Vector y_bias, float* y) {
  check_reserved(1);
  HEARTH_CHECK(s.down_t && !s.down, "sparse FFN needs down_t");
  HEARTH_CHECK(s.n() <= limits_.n_ff);
  HEARTH_CHECK((sparse.hand_off.mailbox != nullptr) == (s.n() > s.n_whole()));
  if (sparse.gate_values != nullptr) fail("gates that are known already are the CPU's to use, not the GPU's");
  const bool exact = sparse.predicted == nullptr;
  HEARTH_CHECK(sparse.linked == nullptr || !exact);
  const bool in_words = sparse.collect == nullptr || sparse.collect->can_publish(s.down_t.cols);
  if (ffn_list_fits(gpu_.properties(), s, !exact) && (!exact || ffn_gates_fit(s.gate)) && in_words)
    return ffn_fused(s, sparse, in, y_bias, y);
  HEARTH_CHECK(sparse.linked == nullptr, "neurons in host memory need rows as can_link() asks for");
  if (s.n() > s.n_whole()) post_gates(s, sparse, in);
  const SparseScratch scratch{scratch_.gate, scratch_.up, scratch_.ids, scratch_.count};
  ffn_select(gpu_, s, sparse, in, scratch);
  down_rows(gpu_, s.down_t, scratch.value, scratch.ids, scratch.count, y_bias, scratch_.down, scratch_.down_counters,
            y);
  if (sparse.collect != nullptr) collect(*sparse.collect, y, s.down_t.cols);
}

// The gates of all neurons first, or those of the predicted ones on the way.
void CudaDevice::ffn_fused(const FfnShard& s, const SparseArgs& sparse, Act in, Vector y_bias, float* y) {
  const bool exact = sparse.predicted == nullptr;
  FfnListArgs list{.ids = sparse.predicted, .count = sparse.n_predicted, .threshold = sparse.threshold};
  NeuronLists lists;
  if (exact) {
    lists = neuron_lists(s.n(), s.n_whole(), sparse.hand_off);
    lists.first = {scratch_.ids, scratch_.count}, lists.first_ids_copy = sparse.active_ids;
    if (lists.posts()) lists.values = scratch_.gate;
    lists.deferred = lists.can_defer();
    const OpQueue::Output output{scratch_.gate, s.n()};
    const auto norm = gpu_.take_norm(in, s.gate, {&output, 1});
    ffn_gates(gpu_, s, sparse.threshold, in, norm ? &*norm : nullptr, scratch_.gate, lists);
    list.ids = scratch_.ids, list.count = scratch_.count, list.values = scratch_.gate;
  } else {
    const auto held = gpu_.take_lists();
    if (held && held->go_to(sparse.predicted, sparse.linked != nullptr ? sparse.linked->named.ids : nullptr)) {
      lists = *held;
    } else if (held) {
      make_lists(gpu_, *held);
    }
    if (sparse.active_ids != nullptr) list.gate_out = scratch_.gate;
  }
  if (lists.deferred) list.made_of = &lists;
  AnswerSource answer;
  if (sparse.collect != nullptr) answer = own(*sparse.collect).answer_source(), list.answer = &answer;
  list.partial = scratch_.down, list.n_active = sparse.n_active, list.linked = sparse.linked;
  list.next = sparse.next, list.hinted = std::exchange(hinted_, false);
  gpu_.make(y, s.down_t.cols, ffn_list(gpu_, s, list, in, y_bias, y));
  if (list.gate_out != nullptr) {
    list_active(gpu_, sparse, {scratch_.gate, scratch_.up, scratch_.ids, scratch_.count});
  }
}

// Hands over the active ones of the gate rows whose neurons the CPU has.
void CudaDevice::post_gates(const FfnShard& s, const SparseArgs& sparse, Act in) {
  HEARTH_CHECK(sparse.hand_off.mailbox != nullptr && sparse.predicted == nullptr);
  const SparseScratch scratch{scratch_.gate, scratch_.up, scratch_.ids, scratch_.count};
  SparseArgs gates;
  gates.threshold = sparse.threshold;
  ffn_select(gpu_, gate_rows(s, s.n_whole(), s.n()), gates, in, scratch);
  const HandOff& h = sparse.hand_off;
  own(*h.mailbox).post(gpu_, h.x, h.n, {scratch.ids, scratch.count}, scratch.value);
}

// --- graphs ---

void CudaDevice::begin_capture() {
  finish_hints();
  CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed));
}

int CudaDevice::end_capture() {
  finish_hints();
  cudaGraph_t captured = nullptr;
  CUDA_CHECK(cudaStreamEndCapture(stream_, &captured));
  const Graph graph(captured);
  cudaGraphExec_t exec = nullptr;
  CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  graphs_.emplace_back(exec);
  CUDA_CHECK(cudaGraphUpload(exec, stream_));
  return static_cast<int>(graphs_.size()) - 1;
}

void CudaDevice::launch(int graph) {
  HEARTH_CHECK(graph >= 0 && static_cast<size_t>(graph) < graphs_.size());
  finish_hints();
  CUDA_CHECK(cudaGraphLaunch(graphs_[static_cast<size_t>(graph)], stream_));
}

}  // namespace

std::unique_ptr<Device> make_device(int gpu, const GpuShape& at_most) {
  require_gpu(gpu);
  return std::make_unique<CudaDevice>(gpu, at_most);
}

}  // namespace hearth::cuda
