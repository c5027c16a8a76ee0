#include "io/model_json.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/json_depth.h"
#include "base/mapped_file.h"
#include "base/python_json.h"

namespace nfp {
namespace {

template <class Json>
void numbers_of_marks(Json& value) {
  if (value.is_structured()) {
    for (Json& item : value) numbers_of_marks(item);
  } else if (value.is_string()) {
    if (const auto number = non_finite_number(value.template get_ref<const std::string&>())) value = *number;
  }
}

void marks_of_numbers(nlohmann::ordered_json& value) {
  if (value.is_structured()) {
    for (nlohmann::ordered_json& item : value) marks_of_numbers(item);
  } else if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    value = non_finite_mark(value.get<double>());
  }
}

// Where the library's reader gave up; nothing where it does not say.
std::string place_of_fault(std::string_view text) {
  size_t at = 0;
  try {
    [[maybe_unused]] const auto read = nlohmann::json::parse(text);
  } catch (const nlohmann::json::parse_error& fault) {
    at = fault.byte;  // counted from 1
  } catch (const nlohmann::json::exception&) {
    return " (a number is too large)";
  }
  if (at == 0 || at > text.size()) return ": it ends too early";
  const std::string_view before = text.substr(0, at - 1);
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  return fmt::format(" at line {}, column {}", line, at - (before.rfind('\n') + 1));
}

}  // namespace

Result<std::string> read_model_text(const std::string& path, size_t limit) {
  using Type = std::filesystem::file_type;
  std::error_code code;
  const Type type = std::filesystem::status(path, code).type();
  if (type == Type::fifo || type == Type::character || type == Type::block || type == Type::socket) {
    return error(ErrorCode::kInvalidInput, "{}: not a regular file", path);
  }
  return read_text_file(path, limit);
}

template <class Json>
Result<Json> parse_model_json(std::string_view text, const std::string& name) {
  if (json_too_deep(text)) {
    return error(ErrorCode::kInvalidInput, "{}: is nested deeper than {} levels", name, kMaxFileJsonDepth);
  }
  const std::string quoted = quote_non_finite(text);
  Json json = parse_file_json<Json>(quoted);
  if (json.is_discarded()) {
    return error(ErrorCode::kInvalidInput, "{}: is not JSON{}", name, place_of_fault(quoted));
  }
  if (!json.is_object()) return error(ErrorCode::kInvalidInput, "{}: is not a JSON object", name);
  if (quoted != text) numbers_of_marks(json);
  return json;
}

template Result<nlohmann::json> parse_model_json(std::string_view, const std::string&);
template Result<nlohmann::ordered_json> parse_model_json(std::string_view, const std::string&);

std::string dump_model_json(nlohmann::ordered_json json) {
  marks_of_numbers(json);
  return unquote_non_finite(json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

}  // namespace nfp
