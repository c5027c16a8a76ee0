// The filters that put items in order.
#include <algorithm>

#include "text/jinja/filters.h"
#include "text/jinja/operators.h"
#include "text/jinja/sequences.h"
#include "text/jinja/sorting.h"

namespace nfp::jinja {
namespace {

// Sorts by keys that were made before; each key is a list of values that compare one after the other.
struct Keyed {
  std::vector<Value> key;
  Value item;
};

bool key_less(Runtime& rt, const std::vector<Value>& a, const std::vector<Value>& b) {
  rt.step();
  for (size_t i = 0; i < a.size(); ++i) {
    if (a.size() > 1 && (identical(a[i], b[i]) || equals(rt, a[i], b[i]))) continue;
    return less(rt, a[i], b[i]);
  }
  return false;
}

std::vector<Value> sorted(Runtime& rt, std::vector<Keyed> keyed, bool reverse) {
  // Python keeps the order of equal items also when it sorts backwards.
  if (reverse) std::reverse(keyed.begin(), keyed.end());
  stable_merge_sort(keyed, [&rt](const Keyed& a, const Keyed& b) { return key_less(rt, a.key, b.key); });
  if (reverse) std::reverse(keyed.begin(), keyed.end());
  std::vector<Value> out;
  out.reserve(keyed.size());
  for (const Keyed& k : keyed) out.push_back(k.item);
  return out;
}

Value sort(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "sort", args, {"reverse", "case_sensitive", "attribute"});
  std::vector<Value> paths;
  if (bound[2].is(Kind::kString)) {
    const std::string_view all = bound[2].text();
    for (size_t begin = 0; begin <= all.size();) {
      const size_t end = std::min(all.find(',', begin), all.size());
      paths.push_back(rt.string(std::string(all.substr(begin, end - begin))));
      begin = end + 1;
    }
  } else {
    paths.push_back(bound[2]);
  }
  std::vector<Keyed> keyed;
  for (const Value& item : items_of(rt, v)) {
    Keyed k;
    k.item = item;
    for (const Value& path : paths) {
      const Value key = by_path(rt, item, path);
      k.key.push_back(truthy(rt, bound[1]) ? key : without_case(rt, key));
    }
    // jinja2's keys are lists, in which equal values are never asked which is less.
    k.key.push_back(Value::none());
    rt.charge(sizeof(Keyed) + k.key.size() * sizeof(Value));
    keyed.push_back(std::move(k));
  }
  return list_of(rt, sorted(rt, std::move(keyed), truthy(rt, bound[0])));
}

Value dict_sort(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "dictsort", args, {"case_sensitive", "by", "reverse"});
  const std::string by = bound[1].missing() ? "key" : to_text(rt, bound[1]);
  if (by != "key" && by != "value") rt.fail("You can only sort by either \"key\" or \"value\"");
  if (v.undefined()) fail_undefined(rt, v);
  if (!v.is(Kind::kDict)) rt.fail("'{}' object has no attribute 'items'", type_name(v));
  std::vector<Keyed> keyed;
  for (const Value& pair : items_of(rt, call_method(rt, v, Method::kItems, Args()))) {
    const Value key = pair.as_list().items[by == "key" ? 0 : 1];
    rt.charge(sizeof(Keyed) + sizeof(Value));
    keyed.push_back({{truthy(rt, bound[0]) ? key : without_case(rt, key)}, pair});
  }
  return list_of(rt, sorted(rt, std::move(keyed), truthy(rt, bound[2])));
}

Value group_by(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, "groupby", args, {"attribute", "default", "case_sensitive"}, 1);
  const bool case_sensitive = truthy(rt, bound[2]);
  const auto attribute_of = [&](const Value& item) {
    const Value found = by_path(rt, item, bound[0]);
    return found.undefined() && !bound[1].none_or_missing() ? bound[1] : found;
  };
  const auto key_of = [&](const Value& item) {
    return case_sensitive ? attribute_of(item) : without_case(rt, attribute_of(item));
  };
  std::vector<Keyed> keyed;
  for (const Value& item : items_of(rt, v)) {
    rt.charge(sizeof(Keyed) + sizeof(Value));
    keyed.push_back({{key_of(item)}, item});
  }
  auto* groups = rt.make<List>();
  List* members = nullptr;
  Value last;
  for (const Value& item : sorted(rt, std::move(keyed), false)) {
    const Value key = key_of(item);
    if (members == nullptr || !equals(rt, key, last)) {
      members = rt.make<List>();
      auto* group = rt.make<List>();
      group->is_group = true;
      group->items = {attribute_of(item), Value::list(members)};
      rt.push(*groups, Value::tuple(group));
      last = key;
    }
    rt.push(*members, item);
  }
  return Value::list(groups);
}

template <bool want_max>
Value extreme(Runtime& rt, const Value& v, const Args& args) {
  const auto bound = bind(rt, want_max ? "max" : "min", args, {"case_sensitive", "attribute"});
  Value best, best_key;
  Iterator* iterator = iterate(rt, v);
  for (Value item; iterator->next(rt, &item);) {
    Value key = by_path(rt, item, bound[1]);
    if (!truthy(rt, bound[0])) key = without_case(rt, key);
    if (best_key.missing() || ordered(rt, want_max ? Order::kGreater : Order::kLess, key, best_key)) {
      best = item;
      best_key = key;
    }
  }
  return best_key.missing() ? rt.undefined("No aggregated item, sequence was empty.") : best;
}

struct Entry {
  std::string_view name;
  FilterFunction function;
};
constexpr Entry kFilters[] = {
    {"dictsort", dict_sort}, {"groupby", group_by}, {"max", extreme<true>}, {"min", extreme<false>}, {"sort", sort}};

}  // namespace

FilterFunction find_order_filter(std::string_view name) {
  for (const Entry& entry : kFilters) {
    if (entry.name == name) return entry.function;
  }
  return nullptr;
}

}  // namespace nfp::jinja
