// jinja2's filters and tests. Those filters that are generators in jinja2 make all their items at once here, but are
// consumed once all the same.
#include "text/jinja/filters.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "text/jinja/operators.h"
#include "text/jinja/text.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace nfp::jinja {
namespace {

Value generator(Runtime& rt, std::vector<Value> items) { return rt.list(std::move(items), Kind::kIterator); }

// --- Single values

Value absolute(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "abs", args, 0, 0);
  if (v.is_integral()) return Value::integer(v.as_int() < 0 ? -v.as_int() : v.as_int());
  if (v.is(Kind::kFloat)) return Value::real(std::fabs(v.as_real()));
  if (v.undefined()) rt.fail_undefined(v);
  rt.fail("bad operand type for abs(): '{}'", type_name(v));
}

Value default_value(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "default", args, {"default_value", "boolean"});
  if (!v.undefined() && !(truthy(rt, bound[1]) && !truthy(rt, v))) return v;
  return bound[0].missing() ? rt.string("") : bound[0];
}

Value to_int(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "int", args, {"default"});
  const Value otherwise = bound[0].missing() ? Value::integer(0) : bound[0];
  if (v.undefined()) rt.fail_undefined(v);
  if (v.is_integral()) return Value::integer(v.as_int());
  if (v.is(Kind::kFloat)) return std::isnan(v.as_real()) ? otherwise : int_of(rt, v.as_real());
  if (!v.is(Kind::kString)) return otherwise;
  if (const auto i = parse_int(v.text())) return Value::integer(*i);
  const auto d = parse_real(v.text());
  return d && std::isfinite(*d) ? int_of(rt, *d) : otherwise;
}

Value to_float(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "float", args, {"default"});
  if (v.undefined()) rt.fail_undefined(v);
  if (v.is_number()) return Value::real(real_of(v));
  const auto d = v.is(Kind::kString) ? parse_real(v.text()) : std::nullopt;
  return d ? Value::real(*d) : bound[0].missing() ? Value::real(0) : bound[0];
}

Value round_number(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "round", args, {"precision", "method"});
  const Int digits = bound[0].missing() ? 0 : int_argument(rt, bound[0], "precision");
  const std::string method = bound[1].missing() ? "common" : to_text(rt, bound[1]);
  if (method != "common" && method != "ceil" && method != "floor") rt.fail("method must be common, ceil or floor");
  if (digits < 0 || digits > 15) rt.fail("a precision of round beyond 0 to 15 is not supported in chat templates");
  if (v.undefined()) rt.fail_undefined(v);
  if (!v.is_number()) rt.fail("type {} doesn't define __round__ method", type_name(v));
  if (method == "common") {
    if (v.is_integral()) return Value::integer(v.as_int());
    if (!std::isfinite(v.as_real())) return v;
    // The C library rounds the exact binary value half to even, as Python does.
    char buffer[400];
    std::snprintf(buffer, sizeof(buffer), "%.*f", static_cast<int>(digits), v.as_real());
    return Value::real(std::strtod(buffer, nullptr));
  }
  const double scale = std::pow(10.0, static_cast<double>(digits));
  const double scaled = real_of(v) * scale;
  return Value::real(real_of(int_of(rt, method == "ceil" ? std::ceil(scaled) : std::floor(scaled))) / scale);
}

Value string(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "string", args, 0, 0);
  return v.is(Kind::kString) ? v : rt.string(to_text(rt, v));
}

Value tojson(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "tojson", args, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ascii = truthy(rt, bound[0]);
  style.sort_keys = truthy(rt, bound[3]);
  if (!bound[1].none_or_missing()) {
    style.pretty = true;
    if (bound[1].is(Kind::kString)) {
      style.indent = bound[1].text();
    } else {
      const Int spaces = std::max<Int>(int_argument(rt, bound[1], "indent"), 0);
      rt.charge(1, spaces);
      style.indent.assign(static_cast<size_t>(spaces), ' ');
    }
    style.item_separator = ",";
  }
  if (!bound[2].none_or_missing()) {
    const std::vector<Value> separators = items_of(rt, bound[2]);
    if (separators.size() != 2 || !separators[0].is(Kind::kString) || !separators[1].is(Kind::kString)) {
      rt.fail("tojson: separators must be two strings");
    }
    style.item_separator = separators[0].text();
    style.key_separator = separators[1].text();
  }
  return rt.string(to_json(rt, v, style));
}

// --- Text

template <text::Case to>
Value change_text(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "filter", args, 0, 0);
  return rt.string(with_case(rt, to_text(rt, v), to));
}

// Each word begins with a capital; words end at white space, '-' and opening brackets.
Value title(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "title", args, 0, 0);
  const std::string all = to_text(rt, v);
  const auto begins_word = [](char32_t c) {
    return c == '-' || c == '(' || c == '{' || c == '[' || c == '<' || text::is_python_space(c);
  };
  std::string out;
  for (size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    const bool separator = begins_word(text::next_code_point(all, end));
    out += with_case(rt, std::string_view(all).substr(begin, end - begin), text::Case::kUpper);
    begin = end;
    for (size_t next = end; next < all.size(); end = next) {
      if (begins_word(text::next_code_point(all, next)) != separator) break;
    }
    out += with_case(rt, std::string_view(all).substr(begin, end - begin), text::Case::kLower);
  }
  return rt.string(std::move(out));
}

Value indent(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "indent", args, {"width", "first", "blank"});
  if (v.undefined()) rt.fail_undefined(v);
  if (!v.is(Kind::kString)) rt.fail("indent needs a string, not '{}'", type_name(v));
  std::string margin;
  if (bound[0].is(Kind::kString)) {
    margin = bound[0].text();
  } else {
    const Int width = bound[0].missing() ? 4 : std::max<Int>(int_argument(rt, bound[0], "width"), 0);
    rt.charge(1, width);
    margin.assign(static_cast<size_t>(width), ' ');
  }
  const bool blank = truthy(rt, bound[2]);
  std::string out = truthy(rt, bound[1]) ? margin : "";
  const std::string lines = std::string(v.text()) + "\n";
  bool first = true;
  for (const std::string_view line : split_lines(rt, lines, false)) {
    rt.charge(1 + margin.size() + line.size());
    if (!first) out += '\n';
    if (!first && (blank || !line.empty())) out += margin;
    out += line;
    first = false;
  }
  return rt.string(std::move(out));
}

Value replace_text(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "replace", args, {"old", "new", "count"}, 2);
  const Int count = bound[2].none_or_missing() ? -1 : int_argument(rt, bound[2], "count");
  return rt.string(replace(rt, to_text(rt, v), to_text(rt, bound[0]), to_text(rt, bound[1]), count));
}

Value trim(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "trim", args, {"chars"});
  return rt.string(strip(rt, to_text(rt, v), bound[0], true, true));
}

// --- Sequences and mappings

Value count(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "length", args, 0, 0);
  return Value::integer(length(rt, v));
}

Value list(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "list", args, 0, 0);
  return rt.list(items_of(rt, v));
}

Value items(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "items", args, 0, 0);
  std::vector<Value> pairs;
  if (v.undefined()) return generator(rt, {});
  if (!v.is(Kind::kDict)) rt.fail("Can only get item pairs from a mapping.");
  for (const Dict::Entry& entry : v.as_dict().entries) pairs.push_back(rt.tuple(entry.key, entry.value));
  return generator(rt, std::move(pairs));
}

Value first(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "first", args, 0, 0);
  Value item;
  return Cursor(rt, v).next(&item) ? item : rt.undefined("No first item, sequence was empty.");
}

Value last(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "last", args, 0, 0);
  if (v.is(Kind::kIterator)) rt.fail("'generator' object is not reversible");
  if (v.is_sequence() || v.is(Kind::kString)) {
    if (length(rt, v) > 0) return get_item(rt, v, Value::integer(-1));
  } else if (const std::vector<Value> all = items_of(rt, v); !all.empty()) {
    return all.back();
  }
  return rt.undefined("No last item, sequence was empty.");
}

Value reverse(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "reverse", args, 0, 0);
  if (v.is(Kind::kString)) return slice(rt, v, Value(), Value(), Value::integer(-1));
  std::vector<Value> all = items_of(rt, v);
  std::reverse(all.begin(), all.end());
  return v.is(Kind::kIterator) ? rt.list(std::move(all)) : generator(rt, std::move(all));
}

Value join(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "join", args, {"d", "attribute"});
  const std::string separator = bound[0].missing() ? "" : to_text(rt, bound[0]);
  std::string out;
  bool is_first = true;
  Cursor cursor(rt, v);
  for (Value item; cursor.next(&item);) {
    rt.charge(separator.size());
    if (!is_first) out += separator;
    is_first = false;
    append_text(rt, out, path_item(rt, item, bound[1]));
  }
  return rt.string(std::move(out));
}

Value sum(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "sum", args, {"attribute", "start"});
  Value total = bound[1].missing() ? Value::integer(0) : bound[1];
  if (total.is(Kind::kString)) rt.fail("sum() can't sum strings [use ''.join(seq) instead]");
  Cursor cursor(rt, v);
  for (Value item; cursor.next(&item);) total = arithmetic(rt, Binary::kAdd, total, path_item(rt, item, bound[0]));
  return total;
}

// What items compare by: an attribute of theirs, with the case of strings ignored unless told otherwise.
Value key_of(Runtime& rt, const Value& item, const Value& path, const Value& case_sensitive) {
  const Value key = path_item(rt, item, path);
  return key.is(Kind::kString) && !truthy(rt, case_sensitive) ? rt.string(with_case(rt, key.text(), text::Case::kLower))
                                                              : key;
}

Value sort(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "sort", args, {"reverse", "case_sensitive", "attribute"});
  if (bound[2].is(Kind::kString) && bound[2].text().find(',') != std::string_view::npos) {
    rt.fail("sort by several attributes is not supported in chat templates");
  }
  const std::vector<Value> all = items_of(rt, v);
  std::vector<Value> keys;
  for (const Value& item : all) keys.push_back(key_of(rt, item, bound[2], bound[1]));
  return rt.list(sorted(rt, all, keys, truthy(rt, bound[0])));
}

Value dict_sort(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "dictsort", args, {"case_sensitive", "by", "reverse"});
  const std::string by = bound[1].missing() ? "key" : to_text(rt, bound[1]);
  if (by != "key" && by != "value") rt.fail("You can only sort by either \"key\" or \"value\"");
  if (v.undefined()) rt.fail_undefined(v);
  if (!v.is(Kind::kDict)) rt.fail("'{}' object has no attribute 'items'", type_name(v));
  std::vector<Value> pairs, keys;
  for (const Dict::Entry& entry : v.as_dict().entries) {
    pairs.push_back(rt.tuple(entry.key, entry.value));
    keys.push_back(key_of(rt, by == "key" ? entry.key : entry.value, Value(), bound[0]));
  }
  return rt.list(sorted(rt, pairs, keys, truthy(rt, bound[2])));
}

template <bool want_max>
Value extreme(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, want_max ? "max" : "min", args, {"case_sensitive", "attribute"});
  Value best, best_key;
  Cursor cursor(rt, v);
  for (Value item; cursor.next(&item);) {
    const Value key = key_of(rt, item, bound[1], bound[0]);
    if (best_key.missing() || compare(rt, want_max ? Compare::kGreater : Compare::kLess, key, best_key)) {
      best = item;
      best_key = key;
    }
  }
  return best_key.missing() ? rt.undefined("No aggregated item, sequence was empty.") : best;
}

Value unique(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "unique", args, {"case_sensitive", "attribute"});
  Dict seen;
  std::vector<Value> out;
  Cursor cursor(rt, v);
  for (Value item; cursor.next(&item);) {
    const Value key = key_of(rt, item, bound[1], bound[0]);
    if (rt.find(seen, key) != nullptr) continue;
    rt.set(seen, key, Value::none());
    out.push_back(item);
  }
  return generator(rt, std::move(out));
}

// map('filter', arguments...) or map(attribute='a.b', default=...).
Value map(Runtime& rt, const Value& v, const Args& args) {
  std::vector<Value> out;
  if (!truthy(rt, v)) return generator(rt, {});
  if (!args.positional.empty()) {
    if (!args.positional[0].is(Kind::kString)) rt.fail("map: the filter's name must be a string");
    const Callable* filter = find_filter(args.positional[0].text());
    if (filter == nullptr) {
      rt.fail("the filter {} is not supported in chat templates", args.positional[0].text().substr(0, 100));
    }
    Args rest = args;
    rest.positional.erase(rest.positional.begin());
    Cursor cursor(rt, v);
    for (Value item; cursor.next(&item);) out.push_back(filter->call(rt, item, rest));
    return generator(rt, std::move(out));
  }
  const auto bound = bind(rt, "map", args, {"attribute", "default"});
  if (bound[0].none_or_missing()) rt.fail("map requires a filter argument");
  Cursor cursor(rt, v);
  for (Value item; cursor.next(&item);) out.push_back(path_item(rt, item, bound[0], bound[1]));
  return generator(rt, std::move(out));
}

// select('test', argument), selectattr('attribute', 'test', argument) and their negations.
template <bool by_attribute, bool wanted>
Value select(Runtime& rt, const Value& v, const Args& args) {
  std::vector<Value> out;
  if (!truthy(rt, v)) return generator(rt, {});
  constexpr size_t kBefore = by_attribute ? 1 : 0;  // arguments before the test's name
  expect_positional(rt, "select", args, kBefore, kBefore + 2);
  const auto& p = args.positional;
  const Test* test = nullptr;
  if (p.size() > kBefore) {
    if (!p[kBefore].is(Kind::kString)) rt.fail("the test's name must be a string");
    test = find_test(p[kBefore].text());
    if (test == nullptr) {
      rt.fail("the test {} is not supported in chat templates", p[kBefore].text().substr(0, 100));
    }
    if (test->has_argument != (p.size() > kBefore + 1))
      rt.fail("the test {} got a wrong number of arguments", test->name);
  }
  Cursor cursor(rt, v);
  for (Value item; cursor.next(&item);) {
    const Value tested = by_attribute ? path_item(rt, item, p[0]) : item;
    const bool holds = test != nullptr ? test->holds(rt, tested, p.size() > kBefore + 1 ? p[kBefore + 1] : Value())
                                       : truthy(rt, tested);
    if (holds == wanted) out.push_back(item);
  }
  return generator(rt, std::move(out));
}

constexpr Callable kFilters[] = {{"abs", absolute},
                                 {"capitalize", change_text<text::Case::kCapitalize>},
                                 {"count", count},
                                 {"d", default_value},
                                 {"default", default_value},
                                 {"dictsort", dict_sort},
                                 {"first", first},
                                 {"float", to_float},
                                 {"indent", indent},
                                 {"int", to_int},
                                 {"items", items},
                                 {"join", join},
                                 {"last", last},
                                 {"length", count},
                                 {"list", list},
                                 {"lower", change_text<text::Case::kLower>},
                                 {"map", map},
                                 {"max", extreme<true>},
                                 {"min", extreme<false>},
                                 {"reject", select<false, false>},
                                 {"rejectattr", select<true, false>},
                                 {"replace", replace_text},
                                 {"reverse", reverse},
                                 {"round", round_number},
                                 {"safe", string},  // nothing is escaped, so there is nothing to mark
                                 {"select", select<false, true>},
                                 {"selectattr", select<true, true>},
                                 {"sort", sort},
                                 {"string", string},
                                 {"sum", sum},
                                 {"title", title},
                                 {"tojson", tojson},
                                 {"trim", trim},
                                 {"unique", unique},
                                 {"upper", change_text<text::Case::kUpper>}};

// --- Tests

template <Kind kind>
bool is_kind(Runtime&, const Value& v, const Value&) {
  return v.is(kind);
}
template <bool wanted>
bool is_bool(Runtime&, const Value& v, const Value&) {
  return v.is(Kind::kBool) && v.as_bool() == wanted;
}
template <Compare op>
bool compares(Runtime& rt, const Value& v, const Value& argument) {
  return compare(rt, op, v, argument);
}
bool is_defined(Runtime&, const Value& v, const Value&) { return !v.undefined(); }
bool is_number(Runtime&, const Value& v, const Value&) { return v.is_number(); }
bool iterable(Runtime&, const Value& v, const Value&) { return is_iterable(v); }
bool sequence(Runtime&, const Value& v, const Value&) {
  return v.is(Kind::kString) || v.is_sequence() || v.is(Kind::kDict) || v.is(Kind::kRange) || v.undefined();
}
bool same_as(Runtime&, const Value& v, const Value& argument) { return identical(v, argument); }
bool divisible_by(Runtime& rt, const Value& v, const Value& divisor) {
  return equals(rt, arithmetic(rt, Binary::kModulo, v, divisor), Value::integer(0));
}
template <int remainder>
bool parity(Runtime& rt, const Value& v, const Value&) {
  return equals(rt, arithmetic(rt, Binary::kModulo, v, Value::integer(2)), Value::integer(remainder));
}

constexpr Test kTests[] = {{"!=", compares<Compare::kNotEqual>, true},
                           {"<", compares<Compare::kLess>, true},
                           {"<=", compares<Compare::kLessEqual>, true},
                           {"==", compares<Compare::kEqual>, true},
                           {">", compares<Compare::kGreater>, true},
                           {">=", compares<Compare::kGreaterEqual>, true},
                           {"boolean", is_kind<Kind::kBool>},
                           {"defined", is_defined},
                           {"divisibleby", divisible_by, true},
                           {"eq", compares<Compare::kEqual>, true},
                           {"equalto", compares<Compare::kEqual>, true},
                           {"even", parity<0>},
                           {"false", is_bool<false>},
                           {"float", is_kind<Kind::kFloat>},
                           {"ge", compares<Compare::kGreaterEqual>, true},
                           {"greaterthan", compares<Compare::kGreater>, true},
                           {"gt", compares<Compare::kGreater>, true},
                           {"in", compares<Compare::kIn>, true},
                           {"integer", is_kind<Kind::kInt>},
                           {"iterable", iterable},
                           {"le", compares<Compare::kLessEqual>, true},
                           {"lessthan", compares<Compare::kLess>, true},
                           {"lt", compares<Compare::kLess>, true},
                           {"mapping", is_kind<Kind::kDict>},
                           {"ne", compares<Compare::kNotEqual>, true},
                           {"none", is_kind<Kind::kNone>},
                           {"number", is_number},
                           {"odd", parity<1>},
                           {"sameas", same_as, true},
                           {"sequence", sequence},
                           {"string", is_kind<Kind::kString>},
                           {"true", is_bool<true>},
                           {"undefined", is_kind<Kind::kUndefined>}};

}  // namespace

const Callable* find_filter(std::string_view name) {
  const auto* it =
      std::find_if(std::begin(kFilters), std::end(kFilters), [&](const auto& f) { return f.name == name; });
  return it == std::end(kFilters) ? nullptr : it;
}

const Test* find_test(std::string_view name) {
  const auto* it = std::find_if(std::begin(kTests), std::end(kTests), [&](const auto& t) { return t.name == name; });
  return it == std::end(kTests) ? nullptr : it;
}

}  // namespace nfp::jinja
