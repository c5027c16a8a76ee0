// Rotary position embedding tables (RoFormer, arXiv 2104.09864) with the scalings that models use.
#pragma once

#include <cstdint>
#include <vector>

#include "model/config.h"

namespace nfp {

// The angle a position adds for each of the dim / 2 pairs, where positions stay below `positions`: beyond the original
// context LongRoPE has other frequencies, for all positions alike. So a key that is cached stays right while a sequence
// grows (docs/models.md, "LongRoPE").
std::vector<double> rope_frequencies(const Rope& rope, int32_t positions);

// [positions, rope.dim]: dim / 2 cosines, then as many sines.
std::vector<float> rope_table(const Rope& rope, int32_t positions);

}  // namespace nfp
