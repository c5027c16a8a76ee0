// What of a JSON schema the grammar made of it does not enforce (xgrammar 0.2.8; server/grammar/grammar_test.cc holds
// this against the grammars themselves).
#pragma once

#include <string>
#include <vector>

#include "server/api/json_text.h"

namespace nfp::server {

// Keywords, each once, in the order of their appearance. Empty = every answer that the grammar allows is valid.
std::vector<std::string> unenforced_keywords(const Json& schema);

}  // namespace nfp::server
