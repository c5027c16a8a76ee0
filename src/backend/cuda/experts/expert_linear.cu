#include "backend/cuda/experts/experts_kernels.h"
#include "backend/cuda/fused/arithmetic.cuh"
#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/ptx/pairs.cuh"

namespace nfp::cuda {
namespace {

constexpr int kStages = 4;              // of tokens in shared memory
constexpr int kStageRow = kBlockK + 8;  // halves: rows of 144 bytes, whose fragments are in different banks
constexpr int kMostTokens = 64;         // at once

enum class Form { kDense, kBoth, kUppers };

// A lane's bytes of 16 rows by 64 k (rows g and g + 8 of the warp's, chunk c: layout.h).
struct RawWeights {
  uint4 upper[2], lower[2];
};

struct Planes {
  const uint8_t* upper;  // where this lane's bytes of the first block lie
  const uint8_t* lower;
  uint32_t bias;    // of a pair of rebuilt numbers
  uint32_t borrow;  // mask of the lowers' highest bits
};

template <bool kLowers>
__device__ __forceinline__ RawWeights load_weights(const Planes& planes, int block) {
  const int64_t at = int64_t{block} * kBlockBytes;
  RawWeights raw;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    raw.upper[row] = __ldg(reinterpret_cast<const uint4*>(planes.upper + at + row * 8 * kBlockK));
    if constexpr (kLowers)
      raw.lower[row] = __ldg(reinterpret_cast<const uint4*>(planes.lower + at + row * 8 * kBlockK));
  }
  return raw;
}

// Four weights of one row as two pairs of FP16 (docs/format.md). Without lower bytes the code's value: E4M3's bits,
// seven places up, are FP16's of a 256th, which is the weight.
template <bool kLowers>
__device__ __forceinline__ void rebuild(const Planes& planes, uint32_t upper, uint32_t lower, uint32_t& first,
                                        uint32_t& second) {
  if constexpr (!kLowers) lower = (upper & 0x01010101u) << 7;
  const uint32_t t = kLowers ? upper - ((lower >> 7) & planes.borrow) : upper;
  const uint32_t high = ((t >> 1) & 0x3f3f3f3fu) | (t & 0x80808080u);
  first = __byte_perm(lower, high, 0x5140);
  second = __byte_perm(lower, high, 0x7362);
  if constexpr (kLowers) {
    first -= planes.bias;
    second -= planes.bias;
  }
}

struct Shared {
  uint16_t x[kStages][kMostTokens][kStageRow];
  int32_t row[kMostTokens];  // of x, for each token of the chunk
};

// A lane's part of the products: rows `row` and row + 8 of the matrix, and columns pair and pair + 1 of each eight.
struct Lane {
  int row;
  int group;  // row within eight
  int pair;
};
__device__ __forceinline__ Lane this_lane() {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  return {static_cast<int>(blockIdx.x) * kExpertRows + thread / 32 * 16 + lane / 4, lane / 4, lane % 4 * 2};
}

// Starts the copies of 64 k of the tokens; zeros behind the last k and the last token.
template <int kTokens>
__device__ __forceinline__ void fetch_tokens(const ExpertParams& p, Shared& shared, int count, int block) {
  for (int i = static_cast<int>(threadIdx.x); i < kTokens * 8; i += kExpertThreads) {
    const int t = i / 8, k = block * kBlockK + i % 8 * 8;
    const bool wanted = t < count && k < p.k;
    const uint16_t* from = p.x + int64_t{shared.row[t]} * p.k + (wanted ? k : 0);
    ptx::copy_async_16(ptx::shared_address(&shared.x[block % kStages][t][i % 8 * 8]), from, wanted);
  }
}

// The operand of four products of 16 k, from a matrix that is not nested.
__device__ __forceinline__ void load_dense(const ExpertParams& p, const ExpertMatrix& matrix, const Lane& lane,
                                           int block, uint32_t (&a)[4][4]) {
  const auto* numbers = reinterpret_cast<const uint16_t*>(matrix.upper);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // rows `row`, row + 8, and again 8 k further
      const int row = lane.row + j % 2 * 8, k = block * kBlockK + step * 16 + j / 2 * 8 + lane.pair;
      a[step][j] = row < p.n && k < p.k ? *reinterpret_cast<const uint32_t*>(numbers + int64_t{row} * p.k + k) : 0;
    }
  }
}
// The same from bytes.
template <bool kLowers, bool kBf16>
__device__ __forceinline__ void rebuild_operand(const Planes& planes, const RawWeights& raw, uint32_t (&a)[4][4]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const uint32_t us[4] = {raw.upper[row].x, raw.upper[row].y, raw.upper[row].z, raw.upper[row].w};
    const uint32_t ls[4] = {raw.lower[row].x, raw.lower[row].y, raw.lower[row].z, raw.lower[row].w};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      rebuild<kLowers>(planes, us[step], ls[step], a[step][row], a[step][2 + row]);
      if constexpr (kBf16) {
        a[step][row] = to_bf16_pair(a[step][row]);
        a[step][2 + row] = to_bf16_pair(a[step][2 + row]);
      }
    }
  }
}

template <bool kBf16>
__device__ __forceinline__ uint16_t rounded(float v) {
  return kBf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(v)) : __half_as_ushort(__float2half_rn(v));
}

template <ExpertEpilogue kEpilogue, bool kBf16, int kTiles>
__device__ __forceinline__ void store_products(const ExpertParams& p, const ExpertMatrix& matrix, const Lane& lane,
                                               const float (&acc)[kTiles][4], int first, int count) {
  const int row = lane.row;
  const bool here[2] = {row < p.n, row + 8 < p.n};
  const float scale[2] = {here[0] && matrix.row_scale != nullptr ? matrix.row_scale[row] : 1.0f,
                          here[1] && matrix.row_scale != nullptr ? matrix.row_scale[row + 8] : 1.0f};
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int t = tile * 8 + lane.pair + j;
      if (t >= count) continue;
      uint16_t* y = p.y + int64_t{first + t} * p.columns;
      const float low = acc[tile][j] * scale[0], high = acc[tile][2 + j] * scale[1];
      if constexpr (kEpilogue == ExpertEpilogue::kStore) {
        if (here[0]) y[row] = rounded<kBf16>(low);
        if (here[1]) y[row + 8] = rounded<kBf16>(high);
      } else if (here[1]) {  // the first eight rows of 16 are gate's, the others up's
        y[row / 16 * 8 + lane.group] = rounded<kBf16>(gate_of<kEpilogue == ExpertEpilogue::kGeglu>(low) * high);
      }
    }
  }
}

// Assignments first .. first + count - 1 (at most 8 kTiles) by the block's 64 rows. kAhead blocks of weights are on
// their way while one is multiplied.
template <ExpertEpilogue kEpilogue, bool kBf16, Form kForm, int kTiles, int kAhead>
__device__ __forceinline__ void multiply(const ExpertParams& p, const ExpertMatrix& matrix, const Planes& planes,
                                         Shared& shared, int first, int count) {
  constexpr int kTokens = kTiles * 8;
  constexpr bool kDense = kForm == Form::kDense, kLowers = kForm == Form::kBoth;
  const Lane lane = this_lane();
  for (int t = static_cast<int>(threadIdx.x); t < kTokens; t += kExpertThreads) {
    const int assignment = first + min(t, count - 1);
    shared.row[t] = p.row != nullptr ? p.row[assignment] : assignment;
  }
  __syncthreads();
  RawWeights raw[kAhead];
  if constexpr (!kDense) {
#pragma unroll
    for (int s = 0; s < kAhead; ++s) raw[s] = load_weights<kLowers>(planes, min(s, p.blocks_k - 1));
  }
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < p.blocks_k) fetch_tokens<kTokens>(p, shared, count, s);
    ptx::copy_async_commit();
  }
  float acc[kTiles][4] = {};
  for (int base = 0; base < p.blocks_k; base += kAhead) {
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      const int block = base + s;
      if (block >= p.blocks_k) break;
      uint32_t a[4][4];
      if constexpr (kDense) {
        load_dense(p, matrix, lane, block, a);
      } else {
        rebuild_operand<kLowers, kBf16>(planes, raw[s], a);
        raw[s] = load_weights<kLowers>(planes, min(block + kAhead, p.blocks_k - 1));
      }
      ptx::copy_async_wait_group<kStages - 2>();
      __syncthreads();  // this block's tokens are there, and everyone is done with those of the one before
      if (block + kStages - 1 < p.blocks_k) fetch_tokens<kTokens>(p, shared, count, block + kStages - 1);
      ptx::copy_async_commit();
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint16_t* token = shared.x[block % kStages][tile * 8 + lane.group];
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          const auto pair = [&](int k) { return *reinterpret_cast<const uint32_t*>(token + step * 16 + k); };
          if constexpr (kBf16) {
            ptx::mma_bf16(acc[tile], a[step], pair(lane.pair), pair(lane.pair + 8));
          } else {
            ptx::mma_f16(acc[tile], a[step], pair(lane.pair), pair(lane.pair + 8));
          }
        }
      }
    }
  }
  ptx::copy_async_wait_group<0>();
  store_products<kEpilogue, kBf16, kTiles>(p, matrix, lane, acc, first, count);
  __syncthreads();  // shared memory is free
}

// Assignments begin .. end - 1. The more tokens, the more registers their sums take, and the fewer blocks of weights
// can be on their way: kMostAhead for few.
template <ExpertEpilogue kEpilogue, bool kBf16, Form kForm, int kMostAhead>
__device__ __forceinline__ void multiply_all(const ExpertParams& p, const ExpertMatrix& matrix, const Planes& planes,
                                             Shared& shared, int begin, int end) {
  if (end - begin <= 8) {
    multiply<kEpilogue, kBf16, kForm, 1, kMostAhead>(p, matrix, planes, shared, begin, end - begin);
  } else if (end - begin <= 32) {
    multiply<kEpilogue, kBf16, kForm, 4, kMostAhead / 2>(p, matrix, planes, shared, begin, end - begin);
  } else {
    for (int first = begin; first < end; first += kMostTokens) {
      multiply<kEpilogue, kBf16, kForm, 8, kMostAhead / 4>(p, matrix, planes, shared, first,
                                                           min(end - first, kMostTokens));
    }
  }
}

// The block's expert: blockIdx.y counts those that have assignments, where fewer can have some than there are. -1:
// none.
__device__ __forceinline__ int this_expert(const ExpertParams& p) {
  if (static_cast<int>(gridDim.y) == p.experts) return static_cast<int>(blockIdx.y);
  constexpr int kWarps = kExpertThreads / 32, kRounds = kMaxExperts / kExpertThreads;
  __shared__ int counts[kRounds * kWarps];
  __shared__ int found;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t votes[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int expert = round * kExpertThreads + static_cast<int>(threadIdx.x);
    votes[round] = __ballot_sync(0xffffffffu, expert < p.experts && p.start[expert] < p.start[expert + 1]);
    if (lane == 0) counts[round * kWarps + warp] = __popc(votes[round]);
  }
  if (threadIdx.x == 0) found = -1;
  __syncthreads();
  int before = 0;
#pragma unroll
  for (int i = 0; i < kRounds * kWarps; ++i) {
    const int count = counts[i], rank = static_cast<int>(blockIdx.y) - before;
    before += count;
    if (i % kWarps != warp || rank < 0 || rank >= count) continue;
    const uint32_t mine = votes[i / kWarps];
    if ((mine >> lane & 1) != 0 && __popc(mine & ((1u << lane) - 1)) == rank) {
      found = i / kWarps * kExpertThreads + static_cast<int>(threadIdx.x);
    }
  }
  __syncthreads();
  return found;
}

template <int kMost, ExpertEpilogue kEpilogue, bool kBf16>
__global__ __launch_bounds__(kExpertThreads,
                             3) void expert_linear_kernel(const __grid_constant__ ExpertLinearParams<kMost> params) {
  __shared__ __align__(16) Shared shared;
  ptx::dependency_wait();
  ptx::launch_dependents();  // only now: see ExpertLinearCall::follows
  const ExpertParams& p = params.shape;
  const int expert = this_expert(p);
  if (expert < 0) return;
  const int begin = p.start[expert], end = p.start[expert + 1];
  if (begin == end) return;
  const ExpertMatrix& matrix = params.matrices[expert];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;  // row + 8 has the same swizzle
  const int64_t at = blockIdx.x * p.slab_bytes + row * kBlockK + ((lane % 4) ^ ((row / 2) % 4)) * 16;
  const Planes planes{matrix.upper + at, matrix.lower + at, matrix.biased ? 0x00400040u : 0u,
                      matrix.biased ? 0u : 0x01010101u};
  if (matrix.dense) {
    for (int first = begin; first < end; first += 32) {
      multiply<kEpilogue, kBf16, Form::kDense, 4, 1>(p, matrix, planes, shared, first, min(end - first, 32));
    }
  } else if (matrix.lower != nullptr) {
    multiply_all<kEpilogue, kBf16, Form::kBoth, 4>(p, matrix, planes, shared, begin, end);
  } else {
    multiply_all<kEpilogue, kBf16, Form::kUppers, 8>(p, matrix, planes, shared, begin, end);
  }
}

template <int kMost, bool kBf16>
const void* function_for(ExpertEpilogue epilogue) {
  switch (epilogue) {
    case ExpertEpilogue::kSwiglu:
      return reinterpret_cast<const void*>(&expert_linear_kernel<kMost, ExpertEpilogue::kSwiglu, kBf16>);
    case ExpertEpilogue::kGeglu:
      return reinterpret_cast<const void*>(&expert_linear_kernel<kMost, ExpertEpilogue::kGeglu, kBf16>);
    default:
      return reinterpret_cast<const void*>(&expert_linear_kernel<kMost, ExpertEpilogue::kStore, kBf16>);
  }
}

}  // namespace

const void* expert_linear_function(bool few_experts, bool bf16, ExpertEpilogue epilogue) {
  if (bf16) return function_for<kMaxExperts, true>(epilogue);
  return few_experts ? function_for<kFewExperts, false>(epilogue) : function_for<kMaxExperts, false>(epilogue);
}

}  // namespace nfp::cuda
