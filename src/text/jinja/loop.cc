#include "text/jinja/loop.h"

#include "text/jinja/operators.h"

namespace nfp::jinja {

bool Loop::advance(Runtime& rt, Value* item) {
  if (!ahead.empty()) {
    *item = ahead.front();
    ahead.pop_front();
  } else if (!source->next(rt, item)) {
    return false;
  }
  ++index0;
  previous = current;
  current = *item;
  return true;
}

const Value* Loop::peek(Runtime& rt) {
  if (ahead.empty()) {
    Value item;
    if (!source->next(rt, &item)) return nullptr;
    rt.charge(sizeof(Value));
    ahead.push_back(item);
  }
  return &ahead.front();
}

Int Loop::length(Runtime& rt) {
  if (known_length) return *known_length;
  std::optional<Int> n;
  if (!iterable.missing()) n = try_length(rt, iterable);
  if (!n) {
    for (Value item; source->next(rt, &item);) {
      rt.charge(sizeof(Value));
      ahead.push_back(item);
    }
    n = static_cast<Int>(ahead.size()) + index0 + 1;
  }
  known_length = n;
  return *n;
}

Value Loop::attribute(Runtime& rt, std::string_view name) {
  if (name == "index") return Value::integer(index0 + 1);
  if (name == "index0") return Value::integer(index0);
  if (name == "first") return Value::boolean(index0 == 0);
  if (name == "last") return Value::boolean(peek(rt) == nullptr);
  if (name == "length") return Value::integer(length(rt));
  if (name == "revindex") return Value::integer(length(rt) - index0);
  if (name == "revindex0") return Value::integer(length(rt) - index0 - 1);
  if (name == "depth") return Value::integer(depth0 + 1);
  if (name == "depth0") return Value::integer(depth0);
  if (name == "previtem") return index0 == 0 ? rt.undefined("there is no previous item") : previous;
  if (name == "nextitem") {
    const Value* next = peek(rt);
    return next == nullptr ? rt.undefined("there is no next item") : *next;
  }
  return {};
}

}  // namespace nfp::jinja
