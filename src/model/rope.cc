#include "model/rope.h"

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

}  // namespace

std::vector<double> rope_frequencies(const ModelConfig& config, std::span<const float> factors) {
  std::vector<double> frequencies;
  for (int32_t i = 0; i < config.head_dim / 2; ++i) {
    double frequency = std::pow(static_cast<double>(config.rope_theta), -2.0 * i / config.head_dim);
    if (!factors.empty()) {
      frequency /= factors[static_cast<size_t>(i)];
    } else if (config.rope_scaling.kind == RopeScaling::Kind::kLinear) {
      frequency /= config.rope_scaling.factor;
    } else if (config.rope_scaling.kind == RopeScaling::Kind::kLlama3) {
      frequency = llama3_scaled(frequency, config.rope_scaling);
    }
    frequencies.push_back(frequency);
  }
  return frequencies;
}

std::vector<float> rope_table(const std::vector<double>& frequencies, int32_t positions) {
  std::vector<float> table;
  table.reserve(frequencies.size() * 2 * static_cast<size_t>(positions));
  for (int32_t position = 0; position < positions; ++position) {
    for (double frequency : frequencies) table.push_back(static_cast<float>(std::cos(position * frequency)));
    for (double frequency : frequencies) table.push_back(static_cast<float>(std::sin(position * frequency)));
  }
  return table;
}

}  // namespace nfp
