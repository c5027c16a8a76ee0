#include "server/tools/written_calls.h"

#include <algorithm>
#include <charconv>

#include "server/tools/parameter_schema.h"
#include "server/tools/parser_parts.h"
#include "text/utf8.h"

namespace nfp::server {
namespace {

constexpr int kMaxDepth = 32;

std::string_view trim(std::string_view text) {
  while (!text.empty() && is_blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
  return text;
}

// Literals of Python (`None`, `True`, "text", 1.5, lists, tuples, dicts) and, with `gemma`, FunctionGemma's: bare keys,
// <escape>text<escape>, null and true.
class LiteralReader {
 public:
  LiteralReader(std::string_view text, bool gemma) : text_(text), gemma_(gemma) {}

  void skip() {
    while (at_ < text_.size() && is_blank(text_[at_])) ++at_;
  }
  bool take(char c) {
    skip();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  bool take_text(std::string_view what) {
    skip();
    if (!text_.substr(at_).starts_with(what)) return false;
    at_ += what.size();
    return true;
  }
  bool done() {
    skip();
    return at_ == text_.size();
  }
  // A name, dots included; empty where there is none.
  std::string name() {
    skip();
    const size_t begin = at_;
    const auto part = [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
             c == '-';
    };
    while (at_ < text_.size() && part(text_[at_])) ++at_;
    return std::string(text_.substr(begin, at_ - begin));
  }

  bool value(Json* out, int depth = 0) {
    if (depth > kMaxDepth) return false;
    skip();
    if (at_ >= text_.size()) return false;
    const char c = text_[at_];
    if (gemma_ && take_text(kEscape)) {
      const size_t end = text_.find(kEscape, at_);
      if (end == std::string_view::npos) return false;
      *out = std::string(text_.substr(at_, end - at_));
      at_ = end + kEscape.size();
      return true;
    }
    if (c == '"' || c == '\'') return string(out);
    if (c == '[' || c == '(') {
      ++at_;
      return list(c == '[' ? ']' : ')', out, depth);
    }
    if (c == '{') {
      ++at_;
      return dictionary(out, depth);
    }
    if ((c >= '0' && c <= '9') || c == '-' || c == '+' || c == '.') return number(out);
    const std::string word = name();
    if (word == "True" || word == "true") return *out = true, true;
    if (word == "False" || word == "false") return *out = false, true;
    if (word == "None" || word == "null") return *out = nullptr, true;
    return false;
  }

  // After '{'.
  bool dictionary(Json* out, int depth) {
    *out = Json::object();
    while (!take('}')) {
      Json key;
      if (gemma_ && !take_text(kEscape)) {
        key = name();
        if (key.get_ref<const std::string&>().empty() && (!value(&key, depth + 1) || !key.is_string())) return false;
      } else if (gemma_) {
        at_ -= kEscape.size();
        if (!value(&key, depth + 1)) return false;
      } else if (!value(&key, depth + 1)) {
        return false;
      }
      const std::string text = key.is_string() ? key.get<std::string>() : dump(key);
      Json item;
      if (!take(':') || !value(&item, depth + 1)) return false;
      (*out)[text] = std::move(item);
      if (!take(',') && !next_is('}')) return false;
    }
    return true;
  }

  bool next_is(char c) {
    skip();
    return at_ < text_.size() && text_[at_] == c;
  }

 private:
  static constexpr std::string_view kEscape = "<escape>";

  bool list(char close, Json* out, int depth) {
    *out = Json::array();
    while (!take(close)) {
      Json item;
      if (!value(&item, depth + 1)) return false;
      out->push_back(std::move(item));
      if (!take(',') && !next_is(close)) return false;
    }
    return true;
  }

  bool number(Json* out) {
    const size_t begin = text_[at_] == '+' ? ++at_ : at_;
    while (at_ < text_.size() && std::string_view("0123456789+-.eE_").find(text_[at_]) != std::string_view::npos) ++at_;
    std::string digits(text_.substr(begin, at_ - begin));
    std::erase(digits, '_');
    const char* end = digits.data() + digits.size();
    int64_t whole = 0;
    if (const auto [stop, code] = std::from_chars(digits.data(), end, whole); code == std::errc() && stop == end) {
      *out = whole;
      return true;
    }
    uint64_t large = 0;
    if (const auto [stop, code] = std::from_chars(digits.data(), end, large); code == std::errc() && stop == end) {
      *out = large;
      return true;
    }
    double real = 0;
    const auto [stop, code] = std::from_chars(digits.data(), end, real);
    if (code != std::errc() || stop != end) return false;
    *out = real;
    return true;
  }

  // A pair of UTF-16, as JSON writes characters beyond U+FFFF; `high` where no other half follows.
  uint32_t join_surrogates(uint32_t high) {
    const std::string_view rest = text_.substr(at_, 6);
    uint32_t low = 0;
    if (rest.size() < 6 || !rest.starts_with("\\u")) return high;
    if (std::from_chars(rest.data() + 2, rest.data() + 6, low, 16).ptr != rest.data() + 6) return high;
    if (low < 0xDC00 || low > 0xDFFF) return high;
    at_ += 6;
    return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
  }

  bool string(Json* out) {
    const char quote = text_[at_++];
    std::string made;
    while (at_ < text_.size() && text_[at_] != quote) {
      if (text_[at_] != '\\' || at_ + 1 >= text_.size()) {
        made += text_[at_++];
        continue;
      }
      const char c = text_[at_ + 1];
      at_ += 2;
      constexpr std::string_view kFrom = "ntrbf0", kTo("\n\t\r\b\f\0", 6);
      if (const size_t simple = kFrom.find(c); simple != std::string_view::npos) {
        made += kTo[simple];
      } else if (c == 'u' || c == 'x' || c == 'U') {
        const size_t width = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        uint32_t code = 0;
        if (at_ + width > text_.size()) return false;
        const char* first = text_.data() + at_;
        if (std::from_chars(first, first + width, code, 16).ptr != first + width || code > 0x10FFFF) return false;
        at_ += width;
        if (code >= 0xD800 && code < 0xDC00) code = join_surrogates(code);
        text::append_utf8(made, code >= 0xD800 && code < 0xE000 ? 0xFFFD : code);
      } else if (c == '\\' || c == '\'' || c == '"') {
        made += c;
      } else if (c != '\n') {  // as Python: an unknown escape stays as it is
        made += '\\';
        made += c;
      }
    }
    if (at_ >= text_.size()) return false;
    ++at_;
    *out = std::move(made);
    return true;
  }

  std::string_view text_;
  size_t at_ = 0;
  bool gemma_;
};

bool python_call(LiteralReader& reader, WrittenCall* out) {
  out->name = reader.name();
  if (out->name.empty() || !reader.take('(')) return false;
  Json arguments = Json::object();
  while (!reader.take(')')) {
    const std::string key = reader.name();
    Json value;
    if (key.empty() || !reader.take('=') || !reader.value(&value)) return false;
    arguments[key] = std::move(value);
    if (!reader.take(',') && !reader.next_is(')')) return false;
  }
  out->arguments = dump(arguments);
  return true;
}

// What a parameter's text means where it may have these types (parameter_schema.h).
Json typed_value(std::string_view text, uint32_t types) {
  Json as_text = std::string(text);
  if (types == 0 || types == kStringType) return as_text;
  Json read;
  if (auto json = parse_json(trim(text)); json.ok()) {
    read = std::move(*json);
  } else {
    LiteralReader literal(text, /*gemma=*/false);  // JSON's too, but for its escapes
    if (!literal.value(&read) || !literal.done()) return as_text;
  }
  // Where a text may be meant, only what the other types allow is none.
  const bool is_meant = (types & kStringType) == 0 || (type_of(read) & types & ~uint32_t{kStringType}) != 0;
  return is_meant ? read : as_text;
}

WrittenCalls json_calls(std::string_view text, bool need_arguments) {
  auto parsed = parse_json(trim(text));
  if (!parsed.ok()) return std::nullopt;
  Json list = parsed->is_array() ? std::move(*parsed) : Json::array({std::move(*parsed)});
  std::vector<WrittenCall> calls;
  for (const Json& item : list) {
    if (!item.is_object() || !item.contains("name") || !item["name"].is_string()) return std::nullopt;
    const char* field = item.contains("arguments") ? "arguments" : "parameters";
    if (need_arguments && !item.contains(field)) return std::nullopt;
    const Json arguments = item.contains(field) ? item[field] : Json::object();
    if (!arguments.is_object()) return std::nullopt;
    calls.push_back({item["name"].get<std::string>(), dump(arguments)});
  }
  if (calls.empty()) return std::nullopt;
  return calls;
}

}  // namespace

WrittenCalls read_python_calls(std::string_view text) {
  constexpr std::string_view kPrint = "print(";
  text = trim(text);
  if (text.starts_with(kPrint) && text.ends_with("))")) {
    text = text.substr(kPrint.size(), text.size() - kPrint.size() - 1);
  }
  LiteralReader reader(text, /*gemma=*/false);
  std::vector<WrittenCall> calls;
  const bool list = reader.take('[');
  do {
    if (list && reader.next_is(']')) break;  // a comma before the end
    if (!python_call(reader, &calls.emplace_back())) return std::nullopt;
  } while (list && reader.take(','));
  if ((list && !reader.take(']')) || !reader.done() || calls.empty()) return std::nullopt;
  return calls;
}

WrittenCalls read_json_calls(std::string_view text) { return json_calls(text, /*need_arguments=*/false); }

WrittenCalls read_unmarked_calls(std::string_view text) {
  auto calls = read_python_calls(text);
  return calls ? std::move(calls) : json_calls(text, /*need_arguments=*/true);
}

WrittenCalls read_xml_calls(std::string_view text, const Json* tools) {
  constexpr std::string_view kFunction = "<function=", kFunctionEnd = "</function>",
                             kParameter = "<parameter=", kParameterEnd = "</parameter>";
  std::vector<WrittenCall> calls;
  for (text = trim(text); !text.empty(); text = trim(text)) {
    if (!text.starts_with(kFunction)) return std::nullopt;
    const size_t close = text.find('>');
    if (close == std::string_view::npos) return std::nullopt;
    WrittenCall call;
    call.name = std::string(trim(text.substr(kFunction.size(), close - kFunction.size())));
    text = trim(text.substr(close + 1));
    Json arguments = Json::object();
    while (text.starts_with(kParameter)) {
      const size_t name_end = text.find('>');
      if (name_end == std::string_view::npos) return std::nullopt;
      const std::string key(trim(text.substr(kParameter.size(), name_end - kParameter.size())));
      text.remove_prefix(name_end + 1);
      // Models leave out the end of a value now and then.
      size_t end = text.find('<');
      const auto ends = [&] {
        const std::string_view rest = text.substr(end);
        return rest.starts_with(kParameterEnd) || rest.starts_with(kParameter) || rest.starts_with(kFunctionEnd);
      };
      while (end != std::string_view::npos && !ends()) end = text.find('<', end + 1);
      std::string_view value = text.substr(0, end);
      text.remove_prefix(std::min(end, text.size()));
      if (text.starts_with(kParameterEnd)) text.remove_prefix(kParameterEnd.size());
      if (value.starts_with('\n')) value.remove_prefix(1);
      if (value.ends_with('\n')) value.remove_suffix(1);
      arguments[key] = typed_value(value, tools == nullptr ? 0 : types_of_parameter(*tools, call.name, key));
      text = trim(text);
    }
    if (call.name.empty()) return std::nullopt;
    if (text.starts_with(kFunctionEnd)) {
      text.remove_prefix(kFunctionEnd.size());
    } else if (!text.empty()) {
      return std::nullopt;
    }
    call.arguments = dump(arguments);
    calls.push_back(std::move(call));
  }
  if (calls.empty()) return std::nullopt;
  return calls;
}

WrittenCalls read_gemma_calls(std::string_view text) {
  LiteralReader reader(trim(text), /*gemma=*/true);
  std::vector<WrittenCall> calls;
  while (!reader.done()) {
    WrittenCall call;
    if (!reader.take_text("call:")) return std::nullopt;
    call.name = reader.name();
    Json arguments;
    if (call.name.empty() || !reader.take('{') || !reader.dictionary(&arguments, 0)) return std::nullopt;
    call.arguments = dump(arguments);
    calls.push_back(std::move(call));
  }
  if (calls.empty()) return std::nullopt;
  return calls;
}

}  // namespace nfp::server
