// What `inspect` says first of a model, and of a config.json.
#pragma once

#include <nlohmann/json.hpp>

#include <string>

#include "model/config.h"

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
          {"max_context", config.max_context}};
}

}  // namespace nfp
