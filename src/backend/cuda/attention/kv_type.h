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

// f<type>().
template <typename F>
auto with_kv_type(KvType type, F&& f) {
  switch (type) {
    case KvType::kE4m3:
      return f.template operator()<KvType::kE4m3>();
    case KvType::kBf16:
      return f.template operator()<KvType::kBf16>();
    default:
      return f.template operator()<KvType::kF16>();
  }
}

}  // namespace nfp::cuda
