#include "io/nested_checkpoint.h"

#include <nlohmann/json.hpp>

#include <utility>

#include "io/model_json.h"

namespace nfp {
namespace {

using Json = nlohmann::ordered_json;

struct RuleName {
  UpperRule rule;
  std::string_view name;
};
constexpr RuleName kRules[] = {
    {UpperRule::kNearest, "nearest"}, {UpperRule::kRestricted, "restricted"}, {UpperRule::kFree, "free"}};

Result<DType> weight_dtype(const Json& value, const std::string& name) {
  if (value.is_string()) {
    const auto dtype = dtype_from_safetensors(value.get<std::string>());
    if (dtype == DType::kF16 || dtype == DType::kBF16) return *dtype;
  }
  return error(ErrorCode::kInvalidInput, "{}: nestedfp: a dtype must be \"F16\" or \"BF16\"; convert the model again",
               name);
}

}  // namespace

Result<NestedInfo> parse_nested_info(std::string_view config_json, const std::string& name) {
  NFP_ASSIGN_OR_RETURN(const Json root, parse_model_json<Json>(config_json, name));
  const auto bad = [&](std::string_view field) {
    return error(ErrorCode::kInvalidInput, "{}: nestedfp: field '{}' is missing or wrong; convert the model again",
                 name, field);
  };
  if (!root.contains("nestedfp") || !root["nestedfp"].is_object()) return bad("nestedfp");
  const Json& object = root["nestedfp"];
  if (!object.contains("version") || !object["version"].is_number_integer()) return bad("version");
  if (object["version"] != kNestedFormatVersion) {
    return error(ErrorCode::kUnsupported, "{}: is of nested format version {}; this program reads version {}", name,
                 object["version"].dump(), kNestedFormatVersion);
  }
  NestedInfo info;
  if (!object.contains("lower") || !object["lower"].is_string()) return bad("lower");
  info.lower_directory = object["lower"].get<std::string>();
  if (info.lower_directory.empty() || info.lower_directory.find('/') != std::string::npos ||
      info.lower_directory == "..") {
    return bad("lower");
  }
  if (!object.contains("source_dtype")) return bad("source_dtype");
  NFP_ASSIGN_OR_RETURN(info.source_dtype, weight_dtype(object["source_dtype"], name));
  if (object.contains("dtypes")) {
    if (!object["dtypes"].is_object()) return bad("dtypes");
    for (const auto& [tensor, dtype] : object["dtypes"].items()) {
      NFP_ASSIGN_OR_RETURN(info.dtypes[tensor], weight_dtype(dtype, name));
    }
  }
  if (object.contains("inexact")) {
    if (!object["inexact"].is_array()) return bad("inexact");
    for (const Json& tensor : object["inexact"]) {
      if (!tensor.is_string()) return bad("inexact");
      info.inexact.insert(tensor.get<std::string>());
    }
  }
  if (!object.contains("uppers") || !object["uppers"].is_string()) return bad("uppers");
  for (const RuleName& row : kRules) {
    if (object["uppers"] == row.name) {
      info.uppers = row.rule;
      return info;
    }
  }
  return bad("uppers");
}

Result<std::string> nested_config(std::string_view source_config, const NestedInfo& info,
                                  const std::vector<std::string>& dense) {
  NFP_ASSIGN_OR_RETURN(Json config, parse_model_json<Json>(source_config, "config.json"));
  const Json weights = {
      {"num_bits", 8},      {"type", "float"},      {"strategy", "channel"}, {"symmetric", true},
      {"dynamic", false},   {"observer", "minmax"}, {"group_size", nullptr}, {"block_structure", nullptr},
      {"actorder", nullptr}};
  const Json activations = {
      {"num_bits", 8},      {"type", "float"},     {"strategy", "token"},   {"symmetric", true},
      {"dynamic", true},    {"observer", nullptr}, {"group_size", nullptr}, {"block_structure", nullptr},
      {"actorder", nullptr}};
  config["quantization_config"] = {{"quant_method", "compressed-tensors"},
                                   {"format", "float-quantized"},
                                   {"quantization_status", "compressed"},
                                   {"global_compression_ratio", nullptr},
                                   {"kv_cache_scheme", nullptr},
                                   {"ignore", dense},
                                   {"config_groups",
                                    {{"group_0",
                                      {{"targets", {"Linear"}},
                                       {"weights", weights},
                                       {"input_activations", activations},
                                       {"output_activations", nullptr}}}}}};
  Json object = {{"version", kNestedFormatVersion},
                 {"lower", info.lower_directory},
                 {"source_dtype", nfp::info(info.source_dtype).safetensors_name}};
  for (const RuleName& row : kRules) {
    if (row.rule == info.uppers) object["uppers"] = row.name;
  }
  if (!info.dtypes.empty()) {
    // Appended: by [] each would be looked up among those before it.
    Json dtypes = Json::object();
    auto& list = dtypes.get_ref<Json::object_t&>();
    for (const auto& [tensor, dtype] : info.dtypes) list.emplace_back(tensor, nfp::info(dtype).safetensors_name);
    object["dtypes"] = std::move(dtypes);
  }
  for (const std::string& tensor : info.inexact) object["inexact"].push_back(tensor);
  if (!info.calibration.empty()) {
    NFP_ASSIGN_OR_RETURN(object["calibration"], parse_model_json<Json>(info.calibration, "calibration"));
  }
  config["nestedfp"] = object;
  return dump_model_json(std::move(config)) + "\n";
}

Result<std::string> plain_config(std::string_view nested_config) {
  NFP_ASSIGN_OR_RETURN(Json config, parse_model_json<Json>(nested_config, "config.json"));
  config.erase("quantization_config");
  config.erase("nestedfp");
  return dump_model_json(std::move(config)) + "\n";
}

}  // namespace nfp
