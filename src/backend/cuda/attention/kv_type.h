// What a KV cache holds.
#pragma once

#include <cstdint>

namespace nfp::cuda {

enum class KvType : uint8_t {
  kF16,
  kE4m3,  // a number is worth code * scale
  kBf16,
};
constexpr bool is_e4m3(KvType type) { return type == KvType::kE4m3; }

}  // namespace nfp::cuda
