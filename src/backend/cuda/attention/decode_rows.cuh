// Attention of many sequences with one query token each: the same walk as in decode.cuh, but every warp has a span of
// its own and sums its rows alone, so that no row of a short context waits for a block's barriers.
//
// Spans meet in registers: every lane fetches of another's piece what it has itself of its own.
#pragma once

#include "backend/cuda/attention/decode.cuh"
#include "backend/cuda/attention/decode_exchange.cuh"

namespace nfp::cuda {

// One warp's piece of a row in the exchange: sums [row][kDim] in the order of the warp's registers, then (largest, sum)
// of each row.
template <int kDim, int kHalves, bool kE4m3>
struct PieceExchange {
  using State = DecodeState<kDim, kHalves, kE4m3>;
  float* slot;
  int group;

  static __device__ __forceinline__ int row(int h) { return static_cast<int>(threadIdx.x) % 32 / 4 + h * 8; }
  // Neighbouring lanes have neighbouring pairs.
  __device__ __forceinline__ float* sums(int h, int i) const {
    return slot + row(h) * kDim + i * 8 + threadIdx.x % 4 * 2;
  }
  __device__ __forceinline__ float* top(int h) const { return slot + kHalves * 8 * kDim + row(h) * 2; }

  __device__ __forceinline__ void give(const State& state, const float (&total)[kHalves]) const {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      if (row(h) >= group) continue;
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) send(sums(h, i), make_float2(state.o[i][2 * h], state.o[i][2 * h + 1]));
      if (threadIdx.x % 4 == 0) send(top(h), make_float2(state.largest[h], total[h]));
    }
  }
  __device__ __forceinline__ void add_to(State& state, float (&total)[kHalves]) const {
    constexpr int kAtOnce = 8;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      if (row(h) >= group) continue;
      const float2 tops = wait_for<1>([&](int) { return top(h); })[0];
      const float largest = fmaxf(state.largest[h], tops.x), base = finite_base(largest);
      const float mine = exp2_fast(state.largest[h] - base), other = exp2_fast(tops.x - base);
      state.largest[h] = largest;
      total[h] = total[h] * mine + tops.y * other;
#pragma unroll
      for (int first = 0; first < kDim / 8; first += kAtOnce) {
        const Numbers<kAtOnce> v = wait_for<kAtOnce>([&](int i) { return sums(h, first + i); });
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          take_back(sums(h, first + i));
          float* const o = &state.o[first + i][2 * h];
          o[0] = o[0] * mine + v[i].x * other;
          o[1] = o[1] * mine + v[i].y * other;
        }
      }
    }
    __syncwarp();  // the quad has read the top
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      if (row(h) < group && threadIdx.x % 4 == 0) take_back(top(h));
    }
  }
};

// The sums of a row, divided, as output.
template <int kDim, int kHalves, bool kE4m3>
__device__ __forceinline__ void store_row(const DecodeParams& p, const DecodeWalk& walk,
                                          const DecodeState<kDim, kHalves, kE4m3>& state,
                                          const float (&total)[kHalves]) {
  using Tile = KvTile<kDim, kE4m3>;
  uint16_t* const out = decode_output(p, p.a.query_start[walk.sequence], walk.head);
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
__global__ __launch_bounds__(kDecodeWarps * 32, DecodeLayout<kDim, kRows, kE4m3>::kBlocks) void decode_rows(
    const __grid_constant__ DecodeParams p) {
  using Layout = DecodeLayout<kDim, kRows, kE4m3>;
  constexpr int kHalves = kRows / 8;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32;
  const uint32_t ring = ptx::shared_address(shared) + warp * Layout::kWarpBytes;
  // Neighbouring spans lie in different blocks: what ends late is spread over the SMs.
  const int unit = warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);

  ptx::launch_dependents();
  if (!p.a.early_cache_reads) ptx::dependency_wait();
  int span = 0, busy = 0;
  DecodeWalk walk = start_walk(p, unit, static_cast<int>(gridDim.x) * kDecodeWarps, kLeastRowsSpan, span, busy);
  if (unit >= busy) {
    if (p.a.early_cache_reads) ptx::dependency_wait();
    return;
  }
  const int query = kDim <= 128 ? p.a.query_start[walk.sequence] : 0;  // before anything waits
  clear_unwritten<kDim, Layout::kWarpBytes>(p, ring);
  DecodeLoader<kDim, kE4m3, Layout::kStages, 1> loader(p, walk, 0, ring);

  DecodeState<kDim, kHalves, kE4m3> state;
  state.load_q(p, kDim <= 128 ? query : p.a.query_start[walk.sequence], walk.head);
  loader.finish_early(p);
  int stage = 0;
  DecodeWalk following;
#pragma unroll 1
  for (; !walk.done; walk = following) {
    if constexpr (kCanRotate<kDim>) {
      if (p.rotation.cos_sin != nullptr) rotate_queries<kDim, kHalves, kE4m3>(p, walk.context, state.q);
    }
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
    if (!following.done) state.load_q(p, p.a.query_start[following.sequence], following.head);
    float total[kHalves];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) total[h] = quad_sum(state.sum[h]);

    using Exchange = PieceExchange<kDim, kHalves, kE4m3>;
    if (walk.begin > 0) {
      Exchange{p.exchange + int64_t{unit} * Layout::kSlotFloats, p.a.group}.give(state, total);
      continue;
    }
    const int last_unit = (walk.row_start + walk.tiles - 1) / span;
    for (int other = unit + 1; other <= last_unit; ++other)
      Exchange{p.exchange + int64_t{other} * Layout::kSlotFloats, p.a.group}.add_to(state, total);
    store_row(p, walk, state, total);
  }
  clear_keyless(p, unit, busy, static_cast<int>(threadIdx.x) % 32, 32);
}

template <int kDim, int kRows, bool kE4m3>
AttentionKernel describe_decode_rows() {
  return {reinterpret_cast<const void*>(&decode_rows<kDim, kRows, kE4m3>), kDecodeWarps * 32,
          static_cast<size_t>(DecodeLayout<kDim, kRows, kE4m3>::kRingBytes)};
}

}  // namespace nfp::cuda
