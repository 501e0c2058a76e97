#include "engine/traffic.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "model/predictors.h"

namespace hearth::engine {
namespace {

SideBytes on(bool host, double bytes) {
  return host ? SideBytes{0, bytes} : SideBytes{bytes, 0};
}

// Active neurons of one layer, a token.
struct Active {
  double main = 0, host = 0, link = 0;
};
Active active_in(const DensityStats& counted, size_t layer) {
  const auto steps = static_cast<double>(counted.steps);
  const double host = counted.active_on_host[layer] / steps, link = counted.active_linked[layer] / steps;
  return {counted.active[layer] / steps - host - link, host, link};
}

// Bytes of one neuron's rows.
struct NeuronBytes {
  double gate = 0, up_down = 0;
};

void add_dense_ffn(LayerTraffic& t, NeuronBytes each, double n_main, double n_host) {
  t.ffn += {n_main * (each.gate + each.up_down), n_host * (each.gate + each.up_down)};
}

// The share of a mixture's neurons of which more than the gate was read, on each side. 1: of all.
SideBytes read_shares(const DensityStats& counted, size_t layer) {
  if (layer >= counted.neurons.size()) return {1, 1};
  const auto share = [](double active, double all) { return all > 0 ? active / all : 1.0; };
  const double host = counted.active_on_host[layer], n_host = counted.neurons_on_host[layer];
  return {share(counted.active[layer] - host, counted.neurons[layer] - n_host), share(host, n_host)};
}

// Expected bytes of a token's experts. hot_share: of those that it uses, on the main device, which may read them in
// another form; nullopt: of all experts. `read`: read_shares().
void add_experts(LayerTraffic& t, const model::LayerWeights& l, const LayerFacts& facts, const MainRows& rows,
                 std::optional<double> hot_share, SideBytes read) {
  t.selection += on(!facts.main_routes, static_cast<double>(l.router.w.bytes() + l.router.shared_gate.bytes()));
  const auto n = static_cast<double>(l.experts.size());
  double bytes = 0, gates = 0, neurons = 0;
  for (const Expert& e : l.experts) {
    bytes += static_cast<double>(e.bytes()), gates += static_cast<double>(e.ffn.gate.bytes());
    neurons += static_cast<double>(e.ffn.n());
  }
  const double gate_share = gates / bytes, hot = hot_share.value_or(static_cast<double>(rows.n_hot) / neurons);
  const double form = rows.expert_neuron_bytes > 0 ? rows.expert_neuron_bytes * neurons / bytes : 1;
  const auto of = [&](double share) { return gate_share + (1 - gate_share) * share; };
  if (l.router.shared) {
    const auto shared = static_cast<double>(l.experts.back().bytes());
    bytes = (bytes - shared) / (n - 1) * static_cast<double>(l.router.routing.n_used) + shared;
  } else {
    bytes *= static_cast<double>(l.router.routing.n_used) / n;
  }
  t.ffn += {hot * bytes * form * of(read.main), (1 - hot) * bytes * of(read.host)};
}

void add_sparse_ffn(LayerTraffic& t, const LayerFacts& facts, NeuronBytes each, double n_main, double n_host,
                    Active active, double predictor_bytes) {
  t.ffn += {active.main * each.up_down, active.host * each.up_down, active.link * each.up_down};
  if (facts.selection == Selection::predictor) {
    t.selection += on(!facts.main_predicts, predictor_bytes);
    t.ffn += {active.main * each.gate, active.host * each.gate, active.link * each.gate};
    return;
  }
  t.ffn += {n_main * each.gate, n_host * each.gate};
}

}  // namespace

double DensityStats::density() const {
  const double all = std::accumulate(neurons.begin(), neurons.end(), 0.0);
  return all == 0 ? NAN : std::accumulate(active.begin(), active.end(), 0.0) / all;
}

double DensityStats::host_share() const {
  double total = std::accumulate(experts.begin(), experts.end(), 0.0);
  double host = std::accumulate(experts_on_host.begin(), experts_on_host.end(), 0.0);
  for (size_t l = 0; l < active.size(); ++l) {
    if (l < experts.size() && experts[l] > 0) continue;  // the neurons are inside of them
    total += active[l], host += active_on_host[l] + active_linked[l];
  }
  return total == 0 ? NAN : host / total;
}

DensityStats DensityStats::since(const DensityStats& before) const {
  DensityStats d = *this;
  d.steps -= before.steps;
  const auto subtract = [&](std::vector<double> DensityStats::*counts) {
    for (size_t l = 0; l < (d.*counts).size(); ++l) (d.*counts)[l] -= (before.*counts)[l];
  };
  for (const auto counts :
       {&DensityStats::active, &DensityStats::active_on_host, &DensityStats::active_linked, &DensityStats::experts,
        &DensityStats::experts_on_host, &DensityStats::neurons, &DensityStats::neurons_on_host}) {
    subtract(counts);
  }
  return d;
}

SideBytes TokenTraffic::total() const {
  SideBytes sum = head;
  for (const LayerTraffic& l : layers) sum += l.attention, sum += l.selection, sum += l.ffn, sum += l.hint;
  return sum;
}

TokenTraffic token_traffic(const TrafficArgs& args, const DensityStats& counted, int64_t n_kv) {
  const model::Weights& weights = args.model.weights();
  const model::Config& config = args.model.config();
  TokenTraffic traffic;
  traffic.parallel_block = config.parallel_block;
  traffic.head = on(args.output_on_host, static_cast<double>(weights.output.bytes()));
  const auto kv_bytes = [&](size_t layer) {
    const int64_t n_seen = config.seen(static_cast<int64_t>(layer), n_kv);
    return static_cast<double>(n_seen * config.n_cached()) * sizeof(f16_t);
  };
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    const model::LayerWeights& l = weights.layers[i];
    const LayerFacts& facts = args.facts[i];
    LayerTraffic& t = traffic.layers.emplace_back();
    double attention = kv_bytes(i);
    for (const Matrix* m : l.attention()) attention += static_cast<double>(m->bytes());
    t.attention = on(facts.host_attends, attention);
    if (l.router) {
      const bool known = i < counted.experts.size() && counted.experts[i] > 0;
      add_experts(t, l, facts, args.rows[i],
                  known ? std::optional(1 - counted.experts_on_host[i] / counted.experts[i]) : std::nullopt,
                  read_shares(counted, i));
      continue;
    }
    const auto n_ff = static_cast<double>(l.ffn.n()), n_main = static_cast<double>(args.rows[i].n_hot);
    const NeuronBytes each = {
        static_cast<double>(l.ffn.gate.row_size()),
        static_cast<double>(l.ffn.up.bytes() + l.ffn.down.bytes() + l.ffn.down_t.bytes()) / std::max(1.0, n_ff)};
    if (args.sparse && facts.hinted) {
      t.hinted = true;
      traffic.layers[i - 1].hint = on(false, static_cast<double>(model::predictor_bytes(l.predictor)));
    }
    if (!args.sparse || facts.selection == Selection::all || counted.steps == 0) {
      add_dense_ffn(t, each, n_main, n_ff - n_main);
    } else {
      add_sparse_ffn(t, facts, each, n_main, n_ff - n_main, active_in(counted, i),
                     static_cast<double>(model::predictor_bytes(l.predictor)));
    }
  }
  return traffic;
}

double floor_seconds(const TokenTraffic& traffic, const SideBytes& bandwidths) {
  const auto each = [&](const SideBytes& b) {
    return SideBytes{b.main / bandwidths.main, b.host / bandwidths.host, b.link > 0 ? b.link / bandwidths.link : 0};
  };
  double seconds = each(traffic.head).total();
  for (const LayerTraffic& l : traffic.layers) {
    const SideBytes attention = each(l.attention), ffn = each(l.ffn);
    const double selection = each(l.selection).total();
    if (l.hinted && !traffic.parallel_block) {
      seconds += std::max(attention.total() + selection + std::max(ffn.main, ffn.link), ffn.host);
      continue;
    }
    seconds += selection;
    seconds += traffic.parallel_block ? std::max({attention.main + ffn.main, attention.host + ffn.host, ffn.link})
                                      : attention.total() + std::max({ffn.main, ffn.host, ffn.link});
  }
  return seconds;
}

}  // namespace hearth::engine
