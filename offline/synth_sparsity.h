#pragma once
// The statistics of a synthetic model: which neuron fires how often, and what that asks of the weights.
//
// The residual stream of token t at the FFN of layer l is x = m e + s_l g: a constant component (m in every coordinate,
// along e = +1, -1, …) and noise g, orthogonal to e, of variance 1 along any vector that is. Everything that writes to
// the residual is orthogonal to e, so m survives while s_l grows from layer to layer. Gate row i is a unit vector v_i
// orthogonal to e, less (s_l b_i / (m n_embd)) e; with the norm h = x / |x|rms the pre-activation is
//     z_i = (v_i . s_l g - s_l b_i) / |x|rms,
// which is positive with probability Phi(-b_i), whatever the norm's factor.
#include <cstdint>
#include <vector>

namespace hearth::offline {

inline constexpr double kHotFraction = 0.26;  // of the neurons, in the definition of --hot-share (PowerInfer, SOSP'24)

double normal_cdf(double x);
double normal_quantile(double p);  // 0 < p < 1

// Firing probabilities by rank, hottest first, with the given mean and the given share of their sum in the first 26 %:
// p(r) = max(floor, 0.98 exp(-k r^q)), r = (rank + 1/2) / n_ff; k and q are solved for, floor = min(0.002, density /
// 10). q = 1 is an exponential law (density 0.11 with share 0.9 gives q close to 1), smaller q a few very hot neurons
// and a long tail, larger q a plateau. Throws Error when no such law exists, with the shares that are possible.
std::vector<double> activation_law(int64_t n_ff, double density, double hot_share);
double mean_of(const std::vector<double>& p);
double hot_share_of(const std::vector<double>& p);  // p sorted, hottest first

// The rank of each neuron of a layer: a permutation of 0 … n_ff - 1 that depends on (seed, layer) alone.
std::vector<int32_t> neuron_ranks(uint64_t seed, int64_t layer, int64_t n_ff);

struct Calibration {
  static constexpr double kConstant = 0.70710678;  // m; at the first layer s = m, so that |x|rms = 1
  static constexpr double kFfnGrowth = 1.0;  // all FFNs together add this much of the first layer's noise variance
  static constexpr double kAttentionGrowth = 0.05;  // all attention blocks together, for a text of one token
  struct Layer {
    double noise;         // s_l at the input of the FFN, along any vector orthogonal to e
    double attn_out_std;  // of the elements of attn_output
    double down_std;      // of the elements of ffn_down
  };
  std::vector<double> threshold;  // b by rank
  std::vector<Layer> layers;
};

struct CalibrationShape {
  int64_t n_embd = 0, n_layer = 0;
  bool gated = true;
  bool parallel_block = false;
  double drift = 0;  // share of the noise that the tokens of a text have in common
};

// How the noise grows: each FFN adds kFfnGrowth / n_layer of the first layer's variance, by the choice of down_std.
// Attention averages the values of a long text, so that only what its tokens have in common (drift) arrives.
Calibration calibrate(const std::vector<double>& law, const CalibrationShape& shape);

}  // namespace hearth::offline
