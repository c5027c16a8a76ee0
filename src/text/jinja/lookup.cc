// Attributes, items and slices, with the rules of jinja2's sandboxed environment: `a.b` looks for an attribute first
// and an item second, `a["b"]` the other way round, and what is not there is Undefined.
#include <algorithm>

#include "text/jinja/callables.h"
#include "text/jinja/loop.h"
#include "text/jinja/operators.h"
#include "text/jinja/unicode_text.h"

namespace nfp::jinja {
namespace {

bool all_digits(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// Values of plain (not callable) attributes; kMissing when there is no such attribute.
Value plain_attribute(Runtime& rt, const Value& object, std::string_view name) {
  switch (object.kind()) {
    case Kind::kNamespace: {
      const Value* value = object.as<Namespace>().attributes.find(name);
      return value != nullptr ? *value : Value();
    }
    case Kind::kLoop:
      return object.as<Loop>().attribute(rt, name);
    case Kind::kCycler: {
      const Cycler& cycler = object.as<Cycler>();
      if (name == "current") return cycler.items[cycler.position];
      if (name == "pos") return Value::integer(static_cast<Int>(cycler.position));
      return {};
    }
    case Kind::kJoiner: {
      const Joiner& joiner = object.as<Joiner>();
      if (name == "sep") return joiner.separator;
      if (name == "used") return Value::boolean(joiner.used);
      return {};
    }
    case Kind::kRange: {
      const Range& range = object.as<Range>();
      if (name == "start") return Value::integer(range.start);
      if (name == "stop") return Value::integer(range.stop);
      if (name == "step") return Value::integer(range.step);
      return {};
    }
    case Kind::kBool:
    case Kind::kInt:
      if (name == "real" || name == "numerator") return Value::integer(object.as_int());
      if (name == "imag") return Value::integer(0);
      if (name == "denominator") return Value::integer(1);
      return {};
    case Kind::kFloat:
      if (name == "real") return object;
      if (name == "imag") return Value::real(0);
      return {};
    case Kind::kMacro:
      if (name == "name") return rt.string(std::string(object.as<Macro>().name));
      return {};
    case Kind::kTuple: {
      const List& list = object.as_list();
      if (list.is_group && name == "grouper") return list.items[0];
      if (list.is_group && name == "list") return list.items[1];
      return {};
    }
    default:
      return {};
  }
}

Value attribute(Runtime& rt, const Value& object, std::string_view name) {
  const Value plain = plain_attribute(rt, object, name);
  if (!plain.missing()) return plain;
  if (const std::optional<Method> method = find_method(object.kind(), name)) {
    if (*method == Method::kForbidden) {
      return rt.undefined(fmt::format("access to attribute '{}' of '{}' object is unsafe.", name, type_name(object)));
    }
    return Value::method(object, *method);
  }
  return {};
}

bool as_index(const Value& key, Int size, Int* index) {
  if (!key.is_integral()) return false;
  *index = key.as_int() < 0 ? key.as_int() + size : key.as_int();
  return *index >= 0 && *index < size;
}

Value code_point(Runtime& rt, const Str& s, size_t index) {
  if (s.ascii()) return rt.string(std::string(1, s.text[index]), s.safe);
  rt.work(s.text.size());
  const size_t begin = unicode::byte_of(s.text, index);
  size_t end = begin;
  unicode::next(s.text, end);
  return rt.string(s.text.substr(begin, end - begin), s.safe);
}

// object[key] of Python; kMissing where it raises a TypeError or LookupError.
Value subscript(Runtime& rt, const Value& object, const Value& key) {
  Int index = 0;
  switch (object.kind()) {
    case Kind::kUndefined:
      fail_undefined(rt, object);
    case Kind::kDict: {
      const Value* found = is_hashable(key) ? object.as_dict().find(key) : nullptr;
      return found != nullptr ? *found : Value();
    }
    case Kind::kList:
    case Kind::kTuple: {
      const auto& items = object.as_list().items;
      return as_index(key, static_cast<Int>(items.size()), &index) ? items[static_cast<size_t>(index)] : Value();
    }
    case Kind::kString: {
      const Str& s = object.as_str();
      return as_index(key, static_cast<Int>(s.length), &index) ? code_point(rt, s, static_cast<size_t>(index))
                                                               : Value();
    }
    case Kind::kRange: {
      const Range& range = object.as<Range>();
      return as_index(key, range.size(), &index) ? Value::integer(range.at(index)) : Value();
    }
    default:
      return {};
  }
}

Value no_attribute(Runtime& rt, const Value& object, const Value& key) {
  if (key.is(Kind::kString)) {
    return rt.undefined(object.is(Kind::kNone) ? fmt::format("None has no attribute '{}'", key.text().substr(0, 100))
                                               : fmt::format("'{} object' has no attribute '{}'", type_name(object),
                                                             key.text().substr(0, 100)));
  }
  return rt.undefined(fmt::format("{} object has no element {}", type_name(object), repr(rt, key)));
}

struct Indices {
  Int start, stop, step, count;
};

// Python's slice.indices(size).
Indices slice_indices(Runtime& rt, Int size, const Value& start, const Value& stop, const Value& step) {
  constexpr const char* kWhat = "slice indices";
  Indices out{};
  out.step = step.none_or_missing() ? 1 : int_argument(rt, step, kWhat);
  if (out.step == 0) rt.fail("slice step cannot be zero");
  const Int lowest = out.step > 0 ? 0 : -1;
  const Int highest = out.step > 0 ? size : size - 1;
  const auto clip = [&](const Value& v, Int if_absent) {
    if (v.none_or_missing()) return if_absent;
    Int i = int_argument(rt, v, kWhat);
    if (i < 0) i += size;
    return std::clamp(i, lowest, std::max(lowest, highest));
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
  rt.charge(static_cast<uint64_t>(at.count));
  std::string out;
  if (at.count == 0) return rt.string("", s.safe);
  if (s.ascii()) {
    if (at.step == 1)
      return rt.string(s.text.substr(static_cast<size_t>(at.start), static_cast<size_t>(at.count)), s.safe);
    for (Int i = 0; i < at.count; ++i) out += s.text[static_cast<size_t>(at.start + i * at.step)];
    return rt.string(std::move(out), s.safe);
  }
  rt.work(s.text.size());
  if (at.step == 1) {
    const size_t begin = unicode::byte_of(s.text, static_cast<size_t>(at.start));
    const std::string_view tail = std::string_view(s.text).substr(begin);
    return rt.string(std::string(tail.substr(0, unicode::byte_of(tail, static_cast<size_t>(at.count)))), s.safe);
  }
  rt.charge(s.length * sizeof(uint32_t));
  std::vector<uint32_t> letters;
  letters.reserve(s.length);
  for (size_t pos = 0; pos < s.text.size();) letters.push_back(unicode::next(s.text, pos));
  for (Int i = 0; i < at.count; ++i) unicode::append(out, letters[static_cast<size_t>(at.start + i * at.step)]);
  return rt.string(std::move(out), s.safe);
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
  if (object.undefined()) fail_undefined(rt, object);
  const Value found = attribute(rt, object, name);
  if (!found.missing()) return found;
  if (object.is(Kind::kDict)) {
    const Value* item = object.as_dict().find(name);
    if (item != nullptr) return *item;
  }
  return no_attribute(rt, object, rt.string(std::string(name)));
}

bool has_attribute(const Value& object, std::string_view name) {
  return object.is(Kind::kNamespace) ? object.as<Namespace>().attributes.find(name) != nullptr
                                     : find_method(object.kind(), name).has_value();
}

Value slice(Runtime& rt, const Value& object, const Value& start, const Value& stop, const Value& step) {
  switch (object.kind()) {
    case Kind::kUndefined:
      fail_undefined(rt, object);
    case Kind::kString:
      return slice_string(rt, object.as_str(),
                          slice_indices(rt, static_cast<Int>(object.as_str().length), start, stop, step));
    case Kind::kList:
    case Kind::kTuple: {
      const auto& items = object.as_list().items;
      const Indices at = slice_indices(rt, static_cast<Int>(items.size()), start, stop, step);
      rt.charge(static_cast<uint64_t>(at.count) * sizeof(Value));
      auto* list = rt.make<List>();
      list->items.reserve(static_cast<size_t>(at.count));
      for (Int i = 0; i < at.count; ++i) list->items.push_back(items[static_cast<size_t>(at.start + i * at.step)]);
      return Value::object(object.kind(), list);
    }
    case Kind::kRange: {
      const Range& range = object.as<Range>();
      const Indices at = slice_indices(rt, range.size(), start, stop, step);
      auto* part = rt.make<Range>();
      part->start = range.at(at.start);
      part->stop = range.at(at.stop);
      part->step = checked_int(rt, range.step * at.step).as_int();
      return Value::object(Kind::kRange, part);
    }
    case Kind::kDict:
      rt.fail("unhashable type: 'slice'");
    default:
      rt.fail("'{}' object is not subscriptable", type_name(object));
  }
}

Value path_item(Runtime& rt, const Value& object, std::string_view dotted) {
  Value item = object;
  for (size_t begin = 0; begin <= dotted.size();) {
    const size_t end = std::min(dotted.find('.', begin), dotted.size());
    const std::string_view part = dotted.substr(begin, end - begin);
    rt.step();
    if (all_digits(part) && part.size() <= 18) {
      item = get_item(rt, item, Value::integer(std::stoll(std::string(part))));
    } else {
      item = get_item(rt, item, rt.string(std::string(part)));
    }
    begin = end + 1;
  }
  return item;
}

}  // namespace nfp::jinja
