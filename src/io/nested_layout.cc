#include "io/nested_layout.h"

#include <optional>

#include "io/json_object.h"

namespace nfp {
namespace {

using Json = nlohmann::ordered_json;

// llm-compressor's FP8_DYNAMIC scheme: static weight scale per output channel, activations scaled per token as they
// come.
Json quantization_config(const std::vector<std::string>& ignore) {
  Json weights = {{"num_bits", 8},         {"type", "float"},  {"symmetric", true},
                  {"strategy", "channel"}, {"dynamic", false}, {"observer", "minmax"}};
  Json activations = {{"num_bits", 8},       {"type", "float"}, {"symmetric", true},
                      {"strategy", "token"}, {"dynamic", true}, {"observer", nullptr}};
  return {{"quant_method", "compressed-tensors"},
          {"format", "float-quantized"},
          {"quantization_status", "compressed"},
          {"kv_cache_scheme", nullptr},
          {"ignore", ignore},
          {"config_groups",
           {{"group_0",
             {{"targets", {"Linear"}},
              {"weights", std::move(weights)},
              {"input_activations", std::move(activations)},
              {"output_activations", nullptr}}}}}};
}

std::optional<DType> nested_dtype(const Json& value) {
  if (!value.is_string()) return std::nullopt;
  const auto dtype = dtype_from_safetensors(value.get<std::string>());
  return dtype == DType::kF16 || dtype == DType::kBF16 ? dtype : std::nullopt;
}

}  // namespace

Result<std::string> nested_config(std::string_view config, const std::string& name, const NestedHeader& header,
                                  const std::vector<std::string>& ignore) {
  NFP_ASSIGN_OR_RETURN(Json json, parse_json_object(config, name));
  json["quantization_config"] = quantization_config(ignore);
  Json own = {{"version", kNestedVersion},
              {"lower", std::string(kNestedFolder) + "/" + kLowerIndex},
              {"source_dtype", info(header.source_dtype).safetensors_name},
              {"rule", header.uppers_restricted ? "restricted" : "free"},
              {"dense", header.dense}};
  if (!header.other_dtypes.empty()) {
    for (const auto& [tensor, dtype] : header.other_dtypes) own["dtypes"][tensor] = info(dtype).safetensors_name;
  }
  if (!header.inexact.empty()) own["inexact"] = header.inexact;
  if (!header.calibration.empty()) {
    NFP_ASSIGN_OR_RETURN(own["calibration"], parse_json_object(header.calibration, "calibration"));
  }
  json["nestedfp"] = std::move(own);
  return to_text(json);
}

Result<std::string> plain_config(std::string_view config, const std::string& name) {
  NFP_ASSIGN_OR_RETURN(Json json, parse_json_object(config, name));
  json.erase("quantization_config");
  json.erase("nestedfp");
  return to_text(json);
}

Result<NestedHeader> parse_nested_header(std::string_view config, const std::string& name) {
  NFP_ASSIGN_OR_RETURN(const Json json, parse_json_object(config, name));
  const auto bad = [&](std::string_view field, std::string_view expected) {
    return error(ErrorCode::kInvalidInput, "{}: nestedfp.{} must be {}; convert the model again", name, field,
                 expected);
  };
  if (!json.contains("nestedfp") || !json["nestedfp"].is_object()) {
    return error(ErrorCode::kInvalidInput, "{}: field 'nestedfp' must be an object; convert the model again", name);
  }
  const Json& own = json["nestedfp"];
  const auto field = [&own](const char* key) { return own.contains(key) ? own[key] : Json(); };
  if (!field("version").is_number_integer()) return bad("version", "a whole number");
  if (field("version") != kNestedVersion) {
    return error(ErrorCode::kUnsupported, "{}: nestedfp.version is {}, but this program reads {}; update it", name,
                 field("version").dump(), kNestedVersion);
  }
  NestedHeader header;
  const auto dtype = nested_dtype(field("source_dtype"));
  if (!dtype) return bad("source_dtype", "F16 or BF16");
  header.source_dtype = *dtype;
  const Json rule = field("rule");
  if (rule != "restricted" && rule != "free") return bad("rule", "restricted or free");
  header.uppers_restricted = rule == "restricted";
  if (const Json dtypes = field("dtypes"); !dtypes.is_null()) {
    if (!dtypes.is_object()) return bad("dtypes", "an object");
    for (const auto& [tensor, value] : dtypes.items()) {
      const auto one = nested_dtype(value);
      if (!one) return bad("dtypes", "of F16 and BF16");
      header.other_dtypes.emplace(tensor, *one);
    }
  }
  if (const Json inexact = field("inexact"); !inexact.is_null()) {
    if (!inexact.is_object()) return bad("inexact", "an object");
    for (const auto& [tensor, count] : inexact.items()) {
      if (!count.is_number_integer()) return bad("inexact", "of whole numbers");
      header.inexact.emplace(tensor, count.get<int64_t>());
    }
  }
  return header;
}

}  // namespace nfp
