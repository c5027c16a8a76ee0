// Regular expressions as xgrammar has to be given them. It ignores an anchor that is not at the expression's end, reads
// some escapes and classes in its own way, and repeats some groups wrongly inside of JSON (as of 0.2.8; grammar_test.cc
// shows each). So an expression is read here, as ECMA-262 has it with the flag u (which JSON Schema asks for), and
// written anew with the few forms that mean the same to all.
#pragma once

#include <string>
#include <string_view>

namespace nfp::server {

enum class RegexUse {
  kAnswer,   // the whole answer
  kPattern,  // the whole of a JSON string: nothing that JSON escapes; what looks ahead is left out
};

// In ASCII. Throws std::runtime_error for what is no such expression, cannot be followed, or matches nothing.
std::string regex_for_grammar(std::string_view regex, RegexUse use);

}  // namespace nfp::server
