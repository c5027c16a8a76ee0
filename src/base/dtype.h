// The one table of element types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace nfp {

enum class DType : uint8_t {
  kF32,
  kF16,
  kBF16,
  kF8E4M3,
  kF8E5M2,
  kU8,
  kI8,
  kI16,
  kU16,
  kI32,
  kU32,
  kI64,
  kU64,
  kF64,
  kBool
};

struct DTypeInfo {
  DType dtype;
  std::string_view name;              // ours, for messages
  std::string_view safetensors_name;  // as a safetensors header spells it
  size_t size;                        // bytes an element
};

inline constexpr DTypeInfo kDTypes[] = {
    {DType::kF32, "f32", "F32", 4},
    {DType::kF16, "f16", "F16", 2},
    {DType::kBF16, "bf16", "BF16", 2},
    {DType::kF8E4M3, "e4m3", "F8_E4M3", 1},
    {DType::kF8E5M2, "e5m2", "F8_E5M2", 1},
    {DType::kU8, "u8", "U8", 1},
    {DType::kI8, "i8", "I8", 1},
    {DType::kI16, "i16", "I16", 2},
    {DType::kU16, "u16", "U16", 2},
    {DType::kI32, "i32", "I32", 4},
    {DType::kU32, "u32", "U32", 4},
    {DType::kI64, "i64", "I64", 8},
    {DType::kU64, "u64", "U64", 8},
    {DType::kF64, "f64", "F64", 8},
    {DType::kBool, "bool", "BOOL", 1},
};

constexpr const DTypeInfo& info(DType dtype) { return kDTypes[static_cast<size_t>(dtype)]; }
constexpr size_t size_of(DType dtype) { return info(dtype).size; }
// What weights are converted from.
constexpr bool is_weight_float(DType dtype) {
  return dtype == DType::kF16 || dtype == DType::kBF16 || dtype == DType::kF32;
}
constexpr std::string_view name_of(DType dtype) { return info(dtype).name; }

constexpr std::optional<DType> dtype_from_safetensors(std::string_view name) {
  for (const DTypeInfo& row : kDTypes) {
    if (row.safetensors_name == name) return row.dtype;
  }
  return std::nullopt;
}

constexpr bool dtype_table_is_in_order() {
  size_t i = 0;
  for (const DTypeInfo& row : kDTypes) {
    if (static_cast<size_t>(row.dtype) != i++) return false;
  }
  return true;
}
static_assert(dtype_table_is_in_order());

}  // namespace nfp
