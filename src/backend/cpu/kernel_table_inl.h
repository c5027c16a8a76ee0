// The kernel table of the instruction set whose simd_*.h was included before.
#pragma once

#include "backend/cpu/attention_inl.h"
#include "backend/cpu/ceilings_inl.h"
#include "backend/cpu/linear_inl.h"
#include "backend/cpu/math_inl.h"
#include "backend/cpu/vector_ops_inl.h"

namespace nfp {
namespace {

template <cpu::PairArithmetic A = cpu::PairArithmetic::kNone>
constexpr cpu::KernelTable make_table(const char* name) {
  cpu::KernelTable table{};
  table.name = name;
  table.pairs = A;
  table.linear = linear<A>;
  table.quantize_e4m3 = quantize_e4m3;
  table.residual_add = residual_add;
  table.dots = dots;
  table.weighted_sum = weighted_sum;
  table.rms_norm = rms_norm;
  table.rope = rope;
  table.to_f16 = to_f16;
  table.to_e4m3 = to_e4m3;
  table.attention = attention;
  table.attention_partition = attention_partition;
  table.attention_merge = attention_merge;
  table.argmax = argmax;
  table.sum_exp = sum_exp;
  table.at_least = at_least;
  table.exps = exps;
  table.racers = racers;
  table.fma_loop = fma_loop;
#if defined(NFP_HAVE_PAIRS) || defined(NFP_HAVE_TILES)
  if constexpr (A != cpu::PairArithmetic::kNone) table.to_pairs = to_pairs<A>;
#endif
#if defined(NFP_HAVE_PAIRS)
  if constexpr (A == cpu::PairArithmetic::kBf16 || A == cpu::PairArithmetic::kFp16) table.dot_loop = dot_loop<A>;
#endif
#if defined(NFP_HAVE_TILES)
  if constexpr (A == cpu::PairArithmetic::kBf16Tiles) {
    table.to_split = to_split;
    table.dot_loop = tile_loop;
  }
#endif
  table.read_loop = read_loop;
  return table;
}

}  // namespace
}  // namespace nfp
