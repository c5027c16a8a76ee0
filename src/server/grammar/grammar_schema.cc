#include "server/grammar/grammar_schema.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "server/api/json_schema.h"
#include "server/grammar/grammar_regex.h"

namespace nfp::server {
namespace {

#define NFP_DATE                                                                      \
  R"((\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|)" \
  R"(02-(0[1-9]|1\d|2[0-8]))|(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29))"
#define NFP_TIME R"(([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d))"
#define NFP_BYTE R"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d))"
// xgrammar's own forms of these have more in them: quotes and control characters, the 31st of February, 010 for 10.
constexpr std::pair<std::string_view, const char*> kFormatPatterns[] = {
    {"date", "^" NFP_DATE "$"},
    {"time", "^" NFP_TIME "$"},
    {"date-time", "^" NFP_DATE "T" NFP_TIME "$"},
    {"ipv4", "^(" NFP_BYTE R"(\.){3})" NFP_BYTE "$"},
    {"json-pointer", "^(/([^/~]|~[01])*)*$"},
    {"relative-json-pointer", "^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$"},
};
#undef NFP_DATE
#undef NFP_TIME
#undef NFP_BYTE

// A character that JSON writes as it is.
constexpr char kUnescaped[] = "[ !#-[\\]-\uD7FF\uE000-\U0010FFFF]";

constexpr uint64_t kMostLength = 999'999'999;  // of a repetition in a regular expression

std::optional<uint64_t> count_in(const Json& schema, const char* keyword, uint64_t otherwise) {
  const auto found = schema.find(keyword);
  if (found == schema.end()) return otherwise;
  return count_of(*found);
}

bool has_any(const Json& schema, std::initializer_list<const char*> keywords) {
  return std::any_of(keywords.begin(), keywords.end(), [&](const char* name) { return schema.contains(name); });
}

bool has_type(const Json& schema, std::string_view name) {
  const auto type = schema.find("type");
  if (type == schema.end()) return false;
  if (!type->is_array()) return *type == name;
  return std::find(type->begin(), type->end(), name) != type->end();
}

// Whether xgrammar would write this number with 17 digits (0.7 as 0.69999999999999996) and follows it exactly as a
// range of one number.
bool is_better_as_range(const Json& value) {
  if (!value.is_number_float() || std::abs(value.get<double>()) >= 1e9) return false;
  const std::string text = dump(value);
  const size_t decimals = text.size() - std::min(text.find('.') + 1, text.size());
  const bool plain = text.find('e') == std::string::npos && decimals <= 6 && !text.ends_with(".0");
  return plain && text != fmt::format("{:.17g}", value.get<double>());
}

// Calls `visit` with what may be or hold schemas in the value of a schema's keyword.
template <typename Visit>
void each_below(const std::string& keyword, Json& value, const Visit& visit) {
  if (holds_schemas_by_name(keyword) && value.is_object()) {
    for (Json& named : value) visit(named);
  } else if (!holds_values(keyword)) {
    visit(value);
  }
}

// xgrammar looks for the parts of a reference as they are written, and in objects only. So escapes give way to what
// they mean, and what is in a list, or has a slash in its name, moves to where it can be found and leaves a reference
// to it; and so does what says of properties by patterns or of all others, which the Rewriter writes anew.
class References {
 public:
  explicit References(Json& root) : root_(root) {
    while (root_.is_object() && root_.contains(place_)) place_ += '-';
  }
  void rewrite() {
    visit(root_);
    if (moved_.empty()) return;
    // All are taken before any gets its place: one may lie in another, and an object that grows copies what it holds.
    std::vector<std::pair<std::string, Json>> taken;
    for (const auto& [target, name] : moved_) {
      taken.emplace_back(name, std::exchange(*target, Json{{"$ref", reference_to(name)}}));
    }
    Json moved = Json::object();
    for (auto& [name, schema] : taken) moved[name] = std::move(schema);
    root_[place_] = std::move(moved);
  }

 private:
  void visit(Json& schema) {
    if (schema.is_array()) {
      for (Json& part : schema) visit(part);
    }
    if (!schema.is_object()) return;
    for (auto& [keyword, value] : schema.items()) {
      if (keyword == "$ref" && value.is_string()) {
        value = written(value.get<std::string>());
      } else {
        each_below(keyword, value, [this](Json& part) { visit(part); });
      }
    }
  }

  std::string written(const std::string& reference) {
    const auto parts = reference_parts(reference);
    if (!parts) return reference;
    std::string plain = "#";
    bool hidden = false;
    Json::json_pointer place;
    const Json* at = &root_;
    for (const std::string& part : *parts) {
      hidden = hidden || at->is_array() || part.empty() || part.find('/') != std::string::npos;
      hidden = hidden || part == "patternProperties" || part == "additionalProperties";
      hidden = hidden || part == "unevaluatedProperties";
      at = find_part(*at, part);
      if (at == nullptr) return reference;  // is refused
      plain += '/' + part;
      place /= part;
    }
    if (!hidden) return plain;
    return reference_to(moved_.try_emplace(&root_.at(place), std::to_string(moved_.size())).first->second);
  }

  std::string reference_to(const std::string& name) const { return fmt::format("#/{}/{}", place_, name); }

  Json& root_;
  std::string place_ = "x-references";
  std::map<Json*, std::string> moved_;  // their names there
};

class Rewriter {
 public:
  void visit(Json& schema) {
    if (schema.is_array()) {
      for (Json& part : schema) visit(part);
    }
    if (!schema.is_object()) return;
    rewrite_values(schema);
    for (auto& [keyword, value] : schema.items()) {
      if (is_count(keyword)) {
        if (const auto count = count_of(value)) value = *count;  // xgrammar takes no 2.0
      } else {
        each_below(keyword, value, [this](Json& part) { visit(part); });
      }
    }
    rewrite_text(schema);
    rewrite_names(schema);
    rewrite_bounds(schema);
    rewrite_items(schema);
    // Whatever else is said, as where nothing is: beside any keyword xgrammar would take them for empty.
    if (has_type(schema, "array") && !has_any(schema, {"items", "prefixItems", "unevaluatedItems"})) {
      schema["items"] = true;
    }
    if (has_type(schema, "object") && !has_any(schema, {"properties", "patternProperties", "additionalProperties",
                                                        "unevaluatedProperties", "propertyNames"})) {
      schema["additionalProperties"] = true;
    }
    // Schemas are taken for equal where they differ in members of these that have the name of an annotation, such as
    // a property "title". A keyword that nobody knows keeps them apart.
    if (has_any(schema, {"properties", "patternProperties", "enum", "const"})) schema["x-number"] = ++numbered_;
  }

 private:
  static std::string rewritten(const std::string& pattern) try {
    return regex_for_grammar(pattern, RegexUse::kPattern);
  } catch (const std::runtime_error& failure) {
    throw std::runtime_error(fmt::format("{} (in the pattern '{}')", failure.what(), pattern));
  }

  void rewrite_text(Json& schema) {
    const auto format = schema.find("format");
    const std::string name = format != schema.end() && format->is_string() ? format->get<std::string>() : "";
    for (const auto& [known, pattern] : kFormatPatterns) {
      if (name != known) continue;
      schema.erase("format");
      schema["pattern"] = regex_for_grammar(pattern, RegexUse::kPattern);
      return;
    }
    if (is_known_format(name)) return;
    if (const auto pattern = schema.find("pattern"); pattern != schema.end()) {
      if (pattern->is_string()) *pattern = rewritten(pattern->get<std::string>());
      return;
    }
    if (!has_any(schema, {"minLength", "maxLength"})) return;
    const auto least = count_in(schema, "minLength", 0), most = count_in(schema, "maxLength", kMostLength + 1);
    if (!least || !most || *least > std::min(*most, kMostLength)) return;  // is refused
    // All that needs no escape; by lengths alone control characters would be in it. Not in ASCII, as such expressions
    // become automata, which are large where these numbers are.
    schema["pattern"] =
        fmt::format("^{}{{{},{}}}$", kUnescaped, *least, *most > kMostLength ? std::string() : std::to_string(*most));
    schema.erase("minLength");
    schema.erase("maxLength");
  }

  // Numbers among the values become ranges, beside an "enum" of the others.
  static void rewrite_values(Json& schema) {
    if (schema.contains("$ref")) return;  // which is all that counts
    const auto constant = schema.find("const"), list = schema.find("enum");
    Json values = constant != schema.end() ? Json::array({*constant}) : list != schema.end() ? *list : Json::array();
    if (!values.is_array() || std::none_of(values.begin(), values.end(), is_better_as_range)) return;
    Json any = Json::array(), others = Json::array();
    for (Json& value : values) {
      if (is_better_as_range(value)) {
        any.push_back({{"type", "number"}, {"minimum", value}, {"maximum", value}});
      } else {
        others.push_back(std::move(value));
      }
    }
    if (!others.empty()) any.push_back({{"enum", std::move(others)}});
    schema.erase("const");
    schema.erase("enum");
    schema["anyOf"] = std::move(any);
  }

  static void rewrite_bounds(Json& schema) {
    if (has_type(schema, "integer") && has_type(schema, "number")) {  // which integers are
      Json& types = schema["type"];
      types.erase(std::find(types.begin(), types.end(), "integer"));
    }
    const bool narrow = has_type(schema, "number") && is_narrow_range(schema);
    const bool whole = has_type(schema, "integer");
    for (const char* bound : {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}) {
      // (xgrammar refuses wide ones of integers.)
      if (narrow || (whole && schema.contains(bound) && is_wide_number(schema[bound]))) schema.erase(bound);
    }
    if (whole) round_bounds(schema);
  }

  // To the whole numbers that they allow, as xgrammar takes no others.
  static void round_bounds(Json& schema) {
    const auto round = [&](const char* bound, double (*rounded)(double)) {
      const auto found = schema.find(bound);
      if (found == schema.end() || !found->is_number_float()) return;
      *found = static_cast<int64_t>(rounded(found->get<double>()));
    };
    const auto up = [](double x) { return std::ceil(x); };
    const auto down = [](double x) { return std::floor(x); };
    round("minimum", up);
    round("exclusiveMaximum", up);
    round("maximum", down);
    round("exclusiveMinimum", down);
  }

  // xgrammar refuses a true among them, and a list that no array may have to its end.
  static void rewrite_items(Json& schema) {
    const auto first = schema.find("prefixItems");
    if (first == schema.end() || !first->is_array()) return;
    size_t kept = std::min<uint64_t>(first->size(), count_in(schema, "maxItems", kMostLength).value_or(kMostLength));
    for (size_t i = 0; i < kept; ++i) {
      Json& item = (*first)[i];
      if (item == Json(false)) kept = i;
      if (item == Json(true)) item = Json::object();
    }
    if (kept == first->size()) return;
    first->erase(first->begin() + static_cast<ptrdiff_t>(kept), first->end());
    schema["items"] = false;
  }

  // Beside names that JSON escapes what xgrammar allows of others is no JSON; a pattern allows what needs no escape.
  static void rewrite_others(Json& schema) {
    const auto described = schema.find("properties");
    if (described == schema.end() || !described->is_object() ||
        has_any(schema, {"patternProperties", "propertyNames"})) {
      return;
    }
    const bool any = std::any_of(described->items().begin(), described->items().end(),
                                 [](const auto& property) { return needs_escape(property.key()); });
    for (const char* keyword : {"additionalProperties", "unevaluatedProperties"}) {
      const auto others = schema.find(keyword);
      if (others == schema.end()) continue;
      if (!any || *others == Json(false)) return;
      Json rest = *others == Json(true) ? Json::object() : *others;
      schema["patternProperties"] = Json{{fmt::format("^{}*$", kUnescaped), std::move(rest)}};
      schema.erase("unevaluatedProperties");
      schema["additionalProperties"] = false;
      return;
    }
  }

  void rewrite_names(Json& schema) {
    rewrite_others(schema);
    const auto names = schema.find("patternProperties");
    if (names == schema.end() || !names->is_object()) return;
    Json renamed = Json::object();
    for (const auto& [pattern, inner] : names->items()) {
      std::string key = rewritten(pattern);
      while (renamed.contains(key)) key += "(?:)";  // two that are written alike
      renamed[key] = inner;
    }
    *names = std::move(renamed);
  }

  int64_t numbered_ = 0;
};

}  // namespace

Json schema_for_grammar(Json schema) {
  References(schema).rewrite();
  Rewriter().visit(schema);
  return schema;
}

}  // namespace nfp::server
