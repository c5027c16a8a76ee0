// Between experts.cc (checks, launch) and the kernels.
#pragma once

#include <cstdint>

#include "backend/cuda/experts/experts_calls.h"

namespace nfp::cuda {

// Logits, then of few rows the rest in one kernel, of many the choice of each row and the assignments of each expert.
inline constexpr int kMostRouteRows = 8;  // that a block of the first has,
inline constexpr int kRouteWarps = 8;     // and experts
inline constexpr int kRouteChunk = 2048;  // of `hidden` in shared memory, where a block has one row
inline constexpr int kRouteSharedBytes = kRouteChunk * (kRouteWarps * 4 + 2);
// At most in one block (32 and 64 took longer so, 1 less, 8 the same).
inline constexpr int kRouteFewRows = 16;
inline constexpr int kRouteFewThreads = 512;
inline constexpr int kChooseWarps = 4;        // rows a block
const void* route_logits_function(int rows);  // 2 or kMostRouteRows a block
const void* route_logits_row_function();      // one; takes kRouteSharedBytes
// On tensor cores, from so many rows on: 32 or 64 experts a block, with kRouteManyRows rows of it. The more experts the
// less often rows and weights are read, from the L2; the fewer the more blocks there are.
inline constexpr int kRouteManyLeast = 65;
inline constexpr int kRouteManyWarps = 8;
inline constexpr int kRouteManyRows = 32;
constexpr int route_many_experts(int64_t rows) { return rows >= 1024 ? 64 : 32; }
constexpr int route_many_shared_bytes(int experts) {
  return kRouteManyWarps * (kRouteManyRows / 16) * experts / 8 * 512;
}
const void* route_logits_many_function(int experts);
const void* route_few_function();
// Logits and choice in one kernel, where the router fits into the shared memory of a cluster: eight blocks, each of
// which has 64 k of every 512, and 16 or 32 rows. It takes as long for fewer rows, and twice as long where not all
// clusters fit on the GPU (an H200 has room for 15).
inline constexpr int kRouteClusterLeast = 17;  // rows,
inline constexpr int kRouteClusterMost = 448;  // at most
inline constexpr int kRouteClusterBlocks = 8;
inline constexpr int kRouteClusterWarps = 8;
inline constexpr int kRouteClusterStep = 512;
inline constexpr int kRouteClusterPitch = 160;          // bytes between rows of 64 k: no bank conflicts
inline constexpr int kRouteClusterOwnBytes = 36 << 10;  // of shared memory, apart from weights and tokens
constexpr int route_cluster_rows(int rows) { return rows <= kRouteClusterMost / 2 ? 16 : 32; }
constexpr int route_cluster_steps(int hidden) { return (hidden + kRouteClusterStep - 1) / kRouteClusterStep; }
constexpr int route_cluster_tiles(int experts) { return experts <= 32 ? 1 : experts <= 64 ? 2 : 4; }  // with the gate
constexpr int route_cluster_weight_bytes(int hidden, int tiles) {
  return route_cluster_steps(hidden) * kRouteClusterWarps * tiles * 2 * 512;
}
constexpr int route_cluster_shared_bytes(int hidden, int tiles) {  // of 32 rows
  return kRouteClusterOwnBytes + route_cluster_weight_bytes(hidden, tiles) +
         route_cluster_steps(hidden) * 32 * kRouteClusterPitch;
}
constexpr bool route_cluster_fits(int hidden, int experts) {  // with the gate
  constexpr int kMostBytes = 227 << 10;                       // that a block can have on Hopper
  return experts <= 128 && hidden <= 16 * kRouteClusterStep &&
         route_cluster_shared_bytes(hidden, route_cluster_tiles(experts)) <= kMostBytes;
}
const void* route_cluster_function(int tiles, int rows);
const void* choose_experts_function();

struct AssignParams : AssignArgs {
  uint64_t pieces_inverse;  // 2^kInverseBits over the pieces of ids a row, rounded up: exact for less than 2^31 pieces
};
inline constexpr int kInverseBits = 36;
// `vectors`: four ids a piece, with rows of ids on 16-byte boundaries, else one. Grid: experts.
inline constexpr int kAssignThreads = 512;
// Of at most kPlacedAtOnce assignments (experts_calls.h). Grid: assignments, and one more.
inline constexpr int kPlaceThreads = 128;
const void* place_function(bool mapped);
const void* assign_function(bool vectors, bool mapped);

struct ExpertParams {
  int32_t* start;
  int32_t* row;  // null where x is sorted
  const uint16_t* x;
  uint16_t* y;
  int64_t slab_bytes;  // of 64 rows of a plane
  int32_t n;
  int32_t k;
  int32_t blocks_k;  // of 64
  int32_t columns;   // of y
  int32_t experts;
};
template <int kMost>
struct ExpertLinearParams {
  ExpertParams shape;
  ExpertMatrix matrices[kMost];
};
inline constexpr int kFewExperts = 64;
inline constexpr int kExpertThreads = 128;
inline constexpr int kExpertRows = 64;  // of a matrix, a thread block
// Takes ExpertLinearParams<kFewExperts>, or of kMaxExperts; of BF16 always that. Grid: blocks of rows, experts or
// as many of them as can have assignments.
const void* expert_linear_function(bool few_experts, bool bf16, ExpertEpilogue epilogue);

inline constexpr int kCombineThreads = 128;  // at most; of eight features each
// Grid: rows, and parts of a row's features.
const void* combine_function();

}  // namespace nfp::cuda
