#include "text/jinja/loop.h"
#include "text/jinja/operators.h"
#include "text/jinja/unicode_text.h"

namespace nfp::jinja {
namespace {

struct EmptyIterator : Iterator {
  bool next(Runtime&, Value*) override { return false; }
};

struct ListIterator : Iterator {
  ListIterator(const List& l, bool backward) : list(l), from_end(backward) {}
  bool next(Runtime& rt, Value* item) override {
    if (index >= list.items.size()) return false;
    rt.step();
    *item = from_end ? list.items[list.items.size() - 1 - index] : list.items[index];
    ++index;
    return true;
  }
  const List& list;
  const bool from_end;
  size_t index = 0;
};

struct StringIterator : Iterator {
  explicit StringIterator(const Str& s) : string(s) {}
  bool next(Runtime& rt, Value* item) override {
    if (pos >= string.text.size()) return false;
    rt.step();
    const size_t begin = pos;
    unicode::next(string.text, pos);
    *item = rt.string(string.text.substr(begin, pos - begin), string.safe);
    return true;
  }
  const Str& string;
  size_t pos = 0;
};

struct DictIterator : Iterator {
  DictIterator(const Dict& d, View::Part p, bool backward) : dict(d), part(p), from_end(backward) {}
  bool next(Runtime& rt, Value* item) override {
    if (index >= dict.entries.size()) return false;
    rt.step();
    const Dict::Entry& entry = dict.entries[from_end ? dict.entries.size() - 1 - index : index];
    ++index;
    if (part == View::kItems) {
      auto* pair = rt.make<List>();
      pair->items = {entry.key, entry.value};
      rt.charge(2 * sizeof(Value));
      *item = Value::tuple(pair);
    } else {
      *item = part == View::kKeys ? entry.key : entry.value;
    }
    return true;
  }
  const Dict& dict;
  const View::Part part;
  const bool from_end;
  size_t index = 0;
};

struct RangeIterator : Iterator {
  RangeIterator(const Range& r, bool backward) : range(r), size(r.size()), from_end(backward) {}
  bool next(Runtime& rt, Value* item) override {
    if (index >= size) return false;
    rt.step();
    *item = Value::integer(range.at(from_end ? size - 1 - index : index));
    ++index;
    return true;
  }
  const Range& range;
  const Int size;
  const bool from_end;
  Int index = 0;
};

// `for x in loop` goes on with the loop's own items, as (item, loop) pairs.
struct LoopIterator : Iterator {
  explicit LoopIterator(Loop& l) : loop(l) {}
  bool next(Runtime& rt, Value* item) override {
    Value current;
    if (!loop.advance(rt, &current)) return false;
    auto* pair = rt.make<List>();
    pair->items = {current, Value::object(Kind::kLoop, &loop)};
    *item = Value::tuple(pair);
    return true;
  }
  Loop& loop;
};

}  // namespace

std::optional<Int> try_length(Runtime& rt, const Value& v) {
  switch (v.kind()) {
    case Kind::kUndefined:
      return 0;
    case Kind::kString:
      return static_cast<Int>(v.as_str().length);
    case Kind::kList:
    case Kind::kTuple:
      return static_cast<Int>(v.as_list().items.size());
    case Kind::kDict:
      return static_cast<Int>(v.as_dict().entries.size());
    case Kind::kView:
      return static_cast<Int>(v.as<View>().dict->entries.size());
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
  switch (v.kind()) {
    case Kind::kUndefined:
    case Kind::kString:
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kDict:
    case Kind::kView:
    case Kind::kRange:
    case Kind::kIterator:
    case Kind::kLoop:
      return true;
    default:
      return false;
  }
}

Iterator* iterate(Runtime& rt, const Value& v) {
  switch (v.kind()) {
    case Kind::kUndefined:
      return rt.make<EmptyIterator>();
    case Kind::kString:
      return rt.make<StringIterator>(v.as_str());
    case Kind::kList:
    case Kind::kTuple:
      return rt.make<ListIterator>(v.as_list(), false);
    case Kind::kDict:
      return rt.make<DictIterator>(v.as_dict(), View::kKeys, false);
    case Kind::kView:
      return rt.make<DictIterator>(*v.as<View>().dict, v.as<View>().part, false);
    case Kind::kRange:
      return rt.make<RangeIterator>(v.as<Range>(), false);
    case Kind::kIterator:
      return &v.as<Iterator>();
    case Kind::kLoop:
      return rt.make<LoopIterator>(v.as<Loop>());
    default:
      rt.fail("'{}' object is not iterable", type_name(v));
  }
}

std::vector<Value> items_of(Runtime& rt, const Value& v) {
  std::vector<Value> items;
  if (v.is_list_like()) {
    rt.charge(v.as_list().items.size() * sizeof(Value));
    return v.as_list().items;
  }
  Iterator* iterator = iterate(rt, v);
  for (Value item; iterator->next(rt, &item);) {
    rt.charge(sizeof(Value));
    items.push_back(item);
  }
  return items;
}

Value reversed(Runtime& rt, const Value& v) {
  Iterator* iterator = nullptr;
  switch (v.kind()) {
    case Kind::kList:
    case Kind::kTuple:
      iterator = rt.make<ListIterator>(v.as_list(), true);
      break;
    case Kind::kDict:
      iterator = rt.make<DictIterator>(v.as_dict(), View::kKeys, true);
      break;
    case Kind::kView:
      iterator = rt.make<DictIterator>(*v.as<View>().dict, v.as<View>().part, true);
      break;
    case Kind::kRange:
      iterator = rt.make<RangeIterator>(v.as<Range>(), true);
      break;
    case Kind::kUndefined:
      iterator = rt.make<EmptyIterator>();
      break;
    default:
      rt.fail("'{}' object is not reversible", type_name(v));
  }
  iterator->type_name = "reversed";
  return Value::object(Kind::kIterator, iterator);
}

}  // namespace nfp::jinja
