#include "policy/step_table.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <limits>
#include <set>
#include <tuple>

#include "base/json_depth.h"

namespace nfp {
namespace {

using Json = nlohmann::ordered_json;
constexpr std::string_view kFormat = "nestedfp-step-times";
constexpr int32_t kVersion = 1;
constexpr int32_t kMostTokens = 1'000'000'000;  // of each kind: any two add up within 32 bits
constexpr double kLeastMs = 1e-6;               // weights of a fit are the inverse

// Reads fields of one object; the first that is missing or wrong stays as the error.
class Fields {
 public:
  Fields(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object_.is_object()) fail("must be an object");
  }
  std::string text(const char* name) {
    const Json* value = find(name);
    if (value == nullptr) return {};
    if (value->is_string()) return value->get<std::string>();
    fail(fmt::format("{} must be a string", name));
    return {};
  }
  int64_t count(const char* name, int64_t least = 0, int64_t most = std::numeric_limits<int32_t>::max()) {
    const Json* value = find(name);
    if (value == nullptr) return 0;
    if (value->is_number_integer()) {
      const bool large = value->is_number_unsigned() &&
                         value->get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
      const int64_t number = large ? -1 : value->get<int64_t>();
      if (!large && number >= least && number <= most) return number;
    }
    fail(fmt::format("{} must be a whole number from {} to {}", name, least, most));
    return 0;
  }
  double number(const char* name, double least, double most) {
    const Json* value = find(name);
    if (value == nullptr) return 0;
    if (value->is_number()) {
      const auto found = value->get<double>();
      if (found >= least && found <= most) return found;
    }
    fail(fmt::format("{} must be a number from {} to {}", name, least, most));
    return 0;
  }
  const Json& list(const char* name) {
    static const Json kNone = Json::array();
    const Json* value = find(name);
    if (value == nullptr) return kNone;
    if (value->is_array() && !value->empty()) return *value;
    fail(fmt::format("{} must be a list with at least one entry", name));
    return kNone;
  }
  void fail(const std::string& what) {
    if (!error_) error_ = error(ErrorCode::kInvalidInput, "{}: {}", where_, what);
  }
  Status status() const { return error_ ? Status(*error_) : ok_status(); }

 private:
  const Json* find(const char* name) {
    if (!object_.is_object()) return nullptr;
    const auto place = object_.find(name);
    if (place != object_.end()) return &*place;
    fail(fmt::format("{} is missing", name));
    return nullptr;
  }

  const Json& object_;
  std::string where_;
  std::optional<Error> error_;
};

Result<StepLevel> parse_level(const Json& json, const std::string& where) {
  Fields fields(json, where);
  StepLevel level;
  const std::string name = fields.text("precision");
  level.fp8_share = fields.number("fp8_share", 0, 1);
  NFP_RETURN_IF_ERROR(fields.status());
  const auto precision = precision_from_name(name);
  if (!precision) return error(ErrorCode::kInvalidInput, "{}: precision '{}' is unknown", where, name);
  level.precision = *precision;
  if (is_exact(level.precision) != (level.fp8_share == 0)) {
    return error(ErrorCode::kInvalidInput, "{}: fp8_share must be 0 in fp16, and more than 0 in {}", where, name);
  }
  return level;
}

Result<StepTime> parse_step(const Json& json, const std::string& where, size_t levels) {
  Fields fields(json, where);
  const auto small = [&](const char* name, int64_t least) {
    return static_cast<int32_t>(fields.count(name, least, kMostTokens));
  };
  StepTime step;
  step.level = static_cast<size_t>(fields.count("level", 0, static_cast<int64_t>(levels) - 1));
  step.prefill_tokens = small("prefill_tokens", 0);
  step.prefill_context = small("prefill_context", 0);
  step.decode_sequences = small("decode_sequences", 0);
  step.decode_context = small("decode_context", 0);
  step.ms = fields.number("ms", kLeastMs, 1e9);
  step.samples = small("samples", 1);
  if (step.prefill_tokens == 0 && step.decode_sequences == 0) fields.fail("the step has no tokens");
  if (step.prefill_tokens == 0 && step.prefill_context > 0) fields.fail("prefill_context without prefill_tokens");
  if ((step.decode_sequences > 0) != (step.decode_context > 0)) {
    fields.fail("decode_sequences and decode_context must both be 0 or neither");
  }
  NFP_RETURN_IF_ERROR(fields.status());
  return step;
}

}  // namespace

std::string StepLevel::name() const {
  if (is_exact(precision) || fp8_share == 1.0) return std::string(name_of(precision));
  return fmt::format("{}@{:.2f}", name_of(precision), fp8_share);
}

Result<StepTable> parse_step_table(std::string_view text, std::string_view where) {
  const auto json = parse_file_json<Json>(text);
  if (json.is_discarded())
    return error(ErrorCode::kInvalidInput, "{}: is not JSON, or nested deeper than {} levels", where,
                 kMaxFileJsonDepth);
  Fields fields(json, std::string(where));
  const std::string format = fields.text("format");
  const int64_t version = fields.count("version");
  NFP_RETURN_IF_ERROR(fields.status());
  if (format != kFormat || version != kVersion) {
    return error(ErrorCode::kInvalidInput,
                 "{}: is '{}' version {}, and {} version {} is needed; make it with "
                 "nestedfp bench MODEL steps",
                 where, format, version, kFormat, kVersion);
  }
  StepTable table;
  table.model = fields.text("model");
  table.device = fields.text("device");
  table.weight_bytes = fields.count("weight_bytes", 0, std::numeric_limits<int64_t>::max());
  table.max_step_tokens = static_cast<int32_t>(fields.count("max_step_tokens", 1, kMostTokens));
  table.max_sequences = static_cast<int32_t>(fields.count("max_sequences", 1, kMostTokens));
  table.kv_dtype = fields.text("kv_dtype");
  if (json.contains("spread")) table.spread = fields.number("spread", 0, 1e9);
  if (json.contains("steps_in_flight")) {
    table.steps_in_flight = static_cast<int32_t>(fields.count("steps_in_flight", 0, 2));
  }
  const Json &levels = fields.list("levels"), &steps = fields.list("steps");
  NFP_RETURN_IF_ERROR(fields.status());
  for (size_t i = 0; i < levels.size(); ++i) {
    NFP_ASSIGN_OR_RETURN(const StepLevel level, parse_level(levels[i], fmt::format("{}: levels[{}]", where, i)));
    table.levels.push_back(level);
  }
  std::set<std::tuple<size_t, int32_t, int32_t, int32_t, int32_t>> seen;
  for (size_t i = 0; i < steps.size(); ++i) {
    const std::string place = fmt::format("{}: steps[{}]", where, i);
    NFP_ASSIGN_OR_RETURN(const StepTime step, parse_step(steps[i], place, table.levels.size()));
    if (step.tokens() > std::max(table.max_step_tokens, table.max_sequences)) {
      return error(ErrorCode::kInvalidInput, "{}: has {} tokens, and max_step_tokens is {}", place, step.tokens(),
                   table.max_step_tokens);
    }
    if (!seen.emplace(step.level, step.prefill_tokens, step.prefill_context, step.decode_sequences, step.decode_context)
             .second) {
      return error(ErrorCode::kInvalidInput, "{}: this step has been given before", place);
    }
    table.steps.push_back(step);
  }
  return table;
}

std::string to_json_text(const StepTable& table) {
  Json levels = Json::array(), steps = Json::array();
  for (const StepLevel& level : table.levels) {
    levels.push_back({{"precision", name_of(level.precision)}, {"fp8_share", level.fp8_share}});
  }
  for (const StepTime& step : table.steps) {
    steps.push_back({{"level", step.level},
                     {"prefill_tokens", step.prefill_tokens},
                     {"prefill_context", step.prefill_context},
                     {"decode_sequences", step.decode_sequences},
                     {"decode_context", step.decode_context},
                     {"ms", step.ms},
                     {"samples", step.samples}});
  }
  const Json json = {{"format", kFormat},
                     {"version", kVersion},
                     {"model", table.model},
                     {"device", table.device},
                     {"weight_bytes", table.weight_bytes},
                     {"max_step_tokens", table.max_step_tokens},
                     {"max_sequences", table.max_sequences},
                     {"kv_dtype", table.kv_dtype},
                     {"spread", table.spread},
                     {"steps_in_flight", table.steps_in_flight},
                     {"levels", levels},
                     {"steps", steps}};
  return json.dump(1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace nfp
