#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/step/step_kernels.h"

namespace nfp::cuda {
namespace {

template <int kVector>
using Packed = std::conditional_t<kVector == 8, uint4, uint2>;

template <int kVector>
__device__ __forceinline__ void load_f16(const uint16_t* from, float (&v)[kVector]) {
  const auto raw = *reinterpret_cast<const Packed<kVector>*>(from);
  const auto* pairs = reinterpret_cast<const __half2*>(&raw);
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    const float2 pair = __half22float2(pairs[i]);
    v[2 * i] = pair.x;
    v[2 * i + 1] = pair.y;
  }
}
template <int kVector>
__device__ __forceinline__ void load_f32(const float* from, float (&v)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    v[i] = four.x;
    v[i + 1] = four.y;
    v[i + 2] = four.z;
    v[i + 3] = four.w;
  }
}

// How numbers lie in the cache. store() returns whether they all fit.
struct F16Store {
  using Element = uint16_t;
  template <int kVector>
  static __device__ __forceinline__ bool store(Element* to, const float (&v)[kVector]) {
    Packed<kVector> raw;
    auto* pairs = reinterpret_cast<__half2*>(&raw);
    uint32_t beyond = 0;
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      pairs[i] = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
      beyond |= __vcmpeq2(*reinterpret_cast<const uint32_t*>(pairs + i) & 0x7c007c00u, 0x7c007c00u);
    }
    *reinterpret_cast<Packed<kVector>*>(to) = raw;
    return beyond == 0;
  }
};
struct E4m3Store {  // nearest even; beyond 448 becomes 448; what was infinite or no number before does not fit
  using Element = uint8_t;
  template <int kVector>
  static __device__ __forceinline__ bool store(Element* to, const float (&v)[kVector]) {
    std::conditional_t<kVector == 8, uint2, uint32_t> raw;
    auto* pairs = reinterpret_cast<uint16_t*>(&raw);
    bool fits = true;
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      fits = fits && isfinite(v[2 * i]) && isfinite(v[2 * i + 1]);
      pairs[i] = __nv_cvt_float2_to_fp8x2(float2{v[2 * i], v[2 * i + 1]}, __NV_SATFINITE, __NV_E4M3);
    }
    *reinterpret_cast<decltype(raw)*>(to) = raw;
    return fits;
  }
};

// kLanes neighbouring lanes share one head of one token. Lane u of them has vectors u and u + half / kVector of the
// part that rotates, or two vectors of the rest.
template <typename Store, int kVector, int kLanes>
__global__ __launch_bounds__(kRopeThreads) void rope_kernel(const RopeParams p) {
  ptx::launch_dependents();
  const RopeCall& c = p.call;
  const auto lane = static_cast<int>(threadIdx.x % kLanes);
  const int64_t item = int64_t{blockIdx.x} * (kRopeThreads / kLanes) + threadIdx.x / kLanes;
  const bool is_item = item < p.items;
  const int all_heads = c.heads + 2 * c.kv_heads;
  const auto token = static_cast<int>(is_item ? item / all_heads : 0);
  const auto head = static_cast<int>(is_item ? item % all_heads : 0);
  const bool is_query = head < c.heads;
  const bool is_value = head >= c.heads + c.kv_heads;
  const int pairs = c.rotary_dim / 2 / kVector;
  const int vectors = c.head_dim / kVector;
  const bool rotates = lane < pairs;
  const int first = rotates ? lane : 2 * pairs + 2 * (lane - pairs);
  const int second = rotates ? lane + pairs : first + 1;
  const bool has_first = is_item && first < vectors;
  const bool has_second = is_item && second < vectors;
  // Where the token stands does not depend on the kernel before: steps begin with a copy.
  const int slot = is_item ? c.slots[token] : -1;
  float cosine[kVector] = {}, sine[kVector] = {};
  if (!is_value && rotates && is_item) {
    const float* table = c.cos_sin + int64_t{c.positions[token]} * c.rotary_dim + lane * kVector;
    load_f32(table, cosine);
    load_f32(table + c.rotary_dim / 2, sine);
  }
  ptx::dependency_wait();
  auto* x = static_cast<uint16_t*>(c.qkv) + (int64_t{token} * all_heads + head) * c.head_dim;
  float a[kVector] = {}, b[kVector] = {};
  if (has_first) load_f16(x + first * kVector, a);
  if (has_second) load_f16(x + second * kVector, b);
  if (!is_value) {
    const float* norm = is_query ? c.q_norm : c.k_norm;
    if (norm != nullptr) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum += a[i] * a[i] + b[i] * b[i];
      const uint32_t head_lanes = (0xffffffffu >> (32 - kLanes)) << (threadIdx.x % 32 / kLanes * kLanes);
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(head_lanes, sum, offset);
      const float factor = rsqrtf(sum / static_cast<float>(c.head_dim) + c.norm_eps);
      float weight[kVector];
      if (has_first) {
        load_f32(norm + first * kVector, weight);
#pragma unroll
        for (int i = 0; i < kVector; ++i) a[i] *= factor * weight[i];
      }
      if (has_second) {
        load_f32(norm + second * kVector, weight);
#pragma unroll
        for (int i = 0; i < kVector; ++i) b[i] *= factor * weight[i];
      }
    }
    if (rotates && is_item) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float rotated = a[i] * cosine[i] - b[i] * sine[i];
        b[i] = b[i] * cosine[i] + a[i] * sine[i];
        a[i] = rotated;
      }
    }
  }
  bool fits = true;
  if (is_query) {
    // An infinite query may hide all keys from itself, and then its output is zeros.
    if (has_first) fits = F16Store::store(x + first * kVector, a);
    if (has_second) fits = F16Store::store(x + second * kVector, b) && fits;
  } else if (slot >= 0) {
    const int kv_head = head - c.heads - (is_value ? c.kv_heads : 0);
    const int block = slot / c.block_size;
    auto* cache = static_cast<typename Store::Element*>(is_value ? c.values : c.keys) +
                  ((int64_t{block} * c.kv_heads + kv_head) * c.block_size + (slot - block * c.block_size)) * c.head_dim;
    if (has_first) fits = Store::store(cache + first * kVector, a);
    if (has_second) fits = Store::store(cache + second * kVector, b) && fits;
  }
  if (!fits && slot >= 0 && c.overflowed_layer != nullptr) *c.overflowed_layer = c.layer;
}

template <typename Store, int kVector>
const void* function_for(int lanes) {
  switch (lanes) {
    case 1:
      return reinterpret_cast<const void*>(&rope_kernel<Store, kVector, 1>);
    case 2:
      return reinterpret_cast<const void*>(&rope_kernel<Store, kVector, 2>);
    case 4:
      return reinterpret_cast<const void*>(&rope_kernel<Store, kVector, 4>);
    case 8:
      return reinterpret_cast<const void*>(&rope_kernel<Store, kVector, 8>);
    case 16:
      return reinterpret_cast<const void*>(&rope_kernel<Store, kVector, 16>);
    default:
      return reinterpret_cast<const void*>(&rope_kernel<Store, kVector, 32>);
  }
}

}  // namespace

const void* rope_function(bool e4m3_cache, int vector, int lanes) {
  if (e4m3_cache) return vector == 8 ? function_for<E4m3Store, 8>(lanes) : function_for<E4m3Store, 4>(lanes);
  return vector == 8 ? function_for<F16Store, 8>(lanes) : function_for<F16Store, 4>(lanes);
}

}  // namespace nfp::cuda
