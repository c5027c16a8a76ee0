#include "server/grammar/grammar_ebnf.h"

#include <algorithm>
#include <cctype>

namespace nfp::server {
namespace {

// The end of the literal or class that begins at `from`, behind what closes it.
size_t end_of(std::string_view text, size_t from, char close) {
  for (size_t i = from + 1; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
    } else if (text[i] == close) {
      return i + 1;
    }
  }
  return text.size();
}

bool is_of_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-' || c == '.'; }

}  // namespace

std::string ebnf_for_grammar(std::string_view gbnf) {
  constexpr std::string_view kNothing = "\"\"", kAnyCharacter = R"([\u0000-\U0010FFFF])";
  std::string out;
  bool awaits = false;  // an alternative begins, of which nothing is there yet
  for (size_t i = 0; i < gbnf.size();) {
    const char c = gbnf[i];
    size_t end = i + 1;
    if (c == '#') {
      end = std::min(gbnf.find('\n', i), gbnf.size());
    } else if (c == '"' || c == '[') {
      end = end_of(gbnf, i, c == '[' ? ']' : '"');
      awaits = false;
    } else if (c == '|' || c == ')' || c == '(') {
      if (awaits && c != '(') out += kNothing;
      awaits = c != ')';
    } else if (gbnf.substr(i).starts_with("::=")) {
      end = i + 3;
      awaits = true;
    } else if (is_of_name(c)) {
      while (end < gbnf.size() && is_of_name(gbnf[end])) ++end;
      awaits = false;
    } else if (std::isspace(static_cast<unsigned char>(c)) == 0) {
      awaits = false;
    }
    const std::string_view part = gbnf.substr(i, end - i);
    out += part == "." ? kAnyCharacter : part;
    i = end;
  }
  if (awaits) out.append("\n").append(kNothing);
  return out;
}

}  // namespace nfp::server
