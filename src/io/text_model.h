// Parts of a whole model: the text model of a multimodal checkpoint (its part of config.json, and its tensors' names),
// and a model that was saved without its head.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"

namespace nfp {

// Of a multimodal configuration that we know the config.json of its text model: text_config, with what is said beside
// it of ids, dtype and quantisation. Nothing for other configurations. `name` is the file, for messages.
Result<std::optional<std::string>> text_model_config(std::string_view config_json, const std::string& name);

// Of a configuration that says that the head is the model's own, and not the embedding, in files that have none: the
// same with the architecture of a model without a head. Nothing for other configurations.
Result<std::optional<std::string>> headless_config(std::string_view config_json, const std::string& name);

// A tensor's name in the text model; nothing for those of other parts.
std::optional<std::string> text_model_tensor(std::string_view name);

}  // namespace nfp
