// Attention of many sequences with one query token each: the same walk as in decode.cuh, but every warp has a span of
// its own and sums its rows alone, so that no row of a short context waits for a block's barriers.
//
// A row that two or more warps' spans share goes through the workspace, and the last of those warps adds it up.
#pragma once

#include "backend/cuda/attention/decode.cuh"

namespace nfp::cuda {

// The sums of a row, divided, as output.
template <int kDim, int kHalves, bool kE4m3>
__device__ __forceinline__ void store_row(const DecodeParams& p, const DecodeWalk& walk,
                                          const DecodeState<kDim, kHalves, kE4m3>& state,
                                          const float (&total)[kHalves]) {
  using Tile = KvTile<kDim, kE4m3>;
  uint16_t* const out = decode_output(p, walk);
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const int row = threadIdx.x % 32 / 4 + h * 8;
    if (row >= p.a.group) continue;
    const float inverse = total[h] > 0.0f ? p.a.value_scale / total[h] : 0.0f;
#pragma unroll
    for (int i = 0; i < kDim / 8; i += 2) {
      const float v[4] = {state.o[i][2 * h] * inverse, state.o[i][2 * h + 1] * inverse, state.o[i + 1][2 * h] * inverse,
                          state.o[i + 1][2 * h + 1] * inverse};
      const int first = Tile::output_column(i, 0), second = kE4m3 ? first + 2 : Tile::output_column(i + 1, 0);
      uint16_t* const to = out + row * p.a.head_dim;
      if (first < p.a.head_dim)
        *reinterpret_cast<uint32_t*>(to + first) = kE4m3 ? pack_half2(v[0], v[2]) : pack_half2(v[0], v[1]);
      if (second < p.a.head_dim)
        *reinterpret_cast<uint32_t*>(to + second) = kE4m3 ? pack_half2(v[1], v[3]) : pack_half2(v[2], v[3]);
    }
  }
}

template <int kDim, int kRows, bool kE4m3>
__global__ __launch_bounds__(kDecodeWarps * 32) void decode_rows(const __grid_constant__ DecodeParams p) {
  using Layout = DecodeLayout<kDim, kRows, kE4m3>;
  constexpr int kHalves = kRows / 8;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t ring = ptx::shared_address(shared) + warp * Layout::kWarpBytes;
  // Neighbouring spans lie in different blocks: what ends late is spread over the SMs.
  const int unit = warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);

  ptx::launch_dependents();
  if (!p.a.early_cache_reads) ptx::dependency_wait();
  int span = 0;
  DecodeWalk walk = start_walk(p, unit, static_cast<int>(gridDim.x) * kDecodeWarps, kLeastRowsSpan, span);
  if (walk.done) {
    if (p.a.early_cache_reads) ptx::dependency_wait();
    return;
  }
  clear_unwritten<kDim, Layout::kWarpBytes>(p, ring);
  DecodeLoader<kDim, kE4m3, Layout::kStages, 1> loader(p, walk, 0, ring);

  DecodeState<kDim, kHalves, kE4m3> state;
  state.load_q(p, walk.sequence, walk.head);
  int stage = 0;
  DecodeWalk following;
#pragma unroll 1
  for (; !walk.done; walk = following) {
    state.clear();
#pragma unroll 1
    for (int tile = walk.begin; tile < walk.end; ++tile) {
      ptx::copy_async_wait_group<Layout::kStages - 1>();
      __syncwarp();
      const int key = (walk.first_tile + tile) * kDecodeTile;
      state.add_tile(p, ring + stage * loader.kStageBytes, walk.context - p.a.window - key, walk.context - key);
      __syncwarp();
      loader.load_next(p, stage);
      stage = stage + 1 == Layout::kStages ? 0 : stage + 1;
    }
    following = walk;
    following.next(p);
    if (!following.done) state.load_q(p, following.sequence, following.head);
    float total[kHalves];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) total[h] = quad_sum(state.sum[h]);

    const int first_unit = walk.row_start / span, last_unit = (walk.row_start + walk.tiles - 1) / span;
    if (first_unit == last_unit) {
      store_row(p, walk, state, total);
      continue;
    }
    // A warp has at most one piece that begins a row which others finish, and one that does not begin its row.
    const auto slot_of = [&](int piece) {
      return p.partials + (int64_t{first_unit + piece} * 2 + (piece == 0 ? 1 : 0)) * Layout::kSlotFloats;
    };
    float* const slot = slot_of(unit - first_unit);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int row = lane / 4 + h * 8;
      if (row >= p.a.group) continue;
      state.store_sums(slot + row * kDim, h);
      if (lane % 4 == 0)
        *reinterpret_cast<float2*>(slot + kRows * kDim + row * 2) = make_float2(state.largest[h], total[h]);
    }
    __threadfence();
    __syncwarp();
    bool is_last = false;
    const int row = walk.sequence * p.a.kv_heads + walk.head;
    if (lane == 0) {
      is_last = atomicAdd(p.arrivals + row, 1u) == static_cast<uint32_t>(last_unit - first_unit);
      if (is_last) p.arrivals[row] = 0;
    }
    is_last = __shfl_sync(0xffffffffu, is_last, 0);
    if (!is_last) continue;
    __threadfence();
    merge_pieces<kDim, kRows>(p, walk, last_unit - first_unit + 1, slot_of, lane, 32);
  }
}

template <int kDim, int kRows, bool kE4m3>
AttentionKernel describe_decode_rows() {
  return {reinterpret_cast<const void*>(&decode_rows<kDim, kRows, kE4m3>), kDecodeWarps * 32,
          static_cast<size_t>(DecodeLayout<kDim, kRows, kE4m3>::kRingBytes)};
}

}  // namespace nfp::cuda
