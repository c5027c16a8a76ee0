// Rotary position embedding tables (RoFormer, arXiv 2104.09864) with the scalings that models use.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/config.h"

namespace nfp {

// The angle a position adds for each of the head_dim / 2 pairs. `factors` (may be empty) divide them one by one.
std::vector<double> rope_frequencies(const ModelConfig& config, std::span<const float> factors);

// [positions, head_dim]: head_dim / 2 cosines, then as many sines.
std::vector<float> rope_table(const std::vector<double>& frequencies, int32_t positions);

}  // namespace nfp
