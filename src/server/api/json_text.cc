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

int json_depth(std::string_view text, int limit) {
  int depth = 0;
  int deepest = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        quoted = false;
      }
    } else if (c == '"') {
      quoted = true;
    } else if (c == '[' || c == '{') {
      deepest = std::max(deepest, ++depth);
      if (deepest > limit) return deepest;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return deepest;
}

Result<Json> parse_json(std::string_view text, int max_depth) {
  if (json_depth(text, max_depth) > max_depth) {
    return error(ErrorCode::kInvalidInput, "the JSON is nested deeper than {} levels", max_depth);
  }
  try {
    return Json::parse(text);
  } catch (const nlohmann::json::exception& failure) {
    // Without the library's "[json.exception.parse_error.101] ".
    std::string_view what = failure.what();
    if (const size_t end = what.find("] "); end != std::string_view::npos) what.remove_prefix(end + 2);
    return error(ErrorCode::kInvalidInput, "not valid JSON: {}", what.substr(0, 300));
  }
}

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
