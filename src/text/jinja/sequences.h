// What the filters on sequences share.
#pragma once

#include <utility>
#include <vector>

#include "text/jinja/operators.h"
#include "text/jinja/unicode_text.h"

namespace nfp::jinja {

inline Value list_of(Runtime& rt, std::vector<Value> items) {
  auto* list = rt.make<List>();
  list->items = std::move(items);
  return Value::list(list);
}

// What jinja2's make_attrgetter looks up: "a.b.0", an index, or (none) the item itself.
inline Value by_path(Runtime& rt, const Value& item, const Value& path) {
  if (path.none_or_missing()) return item;
  if (path.is(Kind::kString)) return path_item(rt, item, path.text());
  return get_item(rt, item, path);
}

inline Value without_case(Runtime& rt, const Value& v) {
  return v.is(Kind::kString) ? rt.string(unicode::lower(v.text())) : v;
}

}  // namespace nfp::jinja
