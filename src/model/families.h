// The table of model families. A family joins by one file (see docs/adding-a-model.md) and one row in families.cc.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "model/config.h"
#include "model/model.h"

namespace nfp {

// Optional fields of config.json whose meaning is a family's own.
struct FamilyFields {
  bool attention_bias = false;
  bool mlp_bias = false;
  bool use_sliding_window = true;
  int32_t sliding_window = 0;
};

struct Family {
  const char* architecture;  // as config.json spells it
  const char* model_type;
  bool tied_by_default;  // transformers' default of tie_word_embeddings
  void (*configure)(const FamilyFields& fields, ModelConfig& config);
  Result<std::unique_ptr<Model>> (*load)(const ModelConfig& config, WeightLoader& weights);
};

const Family* find_family(std::string_view architecture, std::string_view model_type);  // null = unknown
std::string family_names();

}  // namespace nfp
