// What a launch hands to the kernel. By value, so that a captured graph holds all of it.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backend/cuda/gemm/plan/config.h"

namespace nfp::cuda {

struct KernelParams {
  CUtensorMap x;       // activations [m, k]: boxes of 128 bytes of k by box_tokens() rows, 128-byte swizzle
  CUtensorMap x_tail;  // the same with boxes of tail_rows, for the last tile of tokens
  CUtensorMap d_map;   // outputs: boxes of 64 (swiglu: 32) columns by staging_tokens() rows, swizzle as wide as the box
  const uint8_t* upper;      // planes in the layout of layout.h
  const uint8_t* lower;      // unused in the modes of upper bytes alone
  void* d;                   // [m, n] FP16, BF16 or FP32 (n / 2 columns with swiglu), or finds_largest
  const void* residual;      // like d, or null
  const float* row_scale;    // [n] or null (1)
  const float* bias;         // [n] or null (0)
  const float* token_scale;  // [m] or null (1)
  float* partials;           // zero between launches,
  uint32_t* counters;        // as these
  uint32_t* peaks;           // of rows of d (row_peaks.h), or null; only with bulk_stores and swiglu
  int64_t ldd;
  int64_t ldr;
  float weight_scale;  // on every output: 2^-8 where upper bytes stand alone
  int m;
  int n;
  int row_blocks;  // of the weight, in blocks of 64
  int k_groups;    // of the weight's planes, padding included
  int k_iterations;
  int last_token;  // where the last copy of tokens begins
  int tail_rows;   // of it, that each block loads: rows beyond the last token are not asked for (tail_rows() of
                   // config.h)
  int m_tiles;
  int n_tiles;  // clusters
  int tiles;
  int group_m;
  int split_tiles;
  int shares;
  ShareLength length;  // of a share
  bool sliced;         // all parts of a cut tile run at once, and each adds up its slice of the tile's tokens
  int exchange;        // parts of k that one cluster sums through shared memory; 1 = none
  uint32_t one;        // 1: see rebuild()
  int is_bf16;         // of the 16-bit outputs
  int is_f32;          // only without bulk_stores
  int finds_largest;   // d is RowLargest's: only without bulk_stores, swiglu and residual
  int swiglu;
  int bulk_stores;  // 16-bit output, d_map is valid, and residual's rows are 16-byte aligned
  // Weights for the first round of the ring: so many stages are asked for at once, each further one so many cycles
  // later (0 = none is held back).
  int burst;
  uint32_t pace;
};

}  // namespace nfp::cuda
