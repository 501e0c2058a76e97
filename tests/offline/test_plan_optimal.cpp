// The planner against everything that is possible (tiny models) and against an exact integer programme (small ones).
#include <gtest/gtest.h>

#include <numeric>

#include "offline/plan/planner.h"
#include "plan_cases.h"
#ifdef HEARTH_HAS_GLPK
#include <glpk.h>
#endif

namespace hearth::offline {
namespace {

using engine::Selection;
using engine::Where;

enum State { cold, gate_only, hot };

// The time of one layer written from cost_model.h's description, neuron by neuron, for any assignment of states.
double layer_seconds(const LayerShape& l, const std::vector<double>& p, const PlanRequest& r, double n_kv,
                     bool attention_gpu, const std::vector<State>& states) {
  const CostModel& c = r.cost;
  const double gate = static_cast<double>(l.gate_bytes), rows = static_cast<double>(l.up_down_bytes);
  double gpu_gates = 0, gpu_rows = 0, cpu_gates = 0, cpu_rows = 0;
  bool any_cold = false, any_gate_only = false, any_gpu = false;
  for (size_t i = 0; i < states.size(); ++i) {
    (states[i] == cold ? cpu_gates : gpu_gates) += gate;
    (states[i] == hot ? gpu_rows : cpu_rows) += p[i] * rows;
    any_cold |= states[i] != hot, any_gate_only |= states[i] == gate_only, any_gpu |= states[i] != cold;
  }
  const double g = gpu_gates / (c.gpu_bandwidth * c.gpu_dense_efficiency);
  const double on_gpu = gpu_rows / (c.gpu_bandwidth * c.gpu_sparse_efficiency);
  const double on_cpu =
      cpu_gates / (c.cpu_bandwidth * c.cpu_dense_efficiency) + cpu_rows / (c.cpu_bandwidth * c.cpu_sparse_efficiency);
  const double before = any_gate_only ? g : 0, side = any_gate_only ? on_gpu : g + on_gpu;
  double t = before + std::max(side, on_cpu) + c.overlap_loss * std::min(side, on_cpu);
  const double attention = static_cast<double>(l.attention_bytes) + static_cast<double>(l.kv_token_bytes) * n_kv;
  t += attention_gpu ? c.attention_kernels * c.kernel_seconds + attention / (c.gpu_bandwidth * c.gpu_dense_efficiency)
                     : attention / (c.cpu_bandwidth * c.cpu_dense_efficiency);
  if (any_gpu) t += (c.ffn_kernels + c.gate_kernels) * c.kernel_seconds;
  double handoffs = (attention_gpu ? 0 : 1) + (any_cold ? 1 : 0);
  if (!any_gpu) handoffs = std::min(handoffs, 1.0);
  return t + handoffs * c.handoff_seconds;
}

uint64_t layer_bytes(const LayerShape& l, const PlanRequest& r, bool attention_gpu, const std::vector<State>& states) {
  uint64_t bytes = 0;
  if (attention_gpu) {
    bytes += l.attention_bytes + l.kv_token_bytes * static_cast<uint64_t>(r.n_ctx) + 8 * r.reserve.alignment;
  }
  bool any = false;
  for (const State s : states) {
    if (s != cold) bytes += l.gate_bytes + 4, any = true;
    if (s == hot) bytes += l.up_down_bytes;
  }
  return bytes + (any ? 8 * r.reserve.alignment : 0);
}

struct Head {
  uint64_t bytes;
  double seconds;
};
std::vector<Head> heads(const ModelShape& s, const PlanRequest& r) {
  const CostModel& c = r.cost;
  const auto bytes = static_cast<double>(s.output_bytes);
  const double gpu = c.head_kernels * c.kernel_seconds + bytes / (c.gpu_bandwidth * c.gpu_dense_efficiency);
  const double cpu = c.handoff_seconds + bytes / (c.cpu_bandwidth * c.cpu_dense_efficiency);
  const uint64_t slack = 2 * r.reserve.alignment;
  if (s.tied_head) return {{0, cpu + c.host_embedding_seconds}, {s.embedding_bytes + slack, gpu}};
  return {{0, cpu + c.host_embedding_seconds},
          {s.embedding_bytes + slack, cpu},
          {s.output_bytes + slack, gpu + c.host_embedding_seconds},
          {s.embedding_bytes + s.output_bytes + 2 * slack, gpu}};
}

// Calls f(states) for every assignment; `nested`: only those where a more frequent neuron is never colder.
void for_each_assignment(const std::vector<double>& p, bool nested,
                         const std::function<void(const std::vector<State>&)>& f) {
  std::vector<State> states(p.size(), cold);
  for (;;) {
    bool allowed = true;
    for (size_t i = 0; nested && i < p.size(); ++i) {
      for (size_t j = 0; j < p.size(); ++j) {
        const bool before = p[i] > p[j] || (p[i] == p[j] && i < j);
        allowed &= !(before && states[i] < states[j]);
      }
    }
    if (allowed) f(states);
    size_t i = 0;
    while (i < states.size() && states[i] == hot) states[i++] = cold;
    if (i == states.size()) return;
    states[i] = static_cast<State>(states[i] + 1);
  }
}

// Least time over everything that is possible within `budget` bytes beyond the fixed ones.
double best_of_all(const ModelShape& s, const Frequencies& f, const PlanRequest& r, double n_kv, uint64_t budget,
                   bool nested) {
  std::vector<Head> front = heads(s, r);  // combinations so far
  for (size_t l = 0; l < s.layers.size(); ++l) {
    std::vector<Head> ways;
    for (const bool attention : {false, true}) {
      for_each_assignment(f.p[l], nested, [&](const std::vector<State>& states) {
        ways.push_back({layer_bytes(s.layers[l], r, attention, states),
                        layer_seconds(s.layers[l], f.p[l], r, n_kv, attention, states)});
      });
    }
    std::vector<Head> next;
    for (const Head& a : front) {
      for (const Head& b : ways) {
        if (a.bytes + b.bytes <= budget) next.push_back({a.bytes + b.bytes, a.seconds + b.seconds});
      }
    }
    std::sort(next.begin(), next.end(),
              [](auto& a, auto& b) { return a.bytes != b.bytes ? a.bytes < b.bytes : a.seconds < b.seconds; });
    front.clear();
    for (const Head& h : next) {
      if (front.empty() || h.seconds < front.back().seconds) front.push_back(h);
    }
  }
  return front.empty() ? INFINITY : front.back().seconds + r.cost.token_seconds;
}

double cpu_only(const ModelShape& s, const Frequencies& f, const PlanRequest& r, double n_kv) {
  PlanRequest free = r;
  free.cost.handoff_seconds = 0;
  double sum = static_cast<double>(s.output_bytes) / (r.cost.cpu_bandwidth * r.cost.cpu_dense_efficiency);
  for (size_t l = 0; l < s.layers.size(); ++l) {
    sum += layer_seconds(s.layers[l], f.p[l], free, n_kv, false, std::vector<State>(f.p[l].size(), cold));
  }
  return sum;
}

uint64_t random_budget(std::mt19937& rng, const Planner& planner) {
  return static_cast<uint64_t>(test::random_int(rng, static_cast<int64_t>(planner.smallest_budget()),
                                                static_cast<int64_t>(planner.largest_useful_budget()) + 1000));
}

TEST(PlanOptimal, EqualsTheBestOfEverythingThatIsPossible) {
  std::mt19937 rng(5);
  for (int round = 0; round < 150; ++round) {
    const ModelShape shape = test::random_shape(rng, test::random_int(rng, 1, 3), 4);
    const Frequencies f = test::random_frequencies(rng, shape);
    const Planner planner(shape, f, test::random_request(rng));
    const uint64_t budget = random_budget(rng, planner);
    const Plan plan = planner.plan(budget);
    const PlanRequest& r = planner.request();
    const auto n_kv = static_cast<double>(plan.n_kv);
    const double alone = cpu_only(shape, f, r, n_kv);
    const uint64_t free = budget - planner.smallest_budget();
    const double nested = std::min(alone, best_of_all(shape, f, r, n_kv, free, true));
    EXPECT_NEAR(plan.seconds, nested, 1e-6 * nested) << "round " << round;
    EXPECT_LE(plan.bound, nested * (1 + 1e-9)) << "round " << round;
    // Without the rule that frequent neurons go first, a better balance of the two sides can win less than the time of
    // one neuron in each layer.
    double slack = 0;
    for (const LayerShape& l : shape.layers) {
      slack += static_cast<double>(l.neuron_bytes()) / (std::min(r.cost.cpu_bandwidth, r.cost.gpu_bandwidth) * 0.6);
    }
    EXPECT_GE(std::min(alone, best_of_all(shape, f, r, n_kv, free, false)), plan.seconds - slack) << "round " << round;
  }
}

#ifdef HEARTH_HAS_GLPK

// A mixed integer programme, in microseconds and bytes, built row by row.
class Programme {
 public:
  Programme() : lp_(glp_create_prob()) { glp_set_obj_dir(lp_, GLP_MIN); }
  ~Programme() { glp_delete_prob(lp_); }
  Programme(const Programme&) = delete;
  Programme& operator=(const Programme&) = delete;

  int binary(double cost = 0) {
    const int v = glp_add_cols(lp_, 1);
    glp_set_col_kind(lp_, v, GLP_BV);
    glp_set_obj_coef(lp_, v, cost);
    return v;
  }
  int positive(double cost) {
    const int v = glp_add_cols(lp_, 1);
    glp_set_col_bnds(lp_, v, GLP_LO, 0, 0);
    glp_set_obj_coef(lp_, v, cost);
    return v;
  }
  using Terms = std::vector<std::pair<int, double>>;
  void at_least(const Terms& terms, double bound) { row(terms, GLP_LO, bound); }
  void at_most(const Terms& terms, double bound) { row(terms, GLP_UP, bound); }
  double solve() {
    glp_term_out(GLP_OFF);
    glp_iocp control;
    glp_init_iocp(&control);
    control.presolve = GLP_ON;
    control.tol_int = 1e-9;
    EXPECT_EQ(glp_intopt(lp_, &control), 0);
    EXPECT_EQ(glp_mip_status(lp_), GLP_OPT);
    return glp_mip_obj_val(lp_);
  }

 private:
  void row(const Terms& terms, int kind, double bound) {
    const int r = glp_add_rows(lp_, 1);
    glp_set_row_bnds(lp_, r, kind, bound, bound);
    std::vector<int> index{0};
    std::vector<double> value{0};
    for (const auto& [v, x] : terms) index.push_back(v), value.push_back(x);
    glp_set_mat_row(lp_, r, static_cast<int>(terms.size()), index.data(), value.data());
  }
  glp_prob* lp_;
};

// Adds one layer; returns its constant time in microseconds, and its bytes to `bytes`.
double add_layer(Programme& m, Programme::Terms& bytes, const LayerShape& l, const std::vector<double>& p,
                 const PlanRequest& r, double n_kv) {
  const CostModel& c = r.cost;
  const double us = 1e6, gd = c.gpu_bandwidth * c.gpu_dense_efficiency, gs = c.gpu_bandwidth * c.gpu_sparse_efficiency,
               cd = c.cpu_bandwidth * c.cpu_dense_efficiency, cs = c.cpu_bandwidth * c.cpu_sparse_efficiency;
  const double attention = static_cast<double>(l.attention_bytes) + static_cast<double>(l.kv_token_bytes) * n_kv;
  const double gate = static_cast<double>(l.gate_bytes), rows = static_cast<double>(l.up_down_bytes);
  const double h = us * c.handoff_seconds;
  const int a = m.binary(us * (attention / gd - attention / cd + c.attention_kernels * c.kernel_seconds));
  const int lone = m.binary(), any_cold = m.binary(),
            used = m.binary(us * (c.ffn_kernels + c.gate_kernels) * c.kernel_seconds);
  const int handoffs = m.positive(h), t = m.positive(1);
  m.at_least({{handoffs, 1}, {a, 1}}, 1);
  m.at_least({{handoffs, 1}, {any_cold, -1}}, 0);
  m.at_least({{handoffs, 1}, {a, 1}, {any_cold, -1}, {used, -1}}, 0);
  bytes.push_back({a, static_cast<double>(l.attention_bytes + l.kv_token_bytes * static_cast<uint64_t>(r.n_ctx) +
                                          8 * r.reserve.alignment)});
  bytes.push_back({used, static_cast<double>(8 * r.reserve.alignment)});

  std::vector<double> sorted = p;
  std::sort(sorted.rbegin(), sorted.rend());
  // max(a, b) + loss * min(a, b) is the larger of a + loss * b and b + loss * a. So t >= G + R + loss * C, and
  // t >= C + loss * (G + R), or C + G + loss * R if a lone gate is on the GPU. C = everything - what the GPU took.
  const double loss = c.overlap_loss;
  double all_cold = 0;
  Programme::Terms gpu{{t, 1}}, cpu{{t, 1}}, serial{{t, 1}};
  int x_before = 0, g_before = 0;
  for (const double f : sorted) {
    const int x = m.binary(), g = m.binary();
    m.at_least({{g, 1}, {x, -1}}, 0);
    m.at_least({{lone, 1}, {g, -1}, {x, 1}}, 0);
    m.at_least({{any_cold, 1}, {x, 1}}, 1);
    m.at_least({{used, 1}, {g, -1}}, 0);
    if (x_before != 0) m.at_least({{x_before, 1}, {x, -1}}, 0), m.at_least({{g_before, 1}, {g, -1}}, 0);
    x_before = x, g_before = g;
    all_cold += us * (gate / cd + f * rows / cs);
    const double gate_gpu = us * gate / gd, gate_cpu = us * gate / cd, rows_gpu = us * f * rows / gs,
                 rows_cpu = us * f * rows / cs;
    gpu.push_back({g, loss * gate_cpu - gate_gpu}), gpu.push_back({x, loss * rows_cpu - rows_gpu});
    cpu.push_back({g, gate_cpu - loss * gate_gpu}), cpu.push_back({x, rows_cpu - loss * rows_gpu});
    serial.push_back({g, gate_cpu - gate_gpu}), serial.push_back({x, rows_cpu - loss * rows_gpu});
    bytes.push_back({g, gate + 4}), bytes.push_back({x, rows});
  }
  const double big = us * gate * static_cast<double>(p.size()) / gd;
  m.at_least(gpu, loss * all_cold);
  m.at_least(cpu, all_cold);
  serial.push_back({lone, -big});
  m.at_least(serial, all_cold - big);
  return us * attention / cd;
}

TEST(PlanOptimal, EqualsAnExactIntegerProgramme) {
  std::mt19937 rng(8);
  for (int round = 0; round < 60; ++round) {
    const ModelShape shape = test::random_shape(rng, test::random_int(rng, 1, 4), 12);
    const Frequencies f = test::random_frequencies(rng, shape);
    const Planner planner(shape, f, test::random_request(rng));
    const uint64_t budget = random_budget(rng, planner);
    const Plan plan = planner.plan(budget);
    const PlanRequest& r = planner.request();
    const auto n_kv = static_cast<double>(plan.n_kv);

    Programme m;
    Programme::Terms bytes, one;
    double constant = 1e6 * r.cost.token_seconds;
    for (const Head& head : heads(shape, r)) {
      const int v = m.binary(1e6 * head.seconds);
      one.push_back({v, 1});
      bytes.push_back({v, static_cast<double>(head.bytes)});
    }
    m.at_least(one, 1);
    m.at_most(one, 1);
    for (size_t l = 0; l < shape.layers.size(); ++l) constant += add_layer(m, bytes, shape.layers[l], f.p[l], r, n_kv);
    m.at_most(bytes, static_cast<double>(budget - planner.smallest_budget()));
    const double best = std::min(1e-6 * (m.solve() + constant), cpu_only(shape, f, r, n_kv));
    EXPECT_NEAR(plan.seconds, best, 1e-6 * best) << "round " << round;
  }
}

#else
TEST(PlanOptimal, EqualsAnExactIntegerProgramme) {
  GTEST_SKIP() << "needs GLPK (libglpk-dev), which was absent when the tests were built";
}
#endif

}  // namespace
}  // namespace hearth::offline
