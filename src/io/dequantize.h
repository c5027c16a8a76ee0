// GGUF's block formats -> FP32 (llama.cpp's ggml-quants.c defines them).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace nfp {

// Numbers are GGUF's own (ggml_type).
enum class GgmlType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
};

struct GgmlTypeInfo {
  GgmlType type;
  std::string_view name;
  int64_t block;                                                           // elements a block
  int64_t bytes;                                                           // bytes a block
  void (*dequantize)(const std::byte* blocks, int64_t count, float* out);  // count blocks
};

// nullptr for types we do not read.
const GgmlTypeInfo* find_ggml_type(uint32_t type);
// The name of a type that we do not read; empty for a number that has none.
std::string_view unread_ggml_type(uint32_t type);

}  // namespace nfp
