// Which variables a block hides although it has not set them yet.
#pragma once

#include "text/jinja/ast.h"

namespace nfp::jinja {

// jinja2 decides when it compiles a template what each name in a block stands for. Mostly that is what reading through
// the blocks around it finds; but a name that a block sets, and that neither this block mentions before nor any block
// around it mentions at all, is the block's own from its first line on: until it is set it is Undefined, also for the
// blocks inside, even when the template was given a variable of that name. This fills in Template::hidden,
// Stmt::hidden and Stmt::other_hidden with such names.
void find_hidden_names(Template& program);

}  // namespace nfp::jinja
