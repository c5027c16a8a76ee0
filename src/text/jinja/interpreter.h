// Runs a parsed template: statements in interpreter.cc, expressions in evaluate.cc.
#pragma once

#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/ast.h"
#include "text/jinja/operators.h"
#include "text/jinja/runtime.h"

namespace nfp::jinja {

// Variables set in one block of a template; reading falls through to the scopes around it. As in jinja2, an `if` has
// none of its own, and what a loop sets ends with the iteration.
struct Scope : Object {
  explicit Scope(Scope* around) : parent(around) {}
  Scope* const parent;
  std::vector<std::pair<Symbol, Value>> variables;
};

struct Macro : Object {
  const Stmt* node = nullptr;
  Scope* scope = nullptr;  // where it was defined
  std::string_view name;
};

// jinja2's `loop` variable: where a for loop stands in what it iterates over.
struct Loop : Object {
  Loop(Runtime& rt, const Value& items) : iterable(items), cursor(rt, items) {}
  // The next item, or false at the end; moves index0, previous and current along.
  bool advance(Value* item);
  // Looks one item ahead; nullptr at the end.
  const Value* peek(Runtime& rt);
  // Number of items; of a generator or a filtered loop, by reading it to its end.
  Int length(Runtime& rt);
  // loop.NAME; kMissing when there is no such attribute. loop.cycle() is in methods.cc.
  Value attribute(Runtime& rt, std::string_view name);

  const Value iterable;
  Cursor cursor;                              // what is left of it
  std::function<bool(const Value&)> accepts;  // `for x in y if condition`; none: all
  std::deque<Value> ahead;                    // read from the cursor, not yet visited
  Int index0 = -1;
  Value previous, current;
  std::optional<Int> known_length;

 private:
  bool pull(Value* item);
};

class Interpreter {
 public:
  // `context` holds the variables passed to the template, by symbol; kMissing for those not passed.
  Interpreter(const Template& program, Runtime& rt, std::vector<Value> context);

  std::string run();

 private:
  enum class Flow { kNormal, kBreak, kContinue };

  // Statements (interpreter.cc)
  Flow run_body(const std::vector<Stmt*>& body);
  Flow run_statement(const Stmt& s);
  Flow run_if(const Stmt& s);
  Flow run_for(const Stmt& s, const Value& iterable);
  void run_macro_definition(const Stmt& s);
  Flow run_set_block(const Stmt& s);
  void run_generation(const Stmt& s);
  Scope* make_scope(Scope* around, const std::vector<Symbol>& hidden);
  // Runs a body in `scope` with its output kept apart.
  Flow capture(const std::vector<Stmt*>& body, Scope* scope, std::string* out);
  void print(std::string_view text);
  void assign(const Expr& target, const Value& value);
  void pay_for(const Scope& scope);
  void store(Symbol symbol, const Value& value);
  Value load(Symbol symbol, std::string_view name);

  // Expressions (evaluate.cc)
  Value evaluate(const Expr& e);
  Value evaluate_compare(const Expr& e);
  Value evaluate_collection(const Expr& e);
  Value evaluate_concat(const Expr& e);
  Value evaluate_slice(const Expr& e);
  Value evaluate_filter(const Expr& e);
  Value evaluate_test(const Expr& e);
  Value evaluate_condition(const Expr& e);
  Value evaluate_call(const Expr& e);
  Args evaluate_arguments(const Expr& e);
  Value call(const Value& callee, const Args& args);
  Value call_macro(const Macro& macro, const Args& args);

  const Template& program_;
  Runtime& rt_;
  const std::vector<Value> context_;
  std::vector<Value> globals_;  // by symbol
  Scope* scope_ = nullptr;
  std::string* out_ = nullptr;
  const Symbol loop_symbol_;
  Value block_text_;  // what the filters of a set block are applied to
};

}  // namespace nfp::jinja
