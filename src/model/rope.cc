#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace nfp {
namespace {

// Llama 3.1's rule (transformers: modeling_rope_utils.py, _compute_llama3_parameters).
double llama3_scaled(double frequency, const RopeScaling& rope) {
  const double wavelength = 2.0 * std::numbers::pi / frequency;
  const double low = rope.original_context / static_cast<double>(rope.low_freq_factor);
  const double high = rope.original_context / static_cast<double>(rope.high_freq_factor);
  if (wavelength < high) return frequency;
  if (wavelength > low) return frequency / rope.factor;
  const double smooth = (rope.original_context / wavelength - rope.low_freq_factor) /
                        (static_cast<double>(rope.high_freq_factor) - rope.low_freq_factor);
  return (1.0 - smooth) * frequency / rope.factor + smooth * frequency;
}

// How much of pair i is stretched: 0 below the pair that turns beta_fast times over the original context, 1 from the
// one that turns beta_slow times (transformers: modeling_rope_utils.py, _compute_yarn_parameters).
double yarn_ramp(const Rope& rope, int32_t i) {
  const RopeScaling& scaling = rope.scaling;
  const auto pair_of = [&](double turns) {
    return rope.dim * std::log(scaling.original_context / (turns * 2.0 * std::numbers::pi)) /
           (2.0 * std::log(static_cast<double>(rope.theta)));
  };
  double low = pair_of(scaling.beta_fast), high = pair_of(scaling.beta_slow);
  if (scaling.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, rope.dim - 1.0);
  if (low == high) high += 0.001;
  return std::clamp((i - low) / (high - low), 0.0, 1.0);
}

}  // namespace

std::vector<double> rope_frequencies(const Rope& rope, int32_t positions) {
  const RopeScaling& scaling = rope.scaling;
  std::vector<double> frequencies;
  for (int32_t i = 0; i < rope.dim / 2; ++i) {
    double frequency = std::pow(static_cast<double>(rope.theta), -2.0 * i / rope.dim);
    switch (scaling.kind) {
      case RopeScaling::Kind::kNone:
        break;
      case RopeScaling::Kind::kLinear:
        frequency /= scaling.factor;
        break;
      case RopeScaling::Kind::kLlama3:
        frequency = llama3_scaled(frequency, scaling);
        break;
      case RopeScaling::Kind::kYarn: {
        const double stretched = yarn_ramp(rope, i);
        frequency = frequency / scaling.factor * stretched + frequency * (1.0 - stretched);
        break;
      }
      case RopeScaling::Kind::kLongrope: {
        const bool beyond = positions > scaling.original_context;
        frequency /= (beyond ? scaling.long_factors : scaling.short_factors)[static_cast<size_t>(i)];
        break;
      }
    }
    frequencies.push_back(frequency);
  }
  return frequencies;
}

std::vector<float> rope_table(const Rope& rope, int32_t positions) {
  const std::vector<double> frequencies = rope_frequencies(rope, positions);
  const double factor = rope.scaling.attention_factor;
  std::vector<float> table;
  table.reserve(frequencies.size() * 2 * static_cast<size_t>(positions));
  for (int32_t position = 0; position < positions; ++position) {
    for (double frequency : frequencies) table.push_back(static_cast<float>(factor * std::cos(position * frequency)));
    for (double frequency : frequencies) table.push_back(static_cast<float>(factor * std::sin(position * frequency)));
  }
  return table;
}

}  // namespace nfp
