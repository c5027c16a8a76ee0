#include "text/regex.h"

#include <pcre2.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace nfp::text {
namespace {

// The longest real pattern (o200k) has under 1,000 bytes.
constexpr size_t kMaxPattern = 1 << 14;
constexpr uint32_t kMaxNesting = 32;
// Backtracking steps that one match may take: a start and a share for each byte of the text, since `\s+(?!\S)` may
// rightly walk once over all of it.
constexpr uint64_t kStepsPerMatch = 100'000;
constexpr uint64_t kStepsPerByte = 16;
constexpr uint32_t kInterpreterHeapKib = 64 << 10;
constexpr size_t kJitStackStart = 64 << 10;
constexpr size_t kJitStackMax = 16 << 20;

constexpr std::string_view kWord = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc})";
// Oniguruma's \w has a table of its own up to U+00FF, with raised digits and fractions in it; its [\w] has not.
constexpr std::string_view kLatin1Word = R"(\x{B2}\x{B3}\x{B9}\x{BC}-\x{BE})";

constexpr bool is_alnum(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
constexpr bool is_digit(char c) { return c >= '0' && c <= '9'; }
constexpr bool is_hex(char c) { return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

// Rewrites Oniguruma's Ruby syntax for PCRE2. Everything that is not known to mean the same in both is refused.
class Translator {
 public:
  explicit Translator(std::string_view pattern) : in_(pattern) {}

  Result<std::string> run() {
    while (at_ < in_.size()) {
      const char c = in_[at_];
      if (c == '\\') {
        NFP_RETURN_IF_ERROR(escape(false));
      } else if (c == '[') {
        NFP_RETURN_IF_ERROR(char_class());
      } else if (c == '(') {
        NFP_RETURN_IF_ERROR(group());
      } else if (c == '{') {
        NFP_RETURN_IF_ERROR(interval());
      } else {
        copy(1);
      }
    }
    return std::move(out_);
  }

 private:
  Error unsupported(std::string_view what) const {
    return error(ErrorCode::kUnsupported, "regular expression has {} at byte {}, which we do not support", what, at_);
  }
  bool starts(std::string_view with) const { return in_.substr(at_).starts_with(with); }
  char peek(size_t ahead) const { return at_ + ahead < in_.size() ? in_[at_ + ahead] : '\0'; }
  void copy(size_t bytes) {
    out_ += in_.substr(at_, bytes);
    at_ += bytes;
  }
  void replace(size_t bytes, std::string_view by) {
    out_ += by;
    at_ += bytes;
  }

  Status escape(bool in_class) {
    const char c = peek(1);
    if (c == '\0') return unsupported("a lone backslash");
    if (!is_alnum(c)) {
      // A backslash before a character beyond ASCII means nothing in Oniguruma and is an error in PCRE2.
      static_cast<unsigned char>(c) < 0x80 ? copy(2) : replace(1, "");
      return ok_status();
    }
    switch (c) {
      case 'n':
      case 'r':
      case 't':
      case 'f':
      case 'a':
      case 'e':
      case 'd':
      case 'D':
        copy(2);
        return ok_status();
      case 's':  // PCRE2's own has U+180E too
        replace(2, "\\p{White_Space}");
        return ok_status();
      case 'S':
        replace(2, "\\P{White_Space}");
        return ok_status();
      case 'w':  // PCRE2's own has L, N and '_' only
        replace(2, in_class ? kWord : fmt::format("[{}{}]", kWord, kLatin1Word));
        return ok_status();
      case 'W':
        if (in_class) break;
        replace(2, fmt::format("[^{}{}]", kWord, kLatin1Word));
        return ok_status();
      case 'h':  // a hexadecimal digit in Ruby, a horizontal space in PCRE2
        replace(2, in_class ? "0-9a-fA-F" : "[0-9a-fA-F]");
        return ok_status();
      case 'v':  // one character in Ruby, a class in PCRE2
        replace(2, "\\x{b}");
        return ok_status();
      case 'p':
      case 'P':
        return property();
      case 'x':
      case 'u':
        return code_point();
      case 'A':
      case 'z':
      case 'Z':
        if (in_class) break;
        copy(2);
        return ok_status();
      default:
        break;
    }
    return unsupported(fmt::format("'\\{}'", c));
  }

  Status property() {
    const size_t close = in_.find('}', at_);
    if (peek(2) != '{' || close == std::string_view::npos) return unsupported("a property without braces");
    const std::string_view name = in_.substr(at_ + 3, close - at_ - 3);
    const auto good = [](char c) { return is_alnum(c) || c == '_' || c == '^'; };
    if (name.empty() || !std::all_of(name.begin(), name.end(), good)) return unsupported("an odd property name");
    copy(3);
    if (starts("^")) copy(1);
    // PCRE2 takes a script's bare name for all that the script uses, the signs that it shares with others included.
    if (is_script(in_.substr(at_, close - at_))) out_ += "sc:";
    copy(close + 1 - at_);
    return ok_status();
  }

  // Only PCRE2 knows; a version that knows no `sc:` means by the bare name what we do.
  static bool is_script(std::string_view name) {
    const std::string pattern = fmt::format("\\p{{sc:{}}}", name);
    int code = 0;
    size_t offset = 0;
    pcre2_code* compiled =
        pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), PCRE2_UTF, &code, &offset, nullptr);
    const bool known = compiled != nullptr;
    pcre2_code_free(compiled);
    return known;
  }

  Status code_point() {
    size_t digits = 0;
    size_t begin = 2;
    size_t end = 0;
    if (peek(1) == 'x' && peek(2) == '{') {
      begin = 3;
      while (is_hex(peek(begin + digits))) ++digits;
      if (digits == 0 || digits > 6 || peek(begin + digits) != '}') return unsupported("an odd code point");
      end = begin + digits + 1;
    } else {
      const size_t wanted = peek(1) == 'x' ? 2 : 4;
      while (digits < wanted && is_hex(peek(begin + digits))) ++digits;
      if (digits != wanted) return unsupported("an odd code point");
      end = begin + digits;
    }
    const std::string hex(in_.substr(at_ + begin, digits));
    // Two digits are a byte, not a code point, in Oniguruma: the same only in ASCII.
    if (begin == 2 && digits == 2 && hex[0] > '7') return unsupported("a byte beyond ASCII");
    replace(end, "\\x{" + hex + "}");
    return ok_status();
  }

  Status char_class() {
    copy(1);
    if (peek(0) == '^') copy(1);
    NFP_RETURN_IF_ERROR(class_members(true));
    copy(1);
    return ok_status();
  }

  // Up to the ']' behind them. What is in a class inside of a class belongs to the outer one, which needs no brackets
  // for that unless a '-' would come to stand between two characters.
  Status class_members(bool may_have_class) {
    if (peek(0) == ']') return unsupported("an empty character class");
    while (at_ < in_.size()) {
      const char c = in_[at_];
      if (c == ']') return ok_status();
      if (c == '\\') {
        NFP_RETURN_IF_ERROR(escape(true));
      } else if (c == '[') {
        constexpr std::string_view kOther = "^-:";
        const bool is_list = kOther.find(peek(1)) == std::string_view::npos && in_[at_ - 1] != '-';
        if (!may_have_class || !is_list) return unsupported("a class inside a character class");
        replace(1, "");
        NFP_RETURN_IF_ERROR(class_members(false));
        if (in_[at_ - 1] == '-' || peek(1) == '-') return unsupported("a '-' beside a class in a character class");
        replace(1, "");
      } else if (starts("&&")) {
        return unsupported("an intersection of character classes");
      } else {
        copy(1);
      }
    }
    return unsupported("a character class without end");
  }

  Status group() {
    if (peek(1) == '*') return unsupported("'(*'");
    if (peek(1) != '?') {
      replace(1, "(?:");  // nothing refers to groups, so none captures
      return ok_status();
    }
    for (const std::string_view open : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:", "(?-i:", "(?i)"}) {
      if (starts(open)) {
        copy(open.size());
        return ok_status();
      }
    }
    return unsupported(fmt::format("the group '{}'", in_.substr(at_, 4)));
  }

  // {n,m}; a brace that is no interval is ordinary text in both.
  Status interval() {
    size_t i = 1;
    while (is_digit(peek(i))) ++i;
    const bool lower = i > 1;
    bool upper = false;
    const bool comma = peek(i) == ',';
    if (comma) {
      const size_t begin = ++i;
      while (is_digit(peek(i))) ++i;
      upper = i > begin;
    }
    if (peek(i) != '}' || (!lower && !upper)) {
      replace(1, "\\{");
      return ok_status();
    }
    const char after = peek(i + 1);
    if (after == '+' || (after == '?' && !comma)) return unsupported("a quantifier of a quantifier");
    if (lower) {
      copy(i + 1);
    } else {
      replace(1, "{0");
      copy(i);
    }
    return ok_status();
  }

  std::string_view in_;
  size_t at_ = 0;
  std::string out_;
};

std::string message_of(int code) {
  unsigned char text[256] = {};
  pcre2_get_error_message(code, text, sizeof(text));
  return reinterpret_cast<const char*>(text);
}

struct CompileContext {
  pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
  ~CompileContext() { pcre2_compile_context_free(context); }
};

}  // namespace

struct Regex::Code {
  pcre2_code* code = nullptr;
  bool jit = false;
  Code() = default;
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;
  ~Code() { pcre2_code_free(code); }
};

Result<std::string> pattern_for_pcre2(std::string_view pattern) { return Translator(pattern).run(); }

Result<Regex> Regex::compile(std::string_view pattern) {
  if (pattern.empty()) return error(ErrorCode::kUnsupported, "regular expression is empty");
  if (pattern.size() > kMaxPattern) {
    return error(ErrorCode::kUnsupported, "regular expression has {} bytes; at most {} are supported", pattern.size(),
                 kMaxPattern);
  }
  NFP_ASSIGN_OR_RETURN(const std::string translated, pattern_for_pcre2(pattern));
  const CompileContext context;
  if (context.context == nullptr) return error(ErrorCode::kResource, "no memory for a regular expression");
  pcre2_set_newline(context.context, PCRE2_NEWLINE_LF);
  pcre2_set_parens_nest_limit(context.context, kMaxNesting);

  int code = 0;
  size_t offset = 0;
  auto result = std::make_shared<Code>();
  result->code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &code, &offset, context.context);
  if (result->code == nullptr) {
    return error(ErrorCode::kInvalidInput, "regular expression is refused by PCRE2: {}", message_of(code));
  }
  // Where the system forbids executable memory, PCRE2's interpreter does the same, slower.
  result->jit = pcre2_jit_compile(result->code, PCRE2_JIT_COMPLETE) == 0;
  return Regex(std::move(result));
}

Result<Regex> Regex::literal(std::string_view text) {
  std::string pattern;
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x80 && !is_alnum(c)) pattern += '\\';
    pattern += c;
  }
  return compile(pattern);
}

struct RegexSearch::State {
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = nullptr;  // made when PCRE2's own 32 KiB do not do
  ~State() {
    pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
    pcre2_match_data_free(data);
  }
};

RegexSearch::RegexSearch() : state_(std::make_unique<State>()) {
  if (state_->context != nullptr) pcre2_set_heap_limit(state_->context, kInterpreterHeapKib);
}
RegexSearch::~RegexSearch() = default;
RegexSearch::RegexSearch(RegexSearch&&) noexcept = default;
RegexSearch& RegexSearch::operator=(RegexSearch&&) noexcept = default;

Result<RegexSearch::Match> RegexSearch::next(const Regex& regex, std::string_view text, size_t from) {
  State& state = *state_;
  if (state.data == nullptr || state.context == nullptr) return error(ErrorCode::kResource, "no memory for a search");
  const Regex::Code& code = regex.code();
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data() != nullptr ? text.data() : "");
  const uint64_t steps = kStepsPerMatch + kStepsPerByte * (text.size() - from);
  pcre2_set_match_limit(state.context, static_cast<uint32_t>(std::min<uint64_t>(steps, UINT32_MAX)));

  const auto match = [&] {
    return code.jit
               ? pcre2_jit_match(code.code, subject, text.size(), from, PCRE2_NO_UTF_CHECK, state.data, state.context)
               : pcre2_match(code.code, subject, text.size(), from, PCRE2_NO_UTF_CHECK, state.data, state.context);
  };
  int found = match();
  if (found == PCRE2_ERROR_JIT_STACKLIMIT && state.stack == nullptr) {
    state.stack = pcre2_jit_stack_create(kJitStackStart, kJitStackMax, nullptr);
    if (state.stack != nullptr) {
      pcre2_jit_stack_assign(state.context, nullptr, state.stack);
      found = match();
    }
  }
  if (found == PCRE2_ERROR_NOMATCH) return Match{false, 0, 0};
  if (found < 0) {
    return error(ErrorCode::kResource,
                 "the tokenizer's regular expression gives up at byte {} of a text of {} bytes: {}", from, text.size(),
                 message_of(found));
  }
  const size_t* range = pcre2_get_ovector_pointer(state.data);
  return Match{true, range[0], range[1]};
}

}  // namespace nfp::text
