#include "server/grammar/grammar_regex.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "text/utf8.h"

namespace nfp::server {
namespace {

// Code points, both ends included; sorted and apart once they are normal().
using Set = std::vector<std::pair<char32_t, char32_t>>;

constexpr char32_t kLast = 0x10FFFF;
constexpr char32_t kFirstSurrogate = 0xD800, kLastSurrogate = 0xDFFF;
const Set kDigits = {{'0', '9'}};
const Set kWordCharacters = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
const Set kLineEnds = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};
// ECMA-262's WhiteSpace and LineTerminator.
const Set kBlanks = {{'\t', '\r'},     {' ', ' '},       {0xA0, 0xA0},     {0x1680, 0x1680}, {0x2000, 0x200A},
                     {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
const Set kEscapedInJson = {{0, 0x1F}, {'"', '"'}, {'\\', '\\'}};

Set normal(Set set) {
  std::sort(set.begin(), set.end());
  Set out;
  for (const auto& [low, high] : set) {
    if (!out.empty() && low <= out.back().second + 1) {
      out.back().second = std::max(out.back().second, high);
    } else {
      out.emplace_back(low, high);
    }
  }
  return out;
}

// Of a normal set.
Set complement(const Set& set) {
  Set out;
  char32_t next = 0;
  for (const auto& [low, high] : set) {
    if (low > next) out.emplace_back(next, low - 1);
    next = high + 1;
  }
  if (next <= kLast) out.emplace_back(next, kLast);
  return out;
}

Set without(const Set& set, Set others) {
  Set outside = complement(set);
  outside.insert(outside.end(), others.begin(), others.end());
  return complement(normal(std::move(outside)));
}

void add_other_case(Set& set) {
  const Set given = set;
  for (const auto& [from, to] : {std::pair(U'a', U'A'), std::pair(U'A', U'a')}) {
    const char32_t last = from + 25;
    for (const auto& [low, high] : given) {
      if (low <= last && high >= from)
        set.emplace_back(std::max(low, from) - from + to, std::min(high, last) - from + to);
    }
  }
}

constexpr uint32_t kNoMost = std::numeric_limits<uint32_t>::max();

struct Node {
  enum Kind : uint8_t { kSet, kSequence, kChoice, kRepeat, kStart, kEnd } kind = kSequence;
  Set set;
  std::vector<Node> parts;
  uint32_t least = 0, most = 0;  // of kRepeat
  size_t place = 0;              // in the expression
  bool may_be_empty = true;      // may match no character, where its anchors hold
  bool may_be_long = false;      // may match some
  bool has_anchor = false;
};

class Parser {
 public:
  Parser(std::string_view regex, RegexUse use) : use_(use) {
    for (size_t at = 0; at < regex.size();) text_.push_back(text::next_code_point(regex, at));
    if (regex.starts_with("(?i)")) {  // Python's; letters of ASCII only
      ignores_case_ = true;
      at_ = 4;
    }
  }

  Node run() {
    Node whole = choice();
    if (at_ < text_.size()) fail(at_, "')' closes nothing");
    return whole;
  }
  // Whether there is a character that JSON would have to escape.
  bool needs_escapes() const { return needs_escapes_; }

 private:
  static constexpr int kMostNested = 500;
  static constexpr uint32_t kMostRepeated = 999'999'999;

  [[noreturn]] static void fail(size_t place, std::string_view what) {
    throw std::runtime_error(fmt::format("{}, at character {}", what, place + 1));
  }

  bool more() const { return at_ < text_.size(); }
  char32_t peek(size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : 0; }
  bool is_next(std::string_view ascii) const {
    for (size_t i = 0; i < ascii.size(); ++i) {
      if (peek(i) != static_cast<char32_t>(ascii[i])) return false;
    }
    return true;
  }
  bool take(std::string_view ascii) {
    if (!is_next(ascii)) return false;
    at_ += ascii.size();
    return true;
  }

  Node choice() {
    Node out;
    out.kind = Node::kChoice;
    out.place = at_;
    out.may_be_empty = false;
    do {
      Node part = sequence();
      out.may_be_empty = out.may_be_empty || part.may_be_empty;
      out.may_be_long = out.may_be_long || part.may_be_long;
      out.has_anchor = out.has_anchor || part.has_anchor;
      out.parts.push_back(std::move(part));
    } while (take("|"));
    if (out.parts.size() > 1) return out;
    Node only = std::move(out.parts.front());
    return only;
  }

  Node sequence() {
    Node out;
    out.place = at_;
    while (more() && peek() != '|' && peek() != ')') {
      Node part = term();
      out.may_be_empty = out.may_be_empty && part.may_be_empty;
      out.may_be_long = out.may_be_long || part.may_be_long;
      out.has_anchor = out.has_anchor || part.has_anchor;
      out.parts.push_back(std::move(part));
    }
    return out;
  }

  Node term() {
    const size_t place = at_;
    if (peek() == '^' || peek() == '$') {
      Node anchor;
      anchor.kind = text_[at_++] == '^' ? Node::kStart : Node::kEnd;
      anchor.place = place;
      anchor.has_anchor = true;
      if (count()) fail(place, "an anchor is repeated");
      return anchor;
    }
    Node one = peek() == '(' ? group() : of_set(character());
    const auto times = count();
    if (!times) return one;
    if (const size_t again = at_; count()) fail(again, "nothing is there to be repeated");
    Node out;
    out.kind = Node::kRepeat;
    out.place = place;
    std::tie(out.least, out.most) = *times;
    out.may_be_empty = out.least == 0 || one.may_be_empty;
    out.may_be_long = out.most > 0 && one.may_be_long;
    out.has_anchor = one.has_anchor;
    out.parts.push_back(std::move(one));
    return out;
  }

  Node of_set(Set set) {
    Node out;
    out.kind = Node::kSet;
    out.may_be_empty = false;
    out.may_be_long = true;
    // No text has half of a pair.
    out.set = without(normal(std::move(set)), {{kFirstSurrogate, kLastSurrogate}});
    if (use_ == RegexUse::kAnswer || out.set.empty()) return out;
    out.set = without(out.set, kEscapedInJson);
    needs_escapes_ = needs_escapes_ || out.set.empty();
    return out;
  }

  // How often what is before may be there, where something says so. "As few as possible" is all the same here.
  std::optional<std::pair<uint32_t, uint32_t>> count() {
    const size_t place = at_;
    std::optional<std::pair<uint32_t, uint32_t>> out;
    if (take("*")) {
      out = {0, kNoMost};
    } else if (take("+")) {
      out = {1, kNoMost};
    } else if (take("?")) {
      out = {0, 1};
    } else if (take("{")) {
      out = braces();
      if (!out) at_ = place;
    }
    if (out) take("?");
    if (out && out->first > out->second) fail(place, "a repetition has its numbers out of order");
    return out;
  }

  std::optional<std::pair<uint32_t, uint32_t>> braces() {
    const auto least = number();
    if (!least) return std::nullopt;
    if (take("}")) return std::pair(*least, *least);
    if (!take(",")) return std::nullopt;
    const auto most = number();
    if (!take("}")) return std::nullopt;
    return std::pair(*least, most.value_or(kNoMost));
  }

  std::optional<uint32_t> number() {
    const size_t begin = at_;
    uint32_t value = 0;
    for (; peek() >= '0' && peek() <= '9'; ++at_) {
      value = std::min(value, kMostRepeated) * 10 + (peek() - '0');
      if (value > kMostRepeated) fail(begin, "a repetition is too large");
    }
    return at_ > begin ? std::optional(value) : std::nullopt;
  }

  Node group() {
    const size_t place = at_++;
    const bool looks_ahead = is_next("?=") || is_next("?!");
    if (is_next("?<=") || is_next("?<!")) fail(place, "lookbehind is not supported");
    if (looks_ahead && use_ == RegexUse::kAnswer) fail(place, "lookahead is not supported");
    if (looks_ahead) {
      at_ += 2;
    } else if (take("?<") || take("?P<")) {
      const auto in_name = [](char32_t c) {
        return c >= 0x80 || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
               c == '$';
      };
      const size_t begin = at_;
      while (more() && in_name(peek())) ++at_;
      if (at_ == begin || !take(">")) fail(place, "a group's name is not understood");
    } else if (!take("?:") && peek() == '?') {
      fail(place, "this kind of group ('(?') is not supported");
    }
    if (++nested_ > kMostNested) fail(place, fmt::format("groups are nested more than {} deep", kMostNested));
    Node inner = choice();
    --nested_;
    if (!take(")")) fail(place, "'(' is not closed");
    return looks_ahead ? Node() : inner;
  }

  // Where no group, anchor or repetition begins.
  Set character() {
    const size_t place = at_;
    const char32_t c = text_[at_++];
    switch (c) {
      case '.':
        return complement(kLineEnds);
      case '[':
        return character_class(place);
      case '\\':
        return escape(/*in_class=*/false).first;
      case '*':
      case '+':
      case '?':
        fail(place, "nothing is there to be repeated");
      case '{':
        // A brace that counts nothing is itself to JavaScript; {,3} means another thing to others.
        at_ = place;
        if (is_next("{,") || count()) fail(place, "nothing is there to be repeated (a brace is '\\{')");
        ++at_;
        break;
      default:
        break;
    }
    return one(c);
  }

  Set one(char32_t c) const {
    Set out{{c, c}};
    if (ignores_case_) add_other_case(out);
    return out;
  }

  Set character_class(size_t place) {
    const bool negated = take("^");
    Set set;
    const auto unit = [&]() -> std::pair<Set, bool> {
      if (!more()) fail(place, "'[' is not closed");
      if (take("\\")) return escape(/*in_class=*/true);
      const char32_t c = text_[at_++];
      return {Set{{c, c}}, true};
    };
    while (!take("]")) {
      const size_t begin = at_;
      auto [low, single] = unit();
      if (peek() == '-' && peek(1) != ']' && at_ + 1 < text_.size()) {
        ++at_;
        const auto [high, also_single] = unit();
        if (!single || !also_single) fail(begin, "a range of characters has a class at its end");
        if (low[0].first > high[0].first) fail(begin, "a range of characters is out of order");
        low[0].second = high[0].first;
      }
      set.insert(set.end(), low.begin(), low.end());
    }
    if (ignores_case_) add_other_case(set);
    set = normal(std::move(set));
    return negated ? complement(set) : set;
  }

  // What is behind a backslash, and whether it is one character.
  std::pair<Set, bool> escape(bool in_class) {
    const size_t place = at_ - 1;
    if (!more()) fail(place, "a backslash ends it");
    const char32_t c = text_[at_++];
    const auto single = [&](char32_t point) {
      return std::pair(in_class ? Set{{point, point}} : one(point), true);  // a class adds the other case itself
    };
    switch (c) {
      case 'd':
        return {kDigits, false};
      case 'D':
        return {complement(kDigits), false};
      case 'w':
        return {kWordCharacters, false};
      case 'W':
        return {complement(kWordCharacters), false};
      case 's':
        return {kBlanks, false};
      case 'S':
        return {complement(kBlanks), false};
      case 't':
        return single('\t');
      case 'n':
        return single('\n');
      case 'v':
        return single('\v');
      case 'f':
        return single('\f');
      case 'r':
        return single('\r');
      case '0':
        if (peek() >= '0' && peek() <= '9') fail(place, "an octal escape is not supported");
        return single(0);
      case 'x':
        return single(hex(place, 2));
      case 'u':
        return single(unicode(place));
      case 'c':
        if (!((peek() >= 'a' && peek() <= 'z') || (peek() >= 'A' && peek() <= 'Z'))) {
          fail(place, "'\\c' is no letter's control character");
        }
        return single(text_[at_++] % 32);
      case 'b':
        if (in_class) return single('\b');
        [[fallthrough]];
      case 'B':
        fail(place, fmt::format("'\\{}' (a word boundary) is not supported", static_cast<char>(c)));
      case 'p':
      case 'P':
        fail(place, fmt::format("'\\{}' (a Unicode property) is not supported", static_cast<char>(c)));
      default:
        break;
    }
    if ((c >= '1' && c <= '9') || c == 'k') {
      fail(place, fmt::format("'\\{}' (a reference to a group) is not supported", static_cast<char>(c)));
    }
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) {
      fail(place, fmt::format("'\\{}' is no escape of JavaScript's", static_cast<char>(c)));
    }
    return single(c);
  }

  char32_t hex(size_t place, size_t digits) {
    char32_t value = 0;
    for (size_t i = 0; i < digits; ++i, ++at_) {
      const char32_t c = peek();
      if (c >= '0' && c <= '9') {
        value = value * 16 + (c - '0');
      } else if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f') {
        value = value * 16 + ((c | 0x20) - 'a' + 10);
      } else {
        fail(place, "an escape lacks hexadecimal digits");
      }
    }
    return value;
  }

  char32_t unicode(size_t place) {
    if (take("{")) {
      size_t digits = 0;
      while (more() && peek(digits) != '}' && digits <= 6) ++digits;
      if (digits == 0 || digits > 6) fail(place, "'\\u{' needs one to six hexadecimal digits");
      const char32_t point = hex(place, digits);
      if (!take("}") || point > kLast) fail(place, "'\\u{' is beyond Unicode");
      return point;
    }
    const char32_t unit = hex(place, 4);
    if (unit < kFirstSurrogate || unit > 0xDBFF || !is_next("\\u")) return unit;
    const size_t behind = at_;
    at_ += 2;
    const char32_t low = peek() == '{' ? 0 : hex(place, 4);
    if (low >= 0xDC00 && low <= kLastSurrogate) return 0x10000 + ((unit - kFirstSurrogate) << 10) + (low - 0xDC00);
    at_ = behind;
    return unit;
  }

  const RegexUse use_;
  std::u32string text_;
  size_t at_ = 0;
  int nested_ = 0;
  bool ignores_case_ = false;
  bool needs_escapes_ = false;
};

// Whether what is on one side of a place is the text's end.
enum class Side : uint8_t { kEnd, kMore, kEither };

class Writer {
 public:
  // Nothing where no text matches.
  static std::optional<std::string> write(const Node& node, Side before, Side behind) {
    switch (node.kind) {
      case Node::kSet:
        return node.set.empty() ? std::nullopt : std::optional(written(node.set));
      case Node::kStart:
        return anchor(node, before, "'^' behind what may be empty or not");
      case Node::kEnd:
        return anchor(node, behind, "'$' before what may be empty or not");
      case Node::kSequence:
        return sequence(node, before, behind);
      case Node::kChoice:
        return choice(node, before, behind);
      case Node::kRepeat:
        break;
    }
    return repetition(node, before, behind);
  }

 private:
  static std::optional<std::string> anchor(const Node& node, Side side, const char* name) {
    if (side == Side::kEither) {
      throw std::runtime_error(fmt::format("{} is not supported, at character {}", name, node.place + 1));
    }
    return side == Side::kEnd ? std::optional<std::string>("") : std::nullopt;
  }

  // The side of what comes next to `node`.
  static Side past(const Node& node, Side side) {
    if (!node.may_be_empty) return Side::kMore;
    return node.may_be_long && side == Side::kEnd ? Side::kEither : side;
  }

  static std::optional<std::string> sequence(const Node& node, Side before, Side behind) {
    std::vector<Side> sides(node.parts.size());  // behind each
    for (size_t i = sides.size(); i-- > 0; behind = past(node.parts[i], behind)) sides[i] = behind;
    std::string out;
    for (size_t i = 0; i < sides.size(); ++i) {
      const auto part = write(node.parts[i], before, sides[i]);
      if (!part) return std::nullopt;
      out += *part;
      before = past(node.parts[i], before);
    }
    return out;
  }

  static std::optional<std::string> choice(const Node& node, Side before, Side behind) {
    std::string out;
    bool any = false, empty = false;
    for (const Node& part : node.parts) {
      const auto text = write(part, before, behind);
      if (!text) continue;
      if (text->empty()) {
        empty = true;
      } else {
        if (any) out += '|';
        out += *text;
        any = true;
      }
    }
    if (!any) return empty ? std::optional<std::string>("") : std::nullopt;
    return fmt::format("(?:{}{})", out, empty ? "|" : "");
  }

  static std::optional<std::string> repetition(const Node& node, Side before, Side behind) {
    const Node& one = node.parts.front();
    if (node.most == 0) return "";
    if (node.most > 1 && one.has_anchor) {
      // Others of it are beside each, or none.
      if (before == Side::kEnd) before = Side::kEither;
      if (behind == Side::kEnd) behind = Side::kEither;
    }
    auto text = write(one, before, behind);
    if (!text) return node.least == 0 ? std::optional<std::string>("") : std::nullopt;
    if (text->empty() || (node.least == 1 && node.most == 1)) return text;
    const bool single = one.kind == Node::kSet;
    const std::string unit = single ? *text : fmt::format("(?:{})", *text);
    if (node.most != kNoMost) return fmt::format("{}{{{},{}}}", unit, node.least, node.most);
    if (node.least == 0) return unit + '*';
    if (node.least == 1) return unit + '+';
    // X{n,} of a group would allow a part of it to be repeated.
    return single ? fmt::format("{}{{{},}}", unit, node.least) : fmt::format("(?:{}+){{{}}}", unit, node.least);
  }

  static std::string written(const Set& set) {
    if (set.size() == 1 && set[0].first == set[0].second) return written(set[0].first);
    std::string out = "[";
    bool caret = false;
    for (auto [low, high] : set) {
      // Where it is first it would negate the class, also behind a backslash.
      if (low == '^' && out == "[") {
        caret = true;
        if (low++ == high) continue;
      }
      out += written(low);
      if (high > low) (out += high > low + 1 ? "-" : "") += written(high);
    }
    return out + (caret ? "\\^]" : "]");
  }

  static std::string written(char32_t c) {
    const bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (plain) return std::string(1, static_cast<char>(c));
    // An escape of four digits would take more, where some follow.
    return fmt::format("\\u{{{:x}}}", static_cast<uint32_t>(c));
  }
};

}  // namespace

std::string regex_for_grammar(std::string_view regex, RegexUse use) {
  Parser parser(regex, use);
  const Node whole = parser.run();
  if (auto text = Writer::write(whole, Side::kEnd, Side::kEnd)) return *text;
  throw std::runtime_error(parser.needs_escapes() ? "it needs characters that JSON writes as escapes"
                                                  : "no text matches it");
}

}  // namespace nfp::server
