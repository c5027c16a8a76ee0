// What the parser of the command line would take for a number and should not: nothing, which it reads as 0, NaN, which
// passes every range, and whole numbers that do not fit, which it wraps or cuts off; and empty names of files.
#pragma once

#include <CLI/CLI.hpp>

namespace nfp {

// Checks the numbers of every option of `app` and of its verbs, those of a configuration file too. Called after all of
// them were added.
void check_numbers(CLI::App& app);

}  // namespace nfp
