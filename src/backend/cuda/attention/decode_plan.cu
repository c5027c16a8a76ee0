#include "backend/cuda/attention/decode_walk.cuh"

namespace nfp::cuda {
namespace {

__global__ __launch_bounds__(kPlanWarps * 32) void plan_decode_kernel(const __grid_constant__ DecodeParams p, int units,
                                                                      bool warps, DecodeStart* starts) {
  const int unit = static_cast<int>(blockIdx.x * kPlanWarps + threadIdx.x / 32);
  if (unit >= units) return;
  DecodeStart start;
  start.walk = warps ? find_walk<true>(p, unit, units, start.span, start.busy)
                     : find_walk<false>(p, unit, units, start.span, start.busy);
  const DecodeWalk& walk = start.walk;
#pragma unroll
  for (int i = 0; i < kDecodeWarps; ++i) {
    const int key = (walk.first_tile + walk.begin + i) * kDecodeTile;
    start.block[i] = walk.done || walk.begin + i >= walk.end
                         ? 0
                         : p.a.block_table[int64_t{walk.sequence} * p.a.table_width + (key >> p.a.block_shift)];
  }
  if (threadIdx.x % 32 == 0) starts[unit] = start;
}

}  // namespace

const void* plan_decode_function() { return reinterpret_cast<const void*>(&plan_decode_kernel); }
size_t plan_bytes(int units) { return sizeof(DecodeStart) * static_cast<size_t>(units); }

}  // namespace nfp::cuda
