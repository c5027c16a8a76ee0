// Sums the parts of a tile whose k was cut, through the shared memory of a cluster.
#pragma once

#include <cstdint>

#include "backend/cuda/gemm/kernel_params.h"
#include "backend/cuda/gemm/ring.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"

namespace nfp::cuda {

// The blocks of a cluster that hold parts of one tile give each other the sums of the tokens that the other stores,
// and add what they receive in order of k. Returns the chunks that this block stores. The ring is free: this tile was
// the block's only work.
template <Operand kOperand, Tile kTile>
__device__ __forceinline__ uint32_t exchange_parts(const KernelParams& p,
                                                   float (&acc)[kTile.row_blocks][kTile.tokens / 2],
                                                   const typename Ring<kOperand, kTile>::Pipe& pipe, uint32_t rank) {
  constexpr int kRowBlocks = kTile.row_blocks, kCluster = kTile.cluster, kConsumers = kTile.warpgroups;
  constexpr int kChunks = chunks(kTile);
  constexpr int kChunkBlocks = staging_tokens(kTile) / 8;
  const int splits = p.exchange;
  const int me = static_cast<int>(pipe.group) / kCluster;
  const int most = (kChunks + splits - 1) / splits;
  const uint32_t mine = pipe.ring + threadIdx.x * 16;
  // [row block][part][chunk of the owner][8 tokens][thread] of 16 bytes
  constexpr int kRow = kConsumers * 128 * 16;
  const auto place = [&](int b, int part, int chunk) {
    return static_cast<uint32_t>((b * splits + part) * most + chunk) * (kChunkBlocks * kRow);
  };
  ptx::cluster_sync();  // everybody's ring is free
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int owner = chunk * splits / kChunks;
    if (owner == me) continue;
    const uint32_t remote = ptx::map_to_rank(mine, static_cast<uint32_t>(owner) * kCluster + rank);
    const int index = chunk - (owner * kChunks + splits - 1) / splits;
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int j = 0; j < kChunkBlocks; ++j) {
        const float* v = &acc[b][(chunk * kChunkBlocks + j) * 4];
        ptx::store_cluster_16(remote + place(b, me, index) + j * kRow, v[0], v[1], v[2], v[3]);
      }
    }
  }
  ptx::cluster_sync();  // everything has arrived
  uint32_t mask = 0;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk * splits / kChunks != me) continue;
    mask |= 1u << chunk;
    const int index = chunk - (me * kChunks + splits - 1) / splits;
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int j = 0; j < kChunkBlocks; ++j) {
        float* own = &acc[b][(chunk * kChunkBlocks + j) * 4];
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
        for (int part = 0; part < splits; ++part) {
          float4 v = make_float4(own[0], own[1], own[2], own[3]);
          if (part != me) {
            const uint4 bits = ptx::load_shared_16(mine + place(b, part, index) + j * kRow);
            v = make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                            __uint_as_float(bits.w));
          }
          sum.x += v.x;
          sum.y += v.y;
          sum.z += v.z;
          sum.w += v.w;
        }
        own[0] = sum.x;
        own[1] = sum.y;
        own[2] = sum.z;
        own[3] = sum.w;
      }
    }
  }
  return mask;
}

}  // namespace nfp::cuda
