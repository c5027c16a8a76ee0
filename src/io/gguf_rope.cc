#include "io/gguf_rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace nfp {

double llama3_divisor(const Llama3Scaling& scaling, int64_t i, int64_t head_dim, double theta) {
  const double exponent = 2.0 * static_cast<double>(i) / static_cast<double>(head_dim);
  const double wavelength = 2.0 * std::numbers::pi * std::pow(theta, exponent);
  const auto context = static_cast<double>(scaling.original_context);
  if (wavelength < context / scaling.high_freq_factor) return 1.0;
  if (wavelength > context / scaling.low_freq_factor) return scaling.factor;
  const double smooth =
      (context / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
  return 1.0 / ((1.0 - smooth) / scaling.factor + smooth);
}

Result<std::optional<Llama3Scaling>> find_llama3_scaling(std::span<const float> factors, int64_t head_dim, double theta,
                                                         const std::string& file) {
  if (static_cast<int64_t>(factors.size()) * 2 != head_dim) {
    return error(ErrorCode::kInvalidInput, "{}: tensor 'rope_freqs.weight' has {} elements, but a head has {}", file,
                 factors.size(), head_dim);
  }
  if (std::all_of(factors.begin(), factors.end(), [](float f) { return f == 1.0f; })) {
    return std::optional<Llama3Scaling>();
  }
  // Llama 3.1 and 3.3 use factor 8, 3.2 uses 32; otherwise the longest wavelength's divisor is the factor.
  for (const double factor : {8.0, 32.0, static_cast<double>(factors.back())}) {
    Llama3Scaling scaling;
    scaling.factor = factor;
    bool same = std::isfinite(factor) && factor >= 1.0;
    for (size_t i = 0; i < factors.size() && same; ++i) {
      const double expected = llama3_divisor(scaling, static_cast<int64_t>(i), head_dim, theta);
      same = std::abs(factors[i] - expected) <= 1e-4 * expected;
    }
    if (same) return std::optional<Llama3Scaling>(scaling);
  }
  return error(ErrorCode::kUnsupported, "{}: tensor 'rope_freqs.weight' is not the RoPE scaling of a Llama 3 release",
               file);
}

}  // namespace nfp
