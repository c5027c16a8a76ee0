// Logits from global memory into the cluster's shared memory, with bias, mask and penalties, and what is known of them
// once they have gone by: each thread's largest and what they weigh.
#pragma once

#include <cstdint>

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

// Stores the keys of what it is given and weighs them while they are in registers: relative to the warp's largest so
// far, so that no thread waits for other warps.
struct Loader {
  const ClusterRow& row;
  float factor;  // of the weights; 0 = they are not asked for
  uint32_t largest = kPaddingKey;
  double sum = 0;  // this lane's weights, relative to `reference`
  uint32_t reference = kPaddingKey;

  // v[j]: the lane's four ids in stretch j of those from id first_id() + i on.
  template <int kUnroll>
  __device__ __forceinline__ void take(const float4 (&v)[kUnroll], int i) {
    const int32_t first = row.first_id() + static_cast<int32_t>(row.lane) * 4 + i;
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (i + j * kStretch >= row.segment) break;
      const int32_t id = first + j * kStretch;
      uint4 key = make_uint4(key_of(v[j].x), key_of(v[j].y), key_of(v[j].z), key_of(v[j].w));
      if (id + 3 >= row.vocab) {
        key.x = id < row.vocab ? key.x : kPaddingKey;
        key.y = id + 1 < row.vocab ? key.y : kPaddingKey;
        key.z = id + 2 < row.vocab ? key.z : kPaddingKey;
        key.w = kPaddingKey;
      }
      largest = max(max(largest, max(key.x, key.y)), max(key.z, key.w));
      reinterpret_cast<uint4*>(row.warp_keys())[(i + j * kStretch) / 4 + static_cast<int>(row.lane)] = key;
    }
    if (factor == 0.0f) return;
    const uint32_t of_warp = __reduce_max_sync(0xffffffffu, largest);
    const Weigh weigh{logit_of(of_warp), factor};
    if (of_warp != reference) sum *= static_cast<double>(weigh(reference));
    reference = of_warp;
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (i + j * kStretch >= row.segment) break;
      sum += static_cast<double>((weigh.of_logit(v[j].x) + weigh.of_logit(v[j].y)) +
                                 (weigh.of_logit(v[j].z) + weigh.of_logit(v[j].w)));
    }
  }
};

template <bool kAligned>
__device__ __forceinline__ void load_row(Loader& loader, const float* logits) {
  constexpr int kUnroll = 8;
  const ClusterRow& row = loader.row;
  const int32_t first = row.first_id() + static_cast<int32_t>(row.lane) * 4;
  for (int i = 0; i < row.segment; i += kUnroll * kStretch) {
    float4 v[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (i + j * kStretch < row.segment) v[j] = load_four<kAligned>(logits, first + i + j * kStretch, row.vocab);
    }
    loader.take(v, i);
  }
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

// load_row with bias, mask and penalties, in this order.
template <bool kAligned>
__device__ __forceinline__ void load_adjusted(Loader& loader, const float* logits, const Adjustment& a) {
  constexpr int kUnroll = 4;
  const ClusterRow& row = loader.row;
  float4* mine = reinterpret_cast<float4*>(row.warp_keys()) + row.lane;
  const int32_t first = row.first_id() + static_cast<int32_t>(row.lane) * 4;
  if (a.bias != nullptr) {  // tokens are scattered: first the logits, then the biases on top
#pragma unroll 4
    for (int i = 0; i < row.segment; i += kStretch) mine[i / 4] = load_four<kAligned>(logits, first + i, row.vocab);
    __syncthreads();
    const auto begin = static_cast<int32_t>(row.rank * kSampleWarps) * row.segment;
    const int32_t end = min(row.vocab, begin + kSampleWarps * row.segment);
    for (int i = threadIdx.x; i < a.bias_count; i += kSampleThreads) {
      const LogitBias bias = a.bias[i];
      if (bias.token >= begin && bias.token < end) reinterpret_cast<float*>(row.keys)[bias.token - begin] += bias.value;
    }
    __syncthreads();
  }
  for (int i = 0; i < row.segment; i += kUnroll * kStretch) {
    float4 v[kUnroll];
    uint32_t word[kUnroll];
    uint4 count[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const int at = i + j * kStretch;
      if (at >= row.segment) break;
      const int32_t id = first + at;
      v[j] = a.bias != nullptr ? mine[at / 4] : load_four<kAligned>(logits, id, row.vocab);
      if (a.allowed != nullptr) word[j] = id / 32 < a.allowed_words ? a.allowed[id / 32] : 0;
      if (a.counts != nullptr) count[j] = load_counts(a.counts, id, row.vocab);
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (i + j * kStretch >= row.segment) break;
      if (a.allowed != nullptr) {  // four ids lie in one word
        const uint32_t bits = word[j] >> ((first + i + j * kStretch) % 32);
        const float none = __uint_as_float(0xff800000u);
        v[j].x = (bits & 1u) != 0 ? v[j].x : none;
        v[j].y = (bits & 2u) != 0 ? v[j].y : none;
        v[j].z = (bits & 4u) != 0 ? v[j].z : none;
        v[j].w = (bits & 8u) != 0 ? v[j].w : none;
      }
      if (a.counts != nullptr && (count[j].x | count[j].y | count[j].z | count[j].w) != 0) {
        a.penalise(v[j].x, count[j].x);
        a.penalise(v[j].y, count[j].y);
        a.penalise(v[j].z, count[j].z);
        a.penalise(v[j].w, count[j].w);
      }
    }
    loader.take(v, i);
  }
}

}  // namespace nfp::cuda
