// Python's formatting of strings with %.
#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

#include "text/jinja/text.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace nfp::jinja {
namespace {

constexpr Int kMostDigits = 400;  // behind a point

// %(name)-05.2f
struct Field {
  bool left = false, zeros = false;
  std::string sign;  // of numbers that are not negative
  Int width = 0;
  std::optional<Int> precision;
};

class Formatter {
 public:
  Formatter(Runtime& rt, const Value& format, const Value& arguments)
      : rt_(rt), format_(format.text()), safe_(format.is_safe()), arguments_(arguments) {}

  std::string run() {
    while (at_ < format_.size()) {
      rt_.step();
      const size_t percent = std::min(format_.find('%', at_), format_.size());
      put(format_.substr(at_, percent - at_));
      at_ = percent + 1;
      if (percent < format_.size()) field();
    }
    const bool tuple = arguments_.is(Kind::kTuple);
    const bool all = tuple ? next_ == arguments_.items().size() : next_ == 1;
    // Python takes what has items for a mapping, of which not all need be used.
    const bool has_items = arguments_.is(Kind::kDict) || arguments_.is(Kind::kList) || arguments_.undefined();
    if (!all && !has_items) {
      rt_.fail("not all arguments converted during string formatting");
    }
    return std::move(out_);
  }

 private:
  void put(std::string_view text) {
    rt_.charge(text.size());
    out_ += text;
  }

  char look() const {
    if (at_ >= format_.size()) rt_.fail("incomplete format");
    return format_[at_];
  }
  std::optional<Int> number() {
    const size_t end = std::min(format_.find_first_not_of("0123456789", at_), format_.size());
    const std::string_view digits = format_.substr(at_, end - at_);
    at_ = end;
    return digits.empty() ? std::nullopt : std::optional(parse_int(digits).value_or(kIntBound));
  }

  const Value& argument() {
    const bool tuple = arguments_.is(Kind::kTuple);
    if (next_ >= (tuple ? arguments_.items().size() : 1)) rt_.fail("not enough arguments for format string");
    return tuple ? arguments_.items()[next_++] : (++next_, arguments_);
  }
  const Value& named_argument() {
    const size_t end = format_.find(')', at_);
    if (end == format_.npos) rt_.fail("incomplete format key");
    const std::string_view name = format_.substr(at_, end - at_);
    at_ = end + 1;
    if (!arguments_.is(Kind::kDict)) rt_.fail("format requires a mapping");
    const Value* found = rt_.find(arguments_.as_dict(), name);
    if (found == nullptr) rt_.fail("the mapping has no key '{}'", short_name(name));
    return *found;
  }

  void field() {
    const Value* value = nullptr;
    if (look() == '(') {
      ++at_;
      value = &named_argument();
    }
    Field field;
    for (bool flag = true; flag;) {
      const char c = look();
      flag = c == '-' || c == '0' || c == '+' || c == ' ';
      if (c == '-') field.left = true;
      if (c == '0') field.zeros = true;
      if (c == '+') field.sign = "+";
      if (c == ' ' && field.sign.empty()) field.sign = " ";
      if (flag) ++at_;
    }
    field.width = number().value_or(0);
    if (look() == '.') {
      ++at_;
      field.precision = number().value_or(0);
    }
    const char kind = look();
    if (kind == '%') return ++at_, put("%");
    if (std::string_view("srdiuf").find(kind) == std::string_view::npos) {
      rt_.fail("the format {} of % is not supported in chat templates", format_.substr(at_, text::utf8_length(kind)));
    }
    ++at_;
    if (value == nullptr) value = &argument();
    if (kind == 's') return text(field, safe_ ? escaped(rt_, *value) : to_text(rt_, *value));
    if (kind == 'r') return text(field, safe_ ? escaped(rt_, rt_.string(repr(rt_, *value))) : repr(rt_, *value));
    if (value->undefined()) rt_.fail_undefined(*value);
    const Value number = safe_ && value->is(Kind::kString) ? number_in(kind, value->text()) : *value;
    if (!number.is_number()) {
      rt_.fail("%{} format: a number is required, not {}", kind, type_name(number));
    }
    kind == 'f' ? real(field, number) : whole(field, number);
  }

  // A safe string's arguments are objects that become numbers as float() and int() make them of a text.
  Value number_in(char kind, std::string_view text) {
    if (kind == 'f') {
      if (const auto real = parse_float(rt_, text)) return Value::real(*real);
    } else {
      rt_.work(text.size());
      if (const auto whole = parse_int(text)) return Value::integer(*whole);
    }
    rt_.fail("%{} format: '{}' is no number", kind, short_name(text));
  }

  void text(const Field& field, std::string text) {
    if (field.precision && *field.precision < static_cast<Int>(text::count_code_points(text))) {
      text.resize(text::byte_of(text, static_cast<size_t>(*field.precision)));
    }
    padded(field, "", text, /*zeros=*/false);
  }
  void whole(const Field& field, const Value& v) {
    if (field.precision) rt_.fail("the precision of whole numbers is not supported in chat templates");
    if (v.is(Kind::kFloat) && !(std::fabs(v.as_real()) < 0x1p120)) {
      rt_.fail("cannot convert float {} to integer", v.as_real());
    }
    const Int number = v.is(Kind::kFloat) ? static_cast<Int>(v.as_real()) : v.as_int();
    padded(field, number < 0 ? "-" : field.sign, fmt::format("{}", number < 0 ? -number : number), field.zeros);
  }
  void real(const Field& field, const Value& v) {
    const double number = v.is(Kind::kFloat) ? v.as_real() : static_cast<double>(v.as_int());
    const Int digits = field.precision.value_or(6);
    if (digits > kMostDigits) rt_.fail("a precision of more than {} is not supported", static_cast<int>(kMostDigits));
    const std::string text = fmt::format("{:.{}f}", std::fabs(number), static_cast<int>(digits));
    const bool negative = std::signbit(number) && !std::isnan(number);
    padded(field, negative ? "-" : field.sign, text, field.zeros);
  }

  void padded(const Field& field, std::string_view sign, std::string_view text, bool zeros) {
    const Int missing = std::max<Int>(field.width - static_cast<Int>(sign.size() + text::count_code_points(text)), 0);
    rt_.charge(1, missing);
    const std::string fill(static_cast<size_t>(missing), zeros && !field.left ? '0' : ' ');
    if (!field.left && !zeros) put(fill);
    put(sign);
    if (!field.left && zeros) put(fill);
    put(text);
    if (field.left) put(fill);
  }

  Runtime& rt_;
  const std::string_view format_;
  const bool safe_;  // what is put into it is escaped
  const Value arguments_;
  std::string out_;
  size_t at_ = 0;
  size_t next_ = 0;  // argument
};

}  // namespace

Value format_percent(Runtime& rt, const Value& format, const Value& arguments) {
  return rt.string_of(format, Formatter(rt, format, arguments).run());
}

}  // namespace nfp::jinja
