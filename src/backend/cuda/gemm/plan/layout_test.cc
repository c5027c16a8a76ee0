#include "backend/cuda/gemm/plan/layout.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

#include "backend/cuda/gemm/plan/pack.h"
#include "base/float_types.h"

namespace nfp::cuda {
namespace {

struct Split {
  uint8_t upper;
  uint8_t lower;
};
Split split(uint16_t bits, bool other_neighbour) {
  const auto magnitude = static_cast<uint16_t>(bits & 0x7fff);
  const auto truncated = static_cast<uint8_t>(magnitude >> 7);
  const bool inexact = (magnitude & 0x7f) != 0;
  const uint8_t nearest = fp32_to_e4m3(fp16_to_fp32(magnitude) * 256.0f);
  uint8_t upper = nearest;
  if (other_neighbour && inexact) upper = nearest == truncated ? static_cast<uint8_t>(truncated + 1) : truncated;
  if ((upper & 0x7f) == 0x7f) upper = nearest;  // no NaN
  return {static_cast<uint8_t>(upper | (bits >> 8 & 0x80)), static_cast<uint8_t>(bits)};
}

bool nestable(uint16_t bits) { return std::abs(fp16_to_fp32(bits)) <= 1.75f; }

TEST(Join, BiasedRestoresEveryPatternRoundedToNearest) {
  int patterns = 0;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto w = static_cast<uint16_t>(bits);
    if (!nestable(w)) continue;
    ++patterns;
    const Split s = split(w, false);
    EXPECT_EQ(join_fp16(Join::kBiased, s.upper, static_cast<uint8_t>(s.lower + kLowerBias)), w);
    EXPECT_EQ(join_fp16(Join::kFree, s.upper, s.lower), w);
  }
  EXPECT_EQ(patterns, 32258);
}

TEST(Join, BiasedAcceptsTheOtherNeighbourWhereTheLowersTopBitIsClear) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto w = static_cast<uint16_t>(bits);
    if (!nestable(w)) continue;
    const Split s = split(w, true);
    EXPECT_EQ(join_fp16(Join::kFree, s.upper, s.lower), w);
    if ((w & 0x80) == 0) {
      EXPECT_EQ(join_fp16(Join::kBiased, s.upper, static_cast<uint8_t>(s.lower + kLowerBias)), w);
    }
  }
}

TEST(Layout, PermutationFollowsTheWgmmaFragment) {
  std::set<int> seen;
  for (int k = 0; k < kBlockK; ++k) {
    EXPECT_EQ(logical_k(permuted_byte(k)), k);
    seen.insert(permuted_byte(k));
  }
  EXPECT_EQ(seen.size(), 64u);
  // A thread with c = 3 holds, in step j = 2, k = 32 + {6, 7, 14, 15}, in bytes 16 * 3 + 4 * 2.
  EXPECT_EQ(permuted_byte(38), 56);
  EXPECT_EQ(permuted_byte(39), 57);
  EXPECT_EQ(permuted_byte(46), 58);
  EXPECT_EQ(permuted_byte(47), 59);
  EXPECT_EQ(activation_byte(64 + 38), 64 + 56);
}

TEST(Layout, PackedSlabsHoldEveryWeightWherePlaneOffsetSays) {
  std::mt19937 random(1);
  const std::pair<int64_t, int64_t> shapes[] = {{64, 64}, {1, 1}, {65, 129}, {200, 576}, {130, 70}};
  for (const auto& [n, k] : shapes) {
    const PlaneShape shape{n, k};
    EXPECT_EQ(shape.padded_k() % 128, 0);
    std::vector<uint8_t> logical(static_cast<size_t>(n * k));
    for (auto& byte : logical) byte = static_cast<uint8_t>(random());
    for (const Join join : {Join::kBiased, Join::kFree}) {
      const uint8_t bias = join == Join::kBiased ? kLowerBias : 0;
      std::vector<uint8_t> plane(shape.bytes(), 0xaa);
      for (int64_t block = 0; block < shape.row_blocks(); ++block) {
        const int64_t first = block * kBlockRows;
        const int rows = static_cast<int>(std::min<int64_t>(kBlockRows, n - first));
        pack_slab(shape, Plane::kLower, join, std::span(logical).subspan(static_cast<size_t>(first * k)), rows,
                  plane.data() + static_cast<size_t>(block) * shape.slab_bytes());
      }
      int64_t padding = 0;
      std::vector<bool> used(plane.size());
      for (int64_t row = 0; row < n; ++row) {
        for (int64_t col = 0; col < k; ++col) {
          const size_t at = plane_offset(shape, row, col);
          ASSERT_FALSE(used[at]);
          used[at] = true;
          ASSERT_EQ(plane[at], static_cast<uint8_t>(logical[static_cast<size_t>(row * k + col)] + bias));
        }
      }
      for (size_t i = 0; i < plane.size(); ++i) {
        if (used[i]) continue;
        ++padding;
        ASSERT_EQ(plane[i], bias);  // a zero weight
      }
      EXPECT_EQ(padding, static_cast<int64_t>(plane.size()) - n * k);
    }
  }
}

TEST(Layout, FastPackingWritesTheSameBytes) {
  std::mt19937 random(2);
  for (const int64_t k : {64, 1, 63, 65, 127, 128, 200, 576, 1000}) {
    for (const int rows : {64, 63, 1, 8, 13}) {
      const PlaneShape shape{64, k};
      std::vector<uint8_t> logical(static_cast<size_t>(rows * k));
      for (auto& byte : logical) byte = static_cast<uint8_t>(random());
      for (const Plane plane : {Plane::kUpper, Plane::kLower}) {
        for (const Join join : {Join::kBiased, Join::kFree}) {
          std::vector<uint8_t> want(shape.slab_bytes(), 0xaa);
          pack_slab(shape, plane, join, logical, rows, want.data());
          for (const size_t offset : {size_t{0}, size_t{3}}) {  // aligned and not
            std::vector<uint8_t> memory(shape.slab_bytes() + 32, 0xbb);
            uint8_t* out = memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & 15) + offset;
            for (int first = 0, count = 0; first < rows; first += count) {  // in pieces
              count = std::min(rows - first, 1 + static_cast<int>(random() % 40));
              pack_rows(shape, plane, join, std::span(logical).subspan(static_cast<size_t>(first * k)), first, count,
                        out);
            }
            pack_zero_rows(shape, plane, join, rows, kBlockRows - rows, out);
            ASSERT_TRUE(std::equal(want.begin(), want.end(), out)) << "k " << k << ", rows " << rows;
            ASSERT_EQ(out[shape.slab_bytes()], 0xbb);
          }
        }
      }
    }
  }
}

TEST(Layout, ActivationsAreInTheOrderOfTheWeights) {
  for (const int64_t k : {1, 16, 63, 64, 130, 576}) {
    const PlaneShape shape{1, k};
    std::vector<uint8_t> codes(static_cast<size_t>(k)), row(static_cast<size_t>(shape.padded_k()), 0xaa);
    for (int64_t i = 0; i < k; ++i) codes[static_cast<size_t>(i)] = static_cast<uint8_t>(1 + i % 200);
    permute_activations(k, codes, row);
    // Row 0 of a plane is not swizzled.
    std::vector<uint8_t> weights(shape.slab_bytes());
    pack_slab(shape, Plane::kUpper, Join::kFree, codes, 1, weights.data());
    for (int64_t byte = 0; byte < shape.padded_k(); ++byte) {
      const int64_t at = byte / kBlockK * kBlockBytes + byte % kBlockK;
      ASSERT_EQ(row[static_cast<size_t>(byte)], weights[static_cast<size_t>(at)]) << "k " << k << ", byte " << byte;
    }
  }
}

TEST(Layout, SwigluRowsPairInsideSixteen) {
  std::set<int64_t> seen;
  for (int64_t i = 0; i < 64; ++i) {
    EXPECT_EQ(swiglu_up_row(i) - swiglu_gate_row(i), 8);
    EXPECT_EQ(swiglu_gate_row(i) / 16, i / 8);
    seen.insert(swiglu_gate_row(i));
    seen.insert(swiglu_up_row(i));
  }
  EXPECT_EQ(seen.size(), 128u);
  EXPECT_EQ(*seen.rbegin(), 127);
}

}  // namespace
}  // namespace nfp::cuda
