#include "shell/config_file.h"

#include <algorithm>
#include <optional>
#include <set>

#include "text/utf8.h"

namespace nfp::shell {
namespace {

bool is_bare(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
}

// TOML's numbers are decimal with '_' between digits; its other forms (0x, inf, dates) no flag takes. Without the '_'.
std::optional<std::string> number_of(std::string_view value) {
  std::string digits;
  bool digit = false, point = false, exponent = false;
  const auto is_digit = [&](size_t i) { return i < value.size() && value[i] >= '0' && value[i] <= '9'; };
  for (size_t i = 0; i < value.size(); ++i) {
    const char c = value[i];
    bool good = false;
    if (is_digit(i)) {
      digit = good = true;
    } else if (c == '_') {
      if (i == 0 || !is_digit(i - 1) || !is_digit(i + 1)) return std::nullopt;
      continue;
    } else if (c == '+' || c == '-') {
      good = i == 0 || value[i - 1] == 'e' || value[i - 1] == 'E';
    } else if (c == '.') {
      good = digit && !point && !exponent;
      point = true;
    } else if (c == 'e' || c == 'E') {
      good = digit && !exponent;
      exponent = true;
    }
    if (!good) return std::nullopt;
    digits += c;
  }
  if (!digit || digits.back() < '0' || digits.back() > '9') return std::nullopt;
  return digits.front() == '+' ? digits.substr(1) : digits;
}

// What was meant by a value that is none, as TOML has it.
std::string meant(std::string_view value) {
  if (value.size() > 1 && (value.back() == ',' || value.back() == ';')) value.remove_suffix(1);
  if (number_of(value) || value == "true" || value == "false") return std::string(value);
  std::string low(value);
  for (char& c : low) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c | 0x20 : c);
  if (low == "true" || low == "yes" || low == "on") return "true";
  if (low == "false" || low == "no" || low == "off") return "false";
  const char quote = value.front();
  const bool quoted = (quote == '"' || quote == '\'') && value.find(quote, 1) == value.size() - 1;
  if (quoted) return std::string(value);
  std::string plain(value);
  for (const std::string_view curly : {"\u201c", "\u201d", "\u2018", "\u2019"}) {  // as word processors write them
    if (plain.starts_with(curly)) plain.erase(0, curly.size());
    if (plain.ends_with(curly)) plain.erase(plain.size() - curly.size());
  }
  if (plain.find_first_of("\"\\") == std::string::npos) return '"' + plain + '"';
  return plain.find('\'') == std::string::npos ? '\'' + plain + '\'' : "\"...\"";
}

class Reader {
 public:
  Reader(std::string_view text, const std::string& name, const std::string& table)
      : text_(text), name_(name), table_(table) {}

  Result<std::vector<ConfigEntry>> read() {
    std::vector<ConfigEntry> entries;
    std::set<std::string> keys;
    bool headed = false;
    for (skip_lines(); !at_end(); skip_lines()) {
      if (peek() == '[') {
        NFP_RETURN_IF_ERROR(read_header(headed || !entries.empty()));
        headed = true;
      } else {
        ConfigEntry entry;
        entry.line = line_;
        const size_t begin = place_;
        NFP_RETURN_IF_ERROR(read_key(entry.key));
        const size_t end = place_;
        skip_spaces();
        if (!take('=')) return without_equals(entry.key, text_.substr(begin, end - begin));
        skip_spaces();
        NFP_RETURN_IF_ERROR(read_value(entry, /*in_array=*/false));
        if (!keys.insert(entry.key).second) return bad("the key '" + entry.key + "' is there twice", begin);
        entries.push_back(std::move(entry));
      }
      NFP_RETURN_IF_ERROR(end_of_line());
    }
    return entries;
  }

 private:
  bool at_end() const { return place_ >= text_.size(); }
  char peek() const { return at_end() ? '\0' : text_[place_]; }
  bool take(char c) {
    if (at_end() || text_[place_] != c) return false;
    ++place_;
    return true;
  }
  void skip_spaces() {
    while (peek() == ' ' || peek() == '\t') ++place_;
  }
  void skip_comment() {
    if (peek() == '#') place_ = std::min(text_.find('\n', place_), text_.size());
  }
  // Spaces, comments and ends of lines.
  void skip_lines() {
    while (true) {
      skip_spaces();
      skip_comment();
      if (peek() == '\r') ++place_;
      if (!take('\n')) return;
      ++line_;
    }
  }
  // At a place on this line; its column counts characters.
  Error bad(const std::string& what, size_t place) const {
    const size_t start = place == 0 ? 0 : text_.rfind('\n', place - 1) + 1;  // npos + 1 is 0
    const std::string_view before = text_.substr(start, place - start);
    const auto column = 1 + std::count_if(before.begin(), before.end(), [](char c) { return (c & 0xc0) != 0x80; });
    return error(ErrorCode::kUsage, "{}:{}:{}: {}", name_, line_, column, what);
  }
  Error bad(const std::string& what) const { return bad(what, place_); }

  // From a place to the end of its line, or of the array's item, without a comment.
  std::string_view rest(size_t place, bool in_array = false) const {
    std::string_view line = text_.substr(place, text_.find_first_of(in_array ? ",]\r\n" : "\r\n", place) - place);
    line = line.substr(0, line.find('#'));
    while (!line.empty() && (line.back() == ' ' || line.back() == '\t')) line.remove_suffix(1);
    return line;
  }

  // A line of YAML, of a command or of prose.
  Error without_equals(std::string key, std::string_view written) {
    if (written.starts_with("--")) {
      key.erase(0, key.find_first_not_of('-'));
      if (key.empty()) return bad("a line is a key, '=' and a value, such as port = 8000");
    }
    take(':');
    skip_spaces();
    const std::string_view value = rest(place_);
    const std::string should = value.empty() ? "..." : meant(value);
    const char* const list = should == "..." ? ", or of a list [\"...\", \"...\"]" : "";
    return bad(fmt::format("after the key '{}' there must be a '=': write {} = {}{}", written, key, should, list),
               place_);
  }

  Status end_of_line() {
    skip_spaces();
    skip_comment();
    if (peek() == '\r') ++place_;
    if (at_end() || peek() == '\n') return ok_status();
    const std::string_view more = rest(place_);
    return bad(fmt::format("'{}': a line ends after its value; {}", more,
                           more.starts_with(',') ? "several values are a list, in [...]"
                                                 : "text with spaces needs quotes around all of it"));
  }

  Status read_header(bool late) {
    const std::string_view line = text_.substr(place_, text_.find_first_of("\r\n#", place_) - place_);
    const std::string header = "[" + table_ + "]";
    if (late || !line.starts_with(header)) {
      return bad(fmt::format("'{}': the only table is {}, once and first",
                             line.substr(0, line.find_last_not_of(" \t") + 1), header));
    }
    place_ += header.size();
    return ok_status();
  }

  Status read_key(std::string& key) {
    if (peek() == '"' || peek() == '\'') {
      NFP_RETURN_IF_ERROR(read_string(key));
    } else {
      while (!at_end() && is_bare(peek())) key += text_[place_++];
    }
    if (key.empty()) return bad("a line must begin with a key: letters, digits, '-' and '_', as in port = 8000");
    if (peek() == '.') return bad("the key '" + key + ".' is dotted; there are no tables inside");
    std::replace(key.begin(), key.end(), '_', '-');
    return ok_status();
  }

  Status read_value(ConfigEntry& entry, bool in_array) {
    std::string value;
    if (peek() == '"' || peek() == '\'') {
      if (text_.substr(place_, 3) == "\"\"\"" || text_.substr(place_, 3) == "'''") {
        return bad("strings of several lines are not known here");
      }
      NFP_RETURN_IF_ERROR(read_string(value));
      if (!in_array) entry.kind = ConfigEntry::Kind::kString;
    } else if (peek() == '[' && !in_array) {
      return read_array(entry);
    } else {
      const std::string_view written = rest(place_, in_array);
      const bool boolean = written == "true" || written == "false";
      const auto number = number_of(written);
      if (!boolean && !number) return no_value(entry.key, written, in_array);
      value = boolean ? std::string(written) : *number;
      place_ += written.size();
      if (!in_array) entry.kind = boolean ? ConfigEntry::Kind::kBoolean : ConfigEntry::Kind::kNumber;
    }
    entry.values.push_back(std::move(value));
    return ok_status();
  }

  Error no_value(const std::string& key, std::string_view written, bool in_array) const {
    if (written.empty()) {
      return bad(fmt::format("the key '{}' has no value: write text in quotes, a number, true, false or [...]", key));
    }
    if (written.front() == '[' || written.front() == '{') {
      return bad(fmt::format("the value of '{}': there are no tables, nor lists in lists", key));
    }
    const std::string should = meant(written);
    return bad(
        fmt::format("the value of '{}' is {}, not a number, true, false or [...]; text needs quotes: write "
                    "{}",
                    key, written, in_array ? should : key + " = " + should));
  }

  Status read_array(ConfigEntry& entry) {
    entry.kind = ConfigEntry::Kind::kArray;
    const size_t begin = place_;
    const int first = line_;
    take('[');
    while (true) {
      skip_lines();
      if (take(']')) return ok_status();
      if (at_end()) {
        line_ = first;
        return bad("the array of '" + entry.key + "' does not end: a ']' is missing", begin);
      }
      NFP_RETURN_IF_ERROR(read_value(entry, /*in_array=*/true));
      skip_lines();
      if (!at_end() && peek() != ']' && !take(','))
        return bad("in the array of '" + entry.key + "' a comma is missing before this");
    }
  }

  Status read_string(std::string& out) {
    const size_t begin = place_;
    const char quote = text_[place_++];
    while (!at_end() && peek() != '\n') {
      const char c = text_[place_++];
      if (c == quote) return ok_status();
      if (c != '\\' || quote == '\'') {
        out += c;
        continue;
      }
      NFP_RETURN_IF_ERROR(read_escape(out));
    }
    return bad(fmt::format("a string does not end on its line: a {} is missing", quote), begin);
  }

  Status read_escape(std::string& out) {
    constexpr std::string_view kShort = "btnfr\"\\", kMeant = "\b\t\n\f\r\"\\";
    const char c = at_end() ? '\0' : text_[place_++];
    if (const size_t known = kShort.find(c); known != std::string_view::npos) {
      out += kMeant[known];
      return ok_status();
    }
    const size_t digits = c == 'u' ? 4 : c == 'U' ? 8 : 0;
    uint32_t code = 0;
    for (size_t i = 0; i < digits; ++i) {
      const char d = at_end() ? '\0' : text_[place_++];
      const bool decimal = d >= '0' && d <= '9';
      const char low = static_cast<char>(d | 0x20);
      if (!decimal && !(low >= 'a' && low <= 'f')) return bad("an escape in a string has too few hexadecimal digits");
      code = code * 16 + static_cast<uint32_t>(decimal ? d - '0' : low - 'a' + 10);
    }
    if (digits == 0 || code == 0 || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) {
      return bad("a string has an escape that TOML does not know; a backslash is written \\\\, or the string in '...'");
    }
    text::append_utf8(out, code);
    return ok_status();
  }

  const std::string_view text_;
  const std::string& name_;
  const std::string& table_;
  size_t place_ = 0;
  int line_ = 1;
};

}  // namespace

Result<std::vector<ConfigEntry>> parse_config_file(std::string_view text, const std::string& name,
                                                   const std::string& table) {
  return Reader(text, name, table).read();
}

}  // namespace nfp::shell
