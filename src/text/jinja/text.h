// Values as text (str, repr, JSON), numbers from text, and what string methods and filters share. Texts are valid
// UTF-8. Every search and comparison is on the account of a Runtime.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/jinja/value.h"
#include "text/unicode.h"

namespace nfp::jinja {

std::string to_text(Runtime& rt, const Value& v);  // str(v)
std::string repr(Runtime& rt, const Value& v);
void append_text(Runtime& rt, std::string& out, const Value& v);
std::string escaped(Runtime& rt, const Value& v);  // str(v) as HTML, where v is no safe text

// transformers' tojson filter: Python's json.dumps.
struct JsonStyle {
  bool ascii = false;   // escape all but ASCII
  bool pretty = false;  // one item a line, indented by `indent` per level
  bool sort_keys = false;
  std::string indent;
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
std::string to_json(Runtime& rt, const Value& v, const JsonStyle& style);

// The beginning of a name, for messages that values keep: a name may be as long as the template.
std::string_view short_name(std::string_view name);

// What Python's int() makes of a text in ASCII digits; nullopt where it raises ValueError, and for integers beyond
// kIntBound.
std::optional<Int> parse_int(std::string_view text);

// What Python's float() makes of a text; nullopt where it raises ValueError. Fails for numbers that are too large, and
// for digits with underscores between them.
std::optional<double> parse_float(Runtime& rt, std::string_view text);

// First occurrence at or after byte `from`, in linear time; npos when there is none. An empty needle is found at
// `from`.
size_t find_text(Runtime& rt, std::string_view text, std::string_view needle, size_t from);

// The last occurrence, likewise; an empty needle is found at the end.
size_t find_last(Runtime& rt, std::string_view text, std::string_view needle);

// str.split(separator, limit), where no `separator` means at white space; limit < 0 means
// all. Precondition: the separator is not empty.
std::vector<std::string_view> split(Runtime& rt, std::string_view text, std::optional<std::string_view> separator,
                                    Int limit);
// str.rsplit, likewise.
std::vector<std::string_view> split_from_right(Runtime& rt, std::string_view text,
                                               std::optional<std::string_view> separator, Int limit);
std::vector<std::string_view> split_lines(Runtime& rt, std::string_view text, bool keep_ends);

// str.strip: the code points of `set`, or white space when it is None or missing.
std::string_view strip(Runtime& rt, std::string_view text, const Value& set, bool left, bool right);
// str.lower and the like; fails for a letter that they are not supported for.
std::string with_case(Runtime& rt, std::string_view text, text::Case to);
// str.islower or isupper: whether there is a letter that has cases, and all of them are in `of`.
bool has_case(Runtime& rt, std::string_view text, text::Case of);
std::string replace(Runtime& rt, std::string_view text, std::string_view from, std::string_view to, Int limit);

// format % arguments: a tuple's items, a dict's by name, or one value.
Value format_percent(Runtime& rt, const Value& format, const Value& arguments);

}  // namespace nfp::jinja
