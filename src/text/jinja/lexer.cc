#include "text/jinja/lexer.h"

#include <algorithm>
#include <charconv>

#include "text/jinja/runtime.h"
#include "text/jinja/text.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace nfp::jinja {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Every line break becomes \n, and one at the very end goes.
std::string normalized(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      out += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      out += source[i];
    }
  }
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

constexpr std::string_view kOperators[] = {  // longer ones first
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[",
    "]",  "(",  ")",  "{",  "}",  ">",  "<", "=", ".", ":", "|", ","};

class Lexer {
 public:
  explicit Lexer(std::string_view source) : owned_(normalized(source)), source_(owned_) {}

  std::vector<TokenData> run() {
    while (pos_ < source_.size()) text();
    add(Token::kEnd);
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail(std::string message) const {
    throw Failure{ErrorCode::kInvalidInput, std::move(message), line_};
  }

  TokenData& add(Token kind) {
    TokenData token;
    token.kind = kind;
    token.line = line_;
    tokens_.push_back(std::move(token));
    return tokens_.back();
  }

  bool at(std::string_view s) const { return source_.substr(pos_, s.size()) == s; }

  void advance(size_t n) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(pos_),
                                         source_.begin() + static_cast<std::ptrdiff_t>(pos_ + n), '\n'));
    pos_ += n;
    line_starts_ = n > 0 && source_[pos_ - 1] == '\n';
  }

  size_t skip_space(size_t pos) const {
    while (pos < source_.size()) {
      size_t after = pos;
      if (!text::is_python_space(text::next_code_point(source_, after))) break;
      pos = after;
    }
    return pos;
  }

  // Text up to the next tag, then that tag.
  void text() {
    size_t tag = pos_;
    for (;; ++tag) {
      tag = source_.find('{', tag);
      if (tag == std::string_view::npos || tag + 1 >= source_.size()) {
        emit_text(source_.substr(pos_));
        advance(source_.size() - pos_);
        return;
      }
      const char next = source_[tag + 1];
      if (next == '%' || next == '{' || next == '#') break;
    }
    const char kind = source_[tag + 1];
    const char sign =
        tag + 2 < source_.size() && (source_[tag + 2] == '-' || source_[tag + 2] == '+') ? source_[tag + 2] : 0;
    emit_text(stripped(source_.substr(pos_, tag - pos_), sign, kind != '{'));
    advance(tag - pos_);
    if (kind == '%') {
      if (const size_t end = raw_begin(); end != std::string_view::npos) {
        advance(end - pos_);
        raw();
        return;
      }
    }
    advance(sign == 0 ? 2 : 3);
    if (kind == '#') {
      comment();
    } else {
      add(kind == '%' ? Token::kBlockBegin : Token::kVariableBegin);
      inside(kind == '%');
    }
  }

  void emit_text(std::string_view data) {
    if (!data.empty()) add(Token::kText).text = data;
  }

  // What is left of the text before a tag that opens with `sign`.
  std::string_view stripped(std::string_view data, char sign, bool block) const {
    if (sign == '-') return text::strip_space(data, false, true);
    if (sign == '+' || !block) return data;
    const size_t newline = data.rfind('\n');
    const size_t line = newline == std::string_view::npos ? 0 : newline + 1;
    if (line == 0 && !line_starts_) return data;
    return text::strip_space(data.substr(line)).empty() ? data.substr(0, line) : data;
  }

  // The end of "{% raw %}" if one begins here.
  size_t raw_begin() const {
    size_t p = pos_ + 2;
    if (p < source_.size() && (source_[p] == '-' || source_[p] == '+')) ++p;
    p = skip_space(p);
    if (source_.substr(p, 3) != "raw") return std::string_view::npos;
    p = skip_space(p + 3);
    if (source_.substr(p, 3) == "-%}") return skip_space(p + 3);
    return source_.substr(p, 2) == "%}" ? p + 2 : std::string_view::npos;
  }

  void raw() {
    for (size_t tag = source_.find("{%", pos_); tag != std::string_view::npos; tag = source_.find("{%", tag + 1)) {
      size_t p = tag + 2;
      const char sign = p < source_.size() && (source_[p] == '-' || source_[p] == '+') ? source_[p++] : '\0';
      p = skip_space(p);
      if (source_.substr(p, 6) != "endraw") continue;
      p = skip_space(p + 6);
      size_t end = std::string_view::npos;
      if (source_.substr(p, 3) == "+%}") {
        end = p + 3;
      } else if (source_.substr(p, 3) == "-%}") {
        end = skip_space(p + 3);
      } else if (source_.substr(p, 2) == "%}") {
        end = p + 2 + (source_.substr(p + 2, 1) == "\n" ? 1 : 0);
      }
      if (end == std::string_view::npos) continue;
      emit_text(stripped(source_.substr(pos_, tag - pos_), sign, true));
      advance(end - pos_);
      return;
    }
    fail("Missing end of raw directive");
  }

  void comment() {
    const size_t end = source_.find("#}", pos_);
    if (end == std::string_view::npos) fail("Missing end of comment tag");
    const char sign = end > pos_ ? source_[end - 1] : '\0';
    size_t after = end + 2;
    if (sign == '-') {
      after = skip_space(after);
    } else if (sign != '+' && source_.substr(after, 1) == "\n") {
      ++after;
    }
    advance(after - pos_);
  }

  // The end of a tag if one stands here: where the source goes on behind it.
  size_t tag_end(bool block) const {
    const std::string_view close = block ? "%}" : "}}";
    if (at(close)) {
      const size_t after = pos_ + 2;
      return block && source_.substr(after, 1) == "\n" ? after + 1 : after;
    }
    if (source_.substr(pos_ + 1, 2) == close) {
      if (source_[pos_] == '-') return skip_space(pos_ + 3);
      if (source_[pos_] == '+' && block) return pos_ + 3;
    }
    return std::string_view::npos;
  }

  void inside(bool block) {
    open_.clear();
    while (pos_ < source_.size()) {
      if (open_.empty()) {
        if (const size_t end = tag_end(block); end != std::string_view::npos) {
          add(block ? Token::kBlockEnd : Token::kVariableEnd);
          advance(end - pos_);
          return;
        }
      }
      const char c = source_[pos_];
      size_t after = pos_;
      const char32_t code_point = text::next_code_point(source_, after);
      if (text::is_python_space(code_point)) {
        advance(skip_space(pos_) - pos_);
      } else if (is_digit(c)) {
        number();
      } else if (c == '\'' || c == '"') {
        string(c);
      } else if (text::is_word(code_point)) {
        name();
      } else {
        punctuation();
      }
    }
  }

  // The end of decimal digits, which may have underscores between them.
  size_t digits(size_t p) const {
    while (p < source_.size() && (is_digit(source_[p]) || source_[p] == '_')) ++p;
    return p;
  }

  void number() {
    const size_t begin = pos_;
    size_t end = digits(begin);
    bool real = false;
    // A float needs a fraction or an exponent, and no dot before it (as in x.0.1).
    if (begin == 0 || source_[begin - 1] != '.') {
      if (source_.substr(end, 1) == "." && end + 1 < source_.size() && is_digit(source_[end + 1])) {
        end = digits(end + 1);
        real = true;
      }
      if (source_.substr(end, 1) == "e" || source_.substr(end, 1) == "E") {
        const size_t sign = source_.find_first_of("+-", end + 1) == end + 1 ? 1 : 0;
        const size_t exponent = end + 1 + sign;
        if (exponent < source_.size() && is_digit(source_[exponent])) {
          end = digits(exponent);
          real = true;
        }
      }
    }
    std::string text(source_.substr(begin, end - begin));
    std::erase(text, '_');
    if (real) {
      add(Token::kFloat).real = parse_real(text).value_or(0);
    } else {
      const std::optional<Int> value = parse_int(text);
      if (!value) fail("an integer is too large");
      add(Token::kInteger).integer = *value;
    }
    advance(end - pos_);
  }

  void name() {
    size_t end = pos_;
    while (end < source_.size()) {
      size_t after = end;
      if (!text::is_word(text::next_code_point(source_, after))) break;
      end = after;
    }
    add(Token::kName).text = source_.substr(pos_, end - pos_);
    advance(end - pos_);
  }

  void string(char quote) {
    size_t end = pos_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) fail(fmt::format("unexpected char '{}': a string without its end", quote));
    add(Token::kString).text = unescaped(source_.substr(pos_ + 1, end - pos_ - 1));
    advance(end + 1 - pos_);
  }

  // A literal's escapes resolved, as Python does.
  std::string unescaped(std::string_view literal) const {
    constexpr std::string_view kLetters = "abfnrtv\\'\"", kMeanings = "\a\b\f\n\r\t\v\\'\"";
    std::string out;
    for (size_t pos = 0; pos < literal.size();) {
      const char c = literal[pos++];
      if (c != '\\' || pos == literal.size()) {
        out += c;
        continue;
      }
      const char kind = literal[pos++];
      if (const size_t at = kLetters.find(kind); at != std::string_view::npos) {
        out += kMeanings[at];
      } else if (kind >= '0' && kind <= '7') {
        const size_t end = std::min(literal.find_first_not_of("01234567", pos), std::min(pos + 2, literal.size()));
        text::append_utf8(out, number_escape(literal.substr(pos - 1, end - pos + 1), 8, kind));
        pos = end;
      } else if (kind == 'x' || kind == 'u' || kind == 'U') {
        const size_t digits = kind == 'x' ? 2 : kind == 'u' ? 4 : 8;
        if (literal.size() - pos < digits) fail(fmt::format("truncated \\{} escape in a string", kind));
        text::append_utf8(out, number_escape(literal.substr(pos, digits), 16, kind));
        pos += digits;
      } else if (kind == 'N') {
        fail("\\N{...} escapes are not supported in chat templates; write the character itself");
      } else if (kind != '\n') {
        out += '\\';
        out += kind;
      }
    }
    return out;
  }

  char32_t number_escape(std::string_view digits, int base, char kind) const {
    uint32_t value = 0;
    const auto [end, code] = std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
    if (end != digits.data() + digits.size() || code != std::errc()) {
      fail(fmt::format("truncated \\{} escape in a string", kind));
    }
    if (value > 0x10FFFF || (value >= 0xD800 && value < 0xE000)) {
      fail(fmt::format("illegal Unicode character in a \\{} escape", kind));
    }
    return value;
  }

  void punctuation() {
    for (const std::string_view op : kOperators) {
      if (!at(op)) continue;
      balance(op[0]);
      add(Token::kOperator).text = op;
      advance(op.size());
      return;
    }
    size_t after = pos_;
    text::next_code_point(source_, after);
    fail(fmt::format("unexpected char '{}'", source_.substr(pos_, after - pos_)));
  }

  void balance(char c) {
    if (c == '{') open_ += '}';
    if (c == '(') open_ += ')';
    if (c == '[') open_ += ']';
    if (c == '}' || c == ')' || c == ']') {
      if (open_.empty()) fail(fmt::format("unexpected '{}'", c));
      if (open_.back() != c) fail(fmt::format("unexpected '{}', expected '{}'", c, open_.back()));
      open_.pop_back();
    }
  }

  const std::string owned_;
  const std::string_view source_;
  size_t pos_ = 0;
  int line_ = 1;
  bool line_starts_ = true;  // the last thing read ended with a newline
  std::string open_;         // closing brackets still to come
  std::vector<TokenData> tokens_;
};

}  // namespace

std::vector<TokenData> tokenize(std::string_view source) { return Lexer(source).run(); }

std::string describe(const TokenData& token) {
  switch (token.kind) {
    case Token::kText:
      return "template text";
    case Token::kVariableBegin:
      return "{{";
    case Token::kVariableEnd:
      return "}}";
    case Token::kBlockBegin:
      return "{%";
    case Token::kBlockEnd:
      return "%}";
    case Token::kString:
      return "a string";
    case Token::kInteger:
    case Token::kFloat:
      return "a number";
    case Token::kEnd:
      return "the end of the template";
    default:
      return token.text.substr(0, 50);
  }
}

}  // namespace nfp::jinja
