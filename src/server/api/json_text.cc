#include "server/api/json_text.h"

#include <cmath>

#include "text/utf8.h"

namespace nfp::server {
namespace {

// The escape of a character at which readers of streams that split as Python's splitlines() does end a line. Those
// below 0x20 are escaped anyway.
std::string_view line_end(std::string_view character) {
  if (character == "\u0085") return "\\u0085";
  if (character == "\u2028") return "\\u2028";
  return character == "\u2029" ? "\\u2029" : "";
}

}  // namespace

void append_escaped(std::string& out, std::string_view text) {
  size_t plain = 0;  // start of what needs no escape
  for (size_t i = 0; i < text.size();) {
    const auto c = static_cast<uint8_t>(text[i]);
    size_t length = 1;
    std::string_view replacement;
    char code[8];
    if (c == '"') {
      replacement = "\\\"";
    } else if (c == '\\') {
      replacement = "\\\\";
    } else if (c == '\n') {
      replacement = "\\n";
    } else if (c < 0x20) {
      *fmt::format_to(code, "\\u{:04x}", c) = '\0';
      replacement = std::string_view(code, 6);
    } else if (c >= 0x80) {
      const text::Utf8Unit unit = text::utf8_unit(text.substr(i));
      if (unit.kind == text::Utf8Unit::kComplete) {
        length = unit.size;
        replacement = line_end(text.substr(i, length));
      } else {
        replacement = text::kReplacement;
      }
    }
    if (!replacement.empty()) {
      out.append(text.substr(plain, i - plain)).append(replacement);
      plain = i + length;
    }
    i += length;
  }
  out.append(text.substr(plain));
}

void append_string(std::string& out, std::string_view text) {
  out.push_back('"');
  append_escaped(out, text);
  out.push_back('"');
}

std::string dump(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

void append_number(std::string& out, double value) {
  if (!std::isfinite(value)) {
    out += "null";
  } else {
    fmt::format_to(std::back_inserter(out), "{}", static_cast<float>(value));
  }
}

}  // namespace nfp::server
