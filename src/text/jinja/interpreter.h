// Runs a parsed template.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/parser.h"

namespace nfp::jinja {

// Variables set in one block of a template; reading falls through to the scopes around it. As in jinja2, an `if` has
// none of its own, and what a loop sets ends with the iteration. Where jinja2 differs: it decides when it compiles what
// a name stands for, so a block inside of another one that reads a name before the outer one sets it for the first time
// finds it undefined even if the template was given a variable of that name. Here it finds that variable.
struct Scope : Object {
  explicit Scope(Scope* around) : parent(around) {}
  Scope* const parent;
  std::map<Symbol, Value> variables;
};

struct Macro : Object {
  const Stmt* node = nullptr;
  Scope* scope = nullptr;  // where it was defined
};

// jinja2's `loop` variable: where a for loop stands in what it iterates over. Items that a condition has to accept are
// read only when the loop, or something that looks ahead, gets to them: the condition may depend on what the loop does.
struct Loop : Object {
  Loop(Runtime& rt, const Value& iterable) : source(items_of(rt, iterable)) {}
  // Whether there is an item `index`, which is then in `items`.
  bool reach(size_t index);
  // loop.NAME; kMissing when there is no such attribute.
  Value attribute(Runtime& rt, std::string_view name);

  const std::vector<Value> source;
  std::function<bool(const Value&)> accepts;  // `for x in y if condition`; none: all
  size_t next = 0;                            // in source
  std::vector<Value> items;                   // accepted ones
  size_t index0 = 0;
  Int depth0 = 0;              // calls of recursive loops around it
  const Stmt* node = nullptr;  // the loop
  Scope* around = nullptr;
  Value last_changed;  // a tuple, what loop.changed was given last
};

// `context` holds the variables passed to the template, by symbol; kMissing for those not passed.
std::string run_template(const Template& program, Runtime& rt, std::vector<Value> context);

}  // namespace nfp::jinja
