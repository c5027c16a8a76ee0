#include "number_checks.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <string>
#include <string_view>

namespace nfp {
namespace {

// Validators of CLI11: an empty text is agreement.
std::string check_finite(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (end == text.c_str() || *end != '\0') return "'" + text + "' must be a number";
  return std::isfinite(value) ? "" : "'" + text + "' must be a finite number";
}

std::string check_whole(const std::string& text, bool is_signed) {
  // The conversion reads "010" as 8, as C does.
  const size_t first = text.find_first_of("0123456789");
  if (first != std::string::npos && text[first] == '0' && text.find_first_of("0123456789", first + 1) == first + 1) {
    return "'" + text + "' must not begin with 0";
  }
  char* end = nullptr;
  errno = 0;
  if (is_signed) {
    (void)std::strtoll(text.c_str(), &end, 0);
  } else {
    if (text.find('-') != std::string::npos) return "'" + text + "' must not be negative";
    (void)std::strtoull(text.c_str(), &end, 0);
  }
  if (end == text.c_str() || *end != '\0') return "'" + text + "' must be a whole number";
  return errno == ERANGE ? "'" + text + "' does not fit into 64 bits" : "";
}

// Of what has a unit behind it, before that is put in: -1GB would be a product too large, and -1 is whole.
std::string check_size(const std::string& text) {
  return text.find('-') != std::string::npos ? "'" + text + "' must not be negative" : "";
}

// Flags that name something, and are as if they were not given where the name is empty: a variable that is not set
// would fetch another model, or lose what was measured for minutes.
constexpr std::string_view kNaming[] = {"chat-template", "csv",       "file",      "html",     "json",
                                        "json-file",     "kld-base",  "log-tried", "out",      "precision-policy",
                                        "revision",      "save-base", "scratch",   "simulate", "step-log",
                                        "step-times",    "table",     "trace",     "url"};

bool names_something(const CLI::Option& option) {
  const auto& names = option.get_lnames();
  return std::any_of(names.begin(), names.end(), [](const std::string& name) {
    return std::find(std::begin(kNaming), std::end(kNaming), name) != std::end(kNaming);
  });
}

}  // namespace

void check_numbers(CLI::App& app) {
  for (CLI::Option* option : app.get_options([](const CLI::Option*) { return true; })) {
    const std::string type = option->get_type_name();  // with what validators say of themselves behind it
    if (names_something(*option)) {
      option->check([](const std::string& text) { return text.empty() ? std::string("the name is empty") : ""; }, "");
    }
    const bool sized = type.find(":SIZE ") != std::string::npos;
    // Before a range, which says of what is no number only that it is not in it; but behind a unit, which makes it one.
    const auto add = [&](const auto& check) {
      sized ? option->check(check, "") : option->transform(CLI::Validator(check, ""));
    };
    if (sized) option->transform(CLI::Validator(check_size, ""));  // goes first
    if (type.starts_with("FLOAT")) add(check_finite);
    if (type.starts_with("INT")) add([](const std::string& text) { return check_whole(text, true); });
    if (type.starts_with("UINT")) add([](const std::string& text) { return check_whole(text, false); });
  }
  for (CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; })) check_numbers(*verb);
}

}  // namespace nfp
