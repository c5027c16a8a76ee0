// The usual per-channel FP8 of a weight row: scale = max |w| / 448, code = E4M3(w / scale) rounded to nearest. What
// others ship; here an evaluation baseline. The scale is rounded to FP16, as in compressed-tensors checkpoints, whose
// scales have the model's dtype; one too small for a normal FP16 number stays as it is.
#pragma once

#include <cstdint>
#include <span>

namespace nfp {

// Returns the row's scale; the weight is code * scale. A row of zeros has scale 1. codes: [row.size()].
float quantise_fp8_channel(std::span<const uint16_t> fp16_row, uint8_t* codes);

}  // namespace nfp
