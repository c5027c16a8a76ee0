// The JSON of the engine's C interface: options and requests in, outputs out. Every field is checked by name.
#pragma once

#include <nlohmann/json.hpp>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "engine/request.h"
#include "runtime/loaded_model.h"
#include "text/tokenizer.h"

namespace nfp::capi {

struct EngineSettings {
  LoadedModelOptions model;
  EngineConfig serving;
  std::optional<Precision> fp8;  // absent = the backend's fastest
  std::string policy = "fp16";
  std::string generation_config = "auto";  // as load_sampling_defaults has it
};

// kUsage, with `what` in the message: not JSON, too deep, or no object.
Result<nlohmann::ordered_json> parse_object(std::string_view text, std::string_view what);

Result<EngineSettings> parse_settings(const nlohmann::ordered_json& json);
// `tokenizer` for bad_words; null = they are refused.
Result<Request> parse_request(const nlohmann::ordered_json& json, const Tokenizer* tokenizer, int32_t vocab);
Result<std::vector<int32_t>> parse_ids(const nlohmann::ordered_json& json, std::string_view field);

nlohmann::ordered_json to_json(const RequestOutput& output);

// An error of what this program is made of, whose flags it names ("a larger --gpu-memory-utilization"), with the
// options that callers of this library have in their place.
std::string naming_options(std::string_view message);

}  // namespace nfp::capi
