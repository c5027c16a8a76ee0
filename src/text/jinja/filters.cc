// jinja2's filters and tests. Those filters that are generators in jinja2 make all their items at once here, but are
// consumed once all the same.
#include "text/jinja/filters.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "text/jinja/text.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace nfp::jinja {
namespace {

Value generator(Runtime& rt, std::vector<Value> items) { return rt.list(std::move(items), Kind::kIterator); }

// --- Single values

Value default_value(Runtime& rt, const Value& v, const Args& args) {
  if (!v.undefined() && !(truthy(rt, args[1]) && !truthy(rt, v))) return v;
  return args[0].missing() ? rt.string("") : args[0];
}

Value to_int(Runtime& rt, const Value& v, const Args& args) {
  if (v.undefined()) rt.fail_undefined(v);
  if (v.is_integral()) return Value::integer(v.as_int());
  if (v.is(Kind::kFloat)) {
    if (!(std::fabs(v.as_real()) < 0x1p120)) rt.fail("cannot convert float {} to integer", v.as_real());
    return Value::integer(static_cast<Int>(v.as_real()));
  }
  if (v.is(Kind::kString)) rt.work(v.text().size());
  const auto whole = v.is(Kind::kString) ? parse_int(v.text()) : std::nullopt;
  if (whole) return Value::integer(*whole);
  const auto real = v.is(Kind::kString) ? parse_float(rt, v.text()) : std::nullopt;
  if (real && !std::isnan(*real)) return to_int(rt, Value::real(*real), args);
  return args[0].missing() ? Value::integer(0) : args[0];
}

Value to_float(Runtime& rt, const Value& v, const Args& args) {
  if (v.undefined()) rt.fail_undefined(v);
  if (v.is_integral()) return Value::real(static_cast<double>(v.as_int()));
  if (v.is(Kind::kFloat)) return v;
  const auto real = v.is(Kind::kString) ? parse_float(rt, v.text()) : std::nullopt;
  return real ? Value::real(*real) : args[0].missing() ? Value::real(0) : args[0];
}

Value absolute(Runtime& rt, const Value& v, const Args&) {
  if (v.undefined()) rt.fail_undefined(v);
  if (v.is_integral()) return Value::integer(v.as_int() < 0 ? -v.as_int() : v.as_int());
  if (v.is(Kind::kFloat)) return Value::real(std::fabs(v.as_real()));
  rt.fail("bad operand type for abs(): '{}'", type_name(v));
}

Value round(Runtime& rt, const Value& v, const Args& args) {
  constexpr Int kMost = 400;  // digits; a float has no more behind its point that count
  const Int digits = args[0].missing() ? 0 : int_argument(rt, args[0], "precision");
  const std::string method = args[1].missing() ? "common" : to_text(rt, args[1]);
  if (method != "common" && method != "ceil" && method != "floor") rt.fail("method must be common, ceil or floor");
  if (v.undefined()) rt.fail_undefined(v);
  if (!v.is_number()) rt.fail("type {} doesn't define __round__ method", type_name(v));
  if (digits < 0 || (method != "common" && digits > 22)) {
    rt.fail("round to {} digits is not supported in chat templates", static_cast<int64_t>(digits));
  }
  const bool whole = v.is_integral();
  const double value = whole ? static_cast<double>(v.as_int()) : v.as_real();
  if (method == "common") {
    if (whole) return Value::integer(v.as_int());
    if (!std::isfinite(value)) return v;
    // The digits of the number as it is, rounded once, as Python does.
    const std::string text = fmt::format("{:.{}f}", value, static_cast<int>(std::min(digits, kMost)));
    const auto rounded = parse_float(rt, text);
    return rounded ? Value::real(*rounded) : v;
  }
  const double scale = std::pow(10.0, static_cast<double>(digits)), scaled = value * scale;
  if (!std::isfinite(scaled)) rt.fail("cannot convert float {} to integer", scaled);
  return Value::real((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale + 0.0);
}

Value string(Runtime& rt, const Value& v, const Args&) { return v.is(Kind::kString) ? v : rt.string(to_text(rt, v)); }
Value escape(Runtime& rt, const Value& v, const Args&) { return rt.string(escaped(rt, v), /*safe=*/true); }
Value safe(Runtime& rt, const Value& v, const Args&) { return rt.string(to_text(rt, v), /*safe=*/true); }

std::string copy_of(Runtime& rt, const Value& string) {
  rt.charge(string.text().size());
  return std::string(string.text());
}

// A string, or as many blanks as a number says.
std::string margin_of(Runtime& rt, const Value& v, const char* what) {
  if (v.is(Kind::kString)) return copy_of(rt, v);
  const Int width = std::max<Int>(int_argument(rt, v, what), 0);
  rt.charge(1, width);
  return std::string(static_cast<size_t>(width), ' ');
}

Value tojson(Runtime& rt, const Value& v, const Args& args) {
  JsonStyle style;
  style.ascii = truthy(rt, args[0]);
  style.sort_keys = truthy(rt, args[3]);
  if (!args[1].none_or_missing()) {
    style.pretty = true;
    style.indent = margin_of(rt, args[1], "indent");
    style.item_separator = ",";
  }
  if (!args[2].none_or_missing()) {
    const std::vector<Value> separators = items_of(rt, args[2]);
    if (separators.size() != 2 || !separators[0].is(Kind::kString) || !separators[1].is(Kind::kString)) {
      rt.fail("tojson: separators must be two strings");
    }
    style.item_separator = copy_of(rt, separators[0]);
    style.key_separator = copy_of(rt, separators[1]);
  }
  return rt.string(to_json(rt, v, style));
}

// --- Text

Value word_count(Runtime& rt, const Value& v, const Args&) {
  const std::string all = to_text(rt, v);
  rt.work(all.size());
  Int words = 0;
  bool inside = false;
  for (size_t at = 0; at < all.size();) {
    const bool word = text::is_word(text::next_code_point(all, at));
    words += word && !inside ? 1 : 0;
    inside = word;
  }
  return Value::integer(words);
}

// Python's quote_from_bytes; in a query '/' is quoted too and a space is '+'.
std::string url_quoted(Runtime& rt, const Value& v, bool query) {
  const std::string all = to_text(rt, v);
  rt.charge(3, static_cast<Int>(all.size()));
  std::string out;
  for (const char c : all) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       std::string_view("_.-~").find(c) != std::string_view::npos || (c == '/' && !query);
    if (plain) {
      out += c;
    } else {
      out += query && c == ' ' ? "+" : fmt::format("%{:02X}", static_cast<unsigned char>(c));
    }
  }
  return out;
}

// A text, or the pairs of a query.
Value url_encode(Runtime& rt, const Value& v, const Args&) {
  if (v.is(Kind::kString) || !is_iterable(v)) return rt.string(url_quoted(rt, v, /*query=*/false));
  std::string out;
  Cursor cursor(rt, v);
  for (Value item; cursor.next(&item);) {
    const std::vector<Value> pair =
        v.is(Kind::kDict) ? std::vector<Value>{item, *rt.find(v.as_dict(), item)} : items_of(rt, item);
    if (pair.size() != 2) rt.fail("urlencode: an item has {} parts; 2 are required", pair.size());
    if (!out.empty()) out += '&';
    out += url_quoted(rt, pair[0], /*query=*/true) + '=' + url_quoted(rt, pair[1], /*query=*/true);
  }
  return rt.string(std::move(out));
}

template <text::Case to>
Value change_text(Runtime& rt, const Value& v, const Args&) {
  return rt.string_of(v, with_case(rt, to_text(rt, v), to));
}

// Each word begins with a capital; words end at white space, '-' and opening brackets.
Value title(Runtime& rt, const Value& v, const Args&) {
  const std::string all = to_text(rt, v);
  const auto ends_word = [](char32_t c) {
    return c == '-' || c == '(' || c == '{' || c == '[' || c == '<' || text::is_python_space(c);
  };
  std::string out;
  for (size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    rt.step();
    const bool separator = ends_word(text::next_code_point(all, end));
    const size_t second = end;
    for (size_t next = end; !separator && next < all.size(); end = next) {
      if (ends_word(text::next_code_point(all, next))) break;
    }
    out += with_case(rt, all.substr(begin, second - begin), text::Case::kUpper);
    out += with_case(rt, all.substr(second, end - second), text::Case::kLower);
  }
  return rt.string(std::move(out));
}

Value indent(Runtime& rt, const Value& v, const Args& args) {
  if (v.undefined()) rt.fail_undefined(v);
  if (!v.is(Kind::kString)) rt.fail("indent needs a string, not '{}'", type_name(v));
  const std::string margin = args[0].missing() ? "    " : margin_of(rt, args[0], "width");
  const bool blank = truthy(rt, args[2]);
  std::string out = truthy(rt, args[1]) ? margin : "";
  const std::string lines = std::string(v.text()) + "\n";
  bool first = true;
  for (const std::string_view line : split_lines(rt, lines, false)) {
    rt.charge(1 + margin.size() + line.size());
    if (!first) out += '\n';
    if (!first && (blank || !line.empty())) out += margin;
    out += line;
    first = false;
  }
  return rt.string_of(v, std::move(out));
}

Value replace_text(Runtime& rt, const Value& v, const Args& args) {
  const Int count = args[2].none_or_missing() ? -1 : int_argument(rt, args[2], "count");
  return rt.string(replace(rt, to_text(rt, v), to_text(rt, args[0]), to_text(rt, args[1]), count));
}

// Cut at a word's end, unless words may be cut; what is only a little longer stays.
Value truncate(Runtime& rt, const Value& v, const Args& args) {
  const Int most = args[0].missing() ? 255 : int_argument(rt, args[0], "length");
  const Value end = args[2].missing() ? rt.string("...") : args[2];
  const Int leeway = args[3].none_or_missing() ? 5 : int_argument(rt, args[3], "leeway");
  const Int kept = most - length(rt, end);
  if (kept < 0) rt.fail("truncate: length is less than that of end");
  if (leeway < 0) rt.fail("truncate: leeway is negative");
  if (length(rt, v) <= most + leeway) return v;
  if (!v.is(Kind::kString)) rt.fail("truncate needs a string, not '{}'", type_name(v));
  Value begin = slice(rt, v, Value(), Value::integer(kept), Value());
  if (!truthy(rt, args[1])) {
    const std::string_view text = begin.text();
    begin = rt.string_of(v, text.substr(0, text.rfind(' ')));
  }
  return arithmetic(rt, Binary::kAdd, begin, end);
}

Value center(Runtime& rt, const Value& v, const Args& args) {
  const Value text = v.is(Kind::kString) ? v : rt.string(to_text(rt, v));
  const Args width{{args[0].missing() ? Value::integer(80) : args[0]}, {}};
  return invoke(rt, *find_method(Kind::kString, "center"), text, width);
}

Value trim(Runtime& rt, const Value& v, const Args& args) {
  const std::string all = to_text(rt, v);
  return rt.string_of(v, strip(rt, all, args[0], true, true));
}

Value format(Runtime& rt, const Value& v, const Args& args) {
  if (!args.positional.empty() && !args.named.empty()) {
    rt.fail("can't handle positional and keyword arguments at the same time");
  }
  Value arguments = rt.list(args.positional, Kind::kTuple);
  if (!args.named.empty()) {
    auto* dict = rt.make<Dict>();
    for (const auto& [name, value] : args.named) rt.set(*dict, rt.string(name), value);
    arguments = Value::object(Kind::kDict, dict);
  }
  return format_percent(rt, v.is(Kind::kString) ? v : rt.string(to_text(rt, v)), arguments);
}

// --- Sequences and mappings

Value count(Runtime& rt, const Value& v, const Args&) { return Value::integer(length(rt, v)); }

Value list(Runtime& rt, const Value& v, const Args&) { return rt.list(items_of(rt, v)); }

std::vector<Value> pairs_of(Runtime& rt, const Value& dict) {
  std::vector<Value> pairs;
  for (const Dict::Entry& entry : dict.as_dict().entries) pairs.push_back(rt.tuple(entry.key, entry.value));
  return pairs;
}

Value items(Runtime& rt, const Value& v, const Args&) {
  if (v.undefined()) return generator(rt, {});
  if (!v.is(Kind::kDict)) rt.fail("Can only get item pairs from a mapping.");
  return generator(rt, pairs_of(rt, v));
}

Value first(Runtime& rt, const Value& v, const Args&) {
  Value item;
  return Cursor(rt, v).next(&item) ? item : rt.undefined("No first item, sequence was empty.");
}

Value last(Runtime& rt, const Value& v, const Args&) {
  if (v.is(Kind::kIterator)) rt.fail("'generator' object is not reversible");
  if (v.is(Kind::kString) && length(rt, v) > 0) return get_item(rt, v, Value::integer(-1));
  const std::vector<Value> all = items_of(rt, v);
  return all.empty() ? rt.undefined("No last item, sequence was empty.") : all.back();
}

Value reverse(Runtime& rt, const Value& v, const Args&) {
  if (v.is(Kind::kString)) return slice(rt, v, Value(), Value(), Value::integer(-1));
  std::vector<Value> all = items_of(rt, v);
  std::reverse(all.begin(), all.end());
  return v.is(Kind::kIterator) ? rt.list(std::move(all)) : generator(rt, std::move(all));
}

Value join(Runtime& rt, const Value& v, const Args& args) {
  const std::string separator = args[0].missing() ? "" : to_text(rt, args[0]);
  std::string out;
  bool is_first = true;
  Cursor cursor(rt, v);
  for (Value item; cursor.next(&item);) {
    rt.charge(separator.size());
    if (!is_first) out += separator;
    is_first = false;
    append_text(rt, out, path_item(rt, item, args[1]));
  }
  return rt.string(std::move(out));
}

// What items compare by: an attribute of theirs, with the case of strings ignored unless told otherwise.
Value key_of(Runtime& rt, const Value& item, const Value& path, const Value& case_sensitive) {
  const Value key = path_item(rt, item, path);
  return key.is(Kind::kString) && !truthy(rt, case_sensitive) ? rt.string(with_case(rt, key.text(), text::Case::kLower))
                                                              : key;
}

Value sort(Runtime& rt, const Value& v, const Args& args) {
  const std::vector<Value> all = items_of(rt, v);
  std::vector<Value> keys, paths;  // "a,b": by a, and where these are the same by b
  if (args[2].is(Kind::kString) && args[2].text().find(',') != std::string_view::npos) {
    for (const std::string_view path : split(rt, args[2].text(), ",", -1)) paths.push_back(rt.string(path));
  }
  keys.reserve(all.size());
  for (const Value& item : all) {
    std::vector<Value> several;
    several.reserve(paths.size());
    for (const Value& path : paths) several.push_back(key_of(rt, item, path, args[1]));
    keys.push_back(paths.empty() ? key_of(rt, item, args[2], args[1]) : rt.list(std::move(several)));
  }
  return rt.list(sorted(rt, all, keys, truthy(rt, args[0])));
}

// Pairs of a key and the items that have it, by keys in order. The key is shown as the first of the items has it.
Value group_by(Runtime& rt, const Value& v, const Args& args) {
  const std::vector<Value> all = items_of(rt, v);
  std::vector<Value> keys, pairs;
  keys.reserve(all.size());
  pairs.reserve(all.size());
  for (const Value& item : all) {
    const Value key = path_item(rt, item, args[0], args[1]);
    keys.push_back(key_of(rt, key, Value(), args[2]));
    if (all.size() > 1) compare(rt, Compare::kLess, keys.back(), keys.back());  // fails for what has no order
    pairs.push_back(rt.list({keys.back(), key, item}));
  }
  std::vector<Value> out, group;
  const std::vector<Value> order = sorted(rt, pairs, keys, false);
  for (size_t i = 0; i < order.size(); ++i) {
    group.push_back(order[i].items()[2]);
    if (i + 1 < order.size() && equals(rt, order[i].items()[0], order[i + 1].items()[0])) continue;
    const Value first = order[i + 1 - group.size()].items()[1];
    out.push_back(rt.tuple(first, rt.list(std::exchange(group, {}))));
    out.back().as<List>().group = true;
  }
  return rt.list(std::move(out));
}

Value sum(Runtime& rt, const Value& v, const Args& args) {
  Value total = args[1].missing() ? Value::integer(0) : args[1];
  if (total.is(Kind::kString)) rt.fail("sum() can't sum strings [use ''.join(seq) instead]");
  Cursor cursor(rt, v);
  for (Value item; cursor.next(&item);) total = arithmetic(rt, Binary::kAdd, total, path_item(rt, item, args[0]));
  return total;
}

// Lists of so many items; the last is filled up where there is something to fill it with.
Value batch(Runtime& rt, const Value& v, const Args& args) {
  const Int size = int_argument(rt, args[0], "linecount");
  std::vector<Value> out, line;
  Cursor cursor(rt, v);
  for (Value item; cursor.next(&item);) {
    if (static_cast<Int>(line.size()) == size) out.push_back(rt.list(std::exchange(line, {})));
    line.push_back(item);
  }
  if (line.empty()) return generator(rt, std::move(out));
  if (!args[1].none_or_missing() && static_cast<Int>(line.size()) < size) {
    rt.charge(sizeof(Value), size);
    line.resize(static_cast<size_t>(size), args[1]);
  }
  out.push_back(rt.list(std::move(line)));
  return generator(rt, std::move(out));
}

// So many lists, the first ones an item longer where it does not come out even, else the last ones filled up.
Value slices(Runtime& rt, const Value& v, const Args& args) {
  const std::vector<Value> all = items_of(rt, v);
  const Int count = int_argument(rt, args[0], "slices");
  if (count == 0) rt.fail("integer modulo by zero");
  rt.charge(sizeof(Value) + sizeof(List), count);
  std::vector<Value> out;
  size_t begin = 0;
  for (Int i = 0; i < count; ++i) {
    const Int size = static_cast<Int>(all.size()), longer = size % count;
    const size_t end = begin + static_cast<size_t>(size / count) + (i < longer ? 1 : 0);
    std::vector<Value> part(all.begin() + static_cast<std::ptrdiff_t>(begin),
                            all.begin() + static_cast<std::ptrdiff_t>(end));
    if (!args[1].none_or_missing() && i >= longer) part.push_back(args[1]);
    out.push_back(rt.list(std::move(part)));
    begin = end;
  }
  return generator(rt, std::move(out));
}

template <Compare better>
Value extreme(Runtime& rt, const Value& v, const Args& args) {
  Cursor cursor(rt, v);
  Value best, best_key;
  for (Value item; cursor.next(&item);) {
    const Value key = key_of(rt, item, args[1], args[0]);
    if (!best.missing() && !compare(rt, better, key, best_key)) continue;
    best = item;
    best_key = key;
  }
  return best.missing() ? rt.undefined("No aggregated item, sequence was empty.") : best;
}

// The first of those items that have one key.
Value unique(Runtime& rt, const Value& v, const Args& args) {
  Dict seen;
  std::vector<Value> out;
  Cursor cursor(rt, v);
  for (Value item; cursor.next(&item);) {
    const Value key = key_of(rt, item, args[1], args[0]);
    if (!Dict::is_key(key))
      rt.fail("unique of a value of type '{}' is not supported in chat templates", type_name(key));
    if (rt.find(seen, key) != nullptr) continue;
    rt.set(seen, key, key);
    out.push_back(item);
  }
  return generator(rt, std::move(out));
}

Value dict_sort(Runtime& rt, const Value& v, const Args& args) {
  const std::string by = args[1].missing() ? "key" : to_text(rt, args[1]);
  if (by != "key" && by != "value") rt.fail("You can only sort by either \"key\" or \"value\"");
  if (v.undefined()) rt.fail_undefined(v);
  if (!v.is(Kind::kDict)) rt.fail("'{}' object has no attribute 'items'", type_name(v));
  std::vector<Value> keys;
  for (const Dict::Entry& entry : v.as_dict().entries) {
    keys.push_back(key_of(rt, by == "key" ? entry.key : entry.value, Value(), args[0]));
  }
  return rt.list(sorted(rt, pairs_of(rt, v), keys, truthy(rt, args[2])));
}

std::string_view name_argument(Runtime& rt, const Value& v, const char* of) {
  if (!v.is(Kind::kString)) rt.fail("the {}'s name must be a string", of);
  return v.text().substr(0, 100);
}

// An attribute, and never an item.
Value attr(Runtime& rt, const Value& v, const Args& args) {
  return own_attribute(rt, v, name_argument(rt, args[0], "attribute"));
}

// map('filter', arguments...) or map(attribute='a.b', default=...).
Value map(Runtime& rt, const Value& v, const Args& args) {
  std::vector<Value> out;
  if (!truthy(rt, v)) return generator(rt, {});
  if (!args.positional.empty()) {
    const std::string_view name = name_argument(rt, args[0], "filter");
    const Callable& filter = find_filter(rt, name);
    const Args rest{{args.positional.begin() + 1, args.positional.end()}, args.named};
    Cursor cursor(rt, v);
    for (Value item; cursor.next(&item);) out.push_back(invoke(rt, filter, item, rest));
    return generator(rt, std::move(out));
  }
  Value path, otherwise;
  for (const auto& [name, value] : args.named) {
    if (name != "attribute" && name != "default") rt.fail("map() got an unexpected keyword argument '{}'", name);
    (name == "attribute" ? path : otherwise) = value;
  }
  if (path.none_or_missing()) rt.fail("map requires a filter argument");
  Cursor cursor(rt, v);
  for (Value item; cursor.next(&item);) out.push_back(path_item(rt, item, path, otherwise));
  return generator(rt, std::move(out));
}

// select('test', argument), selectattr('attribute', 'test', argument) and their negations.
template <bool by_attribute, bool wanted>
Value select(Runtime& rt, const Value& v, const Args& args) {
  constexpr size_t kBefore = by_attribute ? 1 : 0;  // arguments before the test's name
  std::vector<Value> out;
  if (!truthy(rt, v)) return generator(rt, {});
  const Callable* test = nullptr;
  Args rest;
  if (!args[kBefore].missing()) {
    const std::string_view name = name_argument(rt, args[kBefore], "test");
    test = &find_test(rt, name);
    if (!args[kBefore + 1].missing()) rest.positional.push_back(args[kBefore + 1]);
  }
  Cursor cursor(rt, v);
  for (Value item; cursor.next(&item);) {
    const Value tested = by_attribute ? path_item(rt, item, args[0]) : item;
    if (truthy(rt, test != nullptr ? invoke(rt, *test, tested, rest) : tested) == wanted) out.push_back(item);
  }
  return generator(rt, std::move(out));
}

constexpr Callable kFilters[] = {{"abs", absolute},
                                 {"attr", attr, 1, 1, {"name"}},
                                 {"batch", batch, 1, 2, {"linecount", "fill_with"}},
                                 {"capitalize", change_text<text::Case::kCapitalize>},
                                 {"center", center, 0, 1, {"width"}},
                                 {"count", count},
                                 {"d", default_value, 0, 2, {"default_value", "boolean"}},
                                 {"default", default_value, 0, 2, {"default_value", "boolean"}},
                                 {"dictsort", dict_sort, 0, 3, {"case_sensitive", "by", "reverse"}},
                                 {"e", escape},
                                 {"escape", escape},
                                 {"first", first},
                                 {"float", to_float, 0, 1, {"default"}},
                                 {"format", format, 0, Callable::kAny},
                                 {"groupby", group_by, 1, 3, {"attribute", "default", "case_sensitive"}},
                                 {"indent", indent, 0, 3, {"width", "first", "blank"}},
                                 {"int", to_int, 0, 1, {"default"}},
                                 {"items", items},
                                 {"join", join, 0, 2, {"d", "attribute"}},
                                 {"last", last},
                                 {"length", count},
                                 {"list", list},
                                 {"lower", change_text<text::Case::kLower>},
                                 {"map", map, 0, Callable::kAny},
                                 {"max", extreme<Compare::kGreater>, 0, 2, {"case_sensitive", "attribute"}},
                                 {"min", extreme<Compare::kLess>, 0, 2, {"case_sensitive", "attribute"}},
                                 {"reject", select<false, false>, 0, 2},
                                 {"rejectattr", select<true, false>, 1, 3},
                                 {"replace", replace_text, 2, 3, {"old", "new", "count"}},
                                 {"reverse", reverse},
                                 {"round", round, 0, 2, {"precision", "method"}},
                                 {"safe", safe},
                                 {"select", select<false, true>, 0, 2},
                                 {"selectattr", select<true, true>, 1, 3},
                                 {"slice", slices, 1, 2, {"slices", "fill_with"}},
                                 {"sort", sort, 0, 3, {"reverse", "case_sensitive", "attribute"}},
                                 {"string", string},
                                 {"sum", sum, 0, 2, {"attribute", "start"}},
                                 {"title", title},
                                 {"tojson", tojson, 0, 4, {"ensure_ascii", "indent", "separators", "sort_keys"}},
                                 {"trim", trim, 0, 1, {"chars"}},
                                 {"truncate", truncate, 0, 4, {"length", "killwords", "end", "leeway"}},
                                 {"unique", unique, 0, 2, {"case_sensitive", "attribute"}},
                                 {"upper", change_text<text::Case::kUpper>},
                                 {"urlencode", url_encode},
                                 {"wordcount", word_count}};

// --- Tests

template <Kind kind>
Value is_kind(Runtime&, const Value& v, const Args&) {
  return Value::boolean(v.is(kind));
}
template <bool wanted>
Value is_bool(Runtime&, const Value& v, const Args&) {
  return Value::boolean(v.is(Kind::kBool) && (v.as_int() != 0) == wanted);
}
template <Compare op>
Value compares(Runtime& rt, const Value& v, const Args& args) {
  return Value::boolean(compare(rt, op, v, args[0]));
}
Value is_defined(Runtime&, const Value& v, const Args&) { return Value::boolean(!v.undefined()); }
Value is_number(Runtime&, const Value& v, const Args&) { return Value::boolean(v.is_number()); }
Value iterable(Runtime&, const Value& v, const Args&) { return Value::boolean(is_iterable(v)); }
Value sequence(Runtime& rt, const Value& v, const Args&) {
  if (v.is(Kind::kView)) rt.fail("whether a view or range is a sequence is not supported in chat templates");
  return Value::boolean(v.is(Kind::kString) || v.is_sequence() || v.is(Kind::kDict) || v.undefined());
}
Value same_as(Runtime&, const Value& v, const Args& args) { return Value::boolean(identical(v, args[0])); }
template <int remainder>
Value parity(Runtime& rt, const Value& v, const Args&) {
  return Value::boolean(equals(rt, arithmetic(rt, Binary::kModulo, v, Value::integer(2)), Value::integer(remainder)));
}

Value divisible(Runtime& rt, const Value& v, const Args& args) {
  return Value::boolean(equals(rt, arithmetic(rt, Binary::kModulo, v, args[0]), Value::integer(0)));
}
template <text::Case of>
Value in_case(Runtime& rt, const Value& v, const Args&) {
  return Value::boolean(has_case(rt, to_text(rt, v), of));
}
Value is_callable(Runtime&, const Value& v, const Args&) {
  // An undefined value can be called too: that fails.
  return Value::boolean(v.is(Kind::kFunction) || v.is(Kind::kMacro) || v.is(Kind::kLoop) || v.undefined());
}
Value is_escaped(Runtime&, const Value& v, const Args&) { return Value::boolean(v.is_safe()); }

constexpr Callable kTests[] = {{"!=", compares<Compare::kNotEqual>, 1, 1},
                               {"<", compares<Compare::kLess>, 1, 1},
                               {"<=", compares<Compare::kLessEqual>, 1, 1},
                               {"==", compares<Compare::kEqual>, 1, 1},
                               {">", compares<Compare::kGreater>, 1, 1},
                               {">=", compares<Compare::kGreaterEqual>, 1, 1},
                               {"boolean", is_kind<Kind::kBool>},
                               {"callable", is_callable},
                               {"defined", is_defined},
                               {"divisibleby", divisible, 1, 1},
                               {"eq", compares<Compare::kEqual>, 1, 1},
                               {"equalto", compares<Compare::kEqual>, 1, 1},
                               {"escaped", is_escaped},
                               {"even", parity<0>},
                               {"false", is_bool<false>},
                               {"float", is_kind<Kind::kFloat>},
                               {"ge", compares<Compare::kGreaterEqual>, 1, 1},
                               {"greaterthan", compares<Compare::kGreater>, 1, 1},
                               {"gt", compares<Compare::kGreater>, 1, 1},
                               {"in", compares<Compare::kIn>, 1, 1},
                               {"integer", is_kind<Kind::kInt>},
                               {"iterable", iterable},
                               {"le", compares<Compare::kLessEqual>, 1, 1},
                               {"lessthan", compares<Compare::kLess>, 1, 1},
                               {"lower", in_case<text::Case::kLower>},
                               {"lt", compares<Compare::kLess>, 1, 1},
                               {"mapping", is_kind<Kind::kDict>},
                               {"ne", compares<Compare::kNotEqual>, 1, 1},
                               {"none", is_kind<Kind::kNone>},
                               {"number", is_number},
                               {"odd", parity<1>},
                               {"sameas", same_as, 1, 1},
                               {"sequence", sequence},
                               {"string", is_kind<Kind::kString>},
                               {"true", is_bool<true>},
                               {"undefined", is_kind<Kind::kUndefined>},
                               {"upper", in_case<text::Case::kUpper>}};

}  // namespace

const Callable& find_filter(Runtime& rt, std::string_view name) {
  if (const Callable* filter = find_name(kFilters, name)) return *filter;
  rt.fail("the filter {} is not supported in chat templates", name);
}
const Callable& find_test(Runtime& rt, std::string_view name) {
  if (const Callable* test = find_name(kTests, name)) return *test;
  rt.fail("the test {} is not supported in chat templates", name);
}

}  // namespace nfp::jinja
