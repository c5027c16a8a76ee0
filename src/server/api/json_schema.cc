#include "server/api/json_schema.h"

#include <algorithm>
#include <set>
#include <span>
#include <string_view>

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

// A "type" that names none of the known ones: no value has it, but something is said.
constexpr uint32_t kUnknownType = 1u << 31;

class Walk {
 public:
  // `implied`: the type that its place gives a schema; 0 = any.
  void visit(const Json& schema, uint32_t implied = 0) {
    if (!schema.is_object()) return;
    const auto whole = std::find_if(std::begin(kWhole), std::end(kWhole),
                                    [&](std::string_view name) { return schema.contains(std::string(name)); });
    const uint32_t said = types_said(schema);
    const uint32_t types = said != 0 ? said : implied;
    for (const auto& [key, value] : schema.items()) {
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
  std::vector<std::string> take() { return std::move(found_); }

 private:
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
      if (key == "$ref" && target != "#" && !target.starts_with("#/")) add("$ref to another document");
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
      if (!number) add(key);
      if (key == "multipleOf" && number) {
        const bool plain = value.is_number_unsigned() && value.get<uint64_t>() > 0 && value.get<uint64_t>() <= 1024;
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
      const bool looks = key == "pattern" && value.is_string() &&
                         value.get_ref<const std::string&>().find("(?") != std::string::npos &&
                         value.get_ref<const std::string&>().find("(?:") == std::string::npos;
      if ((types & kStringType) == 0 || !known || other || both || looks) add(key);
    } else if (is_one_of(key, kArray)) {
      if ((types & kArrayType) == 0) add(key);
    } else if (is_one_of(key, kObject)) {
      if ((types & kObjectType) == 0) add(key);
      if (key == "required" && (types & kObjectType) != 0 && value.is_array()) check_required(value, schema);
    }
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
    if (is_one_of(key, kMaps) && value.is_object()) {
      for (const auto& [name, inner] : value.items()) visit(inner);
    } else if (is_one_of(key, kLists) && value.is_array()) {
      for (const Json& inner : value) visit(inner);
    } else if (is_one_of(key, kSingle)) {
      visit(value, key == "propertyNames" ? uint32_t{kStringType} : 0);
    }
  }

  std::vector<std::string> found_;
};

}  // namespace

std::vector<std::string> unenforced_keywords(const Json& schema) {
  Walk walk;
  walk.visit(schema);
  return walk.take();
}

}  // namespace nfp::server
