// Which of its two E4M3 neighbours each weight's upper byte takes, so that the FP8 model's outputs stay closest to the
// exact ones (docs/quality.md). The FP16 weight is restored from either (nested/format.h): this costs nothing.
//
// For one row w and chosen values q the squared error of the outputs is (w - q) H (w - q)^T with H = X^T X over the
// layer's inputs. GPTQ (Frantar et al., arXiv 2210.17323, section 3) fixes one column after the other and lets the
// columns still free make up for the error so far. With H = R R^T, R upper triangular in the order of the sweep, that
// is
//     target_j = w_j + sum over i < j of (w_i - q_i) R_ij / R_jj
// (R^-1 is the Cholesky factor of the inverse that the paper's algorithm 1 uses; this form, Babai's nearest plane,
// needs no inverse: arXiv 2507.18553). q_j is the neighbour of w_j that is nearer to target_j. What the sweep leaves is
// lowered further by descent.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "base/thread_pool.h"
#include "calibrate/hessian.h"
#include "nested/upper_rule.h"

namespace nfp {

// What the sweep needs of H. Shared by all matrices that read the same inputs (q, k and v; gate and up).
struct GptqFactor {
  int64_t cols = 0;
  int64_t padded = 0;          // cols rounded up
  std::vector<int32_t> order;  // [cols] column at each place of the sweep: falling diagonal, so that the costliest
                               //   columns are fixed while most others can still make up for them
  std::vector<float> panels;   // [padded / 4][padded][4]: R_ij / R_jj of place i and, last, place j
  std::vector<float> inverse_squares;  // [padded] 1 / R_jj^2
};

// Of a finished H. Error: it is not positive definite (`name` says of what).
Result<GptqFactor> factorise(const Hessian& hessian, const std::string& name, ThreadPool& threads);

// Bytes a row of choices takes: one bit a weight, bit c % 8 of byte c / 8.
constexpr int64_t choice_row_bytes(int64_t cols) { return (cols + 7) / 8; }

// The two E4M3 neighbours of a nestable weight as numbers, scaled as E4M3 is: w * 2^8. Exact, and so are differences of
// any two: at most 11 bits, within one E4M3 step of each other.
struct Neighbours {
  float weight = 0;
  float nearest = 0;
  float step = 0;  // other neighbour - nearest; 0 where the rule leaves no choice
};
Neighbours neighbours(uint16_t w, UpperRule rule);

// nested: [rows, cols] FP16 bits of w * 2^-e (a row's exponent scales its whole error, so it changes no choice), every
// one nestable. rule: kFree or kRestricted. choice: [rows, choice_row_bytes(cols)], out: 1 = the neighbour that
// rounding to nearest does not take. shift: [rows, cols] to aim at w + shift / 2^8 (compensation.h); empty = at w. The
// result does not depend on the number of threads.
void choose_uppers(const GptqFactor& factor, std::span<const uint16_t> nested, int64_t rows, UpperRule rule,
                   ThreadPool& threads, std::span<uint8_t> choice, std::span<const float> shift = {});

}  // namespace nfp
