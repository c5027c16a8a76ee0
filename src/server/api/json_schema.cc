#include "server/api/json_schema.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <set>
#include <span>
#include <string_view>
#include <unordered_set>

#include "server/api/json_types.h"

namespace nfp::server {
namespace {

using Names = std::span<const std::string_view>;

bool is_one_of(std::string_view name, Names names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Keywords of draft 2020-12 (and its predecessors) that restrict values. Others are annotations, or unknown and without
// effect by the standard.
constexpr std::string_view kNever[] = {"not",
                                       "if",
                                       "then",
                                       "else",
                                       "uniqueItems",
                                       "contains",
                                       "minContains",
                                       "maxContains",
                                       "dependencies",
                                       "dependentRequired",
                                       "dependentSchemas",
                                       "$dynamicRef",
                                       "$recursiveRef",
                                       "additionalItems",
                                       "contentSchema"};
constexpr std::string_view kNumber[] = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"};
constexpr std::string_view kString[] = {"minLength", "maxLength", "pattern", "format"};
constexpr std::string_view kArray[] = {"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"};
constexpr std::string_view kObject[] = {
    "properties",    "required",      "additionalProperties", "patternProperties",
    "propertyNames", "minProperties", "maxProperties",        "unevaluatedProperties"};
// Of these only the first that is there counts, and none of the above beside it.
constexpr std::string_view kWhole[] = {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"};
constexpr std::string_view kFormats[] = {"date",          "time",         "date-time",    "email",
                                         "hostname",      "ipv4",         "ipv6",         "uri",
                                         "uri-reference", "uri-template", "json-pointer", "relative-json-pointer",
                                         "duration",      "uuid"};

// Where schemas are within a schema.
constexpr std::string_view kMaps[] = {"properties", "patternProperties", "$defs", "definitions"};
constexpr std::string_view kLists[] = {"anyOf", "oneOf", "allOf", "prefixItems"};
constexpr std::string_view kSingle[] = {"items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems",
                                        "propertyNames"};

constexpr std::string_view kCounts[] = {"minLength", "maxLength",     "minItems",
                                        "maxItems",  "minProperties", "maxProperties"};
constexpr std::string_view kFilled[] = {"type", "enum", "anyOf", "oneOf", "allOf"};

// References that are followed to places where no schema is looked for: each is looked up.
constexpr size_t kMostReferences = 256;

// A "type" that names none of the known ones: no value has it, but something is said.
constexpr uint32_t kUnknownType = 1u << 31;

bool has_wide_number(const Json& value) {
  if (value.is_structured()) return std::any_of(value.begin(), value.end(), has_wide_number);
  return is_wide_number(value);
}

// Whether a regular expression has an assertion that looks ahead or behind.
bool looks_around(std::string_view pattern) {
  bool in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] == '\\') {
      ++i;
    } else if (in_class) {
      in_class = pattern[i] != ']';
    } else if (pattern[i] == '[') {
      in_class = true;
    } else {
      const std::string_view rest = pattern.substr(i);
      for (const std::string_view group : {"(?=", "(?!", "(?<=", "(?<!"}) {
        if (rest.starts_with(group)) return true;
      }
    }
  }
  return false;
}

class Walk {
 public:
  explicit Walk(const Json& root) : root_(root) {}

  // The root, and what is referred to.
  std::vector<std::string> run() {
    visit(root_);
    while (!waiting_.empty()) {
      const Json* target = find_reference(root_, waiting_.back());
      path_ = {waiting_.back()};
      waiting_.pop_back();
      if (target != nullptr) visit(*target);
    }
    return std::move(found_);
  }
  const std::string& fault() const { return fault_; }

 private:
  // `implied`: the type that its place gives a schema; 0 = any.
  void visit(const Json& schema, uint32_t implied = 0) {
    if (!schema.is_object() || !visited_.insert(&schema).second) return;
    const auto whole = std::find_if(std::begin(kWhole), std::end(kWhole),
                                    [&](std::string_view name) { return schema.contains(std::string(name)); });
    const uint32_t said = types_said(schema);
    const uint32_t types = said != 0 ? said : implied;
    for (const auto& [key, value] : schema.items()) {
      check(key, value);
      if ((key == "const" || key == "enum") && has_wide_number(value)) add(key);
      if (is_one_of(key, kNever)) {
        if (!(value.is_boolean() && !value.get<bool>()) || key == "not") add(key);
      } else if (whole != std::end(kWhole)) {
        beside(*whole, key, value, schema, types);
      } else {
        alone(key, value, schema, types);
      }
      descend(key, value);
    }
  }

  // What xgrammar passes over, refuses, or makes a grammar of that nothing satisfies.
  void check(const std::string& key, const Json& value) {
    const char* wanted = nullptr;
    if (is_count(key) && !count_of(value)) wanted = "a whole number, 0 or more";
    if (is_one_of(key, kFilled) && value.is_array() && value.empty()) wanted = "a list that is not empty";
    if (wanted == nullptr || !fault_.empty()) return;
    fault_ = fmt::format("'{}/{}' must be {}", fmt::join(path_, "/"), key, wanted);
  }

  void add(const std::string& name) {
    if (std::find(found_.begin(), found_.end(), name) == found_.end()) found_.push_back(name);
  }

  // What the grammar takes the schema to be about, as bits: a list of types may be long, and so may the values that are
  // held against it. 0 = any value.
  static uint32_t types_said(const Json& schema) {
    const auto type = schema.find("type");
    if (type != schema.end()) {
      const auto bit = [](const Json& one) {
        if (!one.is_string()) return 0u;
        const uint32_t known = type_named(one.get_ref<const std::string&>());
        return known != 0 ? known : kUnknownType;
      };
      if (!type->is_array()) return bit(*type);
      uint32_t types = 0;
      for (const Json& one : *type) types |= bit(one);
      return types;
    }
    for (const char* name : {"properties", "additionalProperties", "unevaluatedProperties"}) {
      if (schema.contains(name)) return kObjectType;
    }
    for (const char* name : {"items", "prefixItems", "unevaluatedItems"}) {
      if (schema.contains(name)) return kArrayType;
    }
    return 0;
  }

  // A keyword of a schema that `whole` already says all about.
  void beside(std::string_view whole, const std::string& key, const Json& value, const Json& schema, uint32_t types) {
    if (key == whole) {
      const std::string target = value.is_string() ? value.get<std::string>() : std::string();
      if (key == "$ref" && !reference_parts(target)) add("$ref to another document");
      if (key == "$ref") follow(target);
      if (key == "allOf" && value.is_array() && value.size() > 1) add("allOf");
      if (key == "oneOf" && value.is_array() && value.size() > 1) add("oneOf");  // what fits two of them is not refused
      return;
    }
    if (key == "type") {
      // Beside values it says nothing new, if they are of it.
      const auto fits = [&](const Json& one) { return (type_of(one) & types) != 0; };
      const Json& values = schema[std::string(whole)];
      const bool redundant = (whole == "const" && fits(values)) ||
                             (whole == "enum" && values.is_array() && std::all_of(values.begin(), values.end(), fits));
      if (!redundant) add(key);
    } else if (is_one_of(key, kNumber) || is_one_of(key, kString) || is_one_of(key, kArray) ||
               is_one_of(key, kObject) || is_one_of(key, kWhole)) {
      add(key);
    }
  }

  void alone(const std::string& key, const Json& value, const Json& schema, uint32_t types) {
    const bool number = (types & (kNumberType | kIntegerType)) != 0;
    if (is_one_of(key, kNumber)) {
      if (!number || ((types & kIntegerType) != 0 && is_wide_number(value))) add(key);
      if (key != "multipleOf" && (types & kNumberType) != 0 && is_narrow_range(schema)) add(key);
      if (key == "multipleOf" && number) {
        const uint64_t step = count_of(value).value_or(0);
        const bool plain = step > 0 && step <= 1024;
        const bool range = std::any_of(std::begin(kNumber), std::end(kNumber), [&](std::string_view name) {
          return name != "multipleOf" && schema.contains(std::string(name));
        });
        if ((types & kNumberType) != 0 || !plain || range) add(key);
      }
    } else if (is_one_of(key, kString)) {
      const bool known = key != "format" || (value.is_string() && is_one_of(value.get<std::string>(), kFormats));
      const bool other =
          (key == "minLength" || key == "maxLength") && (schema.contains("pattern") || schema.contains("format"));
      const bool both = key == "pattern" && schema.contains("format");
      // Assertions that look around are left out of the grammar.
      const bool looks = key == "pattern" && value.is_string() && looks_around(value.get_ref<const std::string&>());
      if ((types & kStringType) == 0 || !known || other || both || looks) add(key);
    } else if (is_one_of(key, kArray)) {
      if ((types & kArrayType) == 0) add(key);
    } else if (is_one_of(key, kObject)) {
      if ((types & kObjectType) == 0) add(key);
      if ((key == "patternProperties" || key == "propertyNames") && !holds_names(key, value, schema)) add(key);
      if (key == "required" && (types & kObjectType) != 0 && value.is_array()) check_required(value, schema);
      if ((key == "additionalProperties" || key == "unevaluatedProperties") && !excludes_described(value, schema)) {
        add(key);
      }
    }
  }

  // Whether what these say of a property's name is so for all of them. Names that are described, fit one pattern or are
  // others' are alternatives to the grammar, and one name may be several of these.
  static bool holds_names(const std::string& key, const Json& value, const Json& schema) {
    if (schema.contains("properties")) return false;
    if (key == "propertyNames") {
      const auto others = schema.find("additionalProperties");
      const bool closed = others != schema.end() && others->is_boolean() && !others->get<bool>();
      return !closed && !schema.contains("patternProperties");
    }
    return value.size() < 2 && (!value.is_object() || value.empty() || !looks_around(value.items().begin().key()));
  }

  // Whether names that are described are kept from what the grammar allows of others: only those that JSON writes as
  // they are, in ASCII; or those that it escapes, beside which others have no escapes (grammar_schema.cc).
  static bool excludes_described(const Json& others, const Json& schema) {
    if (others.is_boolean() && !others.get<bool>()) return true;
    const auto described = schema.find("properties");
    if (described == schema.end() || !described->is_object()) return true;
    const auto all = [&](const auto& is) {
      return std::all_of(described->items().begin(), described->items().end(),
                         [&](const auto& property) { return is(property.key()); });
    };
    const auto is_plain = [](const std::string& name) {
      return !needs_escape(name) && std::all_of(name.begin(), name.end(), [](char c) { return c >= ' ' && c < 0x7F; });
    };
    if (all(is_plain)) return true;
    return all(needs_escape) && !schema.contains("patternProperties") && !schema.contains("propertyNames");
  }

  // What a reference names may be where no schema is looked for.
  void follow(const std::string& reference) {
    const auto parts = reference_parts(reference);
    if (parts && parts->size() == 2 && ((*parts)[0] == "$defs" || (*parts)[0] == "definitions")) return;
    if (references_.size() >= kMostReferences && !references_.contains(reference)) return add("$ref");
    if (references_.insert(reference).second) waiting_.push_back(reference);
  }

  // Only properties that are described are required by the grammar.
  void check_required(const Json& required, const Json& schema) {
    std::set<std::string> described;
    if (const auto place = schema.find("properties"); place != schema.end() && place->is_object()) {
      for (const auto& [name, value] : place->items()) described.insert(name);
    }
    for (const Json& name : required) {
      if (name.is_string() && !described.contains(name.get<std::string>())) return add("required");
    }
  }

  void descend(const std::string& key, const Json& value) {
    path_.push_back(key);
    if (is_one_of(key, kMaps) && value.is_object()) {
      for (const auto& [name, inner] : value.items()) visit_below(name, inner);
    } else if (is_one_of(key, kLists) && value.is_array()) {
      for (size_t i = 0; i < value.size(); ++i) visit_below(std::to_string(i), value[i]);
    } else if (is_one_of(key, kSingle)) {
      visit(value, key == "propertyNames" ? uint32_t{kStringType} : 0);
    }
    path_.pop_back();
  }

  void visit_below(std::string_view name, const Json& schema) {
    path_.emplace_back(name);
    visit(schema);
    path_.pop_back();
  }

  const Json& root_;
  std::unordered_set<const Json*> visited_;
  std::set<std::string> references_;  // that are followed
  std::vector<std::string> waiting_;  // of these
  std::vector<std::string> found_;
  std::vector<std::string> path_ = {"#"};  // to the schema that is visited
  std::string fault_;
};

}  // namespace

std::vector<std::string> unenforced_keywords(const Json& schema) { return Walk(schema).run(); }

std::string schema_fault(const Json& schema) {
  Walk walk(schema);
  walk.run();
  return walk.fault();
}

std::optional<std::vector<std::string>> reference_parts(std::string_view reference) {
  if (!reference.starts_with('#')) return std::nullopt;
  std::string pointer;
  for (size_t i = 1; i < reference.size(); ++i) {
    uint8_t byte = 0;
    const char* digits = reference.data() + i + 1;
    if (reference[i] == '%' && i + 2 < reference.size() &&
        std::from_chars(digits, digits + 2, byte, 16).ptr == digits + 2) {
      pointer += static_cast<char>(byte);
      i += 2;
    } else {
      pointer += reference[i];
    }
  }
  if (!pointer.empty() && pointer.front() != '/') return std::nullopt;
  std::vector<std::string> parts;
  for (size_t i = 0; i < pointer.size(); ++i) {
    const bool escape = pointer[i] == '~' && i + 1 < pointer.size() && (pointer[i + 1] == '0' || pointer[i + 1] == '1');
    if (pointer[i] == '/') {
      parts.emplace_back();
    } else {
      parts.back() += escape ? (pointer[++i] == '0' ? '~' : '/') : pointer[i];
    }
  }
  return parts;
}

const Json* find_part(const Json& at, std::string_view part) {
  if (at.is_array()) {
    size_t index = 0;
    const auto [end, code] = std::from_chars(part.data(), part.data() + part.size(), index);
    const bool number = code == std::errc() && end == part.data() + part.size() && (part == "0" || part[0] != '0');
    return number && index < at.size() ? &at[index] : nullptr;
  }
  const auto found = at.is_object() ? at.find(part) : at.end();
  return found == at.end() ? nullptr : &*found;
}

const Json* find_reference(const Json& root, std::string_view reference) {
  const auto parts = reference_parts(reference);
  if (!parts) return nullptr;
  const Json* at = &root;
  for (const std::string& part : *parts) {
    if (at != nullptr) at = find_part(*at, part);
  }
  return at;
}

bool holds_schemas_by_name(std::string_view keyword) {
  return is_one_of(keyword, kMaps) || keyword == "dependentSchemas";
}

bool holds_values(std::string_view keyword) {
  constexpr std::string_view kValues[] = {"const", "enum", "default", "examples"};
  return is_one_of(keyword, kValues);
}

bool is_wide_number(const Json& value) {
  if (value.is_number_unsigned()) return value.get<uint64_t>() > INT64_MAX;
  return value.is_number_float() && std::abs(value.get<double>()) >= 0x1p63;
}

bool needs_escape(std::string_view text) {
  return std::any_of(text.begin(), text.end(),
                     [](char c) { return static_cast<uint8_t>(c) < ' ' || c == '"' || c == '\\'; });
}

bool is_narrow_range(const Json& schema) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double least = -kInfinity, most = kInfinity;
  bool above = false, below = false;  // the bounds are not within
  for (const bool exclusive : {false, true}) {
    const auto low = schema.find(exclusive ? "exclusiveMinimum" : "minimum");
    const auto high = schema.find(exclusive ? "exclusiveMaximum" : "maximum");
    if (low != schema.end() && low->is_number() && low->get<double>() >= least) {
      least = low->get<double>();
      above = exclusive;
    }
    if (high != schema.end() && high->is_number() && high->get<double>() <= most) {
      most = high->get<double>();
      below = exclusive;
    }
  }
  constexpr double kWide = 1e9, kSteps = 1e6;
  if (std::abs(least) >= kWide || std::abs(most) >= kWide) return false;
  const auto fits_least = [&](double x) { return above ? x > least : x >= least; };
  const auto fits_most = [&](double x) { return below ? x < most : x <= most; };
  if (!(least < most || (least == most && !above && !below))) return false;
  double step = std::floor(least * kSteps) - 1;
  while (!fits_least(step / kSteps)) ++step;
  return !fits_most(step / kSteps);
}

bool is_count(std::string_view keyword) { return is_one_of(keyword, kCounts); }

std::optional<uint64_t> count_of(const Json& value) {
  if (value.is_number_unsigned()) return value.get<uint64_t>();
  if (!value.is_number_float()) return std::nullopt;
  const auto number = value.get<double>();
  if (!(number >= 0 && number < 0x1p63) || number != std::floor(number)) return std::nullopt;
  return static_cast<uint64_t>(number);
}

bool is_known_format(std::string_view name) { return is_one_of(name, kFormats); }

}  // namespace nfp::server
