#include "backend/cuda/experts/choose.cuh"
#include "backend/cuda/experts/router_pairs.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/cluster.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/mma.cuh"

namespace nfp::cuda {
namespace {

constexpr int kThreads = kRouteClusterWarps * 32;
constexpr int kQuarters = 4;  // warps that share the experts; two share the k
constexpr int kHalves = kRouteClusterWarps / kQuarters;

// Logits and choice. A cluster has some rows, a block of it an eighth of `hidden`, whose weights, of all experts, are
// in shared memory before the kernel before has ended, as operands of tensor cores. A warp has every fourth eight of
// the experts and every other 32 of the block's k. Then each block sums up all warps' sums for some of the rows, and
// chooses. A row's logits do not depend on the others.
//
// In 64 k of a block, a lane has four of each 16: whose k a lane takes is free as long as rows and weights agree.
template <int kTiles, int kRows>  // of eight experts, a warp; rows of a cluster
__global__ __launch_bounds__(kThreads, 1) void route_cluster_kernel(const RouteArgs p) {
  constexpr int kMineRows = kRows / kRouteClusterBlocks;  // whose experts a block chooses
  constexpr int kSixteens = kRows / 16;
  constexpr int kColumns = kTiles * kQuarters * 8, kPitch = kColumns + 8;  // of parts, without bank conflicts
  struct Own {
    float parts[kHalves][kRows][kPitch];
    float logits[kMineRows][kColumns];
  };
  static_assert(sizeof(Own) <= kRouteClusterOwnBytes);
  extern __shared__ __align__(16) uint8_t memory[];
  Own& own = *reinterpret_cast<Own*>(memory);
  const int steps = route_cluster_steps(p.hidden);
  uint8_t* const weights = memory + kRouteClusterOwnBytes;  // 16 bytes [warp][step][tile][16 k][lane]
  uint8_t* const tokens = weights + route_cluster_weight_bytes(p.hidden, kTiles);  // [step][row][kRouteClusterPitch]
  ptx::launch_dependents();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int group = lane / 4, column = lane % 4, quarter = warp % kQuarters, half = warp / kQuarters;
  const int rank = static_cast<int>(blockIdx.x) % kRouteClusterBlocks;
  const int first_row = static_cast<int>(blockIdx.x) / kRouteClusterBlocks * kRows;
  const int experts = p.routes.experts, top = p.routes.top, all = experts + (p.shared_gate != nullptr ? 1 : 0);
  const int pieces = steps * kTiles * 2;  // of 16 k of a tile
  uint4* const mine = reinterpret_cast<uint4*>(weights) + warp * pieces * 32 + lane;
  for (int s = 0; s < steps; ++s) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int expert = (t * kQuarters + quarter) * 8 + group;
      const float* from = expert == experts ? p.shared_gate : p.router + int64_t{expert} * p.hidden;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int k = s * kRouteClusterStep + rank * 64 + half * 32 + i * 16 + column * 4;
        const bool wanted = expert < all && k < p.hidden;
        ptx::copy_async_16(ptx::shared_address(mine + ((s * kTiles + t) * 2 + i) * 32), wanted ? from + k : p.router,
                           wanted);
      }
    }
  }
  ptx::copy_async_wait();
#pragma unroll 8
  for (int i = 0; i < pieces; ++i) {  // a thread's own, so nobody else waits
    const float4 v = *reinterpret_cast<const float4*>(mine + i * 32);
    const SplitPair low = split(v.x, v.y), high = split(v.z, v.w);
    mine[i * 32] = make_uint4(low.most, high.most, low.rest, high.rest);
  }
  ptx::dependency_wait();
  static_assert(kThreads >= kRows * 8);
  for (int s = 0; s < steps && thread < kRows * 8; ++s) {
    const int row = first_row + thread / 8, piece = thread % 8, k = s * kRouteClusterStep + rank * 64 + piece * 8;
    const bool wanted = row < p.rows && k < p.hidden;
    const void* from = wanted ? static_cast<const uint16_t*>(p.x) + int64_t{row} * p.hidden + k : p.x;
    uint8_t* to = tokens + (s * kRows + thread / 8) * kRouteClusterPitch + piece * 16;
    ptx::copy_async_16(ptx::shared_address(to), from, wanted);
  }
  ptx::copy_async_wait();
  __syncthreads();
  float sums[kSixteens][kTiles][4] = {}, rests[kSixteens][kTiles][4] = {};
  const uint8_t* x = tokens + group * kRouteClusterPitch + half * 64 + column * 8;
  for (int s = 0; s < steps; ++s) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t operand[kSixteens][4];
#pragma unroll
      for (int j = 0; j < kSixteens; ++j) {
        const uint8_t* row = x + (s * kRows + j * 16) * kRouteClusterPitch + i * 32;
        const uint2 upper = *reinterpret_cast<const uint2*>(row);
        const uint2 lower = *reinterpret_cast<const uint2*>(row + 8 * kRouteClusterPitch);
        operand[j][0] = upper.x;
        operand[j][1] = lower.x;
        operand[j][2] = upper.y;
        operand[j][3] = lower.y;
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint4 w = mine[((s * kTiles + t) * 2 + i) * 32];
#pragma unroll
        for (int j = 0; j < kSixteens; ++j) {
          ptx::mma_f16(rests[j][t], operand[j], w.z, w.w);
          ptx::mma_f16(sums[j][t], operand[j], w.x, w.y);
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kSixteens; ++j) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = fmaf(rests[j][t][i], 1.0f / kRouteRestScale, sums[j][t][i]);
      const int at = (t * kQuarters + quarter) * 8 + column * 2;
      *reinterpret_cast<float2*>(&own.parts[half][j * 16 + group][at]) = make_float2(v[0], v[1]);
      *reinterpret_cast<float2*>(&own.parts[half][j * 16 + 8 + group][at]) = make_float2(v[2], v[3]);
    }
  }
  ptx::cluster_sync();
  static_assert(kThreads >= kMineRows * kColumns / 2);
  if (thread < kMineRows * kColumns / 2) {
    const int row = thread / (kColumns / 2), at = thread % (kColumns / 2) * 2;
    float2 part[kRouteClusterBlocks][kHalves];
#pragma unroll
    for (int r = 0; r < kRouteClusterBlocks; ++r) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const uint32_t place = ptx::shared_address(&own.parts[h][rank * kMineRows + row][at]);
        part[r][h] = ptx::load_cluster_8(ptx::map_to_rank(place, static_cast<uint32_t>(r)));
      }
    }
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int r = 0; r < kRouteClusterBlocks; ++r) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        sum.x += part[r][h].x;
        sum.y += part[r][h].y;
      }
    }
    *reinterpret_cast<float2*>(&own.logits[row][at]) = sum;
  }
  ptx::cluster_arrive();  // this block has read the others' parts
  __syncthreads();
  const int row = first_row + rank * kMineRows + warp;
  if (warp < kMineRows && row < p.rows) {
    const Choice choice = choose_among<kTiles>(p, own.logits[warp], lane);
    if (lane == 0 && all > experts) p.shared_weight[row] = 1.0f / (1.0f + expf(-own.logits[warp][experts]));
    if (lane < top) {
      p.routes.weight[int64_t{row} * top + lane] = choice.weight;
      // The row's experts, for those who find places.
      reinterpret_cast<int32_t*>(p.logits + int64_t{row} * experts)[lane] = choice.expert;
    }
    __syncwarp();
  }
  ptx::cluster_wait();  // the others have read this block's
}

template <int kRows>
const void* function_of(int tiles) {
  return tiles == 1   ? reinterpret_cast<const void*>(&route_cluster_kernel<1, kRows>)
         : tiles == 2 ? reinterpret_cast<const void*>(&route_cluster_kernel<2, kRows>)
                      : reinterpret_cast<const void*>(&route_cluster_kernel<4, kRows>);
}

}  // namespace

const void* route_cluster_function(int tiles, int rows) {
  return rows == 16 ? function_of<16>(tiles) : function_of<32>(tiles);
}

}  // namespace nfp::cuda
