// Which variables have no value where a scope begins. jinja2 decides when it compiles: a name that a scope assigns
// before it reads it, and that no scope around has, belongs to that scope alone. Until it is assigned it is undefined
// there, and in the scopes within, even where the template was given a variable of this name.
#pragma once

#include "text/jinja/parser.h"

namespace nfp::jinja {

// Fills in every `unset`.
void find_unset(Template& program);

}  // namespace nfp::jinja
