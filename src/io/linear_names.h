// Which tensors are the weights of linear layers, by their Hugging Face names.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace nfp {

enum class LinearKind : uint8_t { kQkv, kO, kGateUp, kDown, kHead };

inline constexpr std::array<std::string_view, 5> kLinearKindNames = {"q/k/v", "o", "gate/up", "down", "lm_head"};

constexpr std::string_view name_of(LinearKind kind) { return kLinearKindNames[static_cast<size_t>(kind)]; }

// Nothing for norms, biases, embeddings and whatever else is no linear layer. The suffixes are those that Llama and the
// families that follow its naming use, fused ones (Phi's qkv_proj, gate_up_proj) included.
constexpr std::optional<LinearKind> linear_kind(std::string_view tensor) {
  struct Suffix {
    std::string_view text;
    LinearKind kind;
  };
  constexpr Suffix kSuffixes[] = {
      {".q_proj.weight", LinearKind::kQkv},     {".k_proj.weight", LinearKind::kQkv},
      {".v_proj.weight", LinearKind::kQkv},     {".qkv_proj.weight", LinearKind::kQkv},
      {".o_proj.weight", LinearKind::kO},       {".gate_proj.weight", LinearKind::kGateUp},
      {".up_proj.weight", LinearKind::kGateUp}, {".gate_up_proj.weight", LinearKind::kGateUp},
      {".down_proj.weight", LinearKind::kDown},
  };
  if (tensor == "lm_head.weight") return LinearKind::kHead;
  for (const Suffix& suffix : kSuffixes) {
    if (tensor.ends_with(suffix.text)) return suffix.kind;
  }
  return std::nullopt;
}

}  // namespace nfp
