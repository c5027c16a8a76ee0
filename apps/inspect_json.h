// What `inspect` says first of a model, and of a config.json.
#pragma once

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <string>

#include "model/config.h"
#include "nested/precision.h"

namespace nfp {

inline nlohmann::ordered_json shape_json(const std::string& path, const ModelConfig& config) {
  return {{"path", path},
          {"architecture", config.architecture},
          {"layers", config.layers},
          {"hidden_size", config.hidden},
          {"heads", config.heads},
          {"kv_heads", config.kv_heads},
          {"head_dim", config.head_dim},
          {"vocab", config.vocab},
          {"max_context", config.max_context},
          {"fp8_steps", {{"cpu", name_of(kFp8OnCpu)}, {"cuda", name_of(kFp8OnGpu)}}}};
}

// Which arithmetic FP8 steps have, for people.
inline std::string fp8_steps_text() {
  return fmt::format(
      "FP8 steps: {} on a CPU (activations of 16 and 32 bits), {} on a GPU (activations in E4M3, one scale a token)",
      name_of(kFp8OnCpu), name_of(kFp8OnGpu));
}

}  // namespace nfp
