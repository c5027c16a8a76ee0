#include "io/dequantize.h"

#include <cstring>
#include <utility>

#include "base/clones.h"
#include "base/float_types.h"

namespace nfp {
namespace {

float half_at(const std::byte* p) {
  uint16_t bits = 0;
  std::memcpy(&bits, p, sizeof(bits));
  return fp16_to_fp32(bits);
}

uint8_t byte_at(const std::byte* p, int64_t i) { return static_cast<uint8_t>(p[i]); }

uint32_t word_at(const std::byte* p) {
  uint32_t word = 0;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

NFP_CLONES void from_f32(const std::byte* in, int64_t count, float* out) {
  std::memcpy(out, in, static_cast<size_t>(count) * 4);
}

NFP_CLONES void from_f16(const std::byte* in, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = half_at(in + 2 * i);
}

NFP_CLONES void from_bf16(const std::byte* in, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, in + 2 * i, sizeof(bits));
    out[i] = bf16_to_fp32(bits);
  }
}

NFP_CLONES void from_q8_0(const std::byte* in, int64_t count, float* out) {
  for (; count > 0; --count, in += 34, out += 32) {
    const float d = half_at(in);
    for (int64_t i = 0; i < 32; ++i) out[i] = d * static_cast<float>(static_cast<int8_t>(byte_at(in, 2 + i)));
  }
}

// 32 codes of 4 bits (low nibbles first), or 5 with the fifth bits in one word; value = d * (code - offset) + m.
template <bool kFiveBits, bool kMinimum>
[[gnu::always_inline]] inline void from_nibbles(const std::byte* in, int64_t count, float* out) {
  constexpr int64_t kHead = kMinimum ? 4 : 2;
  constexpr int64_t kCodes = kHead + (kFiveBits ? 4 : 0);
  constexpr int kOffset = kMinimum ? 0 : (kFiveBits ? 16 : 8);
  for (; count > 0; --count, in += kCodes + 16, out += 32) {
    const float d = half_at(in);
    const float m = kMinimum ? half_at(in + 2) : 0.0f;
    const uint32_t high = kFiveBits ? word_at(in + kHead) : 0;
    for (int64_t i = 0; i < 16; ++i) {
      const uint32_t codes = byte_at(in, kCodes + i);
      const auto low_code = static_cast<int>((codes & 15u) | (((high >> i) & 1u) << 4));
      const auto high_code = static_cast<int>((codes >> 4) | (((high >> (i + 16)) & 1u) << 4));
      out[i] = static_cast<float>(low_code - kOffset) * d;
      out[i + 16] = static_cast<float>(high_code - kOffset) * d;
      if (!kMinimum) continue;  // adding 0 would turn -0 into 0
      out[i] += m;
      out[i + 16] += m;
    }
  }
}

// Scale and minimum (6 bits each) of sub-block j of a K-quant super-block, from its 12 packed bytes.
struct ScaleMin {
  float scale, minimum;
};
ScaleMin scale_min(const std::byte* packed, int64_t j) {
  uint32_t scale = 0, minimum = 0;
  if (j < 4) {
    scale = byte_at(packed, j) & 63u;
    minimum = byte_at(packed, j + 4) & 63u;
  } else {
    scale = (byte_at(packed, j + 4) & 15u) | ((byte_at(packed, j - 4) >> 6) << 4);
    minimum = (static_cast<uint32_t>(byte_at(packed, j + 4)) >> 4) | ((byte_at(packed, j) >> 6) << 4);
  }
  return {static_cast<float>(scale), static_cast<float>(minimum)};
}

// 256 codes in 8 sub-blocks of 32; value = d * scale * code - dmin * minimum.
template <bool kFiveBits>
[[gnu::always_inline]] inline void from_k_nibbles(const std::byte* in, int64_t count, float* out) {
  constexpr int64_t kHigh = 16;
  constexpr int64_t kCodes = kHigh + (kFiveBits ? 32 : 0);
  for (; count > 0; --count, in += kCodes + 128, out += 256) {
    const float d = half_at(in);
    const float dmin = half_at(in + 2);
    for (int64_t j = 0; j < 8; ++j) {
      const ScaleMin sm = scale_min(in + 4, j);
      const float scale = d * sm.scale;
      const float minimum = dmin * sm.minimum;
      const int64_t bytes = kCodes + 32 * (j / 2);
      for (int64_t i = 0; i < 32; ++i) {
        const uint32_t pair = byte_at(in, bytes + i);
        uint32_t code = (j % 2 == 0) ? (pair & 15u) : (pair >> 4);
        if (kFiveBits) code |= ((byte_at(in, kHigh + i) >> j) & 1u) << 4;
        out[32 * j + i] = scale * static_cast<float>(code) - minimum;
      }
    }
  }
}

// 256 codes of 6 bits: 128 bytes of low nibbles, 64 of high pairs, 16 signed scales, d.
NFP_CLONES void from_q6_k(const std::byte* in, int64_t count, float* out) {
  for (; count > 0; --count, in += 210) {
    const float d = half_at(in + 208);
    for (int64_t half = 0; half < 2; ++half, out += 128) {
      const std::byte* low = in + 64 * half;
      const std::byte* high = in + 128 + 32 * half;
      const std::byte* scales = in + 192 + 8 * half;
      for (int64_t i = 0; i < 128; ++i) {
        const int64_t quarter = i / 32, l = i % 32;
        const uint32_t pair = byte_at(low, l + 32 * (quarter % 2));
        const uint32_t nibble = quarter < 2 ? (pair & 15u) : (pair >> 4);
        const uint32_t top = (static_cast<uint32_t>(byte_at(high, l)) >> (2 * quarter)) & 3u;
        const auto scale = static_cast<int8_t>(byte_at(scales, i / 16));
        out[i] = d * static_cast<float>(scale) * static_cast<float>(static_cast<int>(nibble | (top << 4)) - 32);
      }
    }
  }
}

#define NFP_DEQUANTIZER(name, ...) \
  NFP_CLONES void name(const std::byte* in, int64_t count, float* out) { __VA_ARGS__(in, count, out); }
NFP_DEQUANTIZER(from_q4_0, from_nibbles<false, false>)
NFP_DEQUANTIZER(from_q4_1, from_nibbles<false, true>)
NFP_DEQUANTIZER(from_q5_0, from_nibbles<true, false>)
NFP_DEQUANTIZER(from_q5_1, from_nibbles<true, true>)
NFP_DEQUANTIZER(from_q4_k, from_k_nibbles<false>)
NFP_DEQUANTIZER(from_q5_k, from_k_nibbles<true>)
#undef NFP_DEQUANTIZER

constexpr GgmlTypeInfo kTypes[] = {
    {GgmlType::kF32, "F32", 1, 4, from_f32},        {GgmlType::kF16, "F16", 1, 2, from_f16},
    {GgmlType::kBF16, "BF16", 1, 2, from_bf16},     {GgmlType::kQ4_0, "Q4_0", 32, 18, from_q4_0},
    {GgmlType::kQ4_1, "Q4_1", 32, 20, from_q4_1},   {GgmlType::kQ5_0, "Q5_0", 32, 22, from_q5_0},
    {GgmlType::kQ5_1, "Q5_1", 32, 24, from_q5_1},   {GgmlType::kQ8_0, "Q8_0", 32, 34, from_q8_0},
    {GgmlType::kQ4_K, "Q4_K", 256, 144, from_q4_k}, {GgmlType::kQ5_K, "Q5_K", 256, 176, from_q5_k},
    {GgmlType::kQ6_K, "Q6_K", 256, 210, from_q6_k},
};

constexpr std::pair<uint32_t, std::string_view> kUnread[] = {
    {9, "Q8_1"},      {10, "Q2_K"},     {11, "Q3_K"},     {15, "Q8_K"},  {16, "IQ2_XXS"}, {17, "IQ2_XS"},
    {18, "IQ3_XXS"},  {19, "IQ1_S"},    {20, "IQ4_NL"},   {21, "IQ3_S"}, {22, "IQ2_S"},   {23, "IQ4_XS"},
    {24, "I8"},       {25, "I16"},      {26, "I32"},      {27, "I64"},   {28, "F64"},     {29, "IQ1_M"},
    {31, "Q4_0_4_4"}, {32, "Q4_0_4_8"}, {33, "Q4_0_8_8"}, {34, "TQ1_0"}, {35, "TQ2_0"},   {36, "IQ4_NL_4_4"},
    {39, "MXFP4"},    {40, "NVFP4"},    {41, "Q1_0"},     {42, "Q2_0"},
};

}  // namespace

std::string_view unread_ggml_type(uint32_t type) {
  for (const auto& [number, name] : kUnread) {
    if (number == type) return name;
  }
  return {};
}

const GgmlTypeInfo* find_ggml_type(uint32_t type) {
  for (const GgmlTypeInfo& info : kTypes) {
    if (static_cast<uint32_t>(info.type) == type) return &info;
  }
  return nullptr;
}

}  // namespace nfp
