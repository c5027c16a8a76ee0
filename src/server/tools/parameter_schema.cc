#include "server/tools/parameter_schema.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "server/api/json_schema.h"

namespace nfp::server {
namespace {

constexpr int kMostSchemas = 200;  // looked at for one parameter: a schema may refer to itself

// A model that writes 2.5 for an integer means a number, not a text.
uint32_t parameter_type(const Json& name) {
  const uint32_t type = name.is_string() ? type_named(name.get_ref<const std::string&>()) : 0;
  return type == kIntegerType ? kIntegerType | kNumberType : type;
}

uint32_t types_of(const Json& schema, const Json& root, int* left) {
  if (!schema.is_object() || --*left < 0) return 0;
  const auto member = [&](const char* name) {
    const auto found = schema.find(name);
    return found == schema.end() ? nullptr : &*found;
  };
  uint32_t types = 0;
  if (const Json* type = member("type")) {
    if (!type->is_array()) return parameter_type(*type);
    for (const Json& one : *type) types |= parameter_type(one);
    return types;
  }
  if (const Json* value = member("const")) return type_of(*value);
  if (const Json* values = member("enum"); values != nullptr && values->is_array()) {
    for (const Json& value : *values) types |= type_of(value);
    return types;
  }
  if (const Json* reference = member("$ref"); reference != nullptr && reference->is_string()) {
    const Json* meant = find_reference(root, reference->get_ref<const std::string&>());
    return meant == nullptr ? 0 : types_of(*meant, root, left);
  }
  for (const char* combination : {"anyOf", "oneOf", "allOf"}) {
    const Json* parts = member(combination);
    if (parts == nullptr || !parts->is_array()) continue;
    for (const Json& part : *parts) types |= types_of(part, root, left);
  }
  return types;
}

void move_references(Json& schema, const std::string& at) {
  if (schema.is_array()) {
    for (Json& part : schema) move_references(part, at);
    return;
  }
  if (!schema.is_object()) return;
  for (auto& [keyword, value] : schema.items()) {
    if (keyword == "$ref" && value.is_string()) {
      const auto& reference = value.get_ref<const std::string&>();
      if (reference == "#" || reference.starts_with("#/")) value = "#" + at + reference.substr(1);
    } else if (holds_schemas_by_name(keyword) && value.is_object()) {
      for (Json& named : value) move_references(named, at);
    } else if (!holds_values(keyword)) {
      move_references(value, at);
    }
  }
}

}  // namespace

uint32_t types_of_parameter(const Json& tools, const std::string& function, const std::string& parameter) {
  if (!tools.is_array()) return 0;
  for (const Json& tool : tools) {
    if (!tool.is_object() || !tool.contains("function")) continue;
    const Json& f = tool["function"];
    if (!f.is_object() || !f.contains("name") || f["name"] != function || !f.contains("parameters")) continue;
    const Json& schema = f["parameters"];
    const auto properties = schema.is_object() ? schema.find("properties") : schema.end();
    if (properties == schema.end() || !properties->is_object()) return 0;
    const auto found = properties->find(parameter);
    int left = kMostSchemas;
    return found == properties->end() ? 0 : types_of(*found, schema, &left);
  }
  return 0;
}

Json arguments_schema(const Json& function) {
  const auto found = function.find("parameters");
  Json schema = found != function.end() && found->is_object() ? *found : Json::object();
  const auto has = [&](const char* keyword) { return schema.contains(keyword); };
  if (const auto type = schema.find("type"); type != schema.end()) {
    if (type->is_array() && std::find(type->begin(), type->end(), "object") != type->end()) *type = "object";
  } else if (!has("$ref") && !has("anyOf") && !has("oneOf") && !has("allOf") && !has("enum") && !has("const")) {
    schema["type"] = "object";
  }
  return schema;
}

Json with_references_below(Json schema, const std::string& at) {
  move_references(schema, at);
  return schema;
}

}  // namespace nfp::server
