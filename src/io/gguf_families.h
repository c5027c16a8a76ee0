// From a GGUF file's metadata to fields of config.json that are a family's own: what the file says, and what llama.cpp,
// for which such files are made, takes for granted (its src/models/ and conversion/).
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "io/family.h"
#include "io/gguf.h"

namespace nfp {

inline constexpr int64_t kMostLayers = 4096;  // configurations with more are refused

// The family of a file; `path` is for messages. One architecture's name may mean two families, with experts and
// without, or with windows and without.
Result<const Family*> family_of_gguf(const GgufFile& gguf, const std::string& path);

// Keys that may be left out are of the kind that is read.
Status check_kinds(const Family& family, const GgufFile& gguf, const std::string& path);

struct GgufFacts {
  const Family& family;
  const GgufFile& gguf;
  std::string path;
  // Of tensors: divisors of frequencies, and layers with a dense MLP where others have experts.
  std::vector<float> long_factors, short_factors;
  std::vector<int32_t> dense_layers;

  std::string key(std::string_view suffix) const;  // "llama.SUFFIX"
};

// `config` holds what all families have.
void add_family_fields(const GgufFacts& facts, nlohmann::ordered_json& config);
// What changes a model's results and is not supported is refused, by its key.
Status check_metadata(const GgufFacts& facts, const nlohmann::ordered_json& config);
// YaRN and linear scaling of rotation.
Status add_rope_scaling(const GgufFacts& facts, nlohmann::ordered_json& config);
// The same beside tensors of divisors, which llama.cpp computes together.
Status refuse_rope_scaling(const GgufFacts& facts);

}  // namespace nfp
