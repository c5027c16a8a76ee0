// Between attention.cc (checks, launch) and the kernels.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "backend/cuda/attention/kv_type.h"

namespace nfp::cuda {

struct AttentionParams {
  const uint8_t* keys;  // bytes
  const uint8_t* values;
  const uint16_t* q;
  uint16_t* out;
  const int32_t* query_start;  // of this call's first sequence, like the next two
  const int32_t* context;
  const int32_t* block_table;
  int64_t q_stride;
  int table_width;
  int block_shift;  // block_size = 1 << block_shift
  int block_heads;  // from a cache block to the next, in block_size rows of head_dim: at least kv_heads
  int sequences;
  int heads, kv_heads, group, head_dim;
  uint32_t group_inverse;  // 2^31 / group + 1: rows below 2^27 are divided by it exactly
  int window;              // INT32_MAX where there is none
  float score_scale;       // scores are in units of log2(e), ready for exp2
  float soft_cap;          // > 0: in the same units, with score_scale = 1 / the cap
  float value_scale;
  bool early_cache_reads;
};

struct PrefillParams {
  AttentionParams a;
  int32_t* next_item;  // zero between calls: prefill_tile.cuh
  // Of a 16-bit cache: [all rows of the cache, head_dim], boxes of 16 rows by 64 columns, 128-byte swizzle.
  CUtensorMap keys, values;
};

struct DecodeRotation {
  const float* cos_sin;  // null: none
  const float* q_norm;
  const float* k_norm;
  float norm_eps;
  int32_t layer;
  uint8_t* keys;  // the cache
  uint8_t* values;
  int32_t* overflowed_layer;
};

struct DecodeParams {
  AttentionParams a;
  DecodeRotation rotation;
  uint32_t* arrivals;  // deterministic: [sequences * kv_heads], zero between calls
  float* partials;     // deterministic: slots of (rows * (dim + 2)) floats
  float* exchange;     // otherwise: such slots, zero between calls (decode_exchange.cuh)
  bool deterministic;
  int cluster;       // blocks that share each row; 0 = balanced spans
  int bundle;        // of spans of warps: KV heads of a sequence whose rows are cut alike: decode_walk.cuh
  const void* plan;  // DecodeStart of every block or warp (decode_walk.cuh), or null
};

// The decode kernels of these head dimensions can rotate (decode_rotate.cuh); those of 256 have no registers left.
template <int kDim, KvType kKv>
inline constexpr bool kCanRotate = kDim <= 128 && kKv != KvType::kBf16;

inline constexpr int kDecodeTile = 16;  // keys
inline constexpr int kMaxDecodeCluster = 16;
inline constexpr int kDecodeWarps = 4;
inline constexpr int kLeastDecodeSpan =
    2 * kDecodeWarps;                     // tiles of a block: smaller pieces cost more to merge than they win
inline constexpr int kLeastRowsSpan = 4;  // tiles of a warp, where each has its own
// Deterministic decode cuts a row into chunks of 256 keys, longer ones where that made more than 32.
inline constexpr int kMaxDecodeChunks = 32;
inline constexpr int kDecodeChunkTiles = 16;

struct AttentionKernel {
  const void* function;
  int threads;
  size_t shared_bytes;
};

// dim: 64, 128 or 256, at least head_dim; rows: heads of the mma tile, 8 or 16, at least the group.
AttentionKernel decode_kernel(int dim, int rows, KvType type);
// For many rows: see decode_rows.cuh; may be none.
AttentionKernel decode_rows_kernel(int dim, int rows, KvType type, bool rotates);
// (DecodeParams, units, whether they are warps, DecodeStart* [units]), a warp a unit.
const void* plan_decode_function();
inline constexpr int kPlanWarps = 4;  // of a block
size_t plan_bytes(int units);

// Query rows of a tile: a token's heads that share a KV head are neighbours in it.
inline constexpr int kPrefillRows = 128;
AttentionKernel prefill_kernel(int dim, KvType type);  // E4M3's has no tensor maps

}  // namespace nfp::cuda
