// Coordinate descent on what GPTQ's sweep chose.
//
// The sweep fixes a column for good before it has seen those after it. Once all are fixed, going over them again and
// taking a weight's other neighbour wherever that lowers the row's error (w - q) H (w - q)^T finds what the sweep
// missed: with g = (w - q) H, moving q_j by -d changes the error by d (2 g_j + d H_jj). It only ever goes down. (The
// same idea as in CDQuant, arXiv 2406.17542, on two values a weight.)
#pragma once

#include <cstdint>
#include <span>

#include "base/thread_pool.h"
#include "calibrate/hessian.h"
#include "nested/upper_rule.h"

namespace nfp {

inline constexpr int kDescentPasses = 8;  // at most; a row is done when a pass takes nothing

// hessian: finished. nested, rows, rule, shift as in choose_uppers; choice: [rows, choice_row_bytes(cols)], changed in
// place. Returns how many weights took their other neighbour. The result does not depend on the number of threads.
int64_t descend(const Hessian& hessian, std::span<const uint16_t> nested, int64_t rows, UpperRule rule,
                ThreadPool& threads, std::span<uint8_t> choice, std::span<const float> shift = {});

}  // namespace nfp
