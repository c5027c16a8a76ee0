// What a tool's JSON Schema says of its arguments.
#pragma once

#include <cstdint>
#include <string>

#include "server/api/json_text.h"
#include "server/api/json_types.h"

namespace nfp::server {

// The types that `parameter` of the tool called `function` may have: of "type", "enum", "const", "anyOf", "oneOf",
// "allOf" and "$ref" within the schema; where integers are, other numbers are taken too. 0 = nothing is said. `tools`
// is as in a request, and may be null.
uint32_t types_of_parameter(const Json& tools, const std::string& function, const std::string& parameter);

// The schema of a function's arguments, which are always an object: "parameters" where it has such a schema, with that
// type where it names none or several.
Json arguments_schema(const Json& function);

// `schema` with each reference within itself ("#/$defs/X") changed to where it lies in a larger one ("#/at/$defs/X").
Json with_references_below(Json schema, const std::string& at);

}  // namespace nfp::server
