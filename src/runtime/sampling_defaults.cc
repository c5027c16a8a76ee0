#include "runtime/sampling_defaults.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cmath>

#include "base/mapped_file.h"
#include "io/model_json.h"

namespace nfp {
namespace {

constexpr const char* kFile = "generation_config.json";

template <typename Visitor>
void each(const SamplingDefaults& defaults, Visitor&& visit) {
  const auto one = [&](std::string_view name, const auto& value) {
    if (value) visit(name, *value);
  };
  one("temperature", defaults.temperature);
  one("top_k", defaults.top_k);
  one("top_p", defaults.top_p);
  one("min_p", defaults.min_p);
  one("repetition_penalty", defaults.repetition_penalty);
  one("max_tokens", defaults.max_tokens);
}

}  // namespace

void SamplingDefaults::apply(SamplingParams& params) const {
  if (temperature) params.temperature = *temperature;
  if (top_k) params.top_k = *top_k;
  if (top_p) params.top_p = *top_p;
  if (min_p) params.min_p = *min_p;
  if (repetition_penalty) params.repetition_penalty = *repetition_penalty;
  if (max_tokens) params.default_max_tokens = *max_tokens;
}

std::string SamplingDefaults::text() const {
  std::string out;
  each(*this, [&](std::string_view name, const auto& value) {
    out += fmt::format("{}{} {}", out.empty() ? "" : ", ", name, value);
  });
  return out;
}

std::string SamplingDefaults::json() const {
  std::string out = "{";
  each(*this, [&](std::string_view name, const auto& value) {
    out += fmt::format("{}\"{}\":{}", out.size() == 1 ? "" : ",", name, value);
  });
  return out + "}";
}

Result<SamplingDefaults> parse_sampling_defaults(std::string_view json, const std::string& name,
                                                 std::string_view flag) {
  NFP_ASSIGN_OR_RETURN(const auto root, parse_model_json<nlohmann::json>(json, name));
  SamplingDefaults out;
  Status status;
  const auto number = [&](const char* key) -> std::optional<double> {
    const auto place = root.find(key);
    if (place == root.end() || place->is_null()) return std::nullopt;
    if (!place->is_number()) {
      status = error(ErrorCode::kInvalidInput, "{}: '{}' must be a number", name, key);
      return std::nullopt;
    }
    return place->get<double>();
  };
  const auto real = [&](const char* key) -> std::optional<float> {
    const auto value = number(key);
    return value ? std::optional<float>(static_cast<float>(*value)) : std::nullopt;
  };
  out.temperature = real("temperature");
  out.top_p = real("top_p");
  out.min_p = real("min_p");
  out.repetition_penalty = real("repetition_penalty");
  if (const auto value = number("top_k")) {
    if (*value != std::floor(*value) || !(*value >= -1 && *value <= INT32_MAX)) {
      return error(ErrorCode::kInvalidInput, "{}: 'top_k' must be a whole number", name);
    }
    out.top_k = static_cast<int32_t>(std::max(*value, 0.0));  // -1 is "off"
  }
  if (const auto value = number("max_new_tokens")) {
    if (*value != std::floor(*value) || !(*value >= 1 && *value <= INT32_MAX)) {
      return error(ErrorCode::kInvalidInput,
                   "{}: 'max_new_tokens' must be a whole number of at least 1; {} none ignores the file", name, flag);
    }
    out.max_tokens = static_cast<int32_t>(*value);
  }
  NFP_RETURN_IF_ERROR(status);
  // The engine's own ranges: what it refuses must not wait for the first request.
  SamplingParams params;
  out.apply(params);
  const int32_t any_token = 0;
  if (const auto bad = validate({&any_token, 1}, params, {INT32_MAX, INT32_MAX})) {
    return error(ErrorCode::kInvalidInput, "{}: {}; {} none ignores the file", name, bad->message, flag);
  }
  return out;
}

Result<SamplingDefaults> load_sampling_defaults(const ModelSource& source, const std::string& where,
                                                std::string_view flag) {
  if (where == "none" || where == "vllm") return SamplingDefaults{};
  if (where == "auto") {
    NFP_ASSIGN_OR_RETURN(const auto text, source.text_file(kFile));
    if (!text) return SamplingDefaults{};
    return parse_sampling_defaults(*text, source.path() + ": " + kFile, flag);
  }
  auto text = read_text_file(where + "/" + kFile);
  if (!text.ok()) {
    return error(ErrorCode::kUsage, "{} {}: {}; it is auto, none, or a directory with a {}", flag, where,
                 text.error().message, kFile);
  }
  return parse_sampling_defaults(*text, where + "/" + kFile, flag);
}

}  // namespace nfp
