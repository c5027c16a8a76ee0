// Values: types, dicts, attributes, items and slices, iteration. The operators are in operators.cc.
#include "text/jinja/value.h"

#include <fmt/format.h>

#include <algorithm>

#include "text/jinja/filters.h"
#include "text/jinja/interpreter.h"
#include "text/jinja/text.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace nfp::jinja {
namespace {

// A string stands for itself, an integer for a text that no string has (0xFF is not UTF-8).
std::string key_text(const Value& key) {
  return key.is(Kind::kString) ? std::string(key.text()) : fmt::format("\xFF{}", key.as_int());
}

}  // namespace

Str::Str(std::string t, bool is_safe) : text(std::move(t)), length(text::count_code_points(text)), safe(is_safe) {}

const char* type_name(const Value& v) {
  constexpr const char* kNames[] = {"Undefined", "Undefined",   "NoneType", "bool",    "int",       "float",
                                    "str",       "list",        "tuple",    "view",    "generator", "dict",
                                    "Namespace", "LoopContext", "Macro",    "function"};
  return kNames[static_cast<size_t>(v.kind())];
}

const Value* Dict::find(std::string_view key) const {
  const auto it = index_.find(key);
  return it == index_.end() ? nullptr : &entries[it->second].value;
}

const Value* Dict::find(const Value& key) const {
  return key.is(Kind::kString) ? find(key.text()) : is_key(key) ? find(key_text(key)) : nullptr;
}

void Dict::set(const Value& key, const Value& value) {
  const auto [it, added] = index_.try_emplace(key_text(key), entries.size());
  if (added) {
    entries.push_back({key, value});
  } else {
    entries[it->second].value = value;
  }
}

namespace {

// kMissing when there is no such attribute.
Value attribute(Runtime& rt, const Value& object, std::string_view name) {
  if (object.is(Kind::kNamespace)) {
    const Value* value = rt.find(object.as<Namespace>().attributes, name);
    return value != nullptr ? *value : Value();
  }
  if (object.is(Kind::kLoop)) {
    const Value value = object.as<Loop>().attribute(rt, name);
    if (!value.missing()) return value;
  }
  if (object.is(Kind::kTuple) && object.as<List>().group) {
    if (name == "grouper") return object.items()[0];
    if (name == "list") return object.items()[1];
  }
  if (const Callable* method = find_method(object.kind(), name)) return function(rt, method, object);
  const std::string refused = why_no_method(object, name);
  return refused.empty() ? Value() : rt.undefined(refused);
}

Value code_point(Runtime& rt, const Value& string, size_t index) {
  const std::string_view text = string.text();
  if (string.as_str().ascii()) return rt.string_of(string, text.substr(index, 1));
  rt.work(text.size());
  const size_t begin = text::byte_of(text, index);
  return rt.string_of(string, text.substr(begin, text::utf8_length(text[begin])));
}

// object[key] of Python; kMissing where it raises a TypeError or LookupError.
Value subscript(Runtime& rt, const Value& object, const Value& key) {
  if (object.undefined()) rt.fail_undefined(object);
  if (object.is(Kind::kDict)) {
    const Value* found = key.is(Kind::kList) || key.is(Kind::kDict) ? nullptr : rt.find(object.as_dict(), key);
    return found != nullptr ? *found : Value();
  }
  if (object.is(Kind::kView) && key.is_integral()) {
    rt.fail("an item of a view or range is not supported in chat templates; make it a list first");
  }
  if (!key.is_integral() || !(object.is_sequence() || object.is(Kind::kString))) return {};
  const Int size = length(rt, object);
  const Int index = key.as_int() < 0 ? key.as_int() + size : key.as_int();
  if (index < 0 || index >= size) return {};
  return object.is(Kind::kString) ? code_point(rt, object, static_cast<size_t>(index))
                                  : object.items()[static_cast<size_t>(index)];
}

Value no_attribute(Runtime& rt, const Value& object, const Value& key) {
  if (!key.is(Kind::kString)) {
    return rt.undefined(fmt::format("{} object has no element {}", type_name(object), repr(rt, key)));
  }
  const std::string_view name = short_name(key.text());
  return rt.undefined(object.is(Kind::kNone)
                          ? fmt::format("None has no attribute '{}'", name)
                          : fmt::format("'{} object' has no attribute '{}'", type_name(object), name));
}

// The places that [start:stop:step] takes of `size` (Python's slice.indices).
std::vector<size_t> slice_places(Runtime& rt, Int size, const Value& start, const Value& stop,
                                 const Value& step_value) {
  const Int step = step_value.none_or_missing() ? 1 : int_argument(rt, step_value, "slice indices");
  if (step == 0) rt.fail("slice step cannot be zero");
  const Int lowest = step > 0 ? 0 : -1;
  const Int highest = step > 0 ? size : size - 1;
  const auto clip = [&](const Value& v, Int if_absent) {
    if (v.none_or_missing()) return if_absent;
    const Int i = int_argument(rt, v, "slice indices");
    return std::clamp(i < 0 ? i + size : i, lowest, std::max(lowest, highest));
  };
  const Int first = clip(start, step > 0 ? lowest : highest);
  const Int end = clip(stop, step > 0 ? highest : lowest);
  std::vector<size_t> places;
  for (Int i = first; step > 0 ? i < end : i > end; i += step) {
    rt.charge(sizeof(size_t));
    places.push_back(static_cast<size_t>(i));
  }
  return places;
}

}  // namespace

Value get_item(Runtime& rt, const Value& object, const Value& key) {
  const Value item = subscript(rt, object, key);
  if (!item.missing()) return item;
  if (key.is(Kind::kString)) {
    const Value found = attribute(rt, object, key.text());
    if (!found.missing()) return found;
  }
  return no_attribute(rt, object, key);
}

Value own_attribute(Runtime& rt, const Value& object, std::string_view name) {
  if (object.undefined()) rt.fail_undefined(object);
  const Value found = attribute(rt, object, name);
  return found.missing() ? no_attribute(rt, object, rt.string(name)) : found;
}

Value get_attribute(Runtime& rt, const Value& object, std::string_view name) {
  if (object.undefined()) rt.fail_undefined(object);
  const Value found = attribute(rt, object, name);
  if (!found.missing()) return found;
  if (object.is(Kind::kDict)) {
    if (const Value* item = rt.find(object.as_dict(), name)) return *item;
  }
  return no_attribute(rt, object, rt.string(name));
}

Value slice(Runtime& rt, const Value& object, const Value& start, const Value& stop, const Value& step) {
  if (object.undefined()) rt.fail_undefined(object);
  if (!object.is(Kind::kString) && !object.is_sequence()) {
    rt.fail("a value of type '{}' cannot be sliced", type_name(object));
  }
  const std::vector<size_t> places = slice_places(rt, length(rt, object), start, stop, step);
  if (!object.is(Kind::kString)) {
    std::vector<Value> part;
    part.reserve(places.size());
    for (const size_t i : places) part.push_back(object.items()[i]);
    return rt.list(std::move(part), object.kind());
  }
  std::vector<size_t> begins;  // the byte of each code point, and the end
  const std::string_view all = object.text();
  rt.charge((object.as_str().length + 1) * sizeof(begins[0]));
  for (size_t pos = 0; pos < all.size(); pos += text::utf8_length(all[pos])) begins.push_back(pos);
  begins.push_back(all.size());
  std::string out;
  for (const size_t i : places) out += all.substr(begins[i], begins[i + 1] - begins[i]);
  return rt.string_of(object, std::move(out));
}

Value path_item(Runtime& rt, const Value& object, const Value& path, const Value& otherwise) {
  if (path.none_or_missing()) return object;
  Value item = object;
  const auto go = [&](const Value& key) {
    item = get_item(rt, item, key);
    if (item.undefined() && !otherwise.none_or_missing()) item = otherwise;
  };
  if (!path.is(Kind::kString)) {
    go(path);
    return item;
  }
  for (const std::string_view part : split(rt, path.text(), ".", -1)) {
    const std::optional<Int> index = part.find_first_not_of("0123456789") == part.npos ? parse_int(part) : std::nullopt;
    go(index ? Value::integer(*index) : rt.string(part));
  }
  return item;
}

Int length(Runtime& rt, const Value& v) {
  switch (v.kind()) {
    case Kind::kUndefined:
      return 0;
    case Kind::kString:
      return static_cast<Int>(v.as_str().length);
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kView:
      return static_cast<Int>(v.items().size());
    case Kind::kDict:
      return static_cast<Int>(v.as_dict().entries.size());
    default:
      rt.fail("object of type '{}' has no len()", type_name(v));
  }
}

bool is_iterable(const Value& v) { return v.has_items() || v.is(Kind::kString) || v.is(Kind::kDict) || v.undefined(); }

Cursor::Cursor(Runtime& rt, const Value& v) : rt_(rt), v_(v) {
  if (!is_iterable(v)) rt.fail("'{}' object is not iterable", type_name(v));
}

bool Cursor::next(Value* item) {
  rt_.step();
  if (v_.is(Kind::kString)) {
    const std::string_view rest = v_.text().substr(at_);
    if (rest.empty()) return false;
    const size_t bytes = text::utf8_length(rest[0]);
    *item = rt_.string(rest.substr(0, bytes));
    at_ += bytes;
    return true;
  }
  if (v_.is(Kind::kDict)) {
    if (at_ >= v_.as_dict().entries.size()) return false;
    *item = v_.as_dict().entries[at_++].key;
    return true;
  }
  if (v_.undefined()) return false;
  size_t& at = v_.is(Kind::kIterator) ? v_.as<Iterator>().position : at_;
  if (at >= v_.items().size()) return false;
  *item = v_.items()[at++];
  return true;
}

std::vector<Value> items_of(Runtime& rt, const Value& v) {
  std::vector<Value> items;
  Cursor cursor(rt, v);
  for (Value item; cursor.next(&item);) {
    rt.charge(sizeof(Value));
    items.push_back(item);
  }
  return items;
}

}  // namespace nfp::jinja
