#include "offline/plan/layer_choices.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "engine/page_pool.h"

namespace hearth::offline {
namespace {

using engine::Selection;
using engine::Sparsity;
using engine::Where;

constexpr int kAttentionTensors = 8, kNeuronTensors = 8;  // at most, each aligned on its own
constexpr uint64_t kIdBytes = sizeof(int32_t);            // of a neuron on the GPU

}  // namespace

LayerCosts::LayerCosts(const LayerShape& shape, std::span<const double> p, const CostModel& cost,
                       const GpuReserve& reserve, uint64_t kv_bytes, int64_t n_kv,
                       const std::vector<int32_t>* gpu_bucket)
    : shape_(shape),
      cost_(cost),
      reserve_(reserve),
      kv_bytes_(kv_bytes),
      kv_read_(static_cast<double>(shape.kv_token_bytes) * static_cast<double>(n_kv)),
      order_(static_cast<size_t>(shape.n_ff)),
      active_(order_.size() + 1),
      predicted_(order_.size() + 1) {
  HEARTH_CHECK(p.size() == order_.size(), "{} frequencies of {} neurons", p.size(), order_.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::vector<bool> listed(order_.size());
  if (gpu_bucket != nullptr) {
    prescribed_ = static_cast<int32_t>(gpu_bucket->size());
    for (const int32_t id : *gpu_bucket) listed[static_cast<size_t>(id)] = true;
  }
  std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
    const auto i = static_cast<size_t>(a), j = static_cast<size_t>(b);
    return listed[i] != listed[j] ? listed[i] : p[i] > p[j];
  });
  const double named = shape.named_per_active.value_or(cost.predicted_per_active);
  for (size_t k = 0; k < order_.size(); ++k) {
    const double f = p[static_cast<size_t>(order_[k])];
    active_[k + 1] = active_[k] + f;
    predicted_[k + 1] = predicted_[k] + std::min(1.0, f * named);
  }
  spared_.assign(active_.size(), 1.0);
  for (size_t k = order_.size(); k-- > 0;) {
    spared_[k] = spared_[k + 1] * (1 - std::min(1.0, p[static_cast<size_t>(order_[k])]));
  }
  if (!shape.experts) return;
  experts_.push_back(sum_experts(p, {}, {}));
  if (prescribed_ || !shape.inside || shape.cuts.empty()) return;
  std::vector<std::vector<double>> covered(shape.cuts.size());
  for (size_t id = 0; id < shape.inside.used.size(); ++id) sort_inside(id, covered);
  for (size_t i = 0; i < covered.size(); ++i) experts_.push_back(sum_experts(p, shape.cuts[i], covered[i]));
}

// An expert's neurons by falling frequency, and what share of its activations the first ones of each cut make.
void LayerCosts::sort_inside(size_t expert, std::vector<std::vector<double>>& covered) {
  const std::vector<double> f = shape_.inside.frequencies(expert);
  std::vector<int32_t>& ids = hottest_.emplace_back(f.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::ranges::stable_sort(ids,
                           [&](int32_t a, int32_t b) { return f[static_cast<size_t>(a)] > f[static_cast<size_t>(b)]; });
  const double all = std::accumulate(f.begin(), f.end(), 0.0);
  double first = 0;
  int32_t n = 0;
  for (size_t i = 0; i < covered.size(); ++i) {
    for (const int32_t to = shape_.cuts[i].neurons; n < to; ++n) {
      first += f[static_cast<size_t>(ids[static_cast<size_t>(n)])];
    }
    covered[i].push_back(all > 0 ? first / all : static_cast<double>(n) / static_cast<double>(f.size()));
  }
}

// `covered`: by routed expert, the part of its activations that a cut's neurons make.
LayerCosts::ExpertSums LayerCosts::sum_experts(std::span<const double> p, const LayerShape::ExpertCut& cut,
                                               std::span<const double> covered) const {
  const std::vector<double> zeros(order_.size() + 1);
  ExpertSums s{cut.neurons, zeros, zeros, zeros, zeros, zeros};
  for (size_t k = 0; k < order_.size(); ++k) {
    const auto id = static_cast<size_t>(order_[k]);
    const bool whole = id >= covered.size();  // the shared one, too
    const double part = whole ? 1 : static_cast<double>(cut.neurons) / static_cast<double>(shape_.inside.n_ff);
    s.parts[k + 1] = s.parts[k] + part;
    s.memory[k + 1] = s.memory[k] + static_cast<double>(whole ? shape_.neuron_on_gpu() : cut.gpu_bytes);
    s.read[k + 1] = s.read[k] + p[id] * static_cast<double>(whole ? shape_.expert_read_by_gpu() : cut.gpu_bytes);
    s.uses[k + 1] = s.uses[k] + p[id] * part;
    s.active[k + 1] = s.active[k] + p[id] * (whole ? 1 : covered[id]);
  }
  return s;
}

const LayerCosts::ExpertSums& LayerCosts::sums(const LayerChoice& c) const {
  const auto found = std::ranges::find(experts_, c.neurons, &ExpertSums::neurons);
  HEARTH_CHECK(found != experts_.end(), "experts of {} neurons on the GPU are no choice", c.neurons);
  return *found;
}

std::vector<int32_t> LayerCosts::hottest_inside(int32_t expert, int32_t n) const {
  const std::vector<int32_t>& all = hottest_[static_cast<size_t>(expert)];
  std::vector<int32_t> ids(all.begin(), all.begin() + n);
  std::ranges::sort(ids);
  return ids;
}

double LayerCosts::on_gpu(const LayerChoice& c) const {
  return shape_.experts ? sums(c).parts[static_cast<size_t>(c.hot)] : c.hot;
}

double LayerCosts::hot_activations(const LayerChoice& c) const {
  return shape_.experts ? sums(c).uses[static_cast<size_t>(c.hot)] : active_[static_cast<size_t>(c.hot)];
}

uint64_t LayerCosts::kv_gpu_bytes(const LayerChoice& c) const {
  return c.attention == Where::gpu ? kv_bytes_ : 0;
}

uint64_t LayerCosts::gpu_bytes(const LayerChoice& c) const {
  uint64_t bytes = 0;
  if (c.attention == Where::gpu) {
    bytes += shape_.attention_on_gpu() + kv_bytes_ + kAttentionTensors * reserve_.alignment;
  }
  if (c.hot > 0) {
    const uint64_t n = static_cast<uint64_t>(c.hot);
    const uint64_t all =
        shape_.experts ? static_cast<uint64_t>(std::ceil(sums(c).memory[n])) : n * shape_.neuron_on_gpu();
    bytes += all + n * kIdBytes + kNeuronTensors * reserve_.alignment;
  }
  if (c.predicts_on_gpu()) {
    bytes += shape_.predictor_on_gpu() + kPredictorTensors * reserve_.alignment;
  }
  return bytes;
}

Traffic LayerCosts::attention_traffic(const LayerChoice& c) const {
  const double bytes = static_cast<double>(shape_.attention_bytes) + kv_read_;
  Traffic t;
  (c.attention == Where::gpu ? t.gpu_dense : t.cpu_dense) = bytes;
  return t;
}

Traffic LayerCosts::ffn_traffic(const LayerChoice& c) const {
  const auto gate = static_cast<double>(shape_.gate_bytes), up_down = static_cast<double>(shape_.up_down_bytes);
  const auto k = static_cast<size_t>(c.hot), n = order_.size();
  Traffic t;
  if (shape_.experts) {  // whole matrices, but for neurons that the CPU skips
    const ExpertSums& hot = sums(c);
    const double skippable = shape_.active_inside < 1 ? static_cast<double>(shape_.skippable_bytes) : 0;
    t.gpu_dense = hot.read[k];
    t.cpu_dense = (active_[n] - hot.uses[k]) * (up_down - skippable);
    t.cpu_sparse = (active_[n] - hot.active[k]) * skippable * shape_.active_inside;
    return t;
  }
  switch (c.selection) {
    case Selection::all:
      t.gpu_dense = static_cast<double>(k) * (gate + up_down);
      t.cpu_dense = static_cast<double>(n - k) * (gate + up_down);
      break;
    case Selection::gate:
      t.gpu_dense = static_cast<double>(k) * gate;
      t.cpu_dense = static_cast<double>(n - k) * gate;
      t.gpu_sparse = active_[k] * up_down;
      t.cpu_sparse = (active_[n] - active_[k]) * up_down;
      break;
    case Selection::predictor:
      (c.predictor == Where::gpu ? t.gpu_dense : t.cpu_dense) =
          static_cast<double>(shape_.predictor_bytes) * (c.look_ahead ? 2 : 1);
      t.gpu_sparse = predicted_[k] * gate + active_[k] * up_down;
      t.cpu_sparse = cold_bytes(c);
      t.link = t.cpu_sparse * link_share(c);
      t.cpu_sparse -= t.link;
      break;
  }
  return t;
}

double LayerCosts::cold_bytes(const LayerChoice& c) const {
  const auto k = static_cast<size_t>(c.hot), n = order_.size();
  return (predicted_[n] - predicted_[k]) * static_cast<double>(shape_.gate_bytes) +
         (active_[n] - active_[k]) * static_cast<double>(shape_.up_down_bytes);
}

double LayerCosts::predictor_seconds() const {
  return cost_.gpu_predictor(static_cast<double>(shape_.predictor_bytes));
}

double LayerCosts::cpu_seconds(const LayerChoice& c, double bytes) const {
  if (bytes <= 0) return 0;
  const double read = cost_.cpu_sparse(bytes);
  const double before = c.look_ahead ? attention_seconds(c) + predictor_seconds() : 0;
  const double fetched = std::min(cost_.foreseen_share * read, before);
  return cost_.handoff_seconds - cost_.asking_seconds + read - fetched + fetched / cost_.fetched_speedup;
}

double LayerCosts::linked_seconds(const LayerChoice& c, double bytes, bool cpu_rests) const {
  if (bytes <= 0) return 0;
  // With look-ahead, the predictor's time stands for what the rows take to begin with: 0.3, 1.0 and 2.0 MB took 16, 31
  // and 57 us on an H200.
  return (c.look_ahead ? predictor_seconds() : 0) + cost_.linked(bytes, cpu_rests);
}

double LayerCosts::link_share(const LayerChoice& c) const {
  const bool divided = c.hot > 0 && c.hot < shape_.n_ff;
  if (!divided || !c.predicts_on_gpu()) return 0;
  if (cost_.link_share) return *cost_.link_share;
  // Where both sides take equally long: the more is linked, the longer that takes and the shorter the rest.
  const double bytes = cold_bytes(c);
  double least = 0, most = 1;
  for (int i = 0; i < 16; ++i) {
    const double share = (least + most) / 2;
    (linked_seconds(c, share * bytes, false) < cpu_seconds(c, (1 - share) * bytes) ? least : most) = share;
  }
  const bool rests = linked_seconds(c, bytes, true) <= cost_.asking_seconds + cpu_seconds(c, (1 - least) * bytes);
  return rests ? 1 : least;
}

std::vector<int32_t> LayerCosts::linked(const LayerChoice& c) const {
  std::vector<int32_t> ids;
  const double share = link_share(c);
  double due = 0.5 * share;
  for (auto k = static_cast<size_t>(c.hot); share > 0 && k < order_.size(); ++k) {
    due += share;
    if (due < 1) continue;
    ids.push_back(order_[k]);
    due -= 1;
  }
  return ids;
}

LayerCosts::FfnTime LayerCosts::ffn_time(const LayerChoice& c) const {
  const Traffic t = ffn_traffic(c);
  const bool gpu_ffn = c.hot > 0 || c.predicts_on_gpu();
  const double kernels = gpu_ffn ? cost_.ffn_kernels + (c.selection == Selection::gate ? cost_.gate_kernels : 0) : 0;
  const double cpu_dense = cost_.cpu_dense(t.cpu_dense), cpu_sparse = cost_.cpu_sparse(t.cpu_sparse);
  if (c.predicts_on_gpu()) {
    // A hint runs beside the rows: it takes the memory's time, none of its own.
    const double hint = c.look_ahead ? cost_.gpu_dense(static_cast<double>(shape_.predictor_bytes)) : 0;
    const bool asks = t.cpu_sparse > 0;
    const double cold = std::max(cpu_seconds(c, t.cpu_sparse), linked_seconds(c, t.link, !asks));
    return {predictor_seconds() + kernels * cost_.kernel_seconds,
            cost_.gpu_reads(kernels, t.gpu_sparse, cost_.gpu_sparse(t.gpu_sparse)) + hint,
            cold + (asks ? cost_.asking_seconds : 0)};
  }
  const bool predicts = c.selection == Selection::predictor;  // on the CPU
  const double at_rate = cost_.gpu_dense(t.gpu_dense) + cost_.gpu_sparse(t.gpu_sparse);
  return {kernels * cost_.kernel_seconds + (predicts ? cpu_dense : 0), cost_.gpu_reads(kernels, t.gpu(), at_rate),
          cpu_sparse + (predicts ? 0 : cpu_dense)};
}

double LayerCosts::attention_seconds(const LayerChoice& c) const {
  const Traffic t = attention_traffic(c);
  if (c.attention == Where::cpu) return cost_.cpu_dense(t.cpu_dense);
  return cost_.on_gpu(cost_.attention_kernels, t.gpu_dense, cost_.gpu_dense(t.gpu_dense));
}

double LayerCosts::expert_seconds(const LayerChoice& c) const {
  const Traffic t = ffn_traffic(c);
  const double router = cost_.on_gpu(cost_.router_kernels, 0, 0);
  const double hot = cost_.on_gpu(cost_.expert_kernels, t.gpu_dense, cost_.gpu_dense(t.gpu_dense));
  if (c.hot == shape_.n_ff && c.neurons == 0) return router + hot;
  const double spared = c.neurons > 0 ? 0 : spared_[static_cast<size_t>(c.hot)], asked = 1 - spared;
  double waits = 0;
  if (asked > 0) {
    const double cold = cost_.cpu_dense(t.cpu_dense) + cost_.cpu_sparse(t.cpu_sparse);
    waits = cost_.overlapped(hot, cost_.handoff_seconds - cost_.asking_seconds + cold / asked);
  }
  return router + cost_.asking_seconds + spared * hot + asked * waits;
}

double LayerCosts::seconds(const LayerChoice& c) const {
  const double attention = attention_seconds(c);
  if (shape_.experts && c.hot > 0) {
    return attention + (c.attention == Where::cpu ? cost_.handoff_seconds : 0) + expert_seconds(c);
  }
  const bool gpu_ffn = c.hot > 0 || c.predicts_on_gpu(), cold = c.hot < shape_.n_ff;
  const bool in_ffn_time = c.predicts_on_gpu();  // the FFN's hand-off is, as a part of the CPU's side
  const int handoffs = (c.attention == Where::cpu ? 1 : 0) + (cold && !in_ffn_time ? 1 : 0);
  const FfnTime ffn = ffn_time(c);
  return attention + cost_.handoff_seconds * (gpu_ffn ? handoffs : std::min(handoffs, 1)) + ffn.before +
         cost_.overlapped(ffn.hot, ffn.cold);
}

double LayerCosts::seconds_cpu_only(Selection selection) const {
  const LayerChoice c{.selection = selection};
  const FfnTime ffn = ffn_time(c);
  return cost_.cpu_layer_seconds + cost_.cpu_dense(attention_traffic(c).cpu_dense) + ffn.before + ffn.cold;
}

std::vector<Selection> LayerCosts::selections(Sparsity sparsity, bool sparse_family) const {
  const bool predictor = shape_.predictor_bytes > 0;
  if (shape_.experts) return {Selection::gate};  // the cost of a choice: nothing of those that are left out is read
  if (sparsity == Sparsity::off || !shape_.by_neuron) return {Selection::all};
  if (predictor && sparsity == Sparsity::predict) return {Selection::predictor};
  if (predictor && sparsity == Sparsity::auto_) return {Selection::gate, Selection::predictor};
  if (sparsity == Sparsity::auto_ && !sparse_family) return {Selection::all};
  return {Selection::gate};
}

// Numbers of hot neurons worth telling apart: all in small layers, every few in large ones. A group of n_ff / 1024
// neurons is less than a millionth of the time of a token that a plan could win by splitting it.
std::vector<int32_t> LayerCosts::hot_counts() const {
  if (prescribed_) return {*prescribed_};
  const auto n = static_cast<int32_t>(shape_.n_ff);
  if (!shape_.by_neuron) return {0, n};
  if (shape_.experts && !shape_.gpu_experts) return {0};
  std::vector<int32_t> counts;
  for (int32_t k = 0; k < n; k += std::max(1, n / 1024)) counts.push_back(k);
  counts.push_back(n);
  return counts;
}

std::vector<LayerChoice> LayerCosts::choices(Sparsity sparsity, bool sparse_family) const {
  std::vector<LayerChoice> out;
  for (const Where attention : {Where::cpu, Where::gpu}) {
    for (const Selection selection : selections(sparsity, sparse_family)) {
      LayerChoice c{.attention = attention, .selection = selection};
      if (selection == Selection::predictor) {
        if (prescribed_.value_or(0) == 0) out.push_back(c);  // predictor and all neurons on the CPU
        c.predictor = Where::gpu;
      }
      const bool can =
          shape_.can_look_ahead && cost_.look_ahead && attention == Where::gpu && c.predictor == Where::gpu;
      for (const int32_t k : hot_counts()) {
        c.hot = k;
        out.push_back(c);
        for (size_t cut = 1; cut < experts_.size() && k > 0; ++cut) {
          out.push_back(c), out.back().neurons = experts_[cut].neurons;
        }
        if (can && k < shape_.n_ff) out.push_back(c), out.back().look_ahead = true;
      }
    }
  }
  return out;
}

}  // namespace hearth::offline
