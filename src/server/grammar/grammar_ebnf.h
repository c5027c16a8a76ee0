// EBNF as xgrammar has to be given it: it reads llama.cpp's GBNF, but for alternatives that are empty and for the dot.
#pragma once

#include <string>
#include <string_view>

namespace nfp::server {

// On the same lines.
std::string ebnf_for_grammar(std::string_view gbnf);

}  // namespace nfp::server
