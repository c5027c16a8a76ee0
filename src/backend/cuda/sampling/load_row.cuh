// Logits from global memory into the cluster's shared memory, with bias, mask and penalties, as keys; and what the
// warps know of them before they have told each other anything. A thread reads what it has written itself.
#pragma once

#include <cstdint>

#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/sampling/cluster_row.cuh"
#include "backend/cuda/sampling/weigh.cuh"

namespace nfp::cuda {

// Four neighbouring logits; NaN past the vocabulary.
template <bool kAligned>
__device__ __forceinline__ float4 load_four(const float* logits, int32_t id, int32_t vocab) {
  if (kAligned && id + 4 <= vocab) return *reinterpret_cast<const float4*>(logits + id);
  const float none = __uint_as_float(0x7fffffffu);
  float v[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = id + j < vocab ? logits[id + j] : none;
  return make_float4(v[0], v[1], v[2], v[3]);
}

// This warp's logits to where its keys will be; there after copy_async_wait().
template <bool kAligned>
__device__ __forceinline__ void copy_row(const ClusterRow& row, const float* logits) {
  float4* mine = reinterpret_cast<float4*>(row.warp_keys()) + row.lane;
  const int32_t first = row.first_id() + static_cast<int32_t>(row.lane) * 4;
  if (kAligned && row.first_id() + row.segment <= row.vocab) {  // all in flight at once, in no registers
#pragma unroll 4
    for (int i = 0; i < row.segment; i += kStretch)
      ptx::copy_async_16(ptx::shared_address(mine + i / 4), logits + first + i);
    return;
  }
#pragma unroll 4
  for (int i = 0; i < row.segment; i += kStretch) mine[i / 4] = load_four<kAligned>(logits, first + i, row.vocab);
}

struct Adjustment {
  const LogitBias* bias;  // of the row; null = none, likewise below
  int32_t bias_count;
  const uint32_t* allowed;
  int32_t allowed_words;
  const uint32_t* counts;
  float repetition, presence, frequency;
  __device__ bool is_none() const { return bias == nullptr && allowed == nullptr && counts == nullptr; }

  __device__ __forceinline__ void penalise(float& logit, uint32_t count) const {
    if (count == 0) return;
    logit = logit > 0.0f ? logit / repetition : logit * repetition;
    const uint32_t generated = count / 2;  // (rounded like the CPU's: no fused multiply-add)
    if (generated > 0)
      logit = __fsub_rn(logit, __fadd_rn(presence, __fmul_rn(frequency, static_cast<float>(generated))));
  }
};
__device__ __forceinline__ Adjustment adjustment_of(const SampleCall& call, const SamplingRow& s) {
  Adjustment a{};
  if (call.bias != nullptr && s.bias_count > 0) {
    a.bias = call.bias + s.bias_first;
    a.bias_count = s.bias_count;
  }
  if (call.allowed != nullptr && s.allowed_row >= 0) {
    a.allowed = call.allowed + int64_t{s.allowed_row} * call.allowed_words;
    a.allowed_words = call.allowed_words;
  }
  if (call.history.counts != nullptr && s.history_slot >= 0 &&
      (s.repetition_penalty != 1.0f || s.presence_penalty != 0.0f || s.frequency_penalty != 0.0f)) {
    a.counts = call.history.counts + int64_t{s.history_slot} * call.history.vocab;
    a.repetition = s.repetition_penalty;
    a.presence = s.presence_penalty;
    a.frequency = s.frequency_penalty;
  }
  return a;
}

__device__ __forceinline__ uint4 load_counts(const uint32_t* counts, int32_t id, int32_t vocab) {
  if (id + 4 <= vocab && reinterpret_cast<uintptr_t>(counts) % 16 == 0)
    return *reinterpret_cast<const uint4*>(counts + id);
  return make_uint4(id < vocab ? counts[id] : 0, id + 1 < vocab ? counts[id + 1] : 0,
                    id + 2 < vocab ? counts[id + 2] : 0, id + 3 < vocab ? counts[id + 3] : 0);
}

// Copied logits become keys, kAdjusts: masked and penalised. Returns this thread's largest.
template <bool kAdjusts>
__device__ __forceinline__ uint32_t make_keys(const ClusterRow& row, const Adjustment& a) {
  constexpr int kUnroll = kAdjusts ? 2 : 4;
  uint4* mine = reinterpret_cast<uint4*>(row.warp_keys()) + row.lane;
  const int32_t first = row.first_id() + static_cast<int32_t>(row.lane) * 4;
  uint32_t largest = kPaddingKey;
  for (int i = 0; i < row.segment; i += kUnroll * kStretch) {
    uint32_t word[kUnroll];
    uint4 count[kUnroll];
#pragma unroll
    for (int j = 0; kAdjusts && j < kUnroll; ++j) {
      if (i + j * kStretch >= row.segment) break;
      const int32_t id = first + i + j * kStretch;
      if (a.allowed != nullptr) word[j] = id / 32 < a.allowed_words ? a.allowed[id / 32] : 0;
      if (a.counts != nullptr) count[j] = load_counts(a.counts, id, row.vocab);
    }
    if (i == 0) ptx::copy_async_wait();
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (i + j * kStretch >= row.segment) break;
      const int32_t id = first + i + j * kStretch;
      float4 v = reinterpret_cast<const float4*>(mine)[(i + j * kStretch) / 4];
      if (kAdjusts && a.allowed != nullptr) {  // four ids lie in one word
        const uint32_t bits = word[j] >> (id % 32);
        const float none = __uint_as_float(0xff800000u);
        v.x = (bits & 1u) != 0 ? v.x : none;
        v.y = (bits & 2u) != 0 ? v.y : none;
        v.z = (bits & 4u) != 0 ? v.z : none;
        v.w = (bits & 8u) != 0 ? v.w : none;
      }
      if (kAdjusts && a.counts != nullptr && (count[j].x | count[j].y | count[j].z | count[j].w) != 0) {
        a.penalise(v.x, count[j].x);
        a.penalise(v.y, count[j].y);
        a.penalise(v.z, count[j].z);
        a.penalise(v.w, count[j].w);
      }
      uint4 key = make_uint4(key_of(v.x), key_of(v.y), key_of(v.z), key_of(v.w));
      if (id + 3 >= row.vocab) {
        key.x = id < row.vocab ? key.x : kPaddingKey;
        key.y = id + 1 < row.vocab ? key.y : kPaddingKey;
        key.z = id + 2 < row.vocab ? key.z : kPaddingKey;
        key.w = kPaddingKey;
      }
      largest = max(max(largest, max(key.x, key.y)), max(key.z, key.w));
      mine[(i + j * kStretch) / 4] = key;
    }
  }
  return largest;
}

// Copied logits get the row's biases: any thread's tokens.
__device__ __forceinline__ void add_bias(const ClusterRow& row, const Adjustment& a) {
  ptx::copy_async_wait();
  __syncthreads();
  const auto begin = static_cast<int32_t>(row.rank() * kSampleWarps) * row.segment;
  const int32_t end = min(row.vocab, begin + kSampleWarps * row.segment);
  for (int i = threadIdx.x; i < a.bias_count; i += kSampleThreads) {
    const LogitBias bias = a.bias[i];
    if (bias.token >= begin && bias.token < end) reinterpret_cast<float*>(row.keys)[bias.token - begin] += bias.value;
  }
  __syncthreads();
}

// What this warp's tokens weigh relative to its largest.
__device__ __forceinline__ double weigh_warp(const ClusterRow& row, uint32_t largest, float factor) {
  const Weigh weigh{logit_of(largest), factor};
  double sum = 0;
  row.for_each_four<2>([&](const uint4& four, int32_t) {
    sum += static_cast<double>((weigh(four.x) + weigh(four.y)) + (weigh(four.z) + weigh(four.w)));
  });
  return warp_sum(sum);
}

}  // namespace nfp::cuda
