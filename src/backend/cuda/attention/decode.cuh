// Attention of sequences with one query token each.
//
// A "row" is one sequence and one KV head; its work is its 16-key tiles. The rows of the batch, laid end to end, are
// cut into equal spans, one a thread block, so any mix of contexts keeps all SMs busy to the end (the decomposition is
// stream-K's: Osama et al., PPoPP 2023). A block that has all of a row writes its output; for the others see
// decode_exchange.cuh. Where sums must not depend on the batch, a row is cut into chunks by its context alone, and the
// last block to arrive adds them up in their order.
//
// Inside a block each warp takes every fourth tile, with its own ring of copies in flight and its own running softmax,
// and the warps meet only at the end of a row, while the copies for the next are under way. The query heads that share
// the KV head are the columns of one mma tile, whose rows are the keys: a group of up to eight heads costs one product
// for 16 keys and 16 features.
//
// Where there are few rows, latency counts and not balance: a cluster of blocks takes each row in equal parts and adds
// them up through its shared memory, without the workspace.
#pragma once

#include "backend/cuda/attention/decode_merge.cuh"
#include "backend/cuda/attention/decode_rotate.cuh"
#include "backend/cuda/attention/decode_walk.cuh"
#include "backend/cuda/attention/kv_tile.cuh"
#include "backend/cuda/attention/softmax.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/cluster.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/warp.cuh"

namespace nfp::cuda {

template <int kDim, int kRows, KvType kKv>
struct DecodeLayout {
  using Tile = KvTile<kDim, kKv>;
  static constexpr int kTileBytes = kDecodeTile * Tile::kRowBytes;
  static constexpr int kStages = (kDim == 64 ? 6 : kDim == 128 ? 3 : 2) * (is_e4m3(kKv) ? 2 : 1);
  static constexpr int kWarpBytes = kStages * 2 * kTileBytes;
  static constexpr int kRingBytes = kDecodeWarps * kWarpBytes;
  // Each warp's sums, each warp's tops, the block's tops.
  static constexpr int kMergeBytes =
      (kDecodeWarps * kRows * (kSumStride<kDim> + 2) + 2 * kRows) * static_cast<int>(sizeof(float));
  static constexpr int kSlotFloats = kRows * (kDim + 2);
  static constexpr int kBlocks = kRingBytes > 112 * 1024 ? 0 : 2;  // on an SM: what shared memory has room for; 0 = 1
};

// threadIdx.x, read anew at each use where the products leave no register for it.
template <int kDim, KvType kKv>
__device__ __forceinline__ uint32_t decode_thread() {
  if constexpr (kDim == 256 && is_e4m3(kKv)) {
    return ptx::read_thread();
  } else {
    return threadIdx.x;
  }
}

// Tile `tile` of the walk's row, from cache block `block`, into a stage: keys, then values. Rows past the context
// become zeros, since what is there may be no number. With kRotates row `left_out` is left alone; -1 = none.
template <int kDim, KvType kKv, bool kRotates>
__device__ __forceinline__ void load_decode_tile(const DecodeParams& p, const DecodeWalk& walk, int tile, int block,
                                                 uint32_t stage, int left_out) {
  using Tile = KvTile<kDim, kKv>;
  constexpr int kRowsAtOnce = 32 / Tile::kChunks;
  const int lane = decode_thread<kDim, kKv>() % 32;
  const int chunk = lane % Tile::kChunks, row0 = lane / Tile::kChunks;
  if (chunk * Tile::kChunkColumns >= p.a.head_dim) return;
  const int key = (walk.first_tile + tile) * kDecodeTile;
  const int in_block = key & ((1 << p.a.block_shift) - 1);
  const int row_bytes = p.a.head_dim * (is_e4m3(kKv) ? 1 : 2);
  const int64_t start =
      (((int64_t{block} * p.a.block_heads + walk.head) << p.a.block_shift) + in_block + row0) * row_bytes + chunk * 16;
  const uint8_t* k = p.a.keys + start;
  const uint8_t* v = p.a.values + start;
  const int rows = walk.context - key;
  // Nearly always, and with few instructions.
  if (kDim <= 128 && rows >= kDecodeTile && (!kRotates || left_out < 0) && p.a.head_dim == kDim) {
    const uint32_t first = stage + Tile::byte(row0, chunk);
#pragma unroll
    for (int i = 0; i < kDecodeTile / kRowsAtOnce; ++i) {
      const int row = i * kRowsAtOnce;
      // row0 has none of the bits of `row`; a stage begins at a multiple of 128.
      const uint32_t to = (first ^ Tile::swizzle(row) * 16) + row * Tile::kRowBytes;
      ptx::copy_async_16_once(to, k + row * Tile::kRowBytes);
      ptx::copy_async_16_once(to + kDecodeTile * Tile::kRowBytes, v + row * Tile::kRowBytes);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kDecodeTile / kRowsAtOnce; ++i) {
    const int row = row0 + i * kRowsAtOnce;
    const uint32_t to = stage + Tile::byte(row, chunk);
    if (kRotates && row == left_out) continue;
    ptx::copy_async_16_once(to, k + i * kRowsAtOnce * row_bytes, row < rows);
    ptx::copy_async_16_once(to + kDecodeTile * Tile::kRowBytes, v + i * kRowsAtOnce * row_bytes, row < rows);
  }
}

// One warp's running softmax over a piece. Keys are the rows of the mma and the group's heads its columns, eight for
// each of kHalves. A lane has columns 2t and 2t + 1, called its columns j = 0 and 1, of rows g and g + 8.
//
// Weights are exp2(score - base). The base need not be the largest score: it follows when a score exceeds it by more
// than kSlack (FlashAttention-4's conditional rescaling), so that nearly no tile has to look for its largest.
template <int kDim, int kHalves, KvType kKv>
struct DecodeState {
  using Tile = KvTile<kDim, kKv>;
  static constexpr float kSlack = 8.0f;  // weights of up to 256 in FP16
  uint32_t q[kDim / 16][2 * kHalves];
  float o[kHalves][kDim / 16][4];  // of head column j + 8h: [h][i][j] and [h][i][j + 2], in Tile::value_column(i, .)
  float base[kHalves][2];
  float sum[kHalves][2];  // of this lane's keys

  static __device__ __forceinline__ int head(int h, int j) {
    return h * 8 + static_cast<int>(decode_thread<kDim, kKv>()) % 4 * 2 + j;
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r) o[h][i][r] = 0.0f;
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        base[h][j] = -INFINITY;
        sum[h][j] = 0.0f;
      }
    }
  }
  // The group's heads as an mma operand: q[.][h] and q[.][kHalves + h] of column g + 8h.
  __device__ __forceinline__ void load_q(const DecodeParams& p, int query, int head) {
    const uint16_t* token = p.a.q + query * p.a.q_stride;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int row = threadIdx.x % 32 / 4 + h * 8;
      const uint16_t* from = token + (head * p.a.group + row) * p.a.head_dim;
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        const bool there = row < p.a.group && i * 16 < p.a.head_dim;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          q[i][half * kHalves + h] = there ? *reinterpret_cast<const uint32_t*>(from + Tile::query_column(i, half)) : 0;
        }
      }
    }
  }
  // The tile whose keys and values are at `keys` of shared memory, of which keys in [low, high) count.
  __device__ __forceinline__ void add_tile(const DecodeParams& p, uint32_t keys, int low, int high) {
    constexpr int kChains = kHalves == 1 ? 2 : 1;  // of products that wait for each other
    float s[kChains][kHalves][4] = {};
#pragma unroll
    for (int i = 0; i < kDim / 16; i += Tile::kSteps) {
      uint32_t a[Tile::kSteps][4];
      Tile::keys_as_rows(keys, i, a);
#pragma unroll
      for (int step = 0; step < Tile::kSteps; ++step) {
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
          multiply<kKv>(s[(i + step) % kChains][h], a[step], q[i + step][h], q[i + step][kHalves + h]);
      }
    }
    const bool masked = low > 0 || high < kDecodeTile;
    bool exceeds = false;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float& v = s[0][h][r];
        if constexpr (kChains == 2) v += s[1][h][r];
        v = score(p.a, v);
        if (masked) {
          const int key = static_cast<int>(threadIdx.x) % 32 / 4 + r / 2 * 8;
          if (key < low || key >= high) v = -INFINITY;
        }
        exceeds |= v > base[h][r % 2] + kSlack;
      }
    }
    if (__any_sync(0xffffffffu, exceeds)) raise_bases(s[0]);
    uint32_t weights[2 * kHalves];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const float from[2] = {finite_base(base[h][0]), finite_base(base[h][1])};
      float e[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) e[r] = exp2_fast(s[0][h][r] - from[r % 2]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        sum[h][j] += e[j] + e[j + 2];
        weights[j * kHalves + h] = ptx::transpose_matrix(pack_pair<kKv>(e[2 * j], e[2 * j + 1]));
      }
    }
    const uint32_t values = keys + kDecodeTile * Tile::kRowBytes;
#pragma unroll
    for (int i = 0; i < kDim / 16; i += Tile::kSteps) {
      uint32_t a[Tile::kSteps][4];
      Tile::values_as_columns(values, i, a);
#pragma unroll
      for (int step = 0; step < Tile::kSteps; ++step) {
#pragma unroll
        for (int h = 0; h < kHalves; ++h) multiply<kKv>(o[h][i + step], a[step], weights[h], weights[kHalves + h]);
      }
    }
  }
  // The largest score so far becomes the base of each head.
  __device__ __forceinline__ void raise_bases(const float (&s)[kHalves][4]) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float top = fmaxf(base[h][j], column_max(fmaxf(s[h][j], s[h][j + 2])));
        const float scale = exp2_fast(base[h][j] - finite_base(top));
        base[h][j] = top;
        sum[h][j] *= scale;
#pragma unroll
        for (int i = 0; i < kDim / 16; ++i) {
          o[h][i][j] *= scale;
          o[h][i][j + 2] *= scale;
        }
      }
    }
  }
  // Head column j + 8h of the sums, as [kDim].
  __device__ __forceinline__ void store_sums(float* row, int h, int j) const {
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      float* const first = row + Tile::value_column(i, 0);
      if constexpr (is_e4m3(kKv)) {
        *reinterpret_cast<float2*>(first) = make_float2(o[h][i][j], o[h][i][j + 2]);
      } else {
        *first = o[h][i][j];
        row[Tile::value_column(i, 1)] = o[h][i][j + 2];
      }
    }
  }
};

// One warp's copies into its ring. Their walk runs kStages tiles ahead of the sums'; what it needs of the block table
// is read one tile before that. The warp takes every kStep-th tile of a piece, from `first`.
template <int kDim, KvType kKv, int kStages, int kStep, bool kBundles, bool kRotates>
struct DecodeLoader {
  static constexpr int kStageBytes = 2 * kDecodeTile * KvTile<kDim, kKv>::kRowBytes;
  DecodeWalk walk;
  uint32_t ring;
  int first, tile, block;
  bool waited;   // for the kernel before
  bool rotates;  // that kernel left this step's keys as they are
  bool fetched;  // `token` is of the walk's row
  NewToken<kDim, kKv> token;
  // A new token whose tile was asked for before the token was there; context 0 = none.
  NewRow early = {};
  uint32_t early_stage;
  NewToken<kDim, kKv> early_token;

  // The cache block of tile start.begin + first_tile, where it is known; else -1.
  __device__ __forceinline__ DecodeLoader(const DecodeParams& p, const DecodeWalk& start, int first_tile,
                                          int first_block, uint32_t ring_address)
      : walk(start), ring(ring_address), first(first_tile), tile(start.begin + first_tile), fetched(false) {
    waited = !p.a.early_cache_reads;
    rotates = kRotates && p.rotation.cos_sin != nullptr;
    if (rotates) prefetch_rotation<kDim>(p, walk.context);
    const bool known = first_block >= 0 && tile < walk.end;
    settle(p);
    block = known ? first_block : look_up(p);
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) load_next(p, stage);
    wait(p);
    if constexpr (kRotates) {
      if (early.context > 0) early_token.fetch(p, early.token, early.head);
    }
  }
  // Once all that the kernel before has left is asked for.
  __device__ __forceinline__ void finish_early(const DecodeParams& p) {
    if constexpr (kRotates) {
      if (early.context > 0) early_token.append(p, early, early_stage);
    }
  }
  __device__ __forceinline__ void load_next(const DecodeParams& p, int stage) {
    if (!walk.done) {
      // The last tile has the key that the kernel before appended, or computed.
      const bool is_last = tile == walk.tiles - 1;
      const bool appends = is_last && rotates && walk.context > 0;
      const bool is_early = appends && !waited && early.context == 0;
      if (is_last && !is_early) wait(p);
      const uint32_t to = ring + stage * kStageBytes;
      load_decode_tile<kDim, kKv, kRotates>(p, walk, tile, block, to, appends ? (walk.context - 1) % kDecodeTile : -1);
      if constexpr (kRotates) {
        const NewRow row = {walk.token, walk.head, walk.context, block};
        if (is_early) {
          early = row;
          early_stage = to;
        } else if (appends) {
          token.append(p, row, to);
        }
      }
      tile += kStep;
      settle(p);
      block = look_up(p);
    }
    ptx::copy_async_commit();
  }

 private:
  __device__ __forceinline__ void wait(const DecodeParams& p) {
    if (!waited) ptx::dependency_wait();
    waited = true;
    fetch(p);
  }
  __device__ __forceinline__ void fetch(const DecodeParams& p) {
    if (!rotates || fetched || !waited || walk.done) return;
    if constexpr (kRotates) token.fetch(p, walk.token, walk.head);
    fetched = true;
  }
  __device__ __forceinline__ void settle(const DecodeParams& p) {
    bool moved = false;
    while (!walk.done && tile >= walk.end) {
      walk.next<kBundles>(p);
      tile = walk.begin + first;
      moved = true;
    }
    if (!moved || !rotates || walk.done) return;
    prefetch_rotation<kDim>(p, walk.context);
    fetched = false;
    fetch(p);
  }
  __device__ __forceinline__ int look_up(const DecodeParams& p) const {
    return walk.done ? 0 : walk.cache_block(p, tile);
  }
};

// Tile `tile` of a warp's piece, which is the oldest of its ring, and in its place the next one that the loader comes
// to.
template <int kStages, typename State, typename Loader>
__device__ __forceinline__ void add_next(const DecodeParams& p, const DecodeWalk& walk, int tile, uint32_t ring,
                                         State& state, Loader& loader, int& stage) {
  ptx::copy_async_wait_group<kStages - 1>();
  __syncwarp();
  const int key = (walk.first_tile + tile) * kDecodeTile;
  // Exact where the window hides nothing of the tile: context - window is negative or before it.
  state.add_tile(p, ring + stage * Loader::kStageBytes, walk.context - p.a.window - key, walk.context - key);
  __syncwarp();
  loader.load_next(p, stage);
  stage = stage + 1 == kStages ? 0 : stage + 1;
}

// Where copies of fewer than kDim columns never write, the ring has zeros.
template <int kDim, int kWarpBytes>
__device__ __forceinline__ void clear_unwritten(const DecodeParams& p, uint32_t ring) {
  if (p.a.head_dim == kDim) return;
  for (int i = threadIdx.x % 32; i < kWarpBytes / 16; i += 32) {
    ptx::store_shared_16(ring + i * 16, make_uint4(0, 0, 0, 0));
  }
  __syncwarp();
}

// The end of a row's piece in deterministic mode: pieces go to slots, and the last block to arrive merges them.
template <int kDim, int kRows, KvType kKv>
__device__ __forceinline__ void merge_in_order(const DecodeParams& p, const DecodeWalk& walk, float* sums, float2* tops,
                                               float2* block_tops, bool& is_last) {
  using Layout = DecodeLayout<kDim, kRows, kKv>;
  const int row = walk.sequence * p.a.kv_heads + walk.head;
  const int pieces = DecodeWalk::row_work(p, walk.tiles);
  const auto slot_of = [&](int piece) {
    return p.partials + (int64_t{row} * kMaxDecodeChunks + piece) * Layout::kSlotFloats;
  };
  merge_warps<kDim, kRows, kKv>(p, walk, sums, tops, block_tops, slot_of(walk.begin / DecodeWalk::chunk(walk.tiles)),
                                pieces > 1 ? MergeTo::kSlot : MergeTo::kOutput);
  if (pieces == 1) return;
  __syncthreads();
  if (threadIdx.x == 0) {  // the fences count for the whole block, whose threads the barriers order
    __threadfence();
    is_last = atomicAdd(p.arrivals + row, 1u) + 1 == static_cast<uint32_t>(pieces);
    if (is_last) p.arrivals[row] = 0;
    __threadfence();
  }
  __syncthreads();
  if (is_last) merge_pieces<kDim, kRows, kKv>(p, walk, pieces, slot_of);
}

// The same where the blocks of a row are neighbours: the first of them adds up what the others exchange.
template <int kDim, int kRows, KvType kKv>
__device__ __forceinline__ void merge_neighbours(const DecodeParams& p, const DecodeWalk& walk, int span, float* sums,
                                                 float2* tops, float2* block_tops) {
  using Layout = DecodeLayout<kDim, kRows, kKv>;
  const auto exchange_of = [&](int unit) { return p.exchange + int64_t{unit} * Layout::kSlotFloats; };
  const int unit = static_cast<int>(blockIdx.x), last = (walk.row_start + walk.tiles - 1) / span;
  const MergeTo to = walk.begin > 0 ? MergeTo::kExchange : last > unit ? MergeTo::kShared : MergeTo::kOutput;
  merge_warps<kDim, kRows, kKv>(p, walk, sums, tops, block_tops, exchange_of(unit), to);
  if (to != MergeTo::kShared) return;
  __syncthreads();
  merge_exchange<kDim, kRows, kKv>(p, walk, last - unit, exchange_of(unit + 1), sums, block_tops);
}

// A warp's sums and, by row, the base of its weights and their total, for the block's merge.
template <int kDim, int kHalves, KvType kKv>
__device__ __forceinline__ void share_sums(const DecodeState<kDim, kHalves, kKv>& state, int warp, int lane,
                                           float* sums, float2* tops) {
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = warp * kHalves * 8 + state.head(h, j);
      const float sum = column_sum(state.sum[h][j]);
      if (lane < 4) tops[row] = make_float2(state.base[h][j], sum);
      state.store_sums(sums + row * kSumStride<kDim>, h, j);
    }
  }
}

template <int kDim, int kRows, KvType kKv>
__global__ __launch_bounds__(kDecodeWarps * 32, DecodeLayout<kDim, kRows, kKv>::kBlocks) void decode_attention(
    const __grid_constant__ DecodeParams p) {
  using Layout = DecodeLayout<kDim, kRows, kKv>;
  constexpr int kHalves = kRows / 8;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ bool is_last;
  auto* sums = reinterpret_cast<float*>(shared + Layout::kRingBytes);
  auto* tops = reinterpret_cast<float2*>(sums + kDecodeWarps * kRows * kSumStride<kDim>);
  auto* block_tops = tops + kDecodeWarps * kRows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t ring = ptx::shared_address(shared) + warp * Layout::kWarpBytes;

  ptx::launch_dependents();
  if (!p.a.early_cache_reads) ptx::dependency_wait();
  int span = 0, busy = 0, cluster_blocks = 0, first_block = -1;
  DecodeWalk walk = p.cluster > 0
                        ? share_row(p, static_cast<int>(ptx::cluster_rank()), cluster_blocks)
                        : planned_walk<kDim, false>(p, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), warp,
                                                    span, busy, first_block);
  // A block without work leaves at once, unless its cluster adds up something: there is one with work, which waits for
  // the kernel before, and the next kernel finds the room. (A cluster's barriers wait for nobody who has left.)
  if (p.cluster > 0 ? cluster_blocks <= kFewDecodeBlocks && walk.begin == walk.end
                    : static_cast<int>(blockIdx.x) >= busy)
    return;
  clear_unwritten<kDim, Layout::kWarpBytes>(p, ring);
  DecodeLoader<kDim, kKv, Layout::kStages, kDecodeWarps, false, kCanRotate<kDim, kKv>> loader(p, walk, warp,
                                                                                              first_block, ring);

  DecodeState<kDim, kHalves, kKv> state;
  state.load_q(p, walk.token, walk.head);
  loader.finish_early(p);
  bool rotates = p.rotation.cos_sin != nullptr;  // the queries, which have just been loaded
  int stage = 0;
  DecodeWalk following;
#pragma unroll 1
  for (; !walk.done; walk = following) {
    if constexpr (kCanRotate<kDim, kKv>) {
      if (rotates) rotate_queries<kDim, kHalves, kKv>(p, walk.context, state.q);
    }
    state.clear();
#pragma unroll 1
    for (int tile = walk.begin + warp; tile < walk.end; tile += kDecodeWarps)
      add_next<Layout::kStages>(p, walk, tile, ring, state, loader, stage);

    following = walk;
    following.next<false>(p);
    // On their way during the merge.
    const bool is_new = !following.done && (following.sequence != walk.sequence || following.head != walk.head);
    if (is_new) state.load_q(p, following.token, following.head);
    rotates = kCanRotate<kDim, kKv> && is_new && p.rotation.cos_sin != nullptr;
    __syncthreads();  // the merge before has been read
    share_sums<kDim, kHalves, kKv>(state, warp, lane, sums, tops);
    __syncthreads();

    if (p.cluster > 0) {
      const bool alone = cluster_blocks == 1;
      merge_warps<kDim, kRows, kKv>(p, walk, sums, tops, block_tops, nullptr,
                                    alone ? MergeTo::kOutput : MergeTo::kShared);
      if (alone) return;
      ptx::cluster_sync();
      merge_cluster<kDim, kRows, kKv>(p, walk, cluster_blocks, sums, block_tops);
      ptx::cluster_sync();  // until the others have read this block's
      return;
    }
    if (p.deterministic) {
      merge_in_order<kDim, kRows, kKv>(p, walk, sums, tops, block_tops, is_last);
    } else {
      merge_neighbours<kDim, kRows, kKv>(p, walk, span, sums, tops, block_tops);
    }
  }
  clear_keyless(p, static_cast<int>(blockIdx.x), busy, static_cast<int>(threadIdx.x), kDecodeWarps * 32);
}

template <int kDim, int kRows, KvType kKv>
AttentionKernel describe_decode() {
  using Layout = DecodeLayout<kDim, kRows, kKv>;
  return {reinterpret_cast<const void*>(&decode_attention<kDim, kRows, kKv>), kDecodeWarps * 32,
          static_cast<size_t>(Layout::kRingBytes + Layout::kMergeBytes)};
}

}  // namespace nfp::cuda
