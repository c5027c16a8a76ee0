#include "backend/cuda/attention/decode_walk.cuh"

namespace nfp::cuda {
namespace {

__global__ __launch_bounds__(kPlanWarps * 32) void plan_decode_kernel(const __grid_constant__ DecodeParams p, int units,
                                                                      bool warps, DecodeStart* starts) {
  const int unit = static_cast<int>(blockIdx.x * kPlanWarps + threadIdx.x / 32);
  if (unit >= units) return;
  DecodeStart start;
  start.walk = warps ? start_walk<true>(p, unit, units, start.span, start.busy)
                     : start_walk<false>(p, unit, units, start.span, start.busy);
  const DecodeWalk& walk = start.walk;
#pragma unroll
  for (int i = 0; i < kDecodeWarps; ++i) {
    const int tile = walk.begin + i;
    start.block[i] = walk.done || tile >= walk.end ? 0 : walk.cache_block(p, tile);
  }
  if (threadIdx.x % 32 == 0) starts[unit] = start;
}

}  // namespace

const void* plan_decode_function() { return reinterpret_cast<const void*>(&plan_decode_kernel); }
size_t plan_bytes(int units) { return sizeof(DecodeStart) * static_cast<size_t>(units); }

}  // namespace nfp::cuda
