// Where a linear layer's weights should be, so that it makes up for the errors of the layers before it.
//
// In an FP8 step a layer is fed x' instead of the exact x, and adds to a residual stream r' instead of r. Its uppers q
// should bring r' + q x' back to r + w x. Were the weights free, the best of them would be w + shift with
//     shift H = w D + E,    H = sum x' x'^T,  D = sum (x - x') x'^T,  E = sum (r - r') x'^T
// over the tokens (E only of layers that add to the residual stream), and the uppers are chosen around w + shift with
// H as gptq.h and descent.h do it around w. (Asymmetric calibration: GPTAQ, arXiv 2504.02692, section 3, and Qronos,
// arXiv 2505.11695; E carries it over to the residual stream.)
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "calibrate/gptq.h"
#include "calibrate/hessian.h"

namespace nfp {

// How much of the shift is taken. Where only a share of the weights is in FP8, fewer errors come from before than were
// made up for: taking the part s of it gives s (2 - s) of the gain and does s^2 of the harm.
inline constexpr float kShiftTaken = 0.6f;

struct CompensationInputs {
  const CrossSum* inputs = nullptr;    // D: [cols, cols]
  const CrossSum* residual = nullptr;  // E: [rows, cols], or null
};

// factor: of H, damped. nested: [rows, cols] FP16 bits of w * 2^-e; exponent: [rows] e. Returns [rows, cols]: shift *
// 2^(8-e), as choose_uppers and descend take it. The result does not depend on the number of threads.
std::vector<float> find_shifts(const GptqFactor& factor, const CompensationInputs& errors,
                               std::span<const uint16_t> nested, std::span<const int8_t> exponent, ThreadPool& threads);

}  // namespace nfp
