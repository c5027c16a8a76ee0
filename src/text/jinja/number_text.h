// Numbers from text, as Python's int() and float() read them.
#pragma once

#include <optional>
#include <string_view>

#include "text/jinja/value.h"

namespace nfp::jinja {

// base 0 takes it from a prefix 0x, 0o or 0b. nullopt where Python raises ValueError, and beyond kIntBound.
std::optional<Int> parse_int(std::string_view text, int base);
std::optional<double> parse_real(std::string_view text);

}  // namespace nfp::jinja
