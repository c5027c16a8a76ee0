#include "server/api/json_text.h"

#include <cmath>

namespace nfp::server {
namespace {

// Length of the valid UTF-8 sequence at `at`, 0 if there is none.
size_t utf8_length(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : 0u; };
  const auto continues = [&](size_t i) { return (byte(i) & 0xC0u) == 0x80u; };
  const unsigned first = byte(at);
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return continues(at + 1) ? 2 : 0;
  if (first >= 0xE0 && first <= 0xEF) {
    if (!continues(at + 1) || !continues(at + 2)) return 0;
    if (first == 0xE0 && byte(at + 1) < 0xA0) return 0;
    if (first == 0xED && byte(at + 1) > 0x9F) return 0;
    return 3;
  }
  if (first >= 0xF0 && first <= 0xF4) {
    if (!continues(at + 1) || !continues(at + 2) || !continues(at + 3)) return 0;
    if (first == 0xF0 && byte(at + 1) < 0x90) return 0;
    if (first == 0xF4 && byte(at + 1) > 0x8F) return 0;
    return 4;
  }
  return 0;
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
      length = utf8_length(text, i);
      if (length == 0) {
        length = 1;
        replacement = "\xEF\xBF\xBD";
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
