#include "calibrate/estimate.h"

#include "calibrate/hessian.h"

namespace nfp {
namespace {

// Of the rate of the short run, what the whole of a calibration is taken to reach: its other loops are less dense, and
// decoding reads the weights for few rows. An assumption; being wrong by half moves only the limit of `auto`.
constexpr double kEfficiency = 0.7;
constexpr double kCompensated = 5;  // times as long with compensation (docs/quality.md)

// A linear layer of [rows, columns], or `count` of the same size of which each token goes through `active`.
struct LinearSize {
  double rows, columns, count = 1, active = 1;
};

// Sums over all linear layers.
struct Work {
  double weights = 0;   // that a token is multiplied with
  double inputs = 0;    // entries of H that a token is added to
  double cubes = 0;     // of H's sizes
  double products = 0;  // multiplications of all weights with their H
  double linears = 0;

  void add(const LinearSize& size) {
    const double square = size.columns * size.columns;
    weights += size.active * size.rows * size.columns;
    inputs += size.active * square;
    cubes += size.count * square * size.columns;
    products += size.count * size.rows * square;
    linears += size.count;
  }
  void add_mlp(double hidden, double wide, double count = 1, double active = 1) {
    add({2 * wide, hidden, count, active});
    add({hidden, wide, count, active});
  }
};

}  // namespace

double calibration_flops(const ModelConfig& config, const CalibrationOptions& options) {
  const double hidden = config.hidden, attended = config.heads * static_cast<double>(config.head_dim);
  const double qkv = attended + 2.0 * config.kv_heads * config.head_dim;  // rows
  Work work;
  for (int32_t layer = 0; layer < config.layers; ++layer) {
    work.add({qkv, hidden});
    work.add({hidden, attended});
    if (!config.has_experts(layer)) {
      work.add_mlp(hidden, config.intermediate);
      continue;
    }
    const Experts& experts = config.experts;
    work.add_mlp(hidden, experts.intermediate, experts.count, experts.top);
    if (experts.shared_intermediate > 0) work.add_mlp(hidden, experts.shared_intermediate);
  }
  const double vocabulary = static_cast<double>(config.vocab) * hidden;
  const double tokens = static_cast<double>(calibration_tokens(options));
  const double writing = options.text == kSelfText ? tokens * 2 * (work.weights + vocabulary) : 0;
  const double hessians = tokens * (2 * work.weights + work.inputs);  // half of H, 2 operations an entry
  // Factors in FP64 count twice; a sweep is half a product with H, a descent a whole one.
  const double factors = work.cubes * 4 / 3, choices = 3 * work.products;
  const double passes = compensates(options) ? kCompensated : 1;
  // Half a forward pass each.
  const double probes = work.linears * (kSensitivityTokens * work.weights + 32 * 2 * vocabulary);
  return writing + passes * (hessians + factors + choices) + (options.measure_sensitivity ? probes : 0);
}

double estimate_calibration(const ModelConfig& config, const CalibrationOptions& options, ThreadPool& threads) {
  return calibration_flops(config, options) / (kEfficiency * hessian_flops_a_second(threads));
}

}  // namespace nfp
