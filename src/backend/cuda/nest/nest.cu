#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/nest/nest_kernels.h"
#include "nested/format.h"

namespace nfp::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float value_of(uint16_t bits, bool bf16) {
  return bf16 ? __bfloat162float(__ushort_as_bfloat16(bits)) : __half2float(__ushort_as_half(bits));
}
__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((e + 127) << 23); }
__device__ __forceinline__ float round_to_fp16(float v) { return __half2float(__float2half_rn(v)); }

// The maximum over the block; every thread gets it.
__device__ __forceinline__ uint32_t block_max(uint32_t v, uint32_t* scratch) {
  v = __reduce_max_sync(0xffffffffu, v);
  __syncthreads();  // scratch may still be read
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, threadIdx.x % 32 < kThreads / 32 ? scratch[threadIdx.x % 32] : 0);
}

__device__ __forceinline__ void add(int64_t* sum, int64_t more) {
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(more));
}

__global__ void clear_report(NestReport* report, int32_t n) {
  *report = NestReport{};
  report->first_bad_row = n;
}

// A block for each row: analyse_row() of nested/row_analysis.cc, step by step.
__global__ __launch_bounds__(kThreads) void find_exponents(const NestKernelParams p) {
  __shared__ uint32_t scratch[32];
  const int64_t r = blockIdx.x;
  const uint16_t* row = p.weights + r * p.ldw;
  const bool bf16 = p.bf16;
  uint32_t largest = 0;
  bool changed = false;  // FP16(w) is not w
  for (int64_t i = threadIdx.x; i < p.k; i += kThreads) {
    largest = max(largest, row[i] & 0x7fffu);
    if (bf16) {
      const float w = value_of(row[i], true);
      changed |= round_to_fp16(w) != w;
    }
  }
  largest = block_max(largest, scratch);
  if (largest >= (bf16 ? 0x7f80u : 0x7c00u)) {
    if (threadIdx.x == 0) {
      atomicAdd(&p.report->not_finite_rows, 1);
      atomicAdd(&p.report->bad_rows, 1);
      atomicMin(&p.report->first_bad_row, static_cast<int32_t>(r));
      p.row_scale[r] = 1.0f;
    }
    return;
  }
  const float largest_value = value_of(static_cast<uint16_t>(largest), bf16);
  int smallest = 0;  // smallest_exponent()
  if (largest != 0) {
    int exponent = 0;
    const float fraction = frexpf(largest_value, &exponent);
    smallest = max(fraction * 2.0f <= kNestableMax ? exponent - 1 : exponent, p.min_exponent);
  }
  int e = max(smallest, 0);
  if (bf16 && e == 0 && block_max(changed ? 1 : 0, scratch) != 0) e = smallest;
  bool broken = e > p.max_exponent;
  const int shift = min(e, p.max_exponent);
  const float down = power_of_two(-shift), up = power_of_two(shift);
  int32_t inexact = 0, inexact_bf16 = 0;
  for (int64_t i = threadIdx.x; i < p.k; i += kThreads) {
    const float w = value_of(row[i], bf16);
    const float v = round_to_fp16(w * down);
    broken |= e > 0 && v * up != w && v * up != round_to_fp16(w);
    inexact += bf16 && v * up != w ? 1 : 0;
    inexact_bf16 += (__float_as_uint(v) & 0xffffu) != 0 ? 1 : 0;
  }
  const bool bad = block_max(broken ? 1 : 0, scratch) != 0;
  // One addition a row in global memory: all rows add to the same two numbers.
  __shared__ int32_t row_inexact, row_inexact_bf16;
  if (threadIdx.x == 0) row_inexact = row_inexact_bf16 = 0;
  __syncthreads();
  inexact = __reduce_add_sync(0xffffffffu, inexact);
  inexact_bf16 = __reduce_add_sync(0xffffffffu, inexact_bf16);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&row_inexact, inexact);
    atomicAdd(&row_inexact_bf16, inexact_bf16);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (!bad && row_inexact != 0) add(&p.report->inexact, row_inexact);
  if (!bad && row_inexact_bf16 != 0) add(&p.report->inexact_bf16, row_inexact_bf16);
  p.row_scale[r] = bad ? 1.0f : up;
  if (bad) {
    atomicAdd(&p.report->bad_rows, 1);
    atomicMin(&p.report->first_bad_row, static_cast<int32_t>(r));
  } else if (e != 0) {
    atomicAdd(&p.report->rows_shifted, 1);
  }
}

// A thread for each 16-byte chunk of a plane (layout.h): 16 of a row's weights, in 8 pairs of neighbours.
struct Chunk {
  int64_t row, block;
  int chunk;
  int64_t out;  // byte offset in a plane
};
__device__ __forceinline__ Chunk chunk_of(int64_t index, const ChunkGrid& grid) {
  Chunk c;
  c.chunk = static_cast<int>(index % 4);
  const int64_t r = index / 4 % kBlockRows;
  const int64_t block = index / (4 * kBlockRows);
  c.block = block % grid.k_groups;
  c.row = block / grid.k_groups * kBlockRows + r;
  c.out = block * kBlockBytes + r * kBlockK + ((c.chunk ^ (r / 2 % 4)) * 16);
  return c;
}
// Logical k of a pair of neighbours inside its block of 64.
__device__ __forceinline__ int pair_k(int chunk, int pair) { return 16 * (pair / 2) + 2 * chunk + 8 * (pair % 2); }

__device__ __forceinline__ uint8_t biased(uint8_t lower, bool free_join) {
  return static_cast<uint8_t>(lower + (free_join ? 0 : kLowerBias));
}

union Bytes16 {
  uint4 vector;
  uint8_t bytes[16];
};

__global__ __launch_bounds__(kThreads) void nest_chunks(const NestKernelParams p, const ChunkGrid grid) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= grid.chunks) return;
  const Chunk c = chunk_of(index, grid);
  const bool real = c.row < p.n;
  const float down = real ? 1.0f / p.row_scale[c.row] : 1.0f;  // both are powers of two
  Bytes16 upper, lower;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int64_t k = c.block * kBlockK + pair_k(c.chunk, i / 2) + i % 2;
    const uint16_t bits = real && k < p.k ? p.weights[c.row * p.ldw + k] : 0;
    const NestedWeight w = split(__half_as_ushort(__float2half_rn(value_of(bits, p.bf16) * down)));
    upper.bytes[i] = w.upper;
    lower.bytes[i] = biased(w.lower, p.free_join);
  }
  *reinterpret_cast<uint4*>(p.upper + c.out) = upper.vector;
  *reinterpret_cast<uint4*>(p.lower + c.out) = lower.vector;
}

__global__ __launch_bounds__(kThreads) void pack_chunks(const PackKernelParams p, const ChunkGrid grid) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= grid.chunks) return;
  const Chunk c = chunk_of(index, grid);
  Bytes16 out;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int64_t k = c.block * kBlockK + pair_k(c.chunk, i / 2) + i % 2;
    out.bytes[i] = static_cast<uint8_t>((c.row < grid.n && k < grid.k ? p.bytes[c.row * p.ld + k] : 0) + p.bias);
  }
  *reinterpret_cast<uint4*>(p.out + c.out) = out.vector;
}

__global__ __launch_bounds__(kThreads) void unnest_chunks(const UnnestKernelParams p, const ChunkGrid grid) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= grid.chunks) return;
  const Chunk c = chunk_of(index, grid);
  if (c.row >= grid.n) return;
  Bytes16 upper, lower;
  upper.vector = *reinterpret_cast<const uint4*>(p.upper + c.out);
  lower.vector = *reinterpret_cast<const uint4*>(p.lower + c.out);
  const float up = p.row_scale == nullptr ? 1.0f : p.row_scale[c.row];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int64_t k = c.block * kBlockK + pair_k(c.chunk, i / 2) + i % 2;
    if (k >= grid.k) continue;
    const uint16_t bits = join_fp16(p.free_join ? Join::kFree : Join::kBiased, upper.bytes[i], lower.bytes[i]);
    const float w = __half2float(__ushort_as_half(bits)) * up;
    p.weights[c.row * p.ldw + k] =
        p.bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(w)) : __half_as_ushort(__float2half_rn(w));
  }
}

}  // namespace

NestKernels nest_kernels() {
  return {reinterpret_cast<const void*>(clear_report),  reinterpret_cast<const void*>(find_exponents),
          reinterpret_cast<const void*>(nest_chunks),   reinterpret_cast<const void*>(pack_chunks),
          reinterpret_cast<const void*>(unnest_chunks), kThreads};
}

}  // namespace nfp::cuda
