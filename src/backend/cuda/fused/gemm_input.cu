#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "backend/cuda/experts/row_sum.cuh"
#include "backend/cuda/fused/all_reduce.cuh"
#include "backend/cuda/fused/arithmetic.cuh"
#include "backend/cuda/fused/gemm_input_kernel.h"
#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/store_async.cuh"

namespace nfp::cuda {
namespace {

template <bool kBf16>
__device__ __forceinline__ float widen(uint16_t bits) {
  if constexpr (kBf16) return __bfloat162float(__ushort_as_bfloat16(bits));
  return __half2float(__ushort_as_half(bits));
}
template <bool kBf16>
__device__ __forceinline__ uint16_t narrow(float v) {
  if constexpr (kBf16) return __bfloat16_as_ushort(__float2bfloat16_rn(v));
  return __half_as_ushort(__float2half_rn(v));
}

// Eight neighbours as they lie; zeros from `count` on. kAligned: `row` is 16-byte aligned and `count` a multiple of 8.
template <bool kAligned>
__device__ __forceinline__ uint4 load8(const uint16_t* row, int64_t first, int64_t count) {
  if constexpr (kAligned) {
    return first < count ? *reinterpret_cast<const uint4*>(row + first) : make_uint4(0, 0, 0, 0);
  }
  uint64_t low = 0, high = 0;
#pragma unroll 1
  for (int i = 7; i >= 0; --i) {
    high = high << 16 | low >> 48;
    low = low << 16 | (first + i < count ? row[first + i] : 0);
  }
  return make_uint4(static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
                    static_cast<uint32_t>(high >> 32));
}
// Four weights of a norm, zeros from `count` on.
template <bool kAligned>
__device__ __forceinline__ void load4_f32(const float* row, int64_t first, int64_t count, float* v) {
  if constexpr (kAligned) {
    const float4 four = first < count ? *reinterpret_cast<const float4*>(row + first) : make_float4(0, 0, 0, 0);
    v[0] = four.x;
    v[1] = four.y;
    v[2] = four.z;
    v[3] = four.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = first + i < count ? row[first + i] : 0.0f;
  }
}
template <bool kBf16>
__device__ __forceinline__ void widen8(const uint4& raw, float (&v)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = widen<kBf16>(static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16)));
}
template <bool kBf16>
__device__ __forceinline__ uint4 narrow8(const float (&v)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = narrow<kBf16>(v[2 * i]) | static_cast<uint32_t>(narrow<kBf16>(v[2 * i + 1])) << 16;
  return make_uint4(words[0], words[1], words[2], words[3]);
}
template <bool kAligned>
__device__ __forceinline__ void store8(uint16_t* row, int64_t first, int64_t count, const uint4& v) {
  if constexpr (kAligned) {
    // (Of a plain assignment the compiler makes four stores.)
    if (first < count) __stwb(reinterpret_cast<uint4*>(row + first), v);
  } else {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (first + i < count) row[first + i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
    }
  }
}

struct Totals {
  float sum;
  float largest;  // not negative
};
// What the blocks of a cluster that share a row give each other: a place and a barrier for each round of the kernel, so
// that nobody writes over what another has not read.
struct RowParts {
  float2 totals[2][kMaxRowBlocks];
  uint64_t arrived[2];

  __device__ __forceinline__ void init(int blocks) {
    if (threadIdx.x == 0) {
#pragma unroll
      for (uint64_t& bar : arrived) {
        ptx::mbarrier_init(ptx::shared_address(&bar), 1);
        ptx::mbarrier_expect(ptx::shared_address(&bar), blocks * sizeof(float2));
      }
      ptx::mbarrier_init_fence();
    }
    __syncwarp();
    ptx::cluster_arrive_relaxed();
  }
  // After a cluster_wait() for the others' init().
  __device__ __forceinline__ Totals add(const Totals& mine, int blocks, uint32_t rank, int round) {
    const uint32_t bar = ptx::shared_address(&arrived[round]);
    if (static_cast<int>(threadIdx.x) < blocks) {
      const uint32_t place = ptx::shared_address(&totals[round][rank]);
      ptx::store_async_8(ptx::map_to_rank(place, threadIdx.x), ptx::map_to_rank(bar, threadIdx.x),
                         uint64_t{__float_as_uint(mine.largest)} << 32 | __float_as_uint(mine.sum));
    }
    ptx::mbarrier_wait(bar, 0);
    Totals all{0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kMaxRowBlocks; ++i) {
      if (i < blocks) {
        all.sum += totals[round][i].x;
        all.largest = fmaxf(all.largest, totals[round][i].y);
      }
    }
    return all;
  }
};

// Of the block's part of a row, in a fixed order; every thread gets them. A thread's kSets sums are added as those of
// kSets threads would be, blockDim apart.
template <int kSets>
__device__ __forceinline__ Totals reduce(const Totals (&of_thread)[kSets], float2* scratch) {
  float sums[kSets], largest = of_thread[0].largest;
#pragma unroll
  for (int i = 0; i < kSets; ++i) {
    sums[i] = of_thread[i].sum;
    largest = fmaxf(largest, of_thread[i].largest);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
    for (float& sum : sums) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  const int warps = blockDim.x / 32;
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < kSets; ++i) scratch[i * warps + threadIdx.x / 32] = make_float2(sums[i], largest);
  }
  __syncthreads();
  const float2 other = threadIdx.x % 32 < kSets * warps ? scratch[threadIdx.x % 32] : make_float2(0.0f, 0.0f);
  Totals v{other.x, other.y};
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    v.sum += __shfl_xor_sync(0xffffffffu, v.sum, offset);
    v.largest = fmaxf(v.largest, __shfl_xor_sync(0xffffffffu, v.largest, offset));
  }
  return v;
}

// Computed here and not further down, where the compiler would.
__device__ __forceinline__ void now(uint32_t& v) { asm volatile("" : "+r"(v)); }

// A thread's part of a row: kVectors groups of eight columns, blockDim apart, in registers from load to store. What a
// row is made of is known at compile time: the GEMM of a decode step waits for every instruction here.
template <GemmInputSource kSource, bool kBf16, bool kWeightF32, bool kAligned, int kVectors>
struct RowPart {
  static constexpr bool kExperts = kSource == GemmInputSource::kExperts;
  static constexpr bool kReduced = kSource == GemmInputSource::kReducedNorm;
  static constexpr bool kNorm = kSource == GemmInputSource::kNorm || kExperts || kReduced;
  using Params =
      std::conditional_t<kExperts, ExpertsNormParams, std::conditional_t<kReduced, ReducedNormParams, GemmInputParams>>;
  static constexpr bool kGelu = kSource == GemmInputSource::kGeglu;
  static constexpr bool kGated = kSource == GemmInputSource::kSwiglu || kGelu;
  // What a row is made of stays in registers as 16-bit numbers, which leave room for more rows on an SM; what SwiGLU
  // makes has none until the end.
  static constexpr bool kPacked = !kGated;
  // Every load before the first store, so that all are in flight together; a norm of more than four groups a thread has
  // too few registers for that and goes group by group.
  static constexpr bool kEarlyLoads = kVectors <= 4 || kSource == GemmInputSource::kPlain;
  // FP32 weights take twice the registers.
  static constexpr bool kEarlyWeight = kNorm && (kWeightF32 ? kVectors <= 2 : kVectors <= 4);
  static constexpr int kWeights = kEarlyWeight ? kVectors : 1;
  static constexpr bool kEarlyPlace = kVectors <= (kReduced ? 1 : 2);

  int64_t token;
  int64_t begin, end;  // the block's columns
  const uint16_t* x;   // the row
  float v[kPacked ? 1 : kVectors][8];
  uint4 raw[kVectors], second[kVectors];
  uint4 weight[kWeights];
  float weight_f32[kWeightF32 ? kWeights : 1][8];
  RowExperts experts;
  RankParts parts;
  uint32_t place[kEarlyPlace ? kVectors : 1][4];

  __device__ __forceinline__ RowPart(const GemmInputParams& p, int64_t row, uint32_t rank)
      : token(row),
        begin(int64_t{rank} * p.block_columns),
        end(min(p.k, begin + p.block_columns)),
        x(static_cast<const uint16_t*>(p.x) + row * p.ldx) {}

  __device__ __forceinline__ int64_t column_of(int i) const {
    return begin + (int64_t{i} * blockDim.x + threadIdx.x) * 8;
  }
  // Where each pair of codes goes: even k and its neighbour stay neighbours. Computed before the wait where registers
  // allow.
  static __device__ __forceinline__ uint32_t place_of(int i, int j) {
    return static_cast<uint32_t>(activation_byte((i * blockDim.x + threadIdx.x) * 8 + j * 2));
  }
  __device__ __forceinline__ void find_places() {
    if constexpr (kEarlyPlace) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          place[i][j] = place_of(i, j);
          now(place[i][j]);
        }
      }
    }
  }

  __device__ __forceinline__ void find_experts(const Params& p) {
    if constexpr (kExperts) experts = experts_of(p.experts, token, static_cast<int>(threadIdx.x) % 32);
  }
  __device__ __forceinline__ void load(const Params& p, int i) {
    const int64_t first = column_of(i);
    raw[i] = second[i] = make_uint4(0, 0, 0, 0);
    if constexpr (kGated) {
      const int64_t width = first < end ? end * 2 : 0;
      raw[i] = load8<kAligned>(x, first * 2, width);
      second[i] = load8<kAligned>(x, first * 2 + 8, width);
    } else {
      if constexpr (!kExperts) raw[i] = load8<kAligned>(x, first, end);
      if (kNorm && p.residual != nullptr)
        second[i] = load8<kAligned>(static_cast<const uint16_t*>(p.residual) + token * p.ldr, first, end);
      if constexpr (kExperts) {
        raw[i] = sum_of_experts(p.experts, experts, token, static_cast<int>(first), first < end);
      }
    }
  }
  // kReducedNorm: this GPU's part of group i goes to the others, and the sum of all takes its place.
  __device__ __forceinline__ uint32_t part_offset(const Params& p, int i) const {
    return static_cast<uint32_t>(token * p.k + column_of(i)) * uint32_t{sizeof(uint16_t)};
  }
  // Whom this GPU exchanges the row with, where the row is another one's.
  __device__ __forceinline__ int peer(const Params& p) const {
    const auto owner = static_cast<int>(static_cast<uint32_t>(token) % static_cast<uint32_t>(p.reduce.ranks));
    return p.reduce.by_owner && owner != p.reduce.rank ? owner : RankParts::kAll;
  }
  __device__ __forceinline__ bool is_owner(const Params& p) const {
    return p.reduce.by_owner && peer(p) == RankParts::kAll;
  }
  __device__ __forceinline__ void send(const Params& p, int i) const {
    if constexpr (kReduced) {
      if (column_of(i) < end && !is_owner(p)) parts.send(p.reduce, peer(p), part_offset(p, i), raw[i]);
    }
  }
  __device__ __forceinline__ void receive(const Params& p, int i) {
    if constexpr (kReduced) {
      if (column_of(i) >= end) return;
      const int only = peer(p);
      float sum[8] = {};
#pragma unroll 1
      for (int from = 0; from < p.reduce.ranks; ++from) {
        if (only != RankParts::kAll && from != only) continue;
        float part[8];
        widen8<kBf16>(from == p.reduce.rank ? raw[i] : parts.receive(p.reduce, from, part_offset(p, i)), part);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[j] += part[j];
      }
      raw[i] = narrow8<kBf16>(sum);
      if (is_owner(p)) parts.send(p.reduce, RankParts::kAll, part_offset(p, i), raw[i]);
    }
  }
  __device__ __forceinline__ void load_weight(const GemmInputParams& p, int i) {
    const int64_t first = column_of(i);
    const int at = kEarlyWeight ? i : 0;
    if constexpr (kNorm && kWeightF32) {
      load4_f32<kAligned>(static_cast<const float*>(p.weight), first, end, weight_f32[at]);
      load4_f32<kAligned>(static_cast<const float*>(p.weight), first + 4, end, weight_f32[at] + 4);
    } else if constexpr (kNorm) {
      weight[at] = load8<kAligned>(static_cast<const uint16_t*>(p.weight), first, end);
    }
  }
  __device__ __forceinline__ void multiply(const GemmInputParams& p, int i, float (&to)[8]) {
    if constexpr (!kEarlyWeight) load_weight(p, i);
    const int at = kEarlyWeight ? i : 0;
    float w[8];
    if constexpr (kWeightF32) {
#pragma unroll
      for (int j = 0; j < 8; ++j) w[j] = weight_f32[at][j] + p.weight_offset;
    } else {
      widen8<kBf16>(weight[at], w);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) to[j] *= w[j];
  }

  // Makes group i of what was loaded, and adds it to the row's totals.
  __device__ __forceinline__ void make(const GemmInputParams& p, int i, Totals& totals) {
    float element[8], other[8];
    widen8<kBf16>(raw[i], element);
    widen8<kBf16>(second[i], other);
    if constexpr (kGated) {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[i][j] = element[j] = gate_of<kGelu>(element[j]) * other[j];
    } else if (kNorm && p.residual != nullptr) {
#pragma unroll
      for (int j = 0; j < 8; ++j) element[j] += other[j];
      raw[i] = narrow8<kBf16>(element);  // the norm sees what the residual stream holds
      widen8<kBf16>(raw[i], element);
      store8<kAligned>(static_cast<uint16_t*>(p.h) + token * p.ldr, column_of(i), end, raw[i]);
    }
    if constexpr (kNorm) {
#pragma unroll
      for (int j = 0; j < 8; ++j) totals.sum += element[j] * element[j];
      multiply(p, i, element);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) totals.largest = fmaxf(totals.largest, fabsf(element[j]));
  }

  // Group i times the row's factor, to memory in 16 bits and to `codes`, of which the block has `columns`, in E4M3.
  __device__ __forceinline__ void store(const GemmInputParams& p, int i, float factor, float inverse, uint8_t* codes,
                                        int columns) {
    float element[8];
    if constexpr (kPacked) {
      widen8<kBf16>(raw[i], element);
      if constexpr (kNorm) multiply(p, i, element);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) element[j] = v[i][j];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) element[j] *= factor;
    if (p.y_f16 != nullptr) {
      store8<kAligned>(static_cast<uint16_t*>(p.y_f16) + token * p.ldy, column_of(i), end, narrow8<kBf16>(element));
    }
    if (static_cast<int>((i * blockDim.x + threadIdx.x) * 8) >= columns) return;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float2 pair = make_float2(element[j] * inverse, element[j + 1] * inverse);
      *reinterpret_cast<uint16_t*>(codes + (kEarlyPlace ? place[kEarlyPlace ? i : 0][j / 2] : place_of(i, j / 2))) =
          __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
    }
  }
};

// The block's `columns` codes to memory, `made` of which threads have written; the rest is padding.
__device__ __forceinline__ void store_codes(uint8_t* codes, int made, int columns, int stored, uint8_t* out) {
  for (int i = made + static_cast<int>(threadIdx.x * 2); i < columns; i += blockDim.x * 2) {
    *reinterpret_cast<uint16_t*>(codes + i) = 0;
  }
  __syncthreads();
  for (int i = threadIdx.x * 16; i < stored; i += blockDim.x * 16) {
    *reinterpret_cast<uint4*>(out + i) = *reinterpret_cast<const uint4*>(codes + i);
  }
}

// kHalved: a thread does what two of a block of twice the size do, and its sums are added as theirs: the same bits.
template <GemmInputSource kSource, bool kBf16, bool kWeightF32, bool kAligned, int kVectors, bool kHalved = false>
__global__ __launch_bounds__(
    kHalved ? 256 : 512, kHalved
                             ? (kVectors == 2 ? 4 : 2)
                             : (kSource == GemmInputSource::kReducedNorm
                                    ? kReducedBlocks
                                    : 0)) void gemm_input_kernel(const typename RowPart<kSource, kBf16, kWeightF32,
                                                                                        kAligned, kVectors>::Params p) {
  using Part = RowPart<kSource, kBf16, kWeightF32, kAligned, kVectors>;
  extern __shared__ uint8_t codes[];  // one row of E4M3 in the GEMM's order
  __shared__ float2 scratch[32];
  __shared__ RowParts parts;
  ptx::launch_dependents();
  // A cluster of p.blocks blocks shares a token's row: this one has columns [begin, end) of it.
  const uint32_t rank = blockIdx.x % p.blocks;
  Part part(p, blockIdx.x / p.blocks, rank);
  part.find_places();
  if (p.blocks > 1) {
    parts.init(p.blocks);
    ptx::cluster_wait();
  }
  // The norm's weights do not depend on the kernel before; the rest may.
  if constexpr (Part::kEarlyWeight) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) part.load_weight(p, i);
  }
  // Nor do the routes, where products stand between.
  bool early_routes = false;
  if constexpr (Part::kExperts) early_routes = p.experts.follows;
  if (early_routes) part.find_experts(p);
  constexpr bool kRehearses = kAligned && kVectors < kMaxVectors && !kHalved;
  const bool has_codes = p.y_e4m3 != nullptr;
  const int64_t end = part.end;
#pragma unroll 1
  for (bool real = !kRehearses || !p.rehearses;; real = true) {
    if (real) ptx::dependency_wait();
    if (real && !early_routes) part.find_experts(p);
    if constexpr (Part::kReduced) {
      if (real) part.parts.begin(p.reduce);
    }
    if constexpr (kRehearses) part.end = real ? end : part.begin;
    if constexpr (Part::kEarlyLoads) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) part.load(p, i);
    }
    // All of it, before anything is waited for.
#pragma unroll
    for (int i = 0; i < kVectors; ++i) part.send(p, i);
    constexpr int kSets = kHalved ? 2 : 1;
    Totals of_thread[kSets]{};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (!Part::kEarlyLoads) part.load(p, i);
      part.receive(p, i);
      part.make(p, i, of_thread[i % kSets]);
    }
    Totals totals = of_thread[0];
    if (Part::kNorm || has_codes) {
      totals = reduce(of_thread, scratch);
      if (p.blocks > 1) totals = parts.add(totals, p.blocks, rank, real ? 1 : 0);
    }
    if constexpr (Part::kReduced) {
      if (real && threadIdx.x == 0) part.parts.end(p.reduce);
    }
    // The norm's factor is the row's, so the largest magnitude needs no second reduction.
    const float factor = Part::kNorm ? rsqrtf(totals.sum / static_cast<float>(p.k) + p.epsilon) : 1.0f;
    const float largest = totals.largest * factor;
    const float scale = e4m3_scale(largest);
    if (has_codes && threadIdx.x == 0 && rank == 0 && real) p.scales[part.token] = scale;
    const float inverse = 1.0f / scale;
    const int columns = has_codes ? min(p.block_columns, p.padded_k - static_cast<int>(part.begin)) : 0;  // of codes
#pragma unroll
    for (int i = 0; i < kVectors; ++i) part.store(p, i, factor, inverse, codes, columns);
    if (has_codes) {
      store_codes(codes, static_cast<int>(kVectors * blockDim.x * 8), columns, real ? columns : 0,
                  p.y_e4m3 + part.token * p.ldy_e4m3 + part.begin);
    }
    if (real) return;
    __syncthreads();  // all have read what the next round writes over
  }
}

template <GemmInputSource kSource, bool kBf16, bool kWeightF32>
const void* function_for(bool is_aligned, int vectors) {
  if (!is_aligned)
    return reinterpret_cast<const void*>(&gemm_input_kernel<kSource, kBf16, kWeightF32, false, kMaxVectors>);
  switch (vectors) {
    case 1:
      return reinterpret_cast<const void*>(&gemm_input_kernel<kSource, kBf16, kWeightF32, true, 1>);
    case 2:
      return reinterpret_cast<const void*>(&gemm_input_kernel<kSource, kBf16, kWeightF32, true, 2>);
    case 4:
      return reinterpret_cast<const void*>(&gemm_input_kernel<kSource, kBf16, kWeightF32, true, 4>);
    default:
      return reinterpret_cast<const void*>(&gemm_input_kernel<kSource, kBf16, kWeightF32, true, kMaxVectors>);
  }
}

template <bool kBf16>
const void* reduced_norm_function(int vectors) {
  constexpr auto kSource = GemmInputSource::kReducedNorm;
  return vectors == 1 ? reinterpret_cast<const void*>(&gemm_input_kernel<kSource, kBf16, false, true, 1>)
                      : reinterpret_cast<const void*>(&gemm_input_kernel<kSource, kBf16, false, true, 2>);
}

}  // namespace

const void* gemm_input_function(GemmInputSource source, bool bf16, bool weight_f32, bool is_aligned, int vectors) {
  switch (source) {
    case GemmInputSource::kNorm:
      if (weight_f32) {
        return bf16 ? function_for<GemmInputSource::kNorm, true, true>(is_aligned, vectors)
                    : function_for<GemmInputSource::kNorm, false, true>(is_aligned, vectors);
      }
      return bf16 ? function_for<GemmInputSource::kNorm, true, false>(is_aligned, vectors)
                  : function_for<GemmInputSource::kNorm, false, false>(is_aligned, vectors);
    case GemmInputSource::kSwiglu:
      return bf16 ? function_for<GemmInputSource::kSwiglu, true, false>(is_aligned, vectors)
                  : function_for<GemmInputSource::kSwiglu, false, false>(is_aligned, vectors);
    case GemmInputSource::kGeglu:
      return function_for<GemmInputSource::kGeglu, false, false>(is_aligned, vectors);
    case GemmInputSource::kReducedNorm:
      return bf16 ? reduced_norm_function<true>(vectors) : reduced_norm_function<false>(vectors);
    case GemmInputSource::kExperts:
      return vectors == 1
                 ? reinterpret_cast<const void*>(&gemm_input_kernel<GemmInputSource::kExperts, false, true, true, 1>)
                 : reinterpret_cast<const void*>(&gemm_input_kernel<GemmInputSource::kExperts, false, true, true, 2>);
    default:
      return bf16 ? function_for<GemmInputSource::kPlain, true, false>(is_aligned, vectors)
                  : function_for<GemmInputSource::kPlain, false, false>(is_aligned, vectors);
  }
}

const void* halved_norm_function(bool bf16, bool weight_f32, int vectors) {
  constexpr auto kNorm = GemmInputSource::kNorm;
  const auto pick = [&](auto is_bf16, auto is_f32) {
    constexpr bool kBf16 = decltype(is_bf16)::value, kF32 = decltype(is_f32)::value;
    return vectors == 2 ? reinterpret_cast<const void*>(&gemm_input_kernel<kNorm, kBf16, kF32, true, 2, true>)
                        : reinterpret_cast<const void*>(&gemm_input_kernel<kNorm, kBf16, kF32, true, 4, true>);
  };
  if (bf16) return weight_f32 ? pick(std::true_type(), std::true_type()) : pick(std::true_type(), std::false_type());
  return weight_f32 ? pick(std::false_type(), std::true_type()) : pick(std::false_type(), std::false_type());
}

}  // namespace nfp::cuda
