// The race of backend/race.h in a cluster's row, and what likelier tokens weigh than one.
#pragma once

#include <cstdint>

#include "backend/cuda/sampling/cluster_row.cuh"
#include "backend/cuda/sampling/weigh.cuh"
#include "backend/race.h"

namespace nfp::cuda {

// Tokens likelier than this one: with a larger key, or with its key and a lower id.
struct Cut {
  uint32_t key;
  int32_t id;
  __device__ __forceinline__ bool keeps(uint32_t of_key, int32_t of_id) const {
    return of_key > key - (of_id < id ? 1 : 0);  // no key is 0 here
  }
};

inline constexpr int32_t kNobody = INT32_MAX;
struct Runner {
  double arrival = __builtin_inf();
  uint32_t key = 0;
  int32_t id = kNobody;  // the lower one wins a tie
};

// The first one of the lanes' runners.
__device__ __forceinline__ Runner first_of_warp(Runner r) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const double arrival = __shfl_xor_sync(0xffffffffu, r.arrival, offset);
    const uint32_t key = __shfl_xor_sync(0xffffffffu, r.key, offset);
    const int32_t id = __shfl_xor_sync(0xffffffffu, r.id, offset);
    if (arrival < r.arrival || (arrival == r.arrival && id < r.id)) r = {arrival, key, id};
  }
  return r;
}

// coarse_words() and fine_words(). (That a product's halves are apart is not seen in portable code.)
__device__ __forceinline__ uint2 race_words(RaceKey k, uint32_t four) {
  uint2 c = make_uint2(four, k.high);
#pragma unroll
  for (uint32_t round = 0; round < kPhiloxRounds; ++round) {
    uint2 product;
    asm("{\n.reg .b64 p;\nmul.wide.u32 p, %2, %3;\nmov.b64 {%0, %1}, p;\n}"
        : "=r"(product.x), "=r"(product.y)
        : "r"(c.x), "n"(kPhilox2x32Factor));
    c = make_uint2(product.y ^ c.y ^ (k.key + round * kPhiloxKeyStep), product.x);
  }
  return c;
}

// exponential_of() in FP32, within 2^-16 of it: -ln(1 - v) as a series in v where v is small, for there a logarithm of
// 1 - v would be rounded away.
__device__ __forceinline__ float about_exponential_of(uint32_t word) {
  const float v = __fmaf_rn(__uint2float_rn(word), 0x1p-32f, 0x1p-33f);
  const float rest = __fmaf_rn(__uint2float_rn(~word), 0x1p-32f, 0x1p-33f);  // 1 - v
  const float series = v * __fmaf_rn(v, __fmaf_rn(v, __fmaf_rn(v, 0.25f, 0.333333333f), 0.5f), 1.0f);
  float log2_of_rest;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2_of_rest) : "f"(rest));
  return v < 0.0625f ? series : log2_of_rest * -0.693147181f;
}

// Who arrives first of the row's tokens that the cut keeps; every thread gets it. Threads find their own first ones in
// FP32; where several may be the row's, they are timed exactly. (A thread whose first two are within FP32's rounding of
// each other may choose the wrong one: where rounding decides in any case.) The runner's arrival is not told.
__device__ __forceinline__ Runner first_of_row(ClusterRow& row, const Cut& cut, float maximum) {
  constexpr float kSlack = 1.0f + 0x1p-12f;
  const SamplingRow& s = row.shared.row;
  const RaceKey race = race_key(s.seed, s.draw);
  const float rate = fminf(1.44269504f / s.temperature, 3.402823466e38f);
  float first = __uint_as_float(0x7f800000u);
  int32_t first_id = kNobody;
  float bound = first;  // whoever is later is not the warp's first one; in units of 2^-16
  if (row.reaches(cut.key)) {
    row.for_each_four([&](const uint4& four, int32_t id) {
      const uint32_t key[4] = {four.x, four.y, four.z, four.w};
      const auto coarse = race_words(race, static_cast<uint32_t>(id) / 4);
      float times[4];  // 1 / weight
      bool is_in = false;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float down = (maximum - logit_of(key[j])) * rate;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(times[j]) : "f"(down));
        // E is no smaller than the number it is made of, nor that than its coarse bits.
        // (2^23 and those bits in its last places: conversions are slow.)
        const uint32_t bits = __byte_perm(j < 2 ? coarse.x : coarse.y, 0x4b000000u, j % 2 == 0 ? 0x7410 : 0x7432);
        is_in |= key[j] >= cut.key && (__uint_as_float(bits) - 0x1p23f) * times[j] < bound;
      }
      if (__ballot_sync(0xffffffffu, is_in) == 0) return;
      const auto fine = race_words({race.key, race.high ^ kFineBit}, static_cast<uint32_t>(id) / 4);
      const uint32_t word[4] = {__byte_perm(fine.x, coarse.x, 0x5410), __byte_perm(fine.x, coarse.x, 0x7632),
                                __byte_perm(fine.y, coarse.y, 0x5410), __byte_perm(fine.y, coarse.y, 0x7632)};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float arrival = about_exponential_of(word[j]) * times[j];
        if (arrival < first && cut.keeps(key[j], id + j)) {
          first = arrival;
          first_id = id + j;
        }
      }
      bound = __uint_as_float(__reduce_min_sync(0xffffffffu, __float_as_uint(first))) * (kSlack * 0x1p16f);
    });
  }
  // The warps' first ones: when, in FP32, who, and whether that is certain.
  const float of_warp = __uint_as_float(__reduce_min_sync(0xffffffffu, __float_as_uint(first)));
  const uint32_t near = __ballot_sync(0xffffffffu, first_id != kNobody && first <= of_warp * kSlack);
  const int32_t id = __shfl_sync(0xffffffffu, first_id, (__ffs(static_cast<int>(near)) - 1) & 31);
  const bool is_certain = __popc(near) <= 1;
  const uint32_t key = near != 0 ? row.warp_keys()[id - row.first_id()] : 0;
  const Told* told = row.tell(uint64_t{__float_as_uint(of_warp)} << 32 | static_cast<uint32_t>(id),
                              __longlong_as_double(static_cast<int64_t>(uint64_t{is_certain ? 0u : 1u} << 32 | key)));
  uint32_t earliest = 0xffffffffu;
  for (uint32_t i = row.lane; i < row.warps(); i += 32)
    earliest = min(earliest, static_cast<uint32_t>(told[i].word >> 32));
  bound = __uint_as_float(__reduce_min_sync(0xffffffffu, earliest)) * kSlack;
  uint32_t count = 0, owner = 0;  // of those that may be the row's first one
  for (uint32_t i = row.lane; i < row.warps(); i += 32) {
    if (__uint_as_float(static_cast<uint32_t>(told[i].word >> 32)) > bound) continue;
    count += 1 + static_cast<uint32_t>(static_cast<uint64_t>(__double_as_longlong(told[i].sum)) >> 32);
    owner = i;
  }
  if (__reduce_add_sync(0xffffffffu, count) == 1) {
    const Told& winner = told[__reduce_max_sync(0xffffffffu, owner)];
    return {0.0, static_cast<uint32_t>(__double_as_longlong(winner.sum)), static_cast<int32_t>(winner.word)};
  }
  Runner mine;
  if (first_id != kNobody && first <= bound) {
    mine.key = row.warp_keys()[first_id - row.first_id()];
    mine.id = first_id;
    asm volatile("" : "+f"(maximum));  // or it is kept in FP64 too
    mine.arrival = arrival_of(race_word(race, first_id), logit_of(mine.key), maximum, 1.0f / s.temperature);
  }
  mine = first_of_warp(mine);
  told = row.tell(uint64_t{mine.key} << 32 | static_cast<uint32_t>(mine.id), mine.arrival);
  Runner winner;
  for (uint32_t i = row.lane; i < row.warps(); i += 32) {
    const Told& other = told[i];
    if (other.sum < winner.arrival)  // warps are in order of id
      winner = {other.sum, static_cast<uint32_t>(other.word >> 32), static_cast<int32_t>(other.word)};
  }
  return first_of_warp(winner);
}

// What the tokens weigh that the cut keeps; every thread gets it. A call, as race() is.
struct KeptWeight {
  double sum;
  uint32_t exchanges;
};
__device__ __noinline__ KeptWeight weigh_kept(RowShared& shared, RowCut shape, uint32_t exchanges, Cut cut,
                                              float maximum) {
  ClusterRow row = make_row(shared, shape, 0, exchanges);
  const Weigh weigh{maximum, 1.0f / shared.row.temperature};
  double mine = 0;
  if (row.reaches(cut.key)) {
    row.for_each_four([&](const uint4& four, int32_t id) {
      const uint32_t key[4] = {four.x, four.y, four.z, four.w};
      float w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) w[j] = cut.keeps(key[j], id + j) ? weigh(key[j]) : 0.0f;
      mine += static_cast<double>((w[0] + w[1]) + (w[2] + w[3]));
    });
    mine = warp_sum(mine);
  }
  const Told* told = row.tell(0, mine);
  double sum = 0;
  for (uint32_t i = row.lane; i < row.warps(); i += 32) sum += told[i].sum;
  return {warp_sum(sum), row.exchanges};
}

// The token that is drawn of those that the cut keeps, with top-p's target in shared.target. Top-p keeps the likeliest,
// until they weigh enough: the winner, if those likelier do not. Where they do it keeps nobody who is as unlikely as
// the winner, and the others' race is run again: 1 + ln(1 / top_p) times on average, since the winner is as likely in
// any place of the weight. A call, since its caller has no registers left for it; so it takes the row in parts.
struct Raced {
  int32_t id;
  uint32_t exchanges;
};
__device__ __noinline__ Raced race(RowShared& shared, RowCut shape, uint32_t exchanges, Cut cut, float maximum) {
  while (true) {
    ClusterRow row = make_row(shared, shape, 0, exchanges);
    const Runner winner = first_of_row(row, cut, maximum);
    if (!(shared.row.top_p < 1.0f)) return {winner.id, row.exchanges};
    cut = {winner.key, winner.id};
    const KeptWeight before = weigh_kept(shared, shape, row.exchanges, cut, maximum);
    exchanges = before.exchanges;
    if (before.sum <= 0.0 || before.sum < shared.target) return {winner.id, exchanges};
  }
}

}  // namespace nfp::cuda
