#include "text/jinja/lexer.h"

#include <algorithm>
#include <charconv>

#include "text/jinja/runtime.h"
#include "text/jinja/string_literal.h"
#include "text/jinja/unicode_text.h"

namespace nfp::jinja {
namespace {

constexpr auto kNotFound = std::string_view::npos;

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

struct Operator {
  std::string_view text;
  Token kind;
};
constexpr Operator kOperators[] = {  // longer ones first
    {"//", Token::kFloorDiv}, {"**", Token::kPow},     {"==", Token::kEq},    {"!=", Token::kNe},
    {">=", Token::kGe},       {"<=", Token::kLe},      {"+", Token::kAdd},    {"-", Token::kSub},
    {"/", Token::kDiv},       {"*", Token::kMul},      {"%", Token::kMod},    {"~", Token::kTilde},
    {"[", Token::kLBracket},  {"]", Token::kRBracket}, {"(", Token::kLParen}, {")", Token::kRParen},
    {"{", Token::kLBrace},    {"}", Token::kRBrace},   {">", Token::kGt},     {"<", Token::kLt},
    {"=", Token::kAssign},    {".", Token::kDot},      {":", Token::kColon},  {"|", Token::kPipe},
    {",", Token::kComma}};

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
      if (!unicode::is_space(unicode::next(source_, after))) break;
      pos = after;
    }
    return pos;
  }

  // Text up to the next tag, then that tag.
  void text() {
    size_t tag = pos_;
    for (;; ++tag) {
      tag = source_.find('{', tag);
      if (tag == kNotFound || tag + 1 >= source_.size()) {
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
      if (const size_t end = raw_begin(); end != kNotFound) {
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
    if (sign == '-') return unicode::strip_right(data);
    if (sign == '+' || !block) return data;
    const size_t newline = data.rfind('\n');
    const size_t line = newline == kNotFound ? 0 : newline + 1;
    if (line == 0 && !line_starts_) return data;
    return unicode::strip_left(data.substr(line)).empty() ? data.substr(0, line) : data;
  }

  // The end of "{% raw %}" if one begins here.
  size_t raw_begin() const {
    size_t p = pos_ + 2;
    if (p < source_.size() && (source_[p] == '-' || source_[p] == '+')) ++p;
    p = skip_space(p);
    if (source_.substr(p, 3) != "raw") return kNotFound;
    p = skip_space(p + 3);
    if (source_.substr(p, 3) == "-%}") return skip_space(p + 3);
    return source_.substr(p, 2) == "%}" ? p + 2 : kNotFound;
  }

  void raw() {
    for (size_t tag = source_.find("{%", pos_); tag != kNotFound; tag = source_.find("{%", tag + 1)) {
      size_t p = tag + 2;
      const char sign = p < source_.size() && (source_[p] == '-' || source_[p] == '+') ? source_[p++] : '\0';
      p = skip_space(p);
      if (source_.substr(p, 6) != "endraw") continue;
      p = skip_space(p + 6);
      size_t end = kNotFound;
      if (source_.substr(p, 3) == "+%}") {
        end = p + 3;
      } else if (source_.substr(p, 3) == "-%}") {
        end = skip_space(p + 3);
      } else if (source_.substr(p, 2) == "%}") {
        end = p + 2 + (source_.substr(p + 2, 1) == "\n" ? 1 : 0);
      }
      if (end == kNotFound) continue;
      emit_text(stripped(source_.substr(pos_, tag - pos_), sign, true));
      advance(end - pos_);
      return;
    }
    fail("Missing end of raw directive");
  }

  void comment() {
    const size_t end = source_.find("#}", pos_);
    if (end == kNotFound) fail("Missing end of comment tag");
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
    return kNotFound;
  }

  void inside(bool block) {
    open_.clear();
    while (pos_ < source_.size()) {
      if (open_.empty()) {
        if (const size_t end = tag_end(block); end != kNotFound) {
          add(block ? Token::kBlockEnd : Token::kVariableEnd);
          advance(end - pos_);
          return;
        }
      }
      const char c = source_[pos_];
      size_t after = pos_;
      const uint32_t code_point = unicode::next(source_, after);
      if (unicode::is_space(code_point)) {
        advance(skip_space(pos_) - pos_);
      } else if (is_digit(c)) {
        number();
      } else if (c == '\'' || c == '"') {
        string(c);
      } else if (unicode::is_word(code_point)) {
        name();
      } else {
        punctuation();
      }
    }
  }

  // The end of digits that may have single underscores between them, or `p` when there are none.
  template <typename IsDigit>
  size_t digits(size_t p, const IsDigit& accepts, bool underscore_first) const {
    size_t end = p;
    for (;;) {
      const bool underscore = end < source_.size() && source_[end] == '_' && (end > p || underscore_first);
      const size_t digit = underscore ? end + 1 : end;
      if (digit >= source_.size() || !accepts(source_[digit])) return end;
      end = digit + 1;
    }
  }

  void number() {
    const auto decimal = [](char c) { return is_digit(c); };
    const size_t begin = pos_;
    // A float needs a fraction or an exponent, and no dot before it (as in x.0.1).
    const size_t whole = digits(begin, decimal, false);
    size_t end = whole;
    bool real = false;
    if (begin == 0 || source_[begin - 1] != '.') {
      if (source_.substr(end, 1) == "." && end + 1 < source_.size() && is_digit(source_[end + 1])) {
        end = digits(end + 1, decimal, false);
        real = true;
      }
      if (source_.substr(end, 1) == "e" || source_.substr(end, 1) == "E") {
        size_t p = end + 1;
        if (p < source_.size() && (source_[p] == '+' || source_[p] == '-')) ++p;
        if (p < source_.size() && is_digit(source_[p])) {
          end = digits(p, decimal, false);
          real = true;
        }
      }
    }
    if (real) {
      const std::string text = without_underscores(begin, end);
      double value = 0;
      const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
      // Too large is infinity in Python and too small zero; from_chars leaves the value alone then.
      if (parsed.ec == std::errc::result_out_of_range) value = std::strtod(text.c_str(), nullptr);
      add(Token::kFloat).real = value;
    } else {
      end = integer(begin, whole);
    }
    advance(end - pos_);
  }

  size_t integer(size_t begin, size_t whole) {
    int base = 10;
    size_t end = whole;
    if (source_[begin] == '0') {
      const char marker = begin + 1 < source_.size() ? static_cast<char>(source_[begin + 1] | 0x20) : '\0';
      const int marked = marker == 'b' ? 2 : marker == 'o' ? 8 : marker == 'x' ? 16 : 10;
      const auto accepts = [marked](char c) {
        const char lower = static_cast<char>(c | 0x20);
        return marked == 16 ? is_digit(c) || (lower >= 'a' && lower <= 'f') : is_digit(c) && c - '0' < marked;
      };
      end = begin + 1;
      if (marked != 10) {
        const size_t after = digits(begin + 2, accepts, true);
        if (after > begin + 2) {
          base = marked;
          end = after;
        }
      } else {
        end = digits(
            begin, [](char c) { return c == '0'; }, false);
      }
    }
    Int value = 0;
    for (const char c : without_underscores(begin + (base == 10 ? 0 : 2), end)) {
      const int digit = is_digit(c) ? c - '0' : (c | 0x20) - 'a' + 10;
      value = value * base + digit;
      if (value >= kIntBound) fail("an integer is too large");
    }
    add(Token::kInteger).integer = value;
    return end;
  }

  std::string without_underscores(size_t begin, size_t end) const {
    std::string out(source_.substr(begin, end - begin));
    std::erase(out, '_');
    return out;
  }

  void name() {
    size_t end = pos_;
    while (end < source_.size()) {
      size_t after = end;
      if (!unicode::is_word(unicode::next(source_, after))) break;
      end = after;
    }
    add(Token::kName).text = source_.substr(pos_, end - pos_);
    advance(end - pos_);
  }

  void string(char quote) {
    size_t end = pos_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) fail(fmt::format("unexpected char '{}': a string without its end", quote));
    std::string error_text;
    std::string value;
    if (!unescape(source_.substr(pos_ + 1, end - pos_ - 1), &value, &error_text)) fail(error_text);
    add(Token::kString).text = std::move(value);
    advance(end + 1 - pos_);
  }

  void punctuation() {
    for (const Operator& op : kOperators) {
      if (!at(op.text)) continue;
      balance(op.text[0]);
      add(op.kind);
      advance(op.text.size());
      return;
    }
    size_t after = pos_;
    unicode::next(source_, after);
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
    case Token::kName:
      return token.text.substr(0, 50);
    case Token::kString:
      return "a string";
    case Token::kInteger:
    case Token::kFloat:
      return "a number";
    case Token::kEnd:
      return "the end of the template";
    default:
      for (const Operator& op : kOperators) {
        if (op.kind == token.kind) return std::string(op.text);
      }
      return "?";
  }
}

}  // namespace nfp::jinja
