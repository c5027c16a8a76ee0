// Llama 3's RoPE scaling. GGUF files carry its effect, a divisor for each frequency (tensor rope_freqs.weight); a
// Hugging Face config.json carries its parameters. This finds the parameters of the divisors.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/result.h"

namespace nfp {

struct Llama3Scaling {
  double factor = 8.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  int64_t original_context = 8192;
};

// The divisor of frequency i of head_dim / 2 (transformers, modeling_rope_utils.py, "llama3").
double llama3_divisor(const Llama3Scaling& scaling, int64_t i, int64_t head_dim, double theta);

// factors: [head_dim / 2]. Nothing where all are 1. Errors: another length; factors that no Llama 3 release uses.
Result<std::optional<Llama3Scaling>> find_llama3_scaling(std::span<const float> factors, int64_t head_dim, double theta,
                                                         const std::string& file);

}  // namespace nfp
