// The filters on sequences and mappings. Those that are generators in jinja2 are iterators here: consumed once, and
// nothing of them runs (or fails) before somebody asks for an item.
#include <algorithm>
#include <functional>

#include "text/jinja/filters.h"
#include "text/jinja/operators.h"
#include "text/jinja/sequences.h"

namespace nfp::jinja {
namespace {

// --- Generators

struct MapIterator : Iterator {
  bool next(Runtime& rt, Value* item) override {
    if (source == nullptr) {
      if (!truthy(rt, value)) return false;
      if (args.positional.empty() && !attribute.missing()) {
        if (!args.named.empty()) rt.fail("Unexpected keyword argument '{}'", args.named[0].first);
      } else {
        if (args.positional.empty()) rt.fail("map requires a filter argument");
        if (!args.positional[0].is(Kind::kString)) rt.fail("map: the filter's name must be a string");
        filter = find_filter(args.positional[0].text());
        if (filter == nullptr) rt.fail("No filter named '{}'.", args.positional[0].text().substr(0, 100));
        args.positional.erase(args.positional.begin());
      }
      source = iterate(rt, value);
    }
    Value from;
    if (!source->next(rt, &from)) return false;
    if (filter != nullptr) {
      *item = filter(rt, from, args);
      return true;
    }
    *item = by_path_or_default(rt, from);
    return true;
  }

  // With a default, an undefined step on the way becomes the default, and the way goes on from there.
  Value by_path_or_default(Runtime& rt, const Value& from) const {
    if (otherwise.none_or_missing()) return by_path(rt, from, attribute);
    if (!attribute.is(Kind::kString)) {
      const Value found = by_path(rt, from, attribute);
      return found.undefined() ? otherwise : found;
    }
    Value found = from;
    const std::string_view path = attribute.text();
    for (size_t begin = 0; begin <= path.size();) {
      const size_t end = std::min(path.find('.', begin), path.size());
      found = path_item(rt, found, path.substr(begin, end - begin));
      if (found.undefined()) found = otherwise;
      begin = end + 1;
    }
    return found;
  }

  Value value;
  Value attribute, otherwise;
  Args args;
  FilterFunction filter = nullptr;
  Iterator* source = nullptr;
};

Value map(Runtime& rt, const Value& v, const Args& args) {
  auto* iterator = rt.make<MapIterator>();
  iterator->value = v;
  iterator->args = args;
  if (args.positional.empty()) {
    auto& named = iterator->args.named;
    for (auto it = named.begin(); it != named.end();) {
      if (it->first == "attribute") {
        iterator->attribute = it->second;
      } else if (it->first == "default") {
        iterator->otherwise = it->second;
      } else {
        ++it;
        continue;
      }
      it = named.erase(it);
    }
  }
  return Value::object(Kind::kIterator, iterator);
}

struct SelectIterator : Iterator {
  bool next(Runtime& rt, Value* item) override {
    if (source == nullptr) {
      if (!truthy(rt, value)) return false;
      auto& p = args.positional;
      if (by_attribute) {
        if (p.empty()) rt.fail("Missing parameter for attribute name");
        attribute = p[0];
        p.erase(p.begin());
      }
      if (!p.empty()) {
        if (!p[0].is(Kind::kString)) rt.fail("the test's name must be a string");
        test = find_test(p[0].text());
        if (test == nullptr) rt.fail("No test named '{}'.", p[0].text().substr(0, 100));
        p.erase(p.begin());
      }
      source = iterate(rt, value);
    }
    while (source->next(rt, item)) {
      const Value tested = by_attribute ? by_path(rt, *item, attribute) : *item;
      const bool holds = test != nullptr ? test(rt, tested, args) : truthy(rt, tested);
      if (holds == wanted) return true;
    }
    return false;
  }
  Value value;
  Args args;
  bool by_attribute = false;
  bool wanted = true;
  Value attribute;
  TestFunction test = nullptr;
  Iterator* source = nullptr;
};

template <bool by_attribute, bool wanted>
Value select(Runtime& rt, const Value& v, const Args& args) {
  auto* iterator = rt.make<SelectIterator>();
  iterator->value = v;
  iterator->args = args;
  iterator->by_attribute = by_attribute;
  iterator->wanted = wanted;
  return Value::object(Kind::kIterator, iterator);
}

// Makes all its items when the first is asked for.
struct DeferredIterator : Iterator {
  explicit DeferredIterator(std::function<std::vector<Value>(Runtime&)> f) : make_items(std::move(f)) {}
  bool next(Runtime& rt, Value* item) override {
    if (make_items) items = std::exchange(make_items, nullptr)(rt);
    if (index >= items.size()) return false;
    rt.step();
    *item = items[index++];
    return true;
  }
  std::function<std::vector<Value>(Runtime&)> make_items;
  std::vector<Value> items;
  size_t index = 0;
};

Value deferred(Runtime& rt, std::function<std::vector<Value>(Runtime&)> make_items) {
  return Value::object(Kind::kIterator, rt.make<DeferredIterator>(std::move(make_items)));
}

Value batch(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "batch", args, {"linecount", "fill_with"}, 1);
  return deferred(rt, [v, bound](Runtime& r) {
    const Int size = int_argument(r, bound[0], "linecount");
    std::vector<Value> out;
    std::vector<Value> row;
    for (const Value& item : items_of(r, v)) {
      if (static_cast<Int>(row.size()) == size) out.push_back(list_of(r, std::exchange(row, {})));
      row.push_back(item);
    }
    if (!row.empty()) {
      if (!bound[1].none_or_missing() && static_cast<Int>(row.size()) < size) {
        const Int missing = size - static_cast<Int>(row.size());
        r.charge(static_cast<uint64_t>(std::min<Int>(missing, INT32_MAX)) * sizeof(Value));
        row.insert(row.end(), static_cast<size_t>(missing), bound[1]);
      }
      out.push_back(list_of(r, std::move(row)));
    }
    return out;
  });
}

Value slices(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "slice", args, {"slices", "fill_with"}, 1);
  return deferred(rt, [v, bound](Runtime& r) {
    const std::vector<Value> items = items_of(r, v);
    const Int count = int_argument(r, bound[0], "slices");
    if (count == 0) r.fail("integer division or modulo by zero");
    const auto size = static_cast<Int>(items.size());
    std::vector<Value> out;
    for (Int i = 0, at = 0; i < count; ++i) {
      r.step();
      const bool has_extra = i < size % count;
      std::vector<Value> part;
      for (const Int end = at + size / count + (has_extra ? 1 : 0); at < end; ++at) {
        part.push_back(items[static_cast<size_t>(at)]);
      }
      if (!bound[1].none_or_missing() && !has_extra) part.push_back(bound[1]);
      out.push_back(list_of(r, std::move(part)));
    }
    return out;
  });
}

Value unique(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "unique", args, {"case_sensitive", "attribute"});
  return deferred(rt, [v, bound](Runtime& r) {
    const bool case_sensitive = truthy(r, bound[0]);
    Dict seen;
    std::vector<Value> out;
    for (const Value& item : items_of(r, v)) {
      Value key = by_path(r, item, bound[1]);
      if (!case_sensitive) key = without_case(r, key);
      if (is_hashable(key) && seen.find(key) != nullptr) continue;
      r.set(seen, key, Value::none());
      out.push_back(item);
    }
    return out;
  });
}

Value items(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "items", args, 0, 0);
  return deferred(rt, [v](Runtime& r) -> std::vector<Value> {
    if (v.undefined()) return {};
    if (!v.is(Kind::kDict)) r.fail("Can only get item pairs from a mapping.");
    return items_of(r, call_method(r, v, Method::kItems, Args()));
  });
}

// --- The rest

Value first(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "first", args, 0, 0);
  Value item;
  return iterate(rt, v)->next(rt, &item) ? item : rt.undefined("No first item, sequence was empty.");
}

Value last(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "last", args, 0, 0);
  Value item;
  if (v.is(Kind::kString)) {
    if (!v.text().empty()) return get_item(rt, v, Value::integer(-1));
  } else if (reversed(rt, v).as<Iterator>().next(rt, &item)) {
    return item;
  }
  return rt.undefined("No last item, sequence was empty.");
}

Value reverse(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "reverse", args, 0, 0);
  if (v.is(Kind::kString)) return slice(rt, v, Value(), Value(), Value::integer(-1));
  if (!v.is(Kind::kIterator) && !v.is(Kind::kLoop)) return reversed(rt, v);
  std::vector<Value> all = items_of(rt, v);
  std::reverse(all.begin(), all.end());
  return list_of(rt, std::move(all));
}

Value join(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "join", args, {"d", "attribute"});
  const std::string separator = bound[0].missing() ? "" : to_text(rt, bound[0]);
  std::string out;
  bool is_first = true;
  Iterator* iterator = iterate(rt, v);
  for (Value item; iterator->next(rt, &item);) {
    if (!is_first) {
      rt.charge(separator.size());
      out += separator;
    }
    is_first = false;
    append_text(rt, out, by_path(rt, item, bound[1]));
  }
  return rt.string(std::move(out));
}

Value count(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "length", args, 0, 0);
  return Value::integer(length(rt, v));
}

Value list(Runtime& rt, const Value& v, const Args& args) {
  expect_positional(rt, "list", args, 0, 0);
  return list_of(rt, items_of(rt, v));
}

Value sum(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "sum", args, {"attribute", "start"});
  Value total = bound[1].missing() ? Value::integer(0) : bound[1];
  if (total.is(Kind::kString)) rt.fail("sum() can't sum strings [use ''.join(seq) instead]");
  Iterator* iterator = iterate(rt, v);
  for (Value item; iterator->next(rt, &item);) total = add(rt, total, by_path(rt, item, bound[0]));
  return total;
}

struct Entry {
  std::string_view name;
  FilterFunction function;
};
constexpr Entry kFilters[] = {{"batch", batch},
                              {"count", count},
                              {"first", first},
                              {"items", items},
                              {"join", join},
                              {"last", last},
                              {"length", count},
                              {"list", list},
                              {"map", map},
                              {"reject", select<false, false>},
                              {"rejectattr", select<true, false>},
                              {"reverse", reverse},
                              {"select", select<false, true>},
                              {"selectattr", select<true, true>},
                              {"slice", slices},
                              {"sum", sum},
                              {"unique", unique}};

}  // namespace

FilterFunction find_sequence_filter(std::string_view name) {
  for (const Entry& entry : kFilters) {
    if (entry.name == name) return entry.function;
  }
  return nullptr;
}

}  // namespace nfp::jinja
