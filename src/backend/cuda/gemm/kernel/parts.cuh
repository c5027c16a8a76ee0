// How tiles, and parts of tiles, become sums: the order in which thread blocks take them, and the two ways in which the
// parts of a tile whose k was cut are added, through global memory (Parts) and in a cluster (exchange_parts).
#pragma once

#include <cstdint>

#include "backend/cuda/gemm/kernel/kernel_params.h"
#include "backend/cuda/gemm/kernel/ring.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/store_async.cuh"

namespace nfp::cuda {

struct Work {
  int tile;
  int k_begin;  // iterations
  int k_end;
  int share;  // that this is a part of, for a cut tile
};

// What one cluster does: its shares of the cut tiles (ShareLength), then whole tiles. (As few registers as may be: they
// stay beside the sums of the widest tiles.)
class WorkList {
 public:
  __device__ WorkList(const KernelParams& p, int cluster, int clusters) : p_(p), clusters_(clusters), next_(cluster) {}

  __device__ bool next(Work& work) {
    while (true) {
      if (position_ < end_) {
        work.tile = position_ / p_.k_iterations;
        work.k_begin = position_ - work.tile * p_.k_iterations;
        work.k_end = min(p_.k_iterations, work.k_begin + end_ - position_);
        work.share = next_ - clusters_;
        position_ += work.k_end - work.k_begin;
        return true;
      }
      if (next_ < 0) break;
      if (next_ >= p_.shares) {
        next_ = ~(p_.split_tiles + next_ % clusters_);
        break;
      }
      position_ = p_.length.begin(next_);
      end_ = p_.length.begin(next_ + 1);
      next_ += clusters_;
    }
    const int tile = ~next_;
    if (tile >= p_.tiles) return false;
    work = {tile, 0, p_.k_iterations, 0};
    next_ -= clusters_;
    return true;
  }

 private:
  const KernelParams& p_;
  int clusters_;
  int next_;  // share, or ~(whole tile)
  int position_ = 0;
  int end_ = 0;
};

struct TileOrigin {
  int token;
  int cluster_row;  // in units of clusters
};
// Neighbours in time share group_m token tiles, so that a wave of tiles is near square in bytes and stays in the L2.
__device__ __forceinline__ TileOrigin tile_origin(const KernelParams& p, int tile) {
  const int group = tile / (p.group_m * p.n_tiles);
  const int inside = tile - group * p.group_m * p.n_tiles;
  const int height = min(p.group_m, p.m_tiles - group * p.group_m);
  return {group * p.group_m + inside % height, inside / height};
}

// What is on its way to a thread at once: so many pieces of 8 tokens, four sums of each thread, of so many parts. As
// registers allow.
struct InFlight {
  int pieces;
  int parts;
};
template <Operand kOperand, Tile kTile>
constexpr InFlight in_flight() {
  constexpr int kPieces = kTile.tokens / 8;
  if (lean(kTile)) return {kPieces <= 2 ? kPieces : kPieces <= 4 ? 2 : 1, 2};
  if (kOperand == Operand::kE4M3Promoted) return {2, 1};
  if (kTile.warpgroups == 3 && kTile.tokens > 160) return {2, 1};
  if (kTile.warpgroups == 3 || kTile.row_blocks == 2 || halves(kTile) == 2 || kTile.tokens == 240) return {4, 1};
  return kTile.tokens <= 128 ? InFlight{4, 2} : InFlight{8, 1};
}

// Adds up the parts of a cut tile through global memory, in order of k. Where all parts run at once each has a slice of
// the tile (p.sliced), else who comes last, which a counter tells, has all of it.
//
// Partial sums tell by themselves that they are there: their memory is zero before they are written, they are never +0
// (+0 is written as -0, which adds up to the same), and whoever has read them makes it zero again. So nobody waits for
// more than the bytes that it adds, and no fence is needed.
template <Operand kOperand, Tile kTile>
struct Parts {
  static constexpr int kChunks = chunks(kTile);
  static constexpr int kPieces = staging_tokens(kTile) / 8;  // of a chunk: 8 tokens, four sums of each thread
  static constexpr int kTilePieces = kTile.tokens / 8;
  static constexpr int kSlotBlocks = kTile.cluster * kTile.warpgroups * kTile.row_blocks;
  static constexpr InFlight kAtOnce = in_flight<kOperand, kTile>();
  // Few sums are on their way before it is known who is last.
  static constexpr bool kWritesFirst = kTile.tokens <= 64;

  const KernelParams& p;
  const Work& work;
  int block;      // of 64 rows in the cluster
  uint32_t flag;  // four bytes of shared memory, this warpgroup's
  int first = 0, last = 0, first_slot = 0;

  __device__ __forceinline__ float4* part(int share) const {
    const int index = (share == first ? first_slot : 2 * share) * kSlotBlocks + block;
    return reinterpret_cast<float4*>(p.partials) + static_cast<int64_t>(index) * (kTilePieces * 128) +
           threadIdx.x % 128;
  }
  static __device__ __forceinline__ bool has(uint32_t chunk_mask, int piece) {
    return piece < kTilePieces && (chunk_mask >> (piece / kPieces) & 1) != 0;
  }

  // Returns the chunks whose sums this warpgroup then has, and stores.
  __device__ __forceinline__ uint32_t join(float (&acc)[kTile.tokens / 2]) {
    const int tile_begin = work.tile * p.k_iterations;
    first = p.length.of(tile_begin);
    last = p.length.of(tile_begin + p.k_iterations - 1);
    // A share meets at most two tiles that it does not cover whole. Of a tile's shares only the first can have met
    // another before.
    first_slot = 2 * first + (p.length.begin(first) < tile_begin ? 1 : 0);
    uint32_t mine = 0;
    if (p.sliced) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        mine |= chunk_owner(kTile, chunk, last - first + 1) == work.share - first ? 1u << chunk : 0;
    } else if (!kWritesFirst) {
      mine = comes_last() ? ~0u : 0;
    }
    float4* const out = part(work.share);
#pragma unroll
    for (int i = 0; i < kTilePieces; ++i) {
      if (!has(mine, i)) ptx::store_global_relaxed(out + i * 128, written(&acc[4 * i]));
    }
    if (kWritesFirst && !p.sliced) mine = comes_last() ? ~0u : 0;
    if (mine == 0) return 0;
#pragma unroll
    for (int begin = 0; begin < kTilePieces; begin += kAtOnce.pieces) {
      bool any = false;
#pragma unroll
      for (int i = begin; i < begin + kAtOnce.pieces; ++i) any = any || has(mine, i);
      if (any) gather(acc, mine, begin);
    }
    return mine;
  }

  // So many pieces of the tile.
  __device__ __forceinline__ void gather(float (&acc)[kTile.tokens / 2], uint32_t mine, int begin) const {
    float sum[kAtOnce.pieces * 4] = {};
#pragma unroll 1
    for (int share = first; share <= last; share += kAtOnce.parts) {
      float4 v[kAtOnce.parts][kAtOnce.pieces];
      uint32_t least;
      do {
        least = ~0u;
#pragma unroll
        for (int s = 0; s < kAtOnce.parts; ++s) {
          if (!is_other(share + s)) continue;
          const float4* const in = part(share + s);
#pragma unroll
          for (int j = 0; j < kAtOnce.pieces; ++j) {
            if (has(mine, begin + j)) v[s][j] = ptx::load_global_relaxed(in + (begin + j) * 128);
          }
        }
#pragma unroll
        for (int s = 0; s < kAtOnce.parts; ++s) {
          if (!is_other(share + s)) continue;
#pragma unroll
          for (int j = 0; j < kAtOnce.pieces; ++j) {
            if (has(mine, begin + j)) {
              least = min(min(least, min(__float_as_uint(v[s][j].x), __float_as_uint(v[s][j].y))),
                          min(__float_as_uint(v[s][j].z), __float_as_uint(v[s][j].w)));
            }
          }
        }
      } while (!__all_sync(0xffffffffu, least != 0));
#pragma unroll
      for (int s = 0; s < kAtOnce.parts; ++s) {
        if (share + s > last) break;
        float4* const in = part(share + s);
#pragma unroll
        for (int j = 0; j < kAtOnce.pieces; ++j) {
          if (!has(mine, begin + j)) continue;
          const bool is_own = share + s == work.share;
          const float* const own = &acc[4 * (begin + j)];
          sum[4 * j] += is_own ? own[0] : v[s][j].x;
          sum[4 * j + 1] += is_own ? own[1] : v[s][j].y;
          sum[4 * j + 2] += is_own ? own[2] : v[s][j].z;
          sum[4 * j + 3] += is_own ? own[3] : v[s][j].w;
          if (!is_own || (kWritesFirst && !p.sliced))
            ptx::store_global_relaxed(in + (begin + j) * 128, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce.pieces * 4; ++j) {
      if (has(mine, begin + j / 4)) acc[begin * 4 + j] = sum[j];
    }
  }
  __device__ __forceinline__ bool is_other(int share) const { return share <= last && share != work.share; }

  // This warpgroup, of those of all blocks that have a part. Thread 0 tells the others.
  __device__ __forceinline__ bool comes_last() const {
    const int warpgroup = static_cast<int>(threadIdx.x) / 128;
    if (threadIdx.x % 128 == 0) {
      uint32_t* const counter = p.counters + work.tile * kSlotBlocks + block;
      const uint32_t before = atomicAdd(counter, 1);
      if (before == static_cast<uint32_t>(last - first)) *counter = 0;
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(flag), "r"(before) : "memory");
    }
    ptx::named_barrier(1 + warpgroup, 128);
    uint32_t before;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(before) : "r"(flag) : "memory");
    ptx::named_barrier(1 + warpgroup, 128);  // the flag may be written again
    return before == static_cast<uint32_t>(last - first);
  }

  // Round to minus infinity: +0 + -0 = -0, and nothing else changes.
  static __device__ __forceinline__ float4 written(const float* v) {
    return make_float4(__fadd_rd(v[0], -0.0f), __fadd_rd(v[1], -0.0f), __fadd_rd(v[2], -0.0f), __fadd_rd(v[3], -0.0f));
  }
};

// The blocks of a cluster that hold parts of one tile give each other the sums of the tokens that the other stores,
// and add what they receive in order of k. Returns the chunks that this block stores. Parts arrive where the ring was:
// this tile was the block's only work.
template <Operand kOperand, Tile kTile>
__device__ __forceinline__ uint32_t exchange_parts(const KernelParams& p,
                                                   float (&acc)[kTile.row_blocks][kTile.tokens / 2],
                                                   const typename Ring<kOperand, kTile>::Pipe& pipe, uint32_t rank) {
  constexpr int kRowBlocks = kTile.row_blocks, kCluster = kTile.cluster, kConsumers = kTile.warpgroups;
  constexpr int kChunks = chunks(kTile);
  constexpr int kChunkBlocks = staging_tokens(kTile) / 8;
  const int splits = p.exchange;
  const int me = static_cast<int>(pipe.group) / kCluster;
  const int most = owned_chunks(kTile, splits);
  const uint32_t mine = pipe.ring + threadIdx.x * 16;
  // [row block][part][chunk of the owner][8 tokens][thread] of 16 bytes
  constexpr int kRow = kConsumers * 128 * 16;
  const auto place = [&](int b, int part, int chunk) {
    return static_cast<uint32_t>((b * splits + part) * most + chunk) * (kChunkBlocks * kRow);
  };
  const int lane = static_cast<int>(threadIdx.x) % 32;
  ptx::cluster_wait();  // all have set up their barriers: see run()
  if (lane < splits && lane != me)
    ptx::mbarrier_arrive_remote(pipe.free_bar(), static_cast<uint32_t>(lane) * kCluster + rank);
  uint32_t mask = 0;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) mask |= chunk_owner(kTile, chunk, splits) == me ? 1u << chunk : 0;
  if (threadIdx.x == 0)
    ptx::mbarrier_expect(pipe.parts_bar(), __popc(mask) * (splits - 1) * kRowBlocks * kChunkBlocks * kRow);
  ptx::mbarrier_wait(pipe.free_bar(), 0);
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int owner = chunk_owner(kTile, chunk, splits);
    if (owner == me) continue;
    const uint32_t to = static_cast<uint32_t>(owner) * kCluster + rank;
    const uint32_t remote = ptx::map_to_rank(mine, to), bar = ptx::map_to_rank(pipe.parts_bar(), to);
    const int index = chunk - first_chunk(kTile, owner, splits);
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int j = 0; j < kChunkBlocks; ++j) {
        const float* v = &acc[b][(chunk * kChunkBlocks + j) * 4];
        ptx::store_async_16(remote + place(b, me, index) + j * kRow, bar, v[0], v[1], v[2], v[3]);
      }
    }
  }
  ptx::mbarrier_wait(pipe.parts_bar(), 0);
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk_owner(kTile, chunk, splits) != me) continue;
    const int index = chunk - first_chunk(kTile, me, splits);
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
      // As many blocks of 8 tokens at once as registers allow.
      constexpr int kAtOnce = kTile.tokens <= 128 && kOperand != Operand::kE4M3Promoted ? kChunkBlocks : 1;
#pragma unroll
      for (int begin = chunk * kChunkBlocks; begin < (chunk + 1) * kChunkBlocks; begin += kAtOnce) {
        float* const own = &acc[b][begin * 4];
        const uint32_t from = begin % kChunkBlocks * kRow;
        float sum[4 * kAtOnce];
#pragma unroll
        for (int j = 0; j < 4 * kAtOnce; ++j) sum[j] = 0.0f;
#pragma unroll 1
        for (int part = 0; part < splits; ++part) {
          if (part == me) {
#pragma unroll
            for (int j = 0; j < 4 * kAtOnce; ++j) sum[j] += own[j];
            continue;
          }
          uint4 v[kAtOnce];
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) v[j] = ptx::load_shared_16(mine + place(b, part, index) + from + j * kRow);
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) {
            sum[4 * j] += __uint_as_float(v[j].x);
            sum[4 * j + 1] += __uint_as_float(v[j].y);
            sum[4 * j + 2] += __uint_as_float(v[j].z);
            sum[4 * j + 3] += __uint_as_float(v[j].w);
          }
        }
#pragma unroll
        for (int j = 0; j < 4 * kAtOnce; ++j) own[j] = sum[j];
      }
    }
  }
  return mask;
}

}  // namespace nfp::cuda
