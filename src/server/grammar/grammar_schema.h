// JSON schemas as xgrammar has to be given them. Some that it takes as they are become grammars of other values, or of
// texts that are no JSON (as of 0.2.8; grammar_test.cc shows each).
#pragma once

#include "server/api/json_text.h"

namespace nfp::server {

// Throws std::runtime_error for a pattern that cannot be followed.
Json schema_for_grammar(Json schema);

}  // namespace nfp::server
