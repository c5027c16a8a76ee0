// Python's json module writes NaN, Infinity and -Infinity, for which JSON has no numbers, and so do models' files.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace nfp {

// With a string in the place of each of them, which is as long (places stay) and which no file has otherwise.
std::string quote_non_finite(std::string_view json);
// The opposite.
std::string unquote_non_finite(std::string_view json);

// The string, without its quotes, that stands for a number that is not finite; and the number that a string stands for.
std::string_view non_finite_mark(double number);
std::optional<double> non_finite_number(std::string_view mark);

}  // namespace nfp
