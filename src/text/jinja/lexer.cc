#include "text/jinja/lexer.h"

#include <algorithm>
#include <charconv>

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
    if (source[i] == '\r' && source.substr(i + 1, 1) == "\n") continue;
    out += source[i] == '\r' ? '\n' : source[i];
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
    take(Token::kEnd, pos_);
    tokens_.back().text = "the end of the template";
    return std::move(tokens_);
  }

 private:
  static constexpr size_t kNone = std::string_view::npos;

  [[noreturn]] void fail(std::string message) const {
    throw Failure{ErrorCode::kInvalidInput, std::move(message), line_};
  }

  // A token of the source up to `end`.
  TokenData& take(Token kind, size_t end) {
    TokenData token;
    token.kind = kind;
    token.line = line_;
    token.text = source_.substr(pos_, end - pos_);
    tokens_.push_back(std::move(token));
    advance(end);
    return tokens_.back();
  }

  bool at(std::string_view s) const { return source_.substr(pos_, s.size()) == s; }

  void advance(size_t end) {
    const std::string_view passed = source_.substr(pos_, end - pos_);
    line_ += static_cast<int>(std::count(passed.begin(), passed.end(), '\n'));
    line_starts_ = passed.ends_with('\n');
    pos_ = end;
  }

  // The end of the code points from `pos` on that `is` holds for.
  size_t skip(size_t pos, bool (*is)(char32_t)) const {
    while (pos < source_.size()) {
      size_t after = pos;
      if (!is(text::next_code_point(source_, after))) break;
      pos = after;
    }
    return pos;
  }
  size_t skip_space(size_t pos) const { return skip(pos, text::is_python_space); }

  // Text up to the next tag, then that tag.
  void text() {
    size_t tag = pos_;
    while ((tag = source_.find('{', tag)) != source_.npos) {
      const std::string_view next = source_.substr(tag + 1, 1);
      if (next == "%" || next == "{" || next == "#") break;
      ++tag;
    }
    tag = std::min(tag, source_.size());
    const char kind = tag < source_.size() ? source_[tag + 1] : '{';
    const std::string_view sign = source_.substr(std::min(tag + 2, source_.size()), 1);
    const std::string_view data = stripped(source_.substr(pos_, tag - pos_), sign, kind != '{');
    if (!data.empty()) take(Token::kText, tag).text = data;
    advance(tag);
    if (tag == source_.size()) return;
    const size_t inside = tag + (sign == "-" || sign == "+" ? 3 : 2);
    if (kind == '#') {
      comment(inside);
    } else if (const size_t begin = kind == '%' ? raw_tag_end("raw", inside, false) : kNone; begin != kNone) {
      raw(begin);
    } else {
      take(kind == '%' ? Token::kBlockBegin : Token::kVariableBegin, inside).text = kind == '%' ? "{%" : "{{";
      tag_body(kind == '%');
    }
  }

  // What is left of the text before a tag that opens with `sign`.
  std::string_view stripped(std::string_view data, std::string_view sign, bool block) const {
    if (sign == "-") return text::strip_space(data, false, true);
    if (sign == "+" || !block) return data;
    const size_t newline = data.rfind('\n');
    const size_t line = newline == std::string_view::npos ? 0 : newline + 1;
    if (line == 0 && !line_starts_) return data;
    return text::strip_space(data.substr(line)).empty() ? data.substr(0, line) : data;
  }

  void comment(size_t begin) {
    const size_t end = source_.find("#}", begin);
    if (end == std::string_view::npos) fail("Missing end of comment tag");
    const std::string_view sign = end > begin ? source_.substr(end - 1, 1) : "";
    advance(sign == "-" ? skip_space(end + 2) : behind_block(end + 2, sign != "+"));
  }

  // Where the source goes on behind {% raw %} or {% endraw %}, whose name is expected at `pos`.
  size_t raw_tag_end(std::string_view name, size_t pos, bool trim) const {
    pos = skip_space(pos);
    if (source_.substr(pos, name.size()) != name) return kNone;
    pos = skip_space(pos + name.size());
    if (source_.substr(pos, 2) == "%}") return behind_block(pos + 2, trim);
    if (source_.substr(pos, 3) == "-%}") return skip_space(pos + 3);
    return trim && source_.substr(pos, 3) == "+%}" ? pos + 3 : kNone;
  }

  // Text from `begin` to {% endraw %}, whatever is in it.
  void raw(size_t begin) {
    advance(begin);
    for (size_t tag = begin; (tag = source_.find("{%", tag)) != kNone; tag += 2) {
      std::string_view sign = source_.substr(tag + 2, 1);
      if (sign != "-" && sign != "+") sign = {};
      const size_t end = raw_tag_end("endraw", tag + 2 + sign.size(), true);
      if (end == kNone) continue;
      const std::string_view data = stripped(source_.substr(pos_, tag - pos_), sign, true);
      if (!data.empty()) take(Token::kText, tag).text = data;
      advance(end);
      return;
    }
    fail("Missing end of raw directive");
  }

  // Where the source goes on behind a block tag or comment: without one newline.
  size_t behind_block(size_t end, bool trim) const { return end + (trim && source_.substr(end, 1) == "\n" ? 1 : 0); }

  // The end of a tag if one stands here: where the source goes on behind it.
  size_t tag_end(bool block) const {
    const std::string_view close = block ? "%}" : "}}";
    if (at(close)) return behind_block(pos_ + 2, block);
    if (source_.substr(pos_ + 1, 2) != close) return std::string_view::npos;
    if (source_[pos_] == '-') return skip_space(pos_ + 3);
    return source_[pos_] == '+' && block ? pos_ + 3 : std::string_view::npos;
  }

  void tag_body(bool block) {
    open_.clear();
    while (pos_ < source_.size()) {
      if (open_.empty()) {
        if (const size_t end = tag_end(block); end != std::string_view::npos) {
          take(block ? Token::kBlockEnd : Token::kVariableEnd, end).text = block ? "%}" : "}}";
          return;
        }
      }
      const char c = source_[pos_];
      const size_t word = skip(pos_, text::is_word);
      if (const size_t space = skip_space(pos_); space != pos_) {
        advance(space);
      } else if (is_digit(c)) {
        number();
      } else if (c == '\'' || c == '"') {
        string(c);
      } else if (word != pos_) {
        take(Token::kName, word);
      } else {
        punctuation();
      }
    }
  }

  size_t digits(size_t pos) const { return std::min(source_.find_first_not_of("0123456789", pos), source_.size()); }

  void number() {
    size_t end = digits(pos_);
    // A float needs a fraction, and no dot before it (as in x.0.1).
    bool real = (pos_ == 0 || source_[pos_ - 1] != '.') && source_.substr(end, 1) == "." && digits(end + 1) != end + 1;
    if (real) end = digits(end + 1);
    if (const size_t behind = exponent(end); behind != end) {
      real = true;
      end = behind;
    }
    if (skip(end, text::is_word) != end) {
      fail("a number with an underscore or another base is not supported in chat templates");
    }
    if (!real && end > pos_ + 1 && at("0") && source_.find_first_not_of('0', pos_) < end) {
      fail("an integer begins with 0");
    }
    TokenData& token = take(real ? Token::kFloat : Token::kInteger, end);
    const std::optional<Int> value = real ? Int{0} : parse_int(token.text);
    if (!value) fail("an integer is too large");
    token.integer = *value;
    if (!real) return;
    const auto read = std::from_chars(token.text.data(), token.text.data() + token.text.size(), token.real);
    if (read.ec != std::errc()) fail("a number beyond floats is not supported in chat templates");
  }

  // The end of an exponent at `pos`; `pos` where there is none, or a dot before the number (as in x.0e1).
  size_t exponent(size_t pos) const {
    if (pos_ > 0 && source_[pos_ - 1] == '.') return pos;
    if (source_.substr(pos, 1) != "e" && source_.substr(pos, 1) != "E") return pos;
    const bool sign = source_.substr(pos + 1, 1) == "+" || source_.substr(pos + 1, 1) == "-";
    const size_t first = pos + (sign ? 2 : 1), end = digits(first);
    return end == first ? pos : end;
  }

  void string(char quote) {
    size_t end = pos_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) fail(fmt::format("unexpected char '{}': a string without its end", quote));
    std::string text = unescaped(source_.substr(pos_ + 1, end - pos_ - 1));
    take(Token::kString, end + 1).text = std::move(text);
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
      } else if (kind == 'x' || kind == 'u' || kind == 'U') {
        const size_t count = kind == 'x' ? 2 : kind == 'u' ? 4 : 8;
        text::append_utf8(out, code_point(literal.substr(pos, count), count));
        pos += count;
      } else if (kind == 'N' || is_digit(kind)) {
        fail(fmt::format("\\{} escapes are not supported in chat templates; write the character itself", kind));
      } else if (static_cast<unsigned char>(kind) >= 0x80) {
        // It becomes an escape first, whose backslash is the one that this one escapes.
        const char32_t point = text::next_code_point(literal, --pos);
        out += point < 0x100     ? fmt::format("\\x{:02x}", static_cast<uint32_t>(point))
               : point < 0x10000 ? fmt::format("\\u{:04x}", static_cast<uint32_t>(point))
                                 : fmt::format("\\U{:08x}", static_cast<uint32_t>(point));
      } else if (kind != '\n') {
        out += '\\';
        out += kind;
      }
    }
    return out;
  }

  char32_t code_point(std::string_view hex, size_t count) const {
    uint32_t value = 0;
    const auto [end, code] = std::from_chars(hex.data(), hex.data() + hex.size(), value, 16);
    if (hex.size() != count || end != hex.data() + hex.size() || value > 0x10FFFF || (value >> 11) == 0x1B) {
      fail("an escape in a string is truncated or no Unicode character");
    }
    return value;
  }

  void punctuation() {
    for (const std::string_view op : kOperators) {
      if (!at(op)) continue;
      balance(op[0]);
      take(Token::kOperator, pos_ + op.size());
      return;
    }
    fail(fmt::format("unexpected char '{}'", source_.substr(pos_, text::utf8_length(source_[pos_]))));
  }

  void balance(char c) {
    constexpr std::string_view kOpen = "{([", kClose = "})]";
    if (const size_t at = kOpen.find(c); at != kOpen.npos) open_ += kClose[at];
    if (kClose.find(c) != kClose.npos) {
      if (open_.empty() || open_.back() != c) fail(fmt::format("unexpected '{}'", c));
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

}  // namespace nfp::jinja
