// The table of model families. A family joins by one file (see docs/adding-a-model.md) and one row in families.cc.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "model/model.h"

namespace nfp {

// What transformers takes for fields that a family's config.json leaves out. A null there is not left out.
struct FamilyDefaults {
  bool tied_embeddings = false;
  int32_t kv_heads = 0;  // 0 = as many as query heads
  int32_t head_dim = 0;  // 0 = hidden_size / num_attention_heads
  int32_t max_context = 2048;
  int32_t sliding_window = 0;  // 0 = none
};

// Optional fields of config.json whose meaning is a family's own.
struct FamilyFields {
  bool attention_bias = false;
  bool mlp_bias = false;
  bool use_sliding_window = false;
  int32_t sliding_window = 0;      // 0 = none
  int32_t max_window_layers = 28;  // layers from this one on have the window, unless layer_types says which
  std::vector<bool> layer_slides;  // layer_types: one entry a layer, or none at all
};

struct Family {
  const char* architecture;  // as config.json spells it
  const char* model_type;
  FamilyDefaults defaults;
  // Fills in what the fields mean. An error's message begins with the field's name.
  Status (*configure)(const FamilyFields& fields, ModelConfig& config);
  Result<std::unique_ptr<Model>> (*load)(const ModelConfig& config, WeightLoader& weights);
};

const Family* find_family(std::string_view architecture, std::string_view model_type);  // null = unknown
std::string family_names();

}  // namespace nfp
