#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/step/step_kernels.h"

namespace nfp::cuda {
namespace {

template <int kVector>
using Packed = std::conditional_t<kVector == 8, uint4, uint2>;

__device__ __forceinline__ float2 widen_pair(__half2 pair) { return __half22float2(pair); }
__device__ __forceinline__ float2 widen_pair(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
template <typename Pair, int kVector>
__device__ __forceinline__ void load_16(const uint16_t* from, float (&v)[kVector]) {
  const auto raw = *reinterpret_cast<const Packed<kVector>*>(from);
  const auto* pairs = reinterpret_cast<const Pair*>(&raw);
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    const float2 pair = widen_pair(pairs[i]);
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

__device__ __forceinline__ void narrow_pair(float low, float high, __half2& to) { to = __floats2half2_rn(low, high); }
__device__ __forceinline__ void narrow_pair(float low, float high, __nv_bfloat162& to) {
  to = __floats2bfloat162_rn(low, high);
}

// How numbers lie in the cache. store() returns whether they all fit. kExponents: of a pair.
template <typename PairType, uint32_t kExponents>
struct Store16 {
  using Element = uint16_t;
  using Query = Store16;  // how queries lie, and what is rotated
  using Pair = PairType;
  template <int kVector>
  static __device__ __forceinline__ bool store(Element* to, const float (&v)[kVector]) {
    Packed<kVector> raw;
    auto* pairs = reinterpret_cast<Pair*>(&raw);
    uint32_t beyond = 0;
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      narrow_pair(v[2 * i], v[2 * i + 1], pairs[i]);
      beyond |= __vcmpeq2(*reinterpret_cast<const uint32_t*>(pairs + i) & kExponents, kExponents);
    }
    *reinterpret_cast<Packed<kVector>*>(to) = raw;
    return beyond == 0;
  }
};
using F16Store = Store16<__half2, 0x7c007c00u>;
using Bf16Store = Store16<__nv_bfloat162, 0x7f807f80u>;
struct E4m3Store {  // nearest even; beyond 448 becomes 448; what was infinite or no number before does not fit
  using Element = uint8_t;
  using Query = F16Store;
  using Pair = __half2;
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

// Where a token is, and where its keys and values go: a slot below 0 = nowhere.
struct TokenPlace {
  int token, position, slot;
};
__device__ __forceinline__ TokenPlace find_token(const RopeCall& c, int index) {
  if (c.query_start == nullptr) return {index, c.positions[index], c.slots[index]};
  const int32_t* const starts = c.query_start + c.first_sequence;
  int s = index, token = index;
  if (c.one_token_each) {
    token = starts[s];
  } else {
    token += starts[0];
    if (token >= starts[c.sequences]) return {token, 0, -1};
    s = 0;
    for (int end = c.sequences; end - s > 1;) {  // the last that begins at or before it
      const int middle = (s + end) / 2;
      (starts[middle] <= token ? s : end) = middle;
    }
  }
  const int context = c.context[c.first_sequence + s];
  if (context <= 0) return {token, 0, -1};
  const int position = context - starts[s + 1] + token;
  const int block = c.block_table[int64_t{c.first_sequence + s} * c.table_width + position / c.block_size];
  return {token, position, block * c.block_size + position % c.block_size};
}

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
  const auto index = static_cast<int>(is_item ? item / all_heads : 0);
  const auto head = static_cast<int>(is_item ? item % all_heads : 0);
  const bool is_query = head < c.heads;
  const bool is_value = head >= c.heads + c.kv_heads;
  const int pairs = c.rotary_dim / 2 / kVector;
  const int vectors = c.head_dim / kVector;
  const bool rotates = lane < pairs;
  const int first = rotates ? lane : 2 * pairs + 2 * (lane - pairs);
  const int second = rotates ? lane + pairs : first + 1;
  // Where the token stands does not depend on the kernel before: steps begin with a copy.
  const auto [token, position, slot] = is_item ? find_token(c, index) : TokenPlace{0, 0, -1};
  const bool is_there = is_item && (c.query_start == nullptr || slot >= 0);
  const bool has_first = is_there && first < vectors;
  const bool has_second = is_there && second < vectors;
  float cosine[kVector] = {}, sine[kVector] = {};
  if (!is_value && rotates && is_item) {
    const float* table = c.cos_sin + int64_t{position} * c.rotary_dim + lane * kVector;
    load_f32(table, cosine);
    load_f32(table + c.rotary_dim / 2, sine);
  }
  ptx::dependency_wait();
  auto* x = static_cast<uint16_t*>(c.qkv) + (int64_t{token} * all_heads + head) * c.head_dim;
  float a[kVector] = {}, b[kVector] = {};
  if (has_first) load_16<typename Store::Pair>(x + first * kVector, a);
  if (has_second) load_16<typename Store::Pair>(x + second * kVector, b);
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
    if (has_first) fits = Store::Query::store(x + first * kVector, a);
    if (has_second) fits = Store::Query::store(x + second * kVector, b) && fits;
  } else if (slot >= 0) {
    const int kv_head = head - c.heads - (is_value ? c.kv_heads : 0);
    const int block = slot / c.block_size;
    auto* cache = static_cast<typename Store::Element*>(is_value ? c.values : c.keys) + block * c.block_stride +
                  (kv_head * c.block_size + (slot - block * c.block_size)) * c.head_dim;
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

const void* rope_function(RopeStore store, int vector, int lanes) {
  if (store == RopeStore::kE4m3)
    return vector == 8 ? function_for<E4m3Store, 8>(lanes) : function_for<E4m3Store, 4>(lanes);
  if (store == RopeStore::kBf16)
    return vector == 8 ? function_for<Bf16Store, 8>(lanes) : function_for<Bf16Store, 4>(lanes);
  return vector == 8 ? function_for<F16Store, 8>(lanes) : function_for<F16Store, 4>(lanes);
}

}  // namespace nfp::cuda
