// Between grouped.cc (the choice of a kernel, launch) and the kernels of grouped.cuh.
#pragma once

#include <cuda.h>
#include <vector_types.h>

#include <cstdint>
#include <span>

#include "backend/cuda/experts/experts_calls.h"
#include "backend/cuda/gemm/kernel/kernels.h"

namespace nfp::cuda {

struct GroupedShape {
  CUtensorMap x;             // [assignments, k]: boxes of 128 bytes of k by a tile's tokens, 128-byte swizzle
  CUtensorMap x_unit;        // the same by a unit of them (grouped_unit()), where a tile is several
  const int32_t* start;      // [experts + 1]
  const float* token_scale;  // [assignments], with E4M3 activations
  uint16_t* y;               // [assignments, columns]
  int64_t slab_bytes;        // of 64 rows of a plane
  float weight_scale;        // on every sum: 2^-8 where upper bytes stand alone
  uint32_t one;              // 1 (gemm/kernel/multiply_f16.cuh)
  int32_t experts;
  int32_t n;
  int32_t columns;  // of y: n, gated n / 2
  int32_t row_blocks;
  int32_t row_tiles;     // of a thread block's 128 rows
  int32_t k_iterations;  // of step_k()
  bool gated;
  bool gelu;
  bool one_row;  // x is one row, which every assignment has
  bool follows;  // ExpertLinearCall::follows: the routes are there before the kernel before this one is done
  bool bf16;     // what products of E4M3 activations are stored as; else FP16
};

// A kernel's parameters are read where they lie, so those of few experts are apart.
inline constexpr int kSomeExperts = 128;
template <int kMost>
struct GroupedParams {
  GroupedShape shape;
  ExpertMatrix matrices[kMost];
};

struct GroupedEntry {
  int tokens;               // of a tile
  const void* function[2];  // of GroupedParams<kSomeExperts>, <kMaxExperts>
  int threads;
  int shared_bytes;
};
// x's rows in order of assignments. Grid: rows, and parts of a row's assignments.
struct GatherParams {
  const uint4* x;
  uint4* out;
  const int32_t* place;  // [rows, top]
  int32_t top;
  int32_t pieces;  // of 16 bytes a row
};
inline constexpr int kGatherThreads = 128;
const void* gather_tokens_function();

std::span<const GroupedEntry> grouped_f16();
std::span<const GroupedEntry> grouped_bf16();
std::span<const GroupedEntry> grouped_w8a16();
std::span<const GroupedEntry> grouped_w8abf16();
std::span<const GroupedEntry> grouped_e4m3();

}  // namespace nfp::cuda
