// Which matrices are the linear layers that get nested, by what they multiply: the one table of their names.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace nfp {

enum class GemmKind : uint8_t { kQkv, kOutput, kGateUp, kDown, kHead };

inline constexpr size_t kGemmKinds = 5;
inline constexpr std::array<std::string_view, kGemmKinds> kGemmKindNames = {"q/k/v", "o", "gate/up", "down", "lm_head"};

constexpr std::string_view name_of(GemmKind kind) { return kGemmKindNames[static_cast<size_t>(kind)]; }

// By Hugging Face name; nothing for tensors that are not linear layers.
constexpr std::optional<GemmKind> gemm_kind(std::string_view tensor) {
  struct Row {
    std::string_view suffix;
    GemmKind kind;
  };
  constexpr Row kRows[] = {
      {".q_proj.weight", GemmKind::kQkv},       {".k_proj.weight", GemmKind::kQkv},
      {".v_proj.weight", GemmKind::kQkv},       {".o_proj.weight", GemmKind::kOutput},
      {".gate_proj.weight", GemmKind::kGateUp}, {".up_proj.weight", GemmKind::kGateUp},
      {".down_proj.weight", GemmKind::kDown},
  };
  for (const Row& row : kRows) {
    if (tensor.ends_with(row.suffix)) return row.kind;
  }
  return tensor == "lm_head.weight" ? std::optional<GemmKind>(GemmKind::kHead) : std::nullopt;
}

}  // namespace nfp
