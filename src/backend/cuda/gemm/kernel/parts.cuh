// How tiles, and parts of tiles, become sums: the order in which thread blocks take them, and the two ways in which the
// parts of a tile whose k was cut are added, through global memory (join_parts) and in a cluster (exchange_parts).
#pragma once

#include <cstdint>

#include "backend/cuda/gemm/kernel/kernel_params.h"
#include "backend/cuda/gemm/kernel/ring.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"

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

// Adds up the parts of a cut tile. True in the warpgroup that came last: acc then holds the whole sum.
template <int kCount>
__device__ __forceinline__ bool join_parts(const KernelParams& p, float (&acc)[kCount], const Work& work,
                                           int slot_block, int slot_blocks, uint32_t* counter, uint32_t flag,
                                           int warpgroup) {
  static_assert(kCount % 4 == 0);
  const int thread = threadIdx.x % 128;
  const int tile_begin = work.tile * p.k_iterations;
  const int first = p.length.of(tile_begin);
  const int last = p.length.of(tile_begin + p.k_iterations - 1);
  // A share meets at most two tiles that it does not cover whole. Of a tile's shares only the first can have met
  // another before.
  const int first_slot = 2 * first + (p.length.begin(first) < tile_begin ? 1 : 0);
  const auto part = [&](int share) {
    const int index = (share == first ? first_slot : 2 * share) * slot_blocks + slot_block;
    return reinterpret_cast<float4*>(p.partials) + static_cast<int64_t>(index) * (kCount / 4 * 128) + thread;
  };
  const auto write_part = [&] {
    float4* out = part(work.share);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      __stcg(out + i * 128, make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]));
    }
    ptx::named_barrier(1 + warpgroup, 128);
  };
  const auto add_part = [&](int share) {
    const float4* in = part(share);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float4 v = ptx::load_global_cg(in + i * 128);
      acc[4 * i] += v.x;
      acc[4 * i + 1] += v.y;
      acc[4 * i + 2] += v.z;
      acc[4 * i + 3] += v.w;
    }
  };
  // Thread 0 adds to the tile's counter and tells the others what it held.
  const auto count = [&](uint32_t add) {
    if (thread == 0) {
      __threadfence();
      const uint32_t before = atomicAdd(counter, add);
      __threadfence();
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(flag), "r"(before) : "memory");
    }
    ptx::named_barrier(1 + warpgroup, 128);
    uint32_t before;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(before) : "r"(flag) : "memory");
    ptx::named_barrier(1 + warpgroup, 128);  // the flag may be written again
    return before;
  };
  if (last - first == 1) {
    // Two parts: whoever comes second keeps its own in registers and waits for the first, which is already running and
    // waits for nobody. a + b = b + a, so the order is no matter.
    if (count(1) == 0) {
      write_part();
      if (thread == 0) {
        __threadfence();
        atomicAdd(counter, 1u << 16);
      }
      return false;
    }
    if (thread == 0) {
      while (*static_cast<volatile uint32_t*>(counter) < (1u << 16)) __nanosleep(64);
      __threadfence();
      *counter = 0;  // ready for the next launch
    }
    ptx::named_barrier(1 + warpgroup, 128);
    add_part(work.share == first ? last : first);
    return true;
  }
  write_part();
  if (count(1) != static_cast<uint32_t>(last - first)) return false;
  if (thread == 0) *counter = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] = 0.0f;
  // Of narrow tiles several parts are on their way at once.
  constexpr int kAtOnce = kCount <= 4 ? 4 : kCount <= 8 ? 2 : 1;
  int share = first;
  if constexpr (kAtOnce > 1) {
#pragma unroll 1
    for (; share + kAtOnce - 1 <= last; share += kAtOnce) {
      float4 v[kAtOnce][kCount / 4];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) v[j][i] = ptx::load_global_cg(part(share + j) + i * 128);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
          acc[4 * i] += v[j][i].x;
          acc[4 * i + 1] += v[j][i].y;
          acc[4 * i + 2] += v[j][i].z;
          acc[4 * i + 3] += v[j][i].w;
        }
      }
    }
  }
#pragma unroll 1
  for (; share <= last; ++share) add_part(share);
  return true;
}

// Where all parts of a cut tile run at once: each warpgroup gives the others the sums of the tokens that they store,
// adds up those of its own in order of k, and so reads and stores no more than any other. Returns the chunks that it
// stores.
// kTight: registers are short.
template <Tile kTile, bool kTight>
__device__ __forceinline__ uint32_t slice_parts(const KernelParams& p, float (&acc)[kTile.tokens / 2], const Work& work,
                                                int slot_block, int slot_blocks, uint32_t* counter, int warpgroup) {
  constexpr int kChunks = chunks(kTile);
  constexpr int kPieces = staging_tokens(kTile) / 8;  // of a chunk: four sums of each thread
  const int thread = threadIdx.x % 128;
  const int parts = p.shares / p.split_tiles;
  const int first = work.tile * parts;
  const int me = work.share - first;
  uint32_t mine = 0;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk_owner(kTile, chunk, parts) == me) mine |= 1u << chunk;
  }
  const auto part = [&](int index) {
    const int slot = 2 * (first + index) * slot_blocks + slot_block;
    return reinterpret_cast<float4*>(p.partials) + static_cast<int64_t>(slot) * (kTile.tokens / 8 * 128) + thread;
  };
  // a + b = b + a, so what the second part adds first is no matter; from the third on its own sums wait their turn in
  // memory, too.
  const bool in_turn = me >= 2;
  float4* const out = part(me);
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if ((mine >> chunk & 1) == 0 || in_turn) {
#pragma unroll
      for (int j = chunk * kPieces; j < (chunk + 1) * kPieces; ++j)
        __stcg(out + j * 128, make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]));
    }
    // (Sums begin from 0 everywhere: -0 + -0 would keep its sign.)
#pragma unroll
    for (int i = chunk * kPieces * 4; i < (chunk + 1) * kPieces * 4; ++i) acc[i] = in_turn ? 0.0f : acc[i] + 0.0f;
  }
  ptx::named_barrier(1 + warpgroup, 128);
  // The counter goes up to `parts` as they arrive, and on, back to 0, as they have seen that all have.
  const auto count = static_cast<uint32_t>(2 * parts - 1);
  if (thread == 0) {
    __threadfence();
    atomicInc(counter, count);
    while (*static_cast<volatile uint32_t*>(counter) < static_cast<uint32_t>(parts)) __nanosleep(32);
    __threadfence();
    atomicInc(counter, count);
  }
  ptx::named_barrier(1 + warpgroup, 128);
  // So many chunks of a part are on their way at once as registers allow.
  constexpr int kTokensAtOnce = kTight ? 0 : lean(kTile) ? 8 : kTile.tokens <= 96 ? 96 : 64;
  constexpr int kAtOnce = kTokensAtOnce < kPieces * 8 ? 1 : kTokensAtOnce / (kPieces * 8);
#pragma unroll 1
  for (int index = 0; index < parts; ++index) {
    if (index == me && !in_turn) continue;
    const float4* const in = part(index);
#pragma unroll
    for (int begin = 0; begin < kChunks; begin += kAtOnce) {
      constexpr int kMost = kAtOnce * kPieces;
      float4 v[kMost];
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
        const int chunk = begin + j / kPieces;
        if (chunk < kChunks && (mine >> chunk & 1) != 0) v[j] = ptx::load_global_cg(in + (begin * kPieces + j) * 128);
      }
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
        const int chunk = begin + j / kPieces;
        if (chunk < kChunks && (mine >> chunk & 1) != 0) {
          float* const own = &acc[4 * (begin * kPieces + j)];
          own[0] += v[j].x;
          own[1] += v[j].y;
          own[2] += v[j].z;
          own[3] += v[j].w;
        }
      }
    }
  }
  return mine;
}

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
  const int most = owned_chunks(kTile, splits);
  const uint32_t mine = pipe.ring + threadIdx.x * 16;
  // [row block][part][chunk of the owner][8 tokens][thread] of 16 bytes
  constexpr int kRow = kConsumers * 128 * 16;
  const auto place = [&](int b, int part, int chunk) {
    return static_cast<uint32_t>((b * splits + part) * most + chunk) * (kChunkBlocks * kRow);
  };
  ptx::cluster_sync();  // everybody's ring is free
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int owner = chunk_owner(kTile, chunk, splits);
    if (owner == me) continue;
    const uint32_t remote = ptx::map_to_rank(mine, static_cast<uint32_t>(owner) * kCluster + rank);
    const int index = chunk - first_chunk(kTile, owner, splits);
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
    if (chunk_owner(kTile, chunk, splits) != me) continue;
    mask |= 1u << chunk;
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
