#include "shell/config_file.h"

#include <algorithm>
#include <set>

#include "text/utf8.h"

namespace nfp::shell {
namespace {

bool is_bare(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
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
        NFP_RETURN_IF_ERROR(read_key(entry.key));
        skip_spaces();
        if (!take('=')) return bad("after the key '" + entry.key + "' there must be a '='");
        skip_spaces();
        NFP_RETURN_IF_ERROR(read_value(entry, /*in_array=*/false));
        if (!keys.insert(entry.key).second) return bad("the key '" + entry.key + "' is there twice");
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
  Error bad(const std::string& what) const { return error(ErrorCode::kUsage, "{}:{}: {}", name_, line_, what); }

  Status end_of_line() {
    skip_spaces();
    skip_comment();
    if (peek() == '\r') ++place_;
    if (at_end() || peek() == '\n') return ok_status();
    return bad("there is more on the line than a key and its value; text needs quotes");
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
    if (key.empty()) return bad("a line must begin with a key: letters, digits, '-' and '_'");
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
      while (!at_end() && (is_bare(peek()) || peek() == '.' || peek() == '+')) value += text_[place_++];
      const bool boolean = value == "true" || value == "false";
      if (!boolean) NFP_RETURN_IF_ERROR(check_number(entry.key, value));
      if (!in_array) entry.kind = boolean ? ConfigEntry::Kind::kBoolean : ConfigEntry::Kind::kNumber;
    }
    entry.values.push_back(std::move(value));
    return ok_status();
  }

  Status read_array(ConfigEntry& entry) {
    entry.kind = ConfigEntry::Kind::kArray;
    take('[');
    while (true) {
      skip_lines();
      if (take(']')) return ok_status();
      if (at_end()) return bad("the array of '" + entry.key + "' does not end");
      NFP_RETURN_IF_ERROR(read_value(entry, /*in_array=*/true));
      skip_lines();
      if (!at_end() && peek() != ']' && !take(','))
        return bad("in the array of '" + entry.key + "' a comma is missing");
    }
  }

  // TOML's numbers are decimal with '_' between digits; its other forms (0x, inf, dates) no flag takes.
  Status check_number(const std::string& key, std::string& value) const {
    std::string digits;
    bool digit = false, point = false, exponent = false, good = !value.empty();
    for (size_t i = 0; i < value.size(); ++i) {
      const char c = value[i];
      const char before = i > 0 ? value[i - 1] : '\0';
      if (c >= '0' && c <= '9') {
        digit = true;
      } else if (c == '_') {
        good = good && before >= '0' && before <= '9' && i + 1 < value.size() && value[i + 1] >= '0' &&
               value[i + 1] <= '9';
        continue;
      } else if (c == '+' || c == '-') {
        good = good && (i == 0 || before == 'e' || before == 'E');
      } else if (c == '.') {
        good = good && digit && !point && !exponent;
        point = true;
      } else if (c == 'e' || c == 'E') {
        good = good && digit && !exponent;
        exponent = true;
      } else {
        good = false;
      }
      digits += c;
    }
    if (!good || !digit || digits.back() < '0' || digits.back() > '9') {
      return bad(fmt::format("the value of '{}' is '{}': text needs quotes; else it is a number, true, false or [...]",
                             key, value));
    }
    value = digits.front() == '+' ? digits.substr(1) : digits;
    return ok_status();
  }

  Status read_string(std::string& out) {
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
    return bad("a string does not end on its line");
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
