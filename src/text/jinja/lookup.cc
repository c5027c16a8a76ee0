// Attributes, items and slices, with the rules of jinja2's sandboxed environment: `a.b` looks for an attribute first
// and an item second, `a["b"]` the other way round, and what is not there is Undefined. And iteration.
#include <algorithm>

#include "text/jinja/filters.h"
#include "text/jinja/interpreter.h"
#include "text/jinja/operators.h"
#include "text/jinja/text.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace nfp::jinja {
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
  if (const Callable* method = find_method(object.kind(), name)) {
    auto* bound = rt.make<Function>();
    bound->callable = method;
    bound->self = object;
    return Value::object(Kind::kFunction, bound);
  }
  if (changes_its_object(object.kind(), name)) {
    return rt.undefined(fmt::format("access to attribute '{}' of '{}' object is unsafe.", name, type_name(object)));
  }
  return {};
}

bool as_index(const Value& key, Int size, Int* index) {
  if (!key.is_integral()) return false;
  *index = key.as_int() < 0 ? key.as_int() + size : key.as_int();
  return *index >= 0 && *index < size;
}

Value code_point(Runtime& rt, const Str& s, size_t index) {
  if (s.ascii()) return rt.string(std::string_view(s.text).substr(index, 1));
  rt.work(s.text.size());
  const size_t begin = text::byte_of(s.text, index);
  return rt.string(std::string_view(s.text).substr(begin, text::utf8_length(s.text[begin])));
}

// object[key] of Python; kMissing where it raises a TypeError or LookupError.
Value subscript(Runtime& rt, const Value& object, const Value& key) {
  Int index = 0;
  switch (object.kind()) {
    case Kind::kUndefined:
      rt.fail_undefined(object);
    case Kind::kDict: {
      const Value* found = is_key(key) ? rt.find(object.as_dict(), key) : nullptr;
      return found != nullptr ? *found : Value();
    }
    case Kind::kList:
    case Kind::kTuple: {
      const auto& items = object.items();
      return as_index(key, static_cast<Int>(items.size()), &index) ? items[static_cast<size_t>(index)] : Value();
    }
    case Kind::kString: {
      const Str& s = object.as_str();
      return as_index(key, static_cast<Int>(s.length), &index) ? code_point(rt, s, static_cast<size_t>(index))
                                                               : Value();
    }
    case Kind::kRange: {
      const auto& range = object.as<Range>();
      return as_index(key, range.size(), &index) ? Value::integer(range.start + index * range.step) : Value();
    }
    default:
      return {};
  }
}

Value no_attribute(Runtime& rt, const Value& object, const Value& key) {
  if (!key.is(Kind::kString)) {
    return rt.undefined(fmt::format("{} object has no element {}", type_name(object), repr(rt, key)));
  }
  const std::string_view name = key.text().substr(0, text::byte_of(key.text(), 50));
  return rt.undefined(object.is(Kind::kNone)
                          ? fmt::format("None has no attribute '{}'", name)
                          : fmt::format("'{} object' has no attribute '{}'", type_name(object), name));
}

struct Indices {
  Int start, stop, step, count;
};

// Python's slice.indices(size).
Indices slice_indices(Runtime& rt, Int size, const Value& start, const Value& stop, const Value& step) {
  Indices out{};
  out.step = step.none_or_missing() ? 1 : int_argument(rt, step, "slice indices");
  if (out.step == 0) rt.fail("slice step cannot be zero");
  const Int lowest = out.step > 0 ? 0 : -1;
  const Int highest = out.step > 0 ? size : size - 1;
  const auto clip = [&](const Value& v, Int if_absent) {
    if (v.none_or_missing()) return if_absent;
    const Int i = int_argument(rt, v, "slice indices");
    return std::clamp(i < 0 ? i + size : i, lowest, std::max(lowest, highest));
  };
  out.start = clip(start, out.step > 0 ? lowest : highest);
  out.stop = clip(stop, out.step > 0 ? highest : lowest);
  Range range;
  range.start = out.start;
  range.stop = out.stop;
  range.step = out.step;
  out.count = range.size();
  return out;
}

Value slice_string(Runtime& rt, const Str& s, const Indices& at) {
  rt.work(s.text.size());
  std::string out;
  if (at.step == 1) {
    const size_t begin = text::byte_of(s.text, static_cast<size_t>(at.start));
    const std::string_view tail = std::string_view(s.text).substr(begin);
    return rt.string(tail.substr(0, text::byte_of(tail, static_cast<size_t>(at.count))));
  }
  std::vector<char32_t> letters;
  rt.charge(s.length * sizeof(letters[0]));
  letters.reserve(s.length);
  for (size_t pos = 0; pos < s.text.size();) letters.push_back(text::next_code_point(s.text, pos));
  for (Int i = 0; i < at.count; ++i) text::append_utf8(out, letters[static_cast<size_t>(at.start + i * at.step)]);
  return rt.string(std::move(out));
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
  if (object.is(Kind::kString)) {
    return slice_string(rt, object.as_str(),
                        slice_indices(rt, static_cast<Int>(object.as_str().length), start, stop, step));
  }
  if (!object.is_sequence()) rt.fail("a value of type '{}' cannot be sliced", type_name(object));
  const auto& items = object.items();
  const Indices at = slice_indices(rt, static_cast<Int>(items.size()), start, stop, step);
  rt.charge(sizeof(Value), at.count);
  std::vector<Value> part;
  part.reserve(static_cast<size_t>(at.count));
  for (Int i = 0; i < at.count; ++i) part.push_back(items[static_cast<size_t>(at.start + i * at.step)]);
  return rt.list(std::move(part), object.kind());
}

Value path_item(Runtime& rt, const Value& object, const Value& path, const Value& otherwise) {
  if (path.none_or_missing()) return object;
  Value item = object;
  const auto go = [&](const Value& key) {
    item = get_item(rt, item, key);
    if (item.undefined() && !otherwise.none_or_missing()) item = otherwise;
  };
  if (!path.is(Kind::kString)) go(path);
  const std::string_view dotted = path.is(Kind::kString) ? path.text() : std::string_view();
  for (size_t begin = 0; begin <= dotted.size() && path.is(Kind::kString);) {
    const size_t end = std::min(dotted.find('.', begin), dotted.size());
    const std::string_view part = dotted.substr(begin, end - begin);
    const std::optional<Int> index = part.find_first_not_of("0123456789") == part.npos ? parse_int(part) : std::nullopt;
    go(index ? Value::integer(*index) : rt.string(part));
    begin = end + 1;
  }
  return item;
}

std::optional<Int> try_length(Runtime& rt, const Value& v) {
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
    case Kind::kRange:
      return v.as<Range>().size();
    case Kind::kLoop:
      return v.as<Loop>().length(rt);
    default:
      return std::nullopt;
  }
}

Int length(Runtime& rt, const Value& v) {
  const std::optional<Int> n = try_length(rt, v);
  if (!n) rt.fail("object of type '{}' has no len()", type_name(v));
  return *n;
}

bool is_iterable(const Value& v) {
  return v.has_items() || v.is(Kind::kString) || v.is(Kind::kDict) || v.is(Kind::kRange) || v.undefined();
}

Cursor::Cursor(Runtime& rt, const Value& v) : rt_(rt), v_(v) {
  if (!is_iterable(v)) rt.fail("'{}' object is not iterable", type_name(v));
}

bool Cursor::next(Value* item) {
  rt_.step();
  switch (v_.kind()) {
    case Kind::kIterator: {
      auto& source = v_.as<Iterator>();
      if (source.position >= source.items.size()) return false;
      *item = source.items[source.position++];
      return true;
    }
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kView:
      if (at_ >= v_.items().size()) return false;
      *item = v_.items()[at_++];
      return true;
    case Kind::kDict:
      if (at_ >= v_.as_dict().entries.size()) return false;
      *item = v_.as_dict().entries[at_++].key;
      return true;
    case Kind::kRange: {
      const auto& range = v_.as<Range>();
      if (static_cast<Int>(at_) >= range.size()) return false;
      *item = Value::integer(range.start + static_cast<Int>(at_++) * range.step);
      return true;
    }
    case Kind::kString: {
      const std::string_view s = v_.text();
      if (at_ >= s.size()) return false;
      const size_t bytes = text::utf8_length(s[at_]);
      *item = rt_.string(s.substr(at_, bytes));
      at_ += bytes;
      return true;
    }
    default:  // Undefined
      return false;
  }
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
