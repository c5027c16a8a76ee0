// From accumulators to outputs in memory.
#pragma once

#include <cstdint>

#include "backend/cuda/gemm/kernel/kernel_params.h"
#include "backend/cuda/gemm/plan/config.h"
#include "backend/cuda/logit_key.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/pairs.cuh"
#include "backend/cuda/ptx/warp.cuh"
#include "backend/cuda/row_largest.h"
#include "backend/cuda/row_peaks.h"

namespace nfp::cuda {

__device__ __forceinline__ float silu_times(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// `pairs`: outputs of tokens `token` + lane % 4 * 2 and the next one, of row lane / 4 each. slot: of RowPeaks.
__device__ __forceinline__ void add_to_peaks(uint32_t* slot, uint32_t pairs, int token, int tokens, int lane) {
  pairs &= 0x7fff7fffu;
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) pairs = __vmaxu2(pairs, __shfl_xor_sync(0xffffffffu, pairs, offset));
  const int t = token + lane % 4 * 2 + lane / 4;
  if (lane < 8 && t < tokens) atomicMax(slot + t, lane < 4 ? pairs & 0xffffu : pairs >> 16);
}

// One warpgroup's 64 rows x kTokens of accumulators -> global memory: scales, bias, SwiGLU and residual in FP32, one
// rounding. The transpose goes through shared memory a chunk of tokens at a time, from where the copy engine takes
// whole lines.
//
// Every way to store is a copy of the unrolled loop, and these copies were most of the compile time: so whole lines go
// out only in the type that the mode's activations have (bulk_store_type), and without a residual under SwiGLU.
template <Tile kTile, bool kTokenScale, bool kBf16>
struct Epilogue {
  static constexpr int kTokens = kTile.tokens;
  static constexpr int kChunk = staging_tokens(kTile);
  static constexpr int kGroup = staging_group(kTile);
  static constexpr int kSlots = staging_slots(kTile);
  static constexpr int kChunkBytes = kChunk * 128;
  static constexpr bool kFindsPeaks = kTokenScale && kTokens <= RowPeaks::kTileTokens;  // with SwiGLU

  const KernelParams& p;
  uint32_t staging;  // this warpgroup's, 1024-byte aligned
  uint32_t scales;   // this warpgroup's, kTokens floats
  int warpgroup;
  int groups_stored = 0;
  // Loads what store() will need of a tile's tokens, so that the main loop hides the latency.
  __device__ __forceinline__ void prepare(int token0) {
    if constexpr (kTokenScale) {
#pragma unroll
      for (int t = static_cast<int>(threadIdx.x) % 128; t < kTokens; t += 128) {
        if (p.token_scale == nullptr) {
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(scales + t * 4), "f"(1.0f) : "memory");
        } else if (token0 + t < p.m) {
          ptx::copy_async_4(scales + t * 4, p.token_scale + token0 + t);
        }
      }
    }
  }

  __device__ void barrier() const { ptx::named_barrier(1 + warpgroup, 128); }
  // In the warp that handed group `index` over: until the copy engine has read it. (The wait is the issuing thread's,
  // and elect_one() names the same one every time.)
  __device__ void wait_for_store(int index) const {
    if (static_cast<int>(threadIdx.x) / 32 % 4 == index % 4 && ptx::elect_one()) ptx::store_wait_read<0>();
    __syncwarp();
  }

  struct RowFactors {
    float scale0, scale1, bias0, bias1;
  };
  // Of rows `row` and row + 8.
  static __device__ RowFactors row_factors(const KernelParams& p, int row) {
    RowFactors f{p.weight_scale, p.weight_scale, 0.0f, 0.0f};
    if (p.row_scale != nullptr) {
      f.scale0 *= row < p.n ? __ldg(p.row_scale + row) : 0.0f;
      f.scale1 *= row + 8 < p.n ? __ldg(p.row_scale + row + 8) : 0.0f;
    }
    if (p.bias != nullptr) {
      f.bias0 = row < p.n ? __ldg(p.bias + row) : 0.0f;
      f.bias1 = row + 8 < p.n ? __ldg(p.bias + row + 8) : 0.0f;
    }
    return f;
  }

  // Byte of the 16-byte chunk `column16` of token row `t` in a staging buffer: the copy engine's swizzle.
  template <bool kSwiglu>
  static __device__ uint32_t staged(int t, int column16) {
    return kSwiglu ? t * 64 + ((column16 ^ (t / 2 % 4)) * 16) : t * 128 + ((column16 ^ (t % 8)) * 16);
  }

  static constexpr int kTokensAtOnce = kGroup * kChunk;
  static constexpr int kGroups = (kTokens + kTokensAtOnce - 1) / kTokensAtOnce;

  // The residual of a group of chunks, on its way through registers: 16 bytes a load, 8 (4 with swiglu) threads a
  // token.
  template <bool kSwiglu>
  struct Residual {
    static constexpr int kLanes = kSwiglu ? 4 : 8;
    static constexpr int kLoads = (kTokensAtOnce * kLanes + 127) / 128;
    uint4 ahead[kLoads];

    __device__ __forceinline__ void fetch(const KernelParams& p, int group, int token0, int column0, int thread) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int t = (thread + i * 128) / kLanes, column = column0 + thread % kLanes * 8;
        const int token = token0 + group * kTokensAtOnce + t;
        ahead[i] = make_uint4(0, 0, 0, 0);
        if (group < kGroups && t < kTokensAtOnce && token < p.m && column < (kSwiglu ? p.n / 2 : p.n)) {
          ahead[i] = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.residual) + token * p.ldr + column);
        }
      }
    }
    __device__ __forceinline__ void stage(uint32_t slot, int thread) const {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int t = (thread + i * 128) / kLanes;
        if (t < kTokensAtOnce) {
          ptx::store_shared_16(slot + t / kChunk * kChunkBytes + staged<kSwiglu>(t % kChunk, thread % kLanes),
                               ahead[i]);
        }
      }
    }
  };

  // One chunk of tokens -> its staging buffer, where the residual lies already if there is one.
  // peaks: the slot for its tokens' (kSwiglu of E4M3 products), or null.
  template <bool kSwiglu, bool kResidual>
  __device__ __forceinline__ void stage_chunk(const float (&acc)[kTokens / 2], const RowFactors& f, int chunk, int warp,
                                              int lane, uint32_t buffer, int token0, uint32_t* peaks) const {
    float2 token_scales[kTokenScale ? kChunk / 8 : 1];
    if constexpr (kTokenScale && !kResidual) {  // all at once, where registers allow
#pragma unroll
      for (int j = 0; j < kChunk / 8; ++j)
        token_scales[j] = ptx::load_shared_8(scales + (chunk * kChunk + j * 8 + lane % 4 * 2) * 4);
    }
#pragma unroll
    for (int j = 0; j < kChunk / 8; ++j) {
      const int base = (chunk * (kChunk / 8) + j) * 4;
      float v0 = acc[base], v1 = acc[base + 1], v2 = acc[base + 2], v3 = acc[base + 3];
      if constexpr (kTokenScale) {
        if constexpr (kResidual)
          token_scales[j] = ptx::load_shared_8(scales + (chunk * kChunk + j * 8 + lane % 4 * 2) * 4);
        v0 *= token_scales[j].x;
        v1 *= token_scales[j].y;
        v2 *= token_scales[j].x;
        v3 *= token_scales[j].y;
      }
      v0 = fmaf(v0, f.scale0, f.bias0);
      v1 = fmaf(v1, f.scale0, f.bias0);
      v2 = fmaf(v2, f.scale1, f.bias1);
      v3 = fmaf(v3, f.scale1, f.bias1);
      const int t = j * 8 + lane % 8;
      if constexpr (kSwiglu) {  // v0, v1: gate; v2, v3: up
        v0 = silu_times(v0, v2);
        v1 = silu_times(v1, v3);
        const uint32_t address = buffer + staged<true>(t, warp);
        if constexpr (kResidual) {
          uint32_t r0;
          ptx::load_matrix_x1_trans(address, r0);
          const float2 r = unpack_pair(r0, kBf16);
          v0 += r.x;
          v1 += r.y;
        }
        const uint32_t pairs = pack_pair(v0, v1, kBf16);
        ptx::store_matrix_x1_trans(address, pairs);
        if constexpr (kFindsPeaks) {
          if (peaks != nullptr) add_to_peaks(peaks, pairs, token0 + chunk * kChunk + j * 8, p.m, lane);
        }
      } else {
        const uint32_t address = buffer + staged<false>(t, warp * 2 + lane / 8 % 2);
        if constexpr (kResidual) {
          uint32_t r0, r1;
          ptx::load_matrix_x2_trans(address, r0, r1);
          const float2 a = unpack_pair(r0, kBf16), b = unpack_pair(r1, kBf16);
          v0 += a.x;
          v1 += a.y;
          v2 += b.x;
          v3 += b.y;
        }
        ptx::store_matrix_x2_trans(address, pack_pair(v0, v1, kBf16), pack_pair(v2, v3, kBf16));
      }
    }
  }

  // chunk_mask: of the tile's chunks, those that this block stores.
  template <bool kSwiglu, bool kResidual>
  __device__ __forceinline__ void store_bulk(float (&acc)[kTokens / 2], int row0, int token0, uint32_t chunk_mask) {
    const int thread = threadIdx.x % 128;
    const int lane = thread % 32;
    const int warp = ptx::warp_uniform(thread / 32);
    row0 = ptx::warp_uniform(row0);
    token0 = ptx::warp_uniform(token0);
    const RowFactors f = row_factors(p, row0 + warp * 16 + lane / 4);
    const int column0 = kSwiglu ? row0 / 2 : row0;
    if constexpr (kTokenScale) {
      ptx::copy_async_wait();  // prepare()'s
      if constexpr (kSlots > 1) barrier();
    }
    chunk_mask &= ~0u >> (32 - chunks(kTile));  // the last group may have fewer
    uint32_t* const peaks = kSwiglu && kFindsPeaks && p.peaks != nullptr
                                ? p.peaks + row0 / 64 % RowPeaks::kSlots * RowPeaks::kRows
                                : nullptr;
    Residual<kSwiglu> residual;
    if constexpr (kResidual) residual.fetch(p, 0, token0, column0, thread);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int first = token0 + group * kTokensAtOnce;
      if (first >= p.m) break;
      const uint32_t wanted = chunk_mask >> (group * kGroup) & ((1u << kGroup) - 1);
      if (wanted == 0) {
        if constexpr (kResidual) residual.fetch(p, group + 1, token0, column0, thread);
        continue;
      }
      const uint32_t slot = staging + groups_stored % kSlots * (kGroup * kChunkBytes);
      if constexpr (kSlots == 1) {
        wait_for_store(groups_stored - 1);
        barrier();
      }
      if constexpr (kResidual) {
        residual.stage(slot, thread);
        residual.fetch(p, group + 1, token0, column0, thread);
        barrier();
      }
#pragma unroll
      for (int inner = 0; inner < kGroup; ++inner) {
        if (group * kGroup + inner >= chunks(kTile)) break;
        if ((wanted >> inner & 1) == 0) continue;
        stage_chunk<kSwiglu, kResidual>(acc, f, group * kGroup + inner, warp, lane, slot + inner * kChunkBytes, token0,
                                        peaks);
      }
      ptx::fence_async_shared();
      // After this barrier the group is complete, and the next slot is free.
      if constexpr (kSlots > 1) wait_for_store(groups_stored - (kSlots - 1));
      barrier();
      // Warps take turns, so that the others go on while one hands its group over.
      if (warp == groups_stored % 4 && ptx::elect_one()) {
#pragma unroll
        for (int inner = 0; inner < kGroup; ++inner) {
          const int token = first + inner * kChunk;
          if ((wanted >> inner & 1) != 0 && token < p.m)
            ptx::tensor_store_2d(&p.d_map, slot + inner * kChunkBytes, column0, token);
        }
        ptx::store_commit();
      }
      ++groups_stored;
    }
  }

  // Any alignment and any type, for two tokens of rows `row` and row + 8. One function, called, for all of it: inlined
  // it would be most of a kernel's code.
  static __device__ __noinline__ void store_four(const KernelParams& p, int token, int row, float2 low, float2 high) {
    const bool bf16 = p.is_bf16 != 0;
    const auto store_element = [&p, bf16](int t, int column, float value) {
      const int64_t at = t * p.ldd + column;
      if (p.is_f32 != 0) {
        if (p.residual != nullptr) value += static_cast<const float*>(p.residual)[t * p.ldr + column];
        static_cast<float*>(p.d)[at] = value;
        return;
      }
      if (p.residual != nullptr) {
        const uint32_t r = static_cast<const uint16_t*>(p.residual)[t * p.ldr + column];
        value += unpack_pair(r, bf16).x;
      }
      static_cast<uint16_t*>(p.d)[at] = static_cast<uint16_t>(pack_pair(value, 0.0f, bf16));
    };
    const RowFactors f = row_factors(p, row);
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
      const int t = token + side;
      if (t >= p.m) return;
      float v0 = side == 0 ? low.x : low.y, v1 = side == 0 ? high.x : high.y;
      if constexpr (kTokenScale) {
        const float scale = p.token_scale != nullptr ? __ldg(p.token_scale + t) : 1.0f;
        v0 *= scale;
        v1 *= scale;
      }
      v0 = fmaf(v0, f.scale0, f.bias0);
      v1 = fmaf(v1, f.scale1, f.bias1);
      if (p.swiglu != 0) {  // rows come in sixteens: eight of gate, eight of up
        if (row + 8 < p.n) store_element(t, row / 16 * 8 + row % 8, silu_times(v0, v1));
      } else {
        if (row < p.n) store_element(t, row, v0);
        if (row + 8 < p.n) store_element(t, row + 8, v1);
      }
    }
  }
  __device__ __forceinline__ void store_scattered(float (&acc)[kTokens / 2], int row0, int token0,
                                                  uint32_t chunk_mask) const {
    const int lane = threadIdx.x % 32;
    const int row = row0 + threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kTokens / 2; i += 4) {
      if ((chunk_mask >> (i * 2 / kChunk) & 1) == 0) continue;
      store_four(p, token0 + i * 2 + lane % 4 * 2, row, make_float2(acc[i], acc[i + 1]),
                 make_float2(acc[i + 2], acc[i + 3]));
    }
  }

  // FP32 as it is, straight from the accumulators: a warp's eight columns of a token are 32 bytes, a whole sector of
  // the L2, so staging would gain nothing.
  __device__ __forceinline__ void store_f32(float (&acc)[kTokens / 2], int row0, int token0,
                                            uint32_t chunk_mask) const {
    const int lane = threadIdx.x % 32;
    const int row = row0 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    const RowFactors f = row_factors(p, row);
    const int first = token0 + lane % 4 * 2;
    float* out = static_cast<float*>(p.d) + first * p.ldd + row;
    const bool low = row < p.n, high = row + 8 < p.n;
#pragma unroll
    for (int i = 0; i < kTokens / 2; i += 4) {
      if ((chunk_mask >> (i * 2 / kChunk) & 1) != 0) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const int token = first + i * 2 + side;
          if (token >= p.m) break;
          float v0 = acc[i + side], v1 = acc[i + 2 + side];
          if constexpr (kTokenScale) {
            const float scale = p.token_scale != nullptr ? __ldg(p.token_scale + token) : 1.0f;
            v0 *= scale;
            v1 *= scale;
          }
          if (low) out[side * p.ldd] = fmaf(v0, f.scale0, f.bias0);
          if (high) out[side * p.ldd + 8] = fmaf(v1, f.scale1, f.bias1);
        }
      }
      out += 8 * p.ldd;
    }
  }

  // Of each token the largest of the warp's sixteen rows (row_largest.h). The thread is asked for anew: what is
  // computed of it would stay in registers from tile to tile, which large tiles do not have.
  __device__ __forceinline__ void store_largest(float (&acc)[kTokens / 2], int row0, int token0,
                                                uint32_t chunk_mask) const {
    const int thread = static_cast<int>(ptx::read_thread()) % 128, lane = thread % 32;
    row0 = ptx::warp_uniform(row0 + thread / 32 * 16);
    token0 = ptx::warp_uniform(token0);
    if (row0 >= p.n) return;
    const int row = row0 + lane / 4;
    RowFactors f = row_factors(p, row);
    if (row >= p.n) f.bias0 = -INFINITY;  // of padding: never before a row that is there
    if (row + 8 >= p.n) f.bias1 = -INFINITY;
    // The token whose candidate this lane comes to have: half of the lanes have the first of their two, half the other.
    int token = token0 + lane % 4 * 2 + lane / 16;
    const int64_t stride = RowLargest::groups(p.n) * RowLargest::kRows;  // from kRows tokens to the next ones
    uint64_t* out = static_cast<uint64_t*>(p.d) + int64_t{row / RowLargest::kColumns} * RowLargest::kRows +
                    token / RowLargest::kRows * stride + token % RowLargest::kRows;
#pragma unroll
    for (int i = 0; i < kTokens / 2; i += 4) {
      if ((chunk_mask >> (i * 2 / kChunk) & 1) != 0) {
        uint64_t largest[2];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          float v0 = acc[i + side], v1 = acc[i + 2 + side];
          if constexpr (kTokenScale) {
            const int t = token - lane / 16 + side;
            const float scale = p.token_scale != nullptr && t < p.m ? __ldg(p.token_scale + t) : 1.0f;
            v0 *= scale;
            v1 *= scale;
          }
          largest[side] = max(candidate(key_of(fmaf(v0, f.scale0, f.bias0)), row),
                              candidate(key_of(fmaf(v1, f.scale1, f.bias1)), row + 8));
        }
        uint64_t mine = lane < 16 ? largest[0] : largest[1];
        mine = max(mine, __shfl_xor_sync(0xffffffffu, lane < 16 ? largest[1] : largest[0], 16));
        mine = max(mine, __shfl_xor_sync(0xffffffffu, mine, 8));
        mine = max(mine, __shfl_xor_sync(0xffffffffu, mine, 4));
        if ((lane & 12) == 0 && token < p.m) *out = mine;
      }
      token += 8;
      out += 8 / RowLargest::kRows * stride;
    }
  }

  __device__ __forceinline__ void store(float (&acc)[kTokens / 2], int row0, int token0, uint32_t chunk_mask) {
    if (row0 >= p.n) return;
    if (p.bulk_stores == 0) {
      if (p.finds_largest != 0) {
        store_largest(acc, row0, token0, chunk_mask);
      } else if (p.is_f32 != 0 && p.swiglu == 0 && p.residual == nullptr) {
        store_f32(acc, row0, token0, chunk_mask);
      } else {
        store_scattered(acc, row0, token0, chunk_mask);
      }
    } else if (p.swiglu != 0) {
      store_bulk<true, false>(acc, row0, token0, chunk_mask);
    } else if (p.residual != nullptr) {
      store_bulk<false, true>(acc, row0, token0, chunk_mask);
    } else {
      store_bulk<false, false>(acc, row0, token0, chunk_mask);
    }
  }
};

}  // namespace nfp::cuda
