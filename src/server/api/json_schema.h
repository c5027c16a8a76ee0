// What of a JSON schema the grammar made of it does not enforce (xgrammar 0.2.8; server/grammar/grammar_test.cc holds
// this against the grammars themselves).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "server/api/json_text.h"

namespace nfp::server {

// Keywords, each once, in the order of their appearance. Empty = every answer that the grammar allows is valid.
std::vector<std::string> unenforced_keywords(const Json& schema);

// What a reference ("#/$defs/a") names within `root`; null where there is no such thing.
const Json* find_reference(const Json& root, std::string_view reference);

// Members of these keywords are schemas by name; of the others below, no schemas.
bool holds_schemas_by_name(std::string_view keyword);
bool holds_values(std::string_view keyword);

// A "format" that grammars follow.
bool is_known_format(std::string_view name);

}  // namespace nfp::server
