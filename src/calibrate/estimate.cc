#include "calibrate/estimate.h"

#include "calibrate/hessian.h"

namespace nfp {
namespace {

// Of the rate of the short run, what the whole of a calibration is taken to reach: its other loops are less dense, and
// decoding reads the weights for few rows. An assumption; being wrong by half moves only the limit of `auto`.
constexpr double kEfficiency = 0.7;

}  // namespace

double calibration_flops(const ModelConfig& config, const CalibrationOptions& options) {
  const auto cube = [](double x) { return x * x * x; };
  const double hidden = config.hidden, wide = config.intermediate, head = config.head_dim;
  const double attended = config.heads * head, layers = config.layers;
  const double qkv = attended + 2.0 * config.kv_heads * head;  // rows
  const double weights = layers * (qkv * hidden + hidden * attended + 3 * hidden * wide);
  const double vocabulary = static_cast<double>(config.vocab) * hidden;
  const double inputs = layers * (2 * hidden * hidden + attended * attended + wide * wide);  // entries of all H
  const double tokens = static_cast<double>(calibration_tokens(options));
  const double writing = options.text == kSelfText ? tokens * 2 * (weights + vocabulary) : 0;
  const double hessians = tokens * (2 * weights + inputs);  // half of H, 2 operations an entry
  // Factors in FP64 count twice; a sweep is half a product with H, a descent a whole one.
  const double factors = layers * (2 * cube(hidden) + cube(attended) + cube(wide)) * 4 / 3;
  const double choices =
      3 * layers *
      (qkv * hidden * hidden + hidden * attended * attended + 2 * wide * hidden * hidden + hidden * wide * wide);
  const double probes = 4 * layers * kSensitivityTokens * weights + 4 * layers * 32 * 2 * vocabulary;
  return writing + hessians + factors + choices + (options.measure_sensitivity ? probes : 0);
}

double estimate_calibration(const ModelConfig& config, const CalibrationOptions& options, ThreadPool& threads) {
  return calibration_flops(config, options) / (kEfficiency * hessian_flops_a_second(threads));
}

}  // namespace nfp
