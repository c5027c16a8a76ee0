// jinja2's `loop` variable: where a for loop stands in what it iterates over.
#pragma once

#include <deque>
#include <optional>
#include <string_view>

#include "text/jinja/runtime.h"
#include "text/jinja/value.h"

namespace nfp::jinja {

struct Stmt;
struct Scope;

struct Loop : Object {
  // The next item, or false at the end; moves index0, previous and current along.
  bool advance(Runtime& rt, Value* item);
  // Looks one item ahead; nullptr at the end.
  const Value* peek(Runtime& rt);
  // Number of items; of a generator, by reading it to its end.
  Int length(Runtime& rt);
  // loop.NAME; kMissing when there is no such attribute. Methods (cycle, changed) are found in lookup.cc.
  Value attribute(Runtime& rt, std::string_view name);

  Value iterable;              // kMissing when a filter (`for x in y if c`) stands between
  Iterator* source = nullptr;  // what is left of it
  std::deque<Value> ahead;     // read from source, not yet visited
  Int index0 = -1;
  Int depth0 = 0;
  Value previous, current;
  Value last_changed;  // of loop.changed()
  std::optional<Int> known_length;

  const Stmt* recursive = nullptr;  // the loop statement, when it may be called as loop(items)
  Scope* scope = nullptr;           // around it
};

}  // namespace nfp::jinja
