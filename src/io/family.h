// What a model family calls its tensors and what each is for: the one table that loading, GGUF files, conversion,
// inspection, calibration and smoothing read. What a family computes is in src/model/families/.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace nfp {

// The linear layers by what they multiply: the rows of `inspect`'s table, and how a set of FP8 layers is named.
enum class GemmType : uint8_t { kQkv, kOutput, kGateUp, kDown, kHead };

inline constexpr size_t kGemmTypes = 5;
inline constexpr std::array<std::string_view, kGemmTypes> kGemmTypeNames = {"q/k/v", "o", "gate/up", "down", "lm_head"};

constexpr std::string_view name_of(GemmType type) { return kGemmTypeNames[static_cast<size_t>(type)]; }

// What a tensor does in a decoder layer. Matrices that a checkpoint keeps as one have a role of their own.
enum class TensorRole : uint8_t {
  kAttentionNorm,  // of what q, k and v multiply; in families without it that is the residual stream itself
  kQuery,
  kKey,
  kValue,
  kQueryKeyValue,  // one matrix
  kQueryNorm,      // of each head, before rotation
  kKeyNorm,
  kOutput,
  kAttentionPostNorm,  // of what attention adds to the residual stream
  kMlpNorm,            // of what gate and up multiply, likewise
  kGate,
  kUp,
  kGateUp,  // one matrix: all rows of gate, then all of up
  kDown,
  kMlpPostNorm,  // of what the MLP adds to the residual stream
  // Of layers with experts.
  kRouter,      // [experts, hidden], kept in 32 bits
  kExpertGate,  // of each expert, as the next two
  kExpertUp,
  kExpertDown,
  kSharedRouter,  // [1, hidden] how much the shared expert counts, kept in 32 bits
  kSharedGate,    // of the expert that every token has, as the next two
  kSharedUp,
  kSharedDown,
};

// What a matrix belongs to.
enum class Block : uint8_t { kDense, kExpert, kShared };

constexpr Block block_of(TensorRole role) {
  switch (role) {
    case TensorRole::kExpertGate:
    case TensorRole::kExpertUp:
    case TensorRole::kExpertDown:
      return Block::kExpert;
    case TensorRole::kSharedGate:
    case TensorRole::kSharedUp:
    case TensorRole::kSharedDown:
      return Block::kShared;
    default:
      return Block::kDense;
  }
}

constexpr std::optional<GemmType> gemm_type(TensorRole role) {
  switch (role) {
    case TensorRole::kQuery:
    case TensorRole::kKey:
    case TensorRole::kValue:
    case TensorRole::kQueryKeyValue:
      return GemmType::kQkv;
    case TensorRole::kOutput:
      return GemmType::kOutput;
    case TensorRole::kGate:
    case TensorRole::kUp:
    case TensorRole::kGateUp:
    case TensorRole::kExpertGate:
    case TensorRole::kExpertUp:
    case TensorRole::kSharedGate:
    case TensorRole::kSharedUp:
      return GemmType::kGateUp;
    case TensorRole::kDown:
    case TensorRole::kExpertDown:
    case TensorRole::kSharedDown:
      return GemmType::kDown;
    default:
      return std::nullopt;
  }
}

struct LayerTensor {
  TensorRole role;
  std::string_view hf;    // between "model.layers.N." and ".weight"; '#' stands for an expert's number
  std::string_view gguf;  // between "blk.N." and ".weight"
};

enum class FamilyId : uint8_t {
  kLlama,
  kMistral,
  kQwen2,
  kQwen3,
  kSmolLm3,
  kPhi3,
  kGemma,
  kGemma2,
  kGemma3,
  kGranite,
  kMixtral,
  kQwen2Moe,
  kQwen3Moe,
  kOlmo2,
  kOlmo3,
  kOlmoe,
  kSeedOss,
  kExaone4,
  kGlm,
  kGlm4,
  kErnie4_5,
  kMinistral,
  kHelium,
};

struct Family {
  FamilyId id;
  std::string_view architecture;  // as config.json spells them
  std::string_view model_type;
  std::string_view gguf;               // general.architecture; empty = these models come as another family's files,
                                       // as Mistral's do too but for those of Mistral3ForConditionalGeneration;
                                       // two families may share it where one has experts, or the second windows
  std::span<const LayerTensor> layer;  // matrices that are stacked stand in the order of their rows
  bool gguf_permutes_qk = false;       // the converter reorders the rows of q and k (interleaved rotation)
  float norm_offset = 0.0f;            // norms multiply by weight + offset; GGUF files hold the sum

  // Without ".weight"; empty where the family has no such tensor. `expert` counts only for roles of experts.
  std::string name(TensorRole role, int32_t layer, int32_t expert = 0) const;
  std::vector<std::string> names(GemmType type, int32_t layer, Block block = Block::kDense,
                                 int32_t expert = 0) const;  // not of the head
  bool has(TensorRole role) const;
  // The class of these models without a head, of which embeddings are made: "LlamaModel".
  std::string headless_architecture() const;
};

inline constexpr std::string_view kEmbeddingName = "model.embed_tokens";
inline constexpr std::string_view kFinalNormName = "model.norm";
inline constexpr std::string_view kHeadName = "lm_head";

std::span<const Family> families();

struct FoundFamily {
  const Family* family = nullptr;
  bool has_head = true;
};

// By `architecture`, with a head or without, or by `model_type` where that is empty. Errors name the field and what is
// supported.
Result<FoundFamily> find_family(std::string_view architecture, std::string_view model_type);

// Of a tensor by its Hugging Face name; nothing for those that are not the matrix of a linear layer.
std::optional<GemmType> gemm_type(std::string_view tensor);

// "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"; names that the family does not have stay.
std::string hf_name(const Family& family, std::string_view gguf);
std::optional<TensorRole> role_of(const Family& family, std::string_view tensor);  // by Hugging Face name

// The block of a linear layer's matrix by its Hugging Face name; kDense for those that are none.
Block block_of(std::string_view tensor);

// A tensor that chooses experts, or says how much the shared one counts, by its Hugging Face name.
bool is_router(std::string_view tensor);

}  // namespace nfp
