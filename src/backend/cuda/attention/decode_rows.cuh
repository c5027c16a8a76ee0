// Attention of many sequences with one query token each: the same walk as in decode.cuh, but every warp has a span of
// its own and sums its rows alone, so that no row of a short context waits for a block's barriers.
//
// Spans meet in registers: every lane fetches of another's piece what it has itself of its own.
#pragma once

#include "backend/cuda/attention/decode.cuh"
#include "backend/cuda/attention/decode_exchange.cuh"

namespace nfp::cuda {

// One warp's piece of a row in the exchange: sums [head][kDim], pairs of them in the order of the warp's registers,
// then (base, sum) of each head.
template <int kDim, int kHalves, KvType kKv>
struct PieceExchange {
  using State = DecodeState<kDim, kHalves, kKv>;
  float* slot;
  int group;

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ float* sums(int head, int i) const { return slot + head * kDim + i * 16 + lane() / 4 * 2; }
  __device__ __forceinline__ float* top(int head) const { return slot + kHalves * 8 * kDim + head * 2; }

  __device__ __forceinline__ void give(const State& state, const float (&total)[kHalves][2]) const {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int head = State::head(h, j);
        if (head >= group) continue;
#pragma unroll
        for (int i = 0; i < kDim / 16; ++i) send(sums(head, i), make_float2(state.o[h][i][j], state.o[h][i][j + 2]));
        if (lane() < 4) send(top(head), make_float2(state.base[h][j], total[h][j]));
      }
    }
  }
  // What this lane adds of a piece, where there are registers for all of it while a tile is summed: it is asked for
  // before a row's last tile, as one journey to the L2 after another would end the kernel late.
  static constexpr bool kLooksAhead = kHalves == 1 && kDim <= 128;
  struct Piece {
    float2 top[2] = {}, sum[2][kDim / 16] = {};
  };
  __device__ __forceinline__ void look_at(Piece& piece) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (State::head(0, j) >= group) continue;
      piece.top[j] = look(top(State::head(0, j)));
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) piece.sum[j][i] = look(sums(State::head(0, j), i));
    }
  }
  __device__ __forceinline__ bool is_there(const Piece& piece) const {
    bool all = true;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (State::head(0, j) >= group) continue;
      all = all && arrived(piece.top[j]);
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) all = all && arrived(piece.sum[j][i]);
    }
    return all;
  }

  // Sums of head j + 8h to a base that suits both; returns what those of `other` are multiplied by, and in `mine` what
  // the state's own are.
  static __device__ __forceinline__ float meet(State& state, float (&total)[kHalves][2], int h, int j, float2 other,
                                               float& mine) {
    const float largest = fmaxf(state.base[h][j], other.x), base = finite_base(largest);
    mine = exp2_fast(state.base[h][j] - base);
    const float theirs = exp2_fast(other.x - base);
    state.base[h][j] = largest;
    total[h][j] = total[h][j] * mine + other.y * theirs;
    return theirs;
  }
  static __device__ __forceinline__ void add(float (&o)[4], int j, float mine, float2 v, float theirs) {
    o[j] = o[j] * mine + v.x * theirs;
    o[j + 2] = o[j + 2] * mine + v.y * theirs;
  }

  // `piece`: of look_at(), or nothing yet.
  __device__ __forceinline__ void add_to(State& state, float (&total)[kHalves][2], Piece& piece) const {
    static_assert(kLooksAhead);
    while (!is_there(piece)) look_at(piece);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int head = State::head(0, j);
      if (head >= group) continue;
      float mine;
      const float theirs = meet(state, total, 0, j, piece.top[j], mine);
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        take_back(sums(head, i));
        add(state.o[0][i], j, mine, piece.sum[j][i], theirs);
      }
    }
    take_tops_back();
  }
  __device__ __forceinline__ void add_to(State& state, float (&total)[kHalves][2]) const {
    constexpr int kAtOnce = kDim == 128 ? 8 : 4;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int head = State::head(h, j);
        if (head >= group) continue;
        float mine;
        const float theirs = meet(state, total, h, j, wait_for<1>([&](int) { return top(head); })[0], mine);
#pragma unroll
        for (int first = 0; first < kDim / 16; first += kAtOnce) {
          const Numbers<kAtOnce> v = wait_for<kAtOnce>([&](int i) { return sums(head, first + i); });
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            take_back(sums(head, first + i));
            add(state.o[h][first + i], j, mine, v[i], theirs);
          }
        }
      }
    }
    take_tops_back();
  }
  __device__ __forceinline__ void take_tops_back() const {
    __syncwarp();  // all lanes have read the tops
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (State::head(h, j) < group && lane() < 4) take_back(top(State::head(h, j)));
      }
    }
  }
};

// The sums of a row, divided, as output.
template <int kDim, int kHalves, KvType kKv>
__device__ __forceinline__ void store_row(const DecodeParams& p, const DecodeWalk& walk,
                                          const DecodeState<kDim, kHalves, kKv>& state,
                                          const float (&total)[kHalves][2]) {
  using State = DecodeState<kDim, kHalves, kKv>;
  uint16_t* const out = decode_output(p, p.a.query_start[walk.sequence], walk.head);
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    float inverse[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) inverse[j] = total[h][j] > 0.0f ? p.a.value_scale / total[h][j] : 0.0f;
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      const float(&o)[4] = state.o[h][i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t pair;
        int head, column;
        if constexpr (is_e4m3(kKv)) {  // two columns of head 2t + half
          pair = pack_pair<kKv>(o[half] * inverse[half], o[half + 2] * inverse[half]);
          head = State::head(h, half);
          column = State::Tile::value_column(i, 0);
        } else {  // one column of two heads, which becomes two columns of head g
          pair = ptx::transpose_matrix(pack_pair<kKv>(o[2 * half] * inverse[0], o[2 * half + 1] * inverse[1]));
          head = h * 8 + lane / 4;
          column = i * 16 + half * 8 + lane % 4 * 2;
        }
        if (head < p.a.group && column < p.a.head_dim)
          *reinterpret_cast<uint32_t*>(out + head * p.a.head_dim + column) = pair;
      }
    }
  }
}

// kRotates: calls may have a rotation. Without, the code that a step has to fetch is a third shorter.
template <int kDim, int kRows, KvType kKv, bool kRotates>
__global__ __launch_bounds__(kDecodeWarps * 32, DecodeLayout<kDim, kRows, kKv>::kBlocks) void decode_rows(
    const __grid_constant__ DecodeParams p) {
  using Layout = DecodeLayout<kDim, kRows, kKv>;
  constexpr int kHalves = kRows / 8;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32;
  const uint32_t ring = ptx::shared_address(shared) + warp * Layout::kWarpBytes;
  // A bundle's warps are neighbours, as those of a block keep step with each other.
  const int unit = static_cast<int>(blockIdx.x) * kDecodeWarps + warp;

  ptx::launch_dependents();
  if (!p.a.early_cache_reads) ptx::dependency_wait();
  int span = 0, busy = 0, first_block = -1;
  DecodeWalk walk =
      planned_walk<kDim, true>(p, unit, static_cast<int>(gridDim.x) * kDecodeWarps, 0, span, busy, first_block);
  if (unit >= busy) {
    if (p.a.early_cache_reads) ptx::dependency_wait();
    return;
  }
  const int query = kDim <= 128 ? p.a.query_start[walk.sequence] : 0;  // before anything waits
  clear_unwritten<kDim, Layout::kWarpBytes>(p, ring);
  DecodeLoader<kDim, kKv, Layout::kStages, 1, true, kRotates> loader(p, walk, 0, first_block, ring);

  DecodeState<kDim, kHalves, kKv> state;
  state.load_q(p, kDim <= 128 ? query : p.a.query_start[walk.sequence], walk.head);
  loader.finish_early(p);
  int stage = 0;
  DecodeWalk following;
#pragma unroll 1
  for (; !walk.done; walk = following) {
    if constexpr (kRotates) {
      if (p.rotation.cos_sin != nullptr) rotate_queries<kDim, kHalves, kKv>(p, walk.context, state.q);
    }
    state.clear();
    using Exchange = PieceExchange<kDim, kHalves, kKv>;
    const auto exchange = [&](int of) { return Exchange{p.exchange + int64_t{of} * Layout::kSlotFloats, p.a.group}; };
    // (Where nothing is looked for ahead, it is no more than a name.)
    [[maybe_unused]] typename Exchange::Piece next_piece;
#pragma unroll 1
    for (int tile = walk.begin; tile < walk.end; ++tile) {
      if constexpr (Exchange::kLooksAhead) {
        if (tile == walk.end - 1 && walk.begin == 0 && walk.end < walk.tiles)
          exchange(unit + p.bundle).look_at(next_piece);
      }
      add_next<Layout::kStages>(p, walk, tile, ring, state, loader, stage);
    }
    following = walk;
    following.next<true>(p);
    if (!following.done) state.load_q(p, p.a.query_start[following.sequence], following.head);
    float total[kHalves][2];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int j = 0; j < 2; ++j) total[h][j] = column_sum(state.sum[h][j]);
    }

    if (walk.begin > 0) {
      exchange(unit).give(state, total);
      continue;
    }
    const int last_unit = ((walk.row_start + walk.tiles - 1) / span + 1) * p.bundle - 1;
    for (int other = unit + p.bundle; other <= last_unit; other += p.bundle) {
      if constexpr (Exchange::kLooksAhead) {
        exchange(other).add_to(state, total, next_piece);
        next_piece = {};
      } else {
        exchange(other).add_to(state, total);
      }
    }
    store_row(p, walk, state, total);
  }
  clear_keyless(p, unit, busy, static_cast<int>(threadIdx.x) % 32, 32);
}

template <int kDim, int kRows, KvType kKv>
AttentionKernel describe_decode_rows(bool rotates) {
  return {rotates ? reinterpret_cast<const void*>(&decode_rows<kDim, kRows, kKv, kCanRotate<kDim, kKv>>)
                  : reinterpret_cast<const void*>(&decode_rows<kDim, kRows, kKv, false>),
          kDecodeWarps * 32, static_cast<size_t>(DecodeLayout<kDim, kRows, kKv>::kRingBytes)};
}

}  // namespace nfp::cuda
