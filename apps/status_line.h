// The line on standard error that says how far long work has come, and is written over.
#pragma once

#include <string_view>

namespace nfp {

// Whether escape sequences do there what they say: a terminal, but no dumb one.
bool takes_escapes(int fd);
// In place of the last one, and never longer than the terminal is wide: what is left of a line that was broken is not
// written over. For a standard error that takes escapes.
void draw_status_line(std::string_view text);
void clear_status_line();

}  // namespace nfp
