// How the spans that share a row (decode_walk.cuh) meet: the span that has a row's beginning adds up what the others
// have of it. It comes to that row last, they to theirs first, so that it seldom waits; and nobody waits for it.
//
// A span has one slot, for the only piece that does not begin its row. Numbers are their own flags: a slot is zero bits
// until its numbers arrive (a zero goes as -0), in any order, so no fence is needed; who has read them makes them zero
// again. All spans of a launch must be resident at once.
#pragma once

#include <cstdint>

namespace nfp::cuda {

__device__ __forceinline__ float never_zero_bits(float v) { return v == 0.0f ? -0.0f : v; }
__device__ __forceinline__ float2 never_zero_bits(float2 v) {
  return make_float2(never_zero_bits(v.x), never_zero_bits(v.y));
}
__device__ __forceinline__ bool arrived(float2 v) { return __float_as_uint(v.x) != 0 && __float_as_uint(v.y) != 0; }

__device__ __forceinline__ void send(float* to, float2 v) {
  v = never_zero_bits(v);
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(v.x), "f"(v.y) : "memory");
}
__device__ __forceinline__ float2 look(const float* from) {
  float2 v;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from) : "memory");
  return v;
}
template <int kCount>
struct Numbers {
  float2 v[kCount];
  __device__ __forceinline__ const float2& operator[](int i) const { return v[i]; }
};
// Those at from(0) to from(kCount - 1), once all of them have arrived.
template <int kCount, typename From>
__device__ __forceinline__ Numbers<kCount> wait_for(const From& from) {
  Numbers<kCount> n;
  bool again = true;
  while (again) {
    again = false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) n.v[i] = look(from(i));
#pragma unroll
    for (int i = 0; i < kCount; ++i) again |= !arrived(n.v[i]);
  }
  return n;
}
__device__ __forceinline__ void take_back(float* from) { *reinterpret_cast<float2*>(from) = make_float2(0.0f, 0.0f); }

}  // namespace nfp::cuda
