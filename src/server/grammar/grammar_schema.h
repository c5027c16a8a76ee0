// JSON schemas and regular expressions as xgrammar has to be given them. Some that it takes as they are become grammars
// of other values, or of texts that are no JSON (as of 0.2.8; grammar_test.cc shows each).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "server/api/json_text.h"

namespace nfp::server {

struct GrammarSchema {
  Json schema;
  std::vector<std::string> patterns;  // regular expressions of the client's that are in it, as they are there
};

GrammarSchema schema_for_grammar(Json schema);
// Of a whole answer: a dot is any character but a line's end, as in ECMAScript, whose expressions schemas have.
std::string regex_for_grammar(std::string_view regex);

}  // namespace nfp::server
