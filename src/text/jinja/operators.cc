#include "text/jinja/operators.h"

#include <algorithm>
#include <cmath>

#include "text/jinja/search.h"

namespace nfp::jinja {
namespace {

const char* symbol(Order order) {
  switch (order) {
    case Order::kLess:
      return "<";
    case Order::kLessEqual:
      return "<=";
    case Order::kGreater:
      return ">";
    case Order::kGreaterEqual:
      return ">=";
  }
  return "?";
}

template <typename T>
bool holds(Order order, const T& a, const T& b) {
  switch (order) {
    case Order::kLess:
      return a < b;
    case Order::kLessEqual:
      return a <= b;
    case Order::kGreater:
      return a > b;
    case Order::kGreaterEqual:
      return a >= b;
  }
  return false;
}

bool ordered_numbers(Order order, const Value& a, const Value& b) {
  if (a.is_integral() && b.is_integral()) return holds(order, a.as_int(), b.as_int());
  if (a.is(Kind::kFloat) && b.is(Kind::kFloat)) return holds(order, a.as_real(), b.as_real());
  // An int and a float compare by value; only floats beyond the range of Int need not be turned into one.
  const bool a_real = a.is(Kind::kFloat);
  const double real = a_real ? a.as_real() : b.as_real();
  const Int whole = a_real ? b.as_int() : a.as_int();
  if (std::isnan(real)) return false;
  int sign = 0;  // of real - whole
  if (std::fabs(real) >= 0x1p121) {
    sign = real > 0 ? 1 : -1;
  } else {
    const double floor = std::floor(real);
    const Int floored = static_cast<Int>(floor);
    sign = floored > whole ? 1 : floored < whole ? -1 : real > floor ? 1 : 0;
  }
  return a_real ? holds(order, sign, 0) : holds(order, 0, sign);
}

bool equal_items(Runtime& rt, const std::vector<Value>& a, const std::vector<Value>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    rt.step();
    if (!identical(a[i], b[i]) && !equals(rt, a[i], b[i])) return false;
  }
  return true;
}

bool equal_ranges(const Range& a, const Range& b) {
  const Int n = a.size();
  return n == b.size() && (n == 0 || (a.start == b.start && (n == 1 || a.step == b.step)));
}

}  // namespace

bool truthy(Runtime& rt, const Value& v) {
  switch (v.kind()) {
    case Kind::kMissing:
    case Kind::kUndefined:
    case Kind::kNone:
      return false;
    case Kind::kBool:
      return v.as_bool();
    case Kind::kInt:
      return v.as_int() != 0;
    case Kind::kFloat:
      return v.as_real() != 0;
    case Kind::kString:
      return !v.text().empty();
    case Kind::kList:
    case Kind::kTuple:
      return !v.as_list().items.empty();
    case Kind::kDict:
      return !v.as_dict().entries.empty();
    case Kind::kView:
    case Kind::kRange:
    case Kind::kLoop:
      return length(rt, v) != 0;
    default:
      return true;
  }
}

bool identical(const Value& a, const Value& b) {
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kMissing:
    case Kind::kNone:
      return true;
    case Kind::kBool:
    case Kind::kInt:
      return a.as_int() == b.as_int();
    case Kind::kFloat:
      return a.as_real() == b.as_real();
    case Kind::kFunction:
      return a.as_function() == b.as_function();
    case Kind::kMethod:
      return false;  // Python binds a method anew at each access
    default:
      return a.pointer() == b.pointer();
  }
}

bool equals(Runtime& rt, const Value& a, const Value& b) {
  const Runtime::Nest nest(rt);
  if (a.is_number() && b.is_number()) return equal_numbers(a, b);
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kMissing:
    case Kind::kUndefined:
    case Kind::kNone:
      return true;
    case Kind::kString:
      rt.work(a.text().size());
      return a.text() == b.text();
    case Kind::kList:
    case Kind::kTuple:
      return equal_items(rt, a.as_list().items, b.as_list().items);
    case Kind::kDict: {
      const Dict& left = a.as_dict();
      const Dict& right = b.as_dict();
      if (left.entries.size() != right.entries.size()) return false;
      for (const Dict::Entry& entry : left.entries) {
        rt.step();
        const Value* other = right.find(entry.key);
        if (other == nullptr || (!identical(entry.value, *other) && !equals(rt, entry.value, *other))) return false;
      }
      return true;
    }
    case Kind::kRange:
      return equal_ranges(a.as<Range>(), b.as<Range>());
    case Kind::kFunction:
      return a.as_function() == b.as_function();
    case Kind::kMethod:
      return a.as_method() == b.as_method() && identical(a.self(), b.self());
    case Kind::kView: {
      const View& left = a.as<View>();
      const View& right = b.as<View>();
      if (left.part == View::kValues || right.part == View::kValues) return a.pointer() == b.pointer();
      if (left.dict->entries.size() != right.dict->entries.size()) return false;
      for (const Value& item : items_of(rt, a)) {
        if (!contains(rt, b, item)) return false;
      }
      return true;
    }
    default:
      return a.pointer() == b.pointer();
  }
}

bool ordered(Runtime& rt, Order order, const Value& a, const Value& b) {
  const Runtime::Nest nest(rt);
  if (a.is_number() && b.is_number()) return ordered_numbers(order, a, b);
  if (a.undefined()) fail_undefined(rt, a);
  if (b.undefined()) fail_undefined(rt, b);
  if (a.is(Kind::kString) && b.is(Kind::kString)) {
    rt.work(std::min(a.text().size(), b.text().size()));
    return holds(order, a.text(), b.text());  // UTF-8 bytes sort as code points do
  }
  if (a.is_list_like() && a.kind() == b.kind()) {
    const auto& left = a.as_list().items;
    const auto& right = b.as_list().items;
    for (size_t i = 0; i < left.size() && i < right.size(); ++i) {
      rt.step();
      if (!identical(left[i], right[i]) && !equals(rt, left[i], right[i])) {
        return ordered(rt, order, left[i], right[i]);
      }
    }
    return holds(order, left.size(), right.size());
  }
  rt.fail("'{}' not supported between instances of '{}' and '{}'", symbol(order), type_name(a), type_name(b));
}

bool contains(Runtime& rt, const Value& container, const Value& item) {
  switch (container.kind()) {
    case Kind::kString:
      if (!item.is(Kind::kString)) {
        rt.fail("'in <string>' requires string as left operand, not {}", type_name(item));
      }
      return find_text(rt, container.text(), item.text(), 0) != std::string_view::npos;
    case Kind::kDict:
      if (!is_hashable(item)) rt.fail("unhashable type: '{}'", type_name(item));
      return container.as_dict().find(item) != nullptr;
    case Kind::kRange: {
      const Range& range = container.as<Range>();
      if (item.is_integral()) {
        const Int offset = item.as_int() - range.start;
        const Int index = offset / range.step;
        return offset % range.step == 0 && index >= 0 && index < range.size();
      }
      break;
    }
    case Kind::kView: {
      const View& view = container.as<View>();
      if (view.part == View::kKeys) {
        if (!is_hashable(item)) rt.fail("unhashable type: '{}'", type_name(item));
        return view.dict->find(item) != nullptr;
      }
      break;
    }
    default:
      break;
  }
  Iterator* iterator = iterate(rt, container);
  for (Value candidate; iterator->next(rt, &candidate);) {
    if (identical(candidate, item) || equals(rt, candidate, item)) return true;
  }
  return false;
}

}  // namespace nfp::jinja
