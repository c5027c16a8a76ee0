// What of a JSON schema the grammar made of it does not enforce (xgrammar 0.2.8; server/grammar/grammar_test.cc holds
// this against the grammars themselves).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/api/json_text.h"

namespace nfp::server {

// Keywords, each once, in the order of their appearance. Empty = every answer that the grammar allows is valid.
std::vector<std::string> unenforced_keywords(const Json& schema);

// The first place where a schema has what none may have (a negative "maxLength", an empty "type"), as a clause that
// names it: "'#/properties/a/maxLength' must be ..."; empty = there is none.
std::string schema_fault(const Json& schema);

// The names on the way to what a reference means, as RFC 6901 has them in URIs: "#/$defs/a~1b%20c" has "$defs" and
// "a/b c". Nothing where it is one to another document, or to an anchor.
std::optional<std::vector<std::string>> reference_parts(std::string_view reference);

// What a reference ("#/$defs/a") names within `root`; null where there is no such thing.
const Json* find_reference(const Json& root, std::string_view reference);
// What the next of its parts names.
const Json* find_part(const Json& at, std::string_view part);

// Members of these keywords are schemas by name; of the others below, no schemas.
bool holds_schemas_by_name(std::string_view keyword);
bool holds_values(std::string_view keyword);

// Whether the value of this keyword is a number of things (minLength, maxItems, ...), and such a number: 2.0 is one, as
// JSON Schema has it. Nothing where it is none.
bool is_count(std::string_view keyword);
std::optional<uint64_t> count_of(const Json& value);

// A number that xgrammar takes for another one in values, and refuses as the bound of integers: beyond 64 bits, with
// their sign.
bool is_wide_number(const Json& value);

// Whether there are characters in a string that JSON has to escape.
bool needs_escape(std::string_view text);

// Whether bounds of numbers leave some, but none of six decimals, as xgrammar writes them within bounds.
bool is_narrow_range(const Json& schema);

// A "format" that grammars follow.
bool is_known_format(std::string_view name);

}  // namespace nfp::server
