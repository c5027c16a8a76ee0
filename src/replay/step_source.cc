#include "replay/step_source.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "base/json_depth.h"
#include "base/mapped_file.h"

namespace nfp {
namespace {

using Json = nlohmann::json;

std::string string_field(const Json& row, const char* name) {
  const auto place = row.find(name);
  return place != row.end() && place->is_string() ? place->get<std::string>() : "";
}

int32_t count_of(const Json& row, const char* name) {
  const auto place = row.find(name);
  if (place == row.end() || !place->is_number_integer()) return -1;
  const auto value = place->get<int64_t>();
  return value >= 0 && value <= (1 << 24) ? static_cast<int32_t>(value) : -1;
}

// Whether a row is of the model or engine that was asked for. One name may be a part of another: the whole name wins.
class Wanted {
 public:
  Wanted(const Json& rows, const char* field, const std::string& name)
      : field_(field), name_(name), whole_(std::any_of(rows.begin(), rows.end(), [&](const Json& row) {
          return !name.empty() && row.is_object() && string_field(row, field) == name;
        })) {}
  bool fits(const Json& row) const {
    const std::string name = string_field(row, field_);
    return whole_ ? name == name_ : name.find(name_) != std::string::npos;
  }

 private:
  const char* field_;
  const std::string& name_;
  bool whole_;
};

std::string joined(const std::set<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "'" : ", '") + name + "'";
  return text;
}

}  // namespace

Result<StepTable> parse_step_rows(std::string_view text, std::string_view where, const StepSource& source) {
  const auto json = parse_file_json<Json>(text);
  if (!json.is_object() || !json.contains("rows") || !json["rows"].is_array()) {
    return error(ErrorCode::kInvalidInput, "{}: is not JSON with a list 'rows'", where);
  }
  StepTable table;
  // FP8 of these engines is of weights and activations, as tensor cores have it.
  table.levels = {{Precision::kFp16, 0}, {Precision::kFp8W8A8, 1}};
  using Shape = std::tuple<size_t, int32_t, int32_t, int32_t>;
  std::map<Shape, std::vector<double>> found;
  std::set<std::string> models, engines;
  const Json& rows = json["rows"];
  const Wanted wanted_model(rows, "model", source.model), wanted_engine(rows, "engine", source.engine);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Json& row = rows[i];
    if (!row.is_object()) return error(ErrorCode::kInvalidInput, "{}: rows[{}]: must be an object", where, i);
    if (!wanted_model.fits(row) || !wanted_engine.fits(row)) continue;
    models.insert(string_field(row, "model"));
    engines.insert(string_field(row, "engine"));
    const std::string precision = string_field(row, "precision"), kind = string_field(row, "kind");
    const int32_t tokens = count_of(row, "tokens"), context = count_of(row, "context_per_sequence");
    const auto ms = row.find("ms");
    const bool timed = ms != row.end() && ms->is_number() && ms->get<double>() >= 1e-6 && ms->get<double>() < 1e9;
    if ((precision != "fp16" && precision != "fp8") || (kind != "decode" && kind != "prefill") || tokens < 1 ||
        context < 1 || !timed) {
      return error(ErrorCode::kInvalidInput,
                   "{}: rows[{}]: needs precision fp16 or fp8, kind decode or prefill, tokens, context_per_sequence "
                   "and ms of 1e-6 to 1e9",
                   where, i);
    }
    const size_t level = precision == "fp16" ? 0 : 1;
    const Shape shape = kind == "prefill" ? Shape{level, tokens, 0, 0} : Shape{level, 0, tokens, context};
    found[shape].push_back(ms->get<double>());
    table.max_step_tokens = std::max(table.max_step_tokens, tokens);
    if (kind == "decode") table.max_sequences = std::max(table.max_sequences, tokens);
  }
  if (found.empty()) {
    return error(ErrorCode::kUsage, "{}: has no rows of a model like '{}' on an engine like '{}'", where, source.model,
                 source.engine);
  }
  if (models.size() > 1 || engines.size() > 1) {
    return error(ErrorCode::kUsage, "{}: choose one model of {} and one engine of {} (--table-model, --table-engine)",
                 where, joined(models), joined(engines));
  }
  table.model = *models.begin();
  table.device = *engines.begin();
  table.kv_dtype = "f16";
  for (auto& [shape, times] : found) {
    StepTime step;
    step.level = std::get<0>(shape);
    step.prefill_tokens = std::get<1>(shape);
    step.decode_sequences = std::get<2>(shape);
    step.decode_context = std::get<3>(shape);
    double sum = 0;
    for (const double time : times) sum += time;
    step.ms = sum / static_cast<double>(times.size());
    step.samples = static_cast<int32_t>(times.size());
    table.steps.push_back(step);
  }
  return table;
}

Result<StepTable> read_step_times(const std::string& path, const StepSource& source) {
  NFP_ASSIGN_OR_RETURN(const std::string text, read_text_file(path));
  const auto json = parse_file_json<Json>(text);
  if (json.is_object() && json.contains("rows")) return parse_step_rows(text, path, source);
  NFP_ASSIGN_OR_RETURN(StepTable table, parse_step_table(text, path));
  if (table.model.find(source.model) == std::string::npos || table.device.find(source.engine) == std::string::npos) {
    return error(ErrorCode::kUsage,
                 "{}: is of '{}' on '{}' alone, no model like '{}' on an engine like '{}' (--table-model, "
                 "--table-engine)",
                 path, table.model, table.device, source.model, source.engine);
  }
  return table;
}

}  // namespace nfp
