// Runs a parsed template.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "text/jinja/ast.h"
#include "text/jinja/loop.h"
#include "text/jinja/runtime.h"

namespace nfp::jinja {

// Variables set in one block of a template; reading falls through to the scopes around it. As in jinja2, an `if` has
// none of its own, and what a loop sets ends with the iteration.
struct Scope : Object {
  explicit Scope(Scope* around) : parent(around) {}
  Scope* const parent;
  std::vector<std::pair<Symbol, Value>> variables;
};

class Interpreter {
 public:
  // `context` holds the variables passed to the template, by symbol; kMissing for those not passed.
  Interpreter(const Template& program, Runtime& rt, std::vector<Value> context);

  std::string run();

 private:
  friend struct FilteredIterator;

  enum class Flow { kNormal, kBreak, kContinue };

  // Statements (interpreter.cc)
  Flow run_body(const std::vector<Stmt*>& body);
  Flow run_statement(const Stmt& s);
  Flow run_if(const Stmt& s);
  Flow run_for(const Stmt& s, const Value& iterable, Int depth0);
  void run_macro_definition(const Stmt& s);
  void run_call_block(const Stmt& s);
  Flow run_filter_block(const Stmt& s);
  Flow run_set_block(const Stmt& s);
  Flow run_with(const Stmt& s);
  void run_generation(const Stmt& s);
  Scope* make_scope(Scope* around, const std::vector<Symbol>& hidden);
  // Runs a body in `scope` with its output kept apart.
  Flow capture(const std::vector<Stmt*>& body, Scope* scope, std::string* out);
  void print(std::string_view text);
  void print_string(const Value& value);  // of a filter or call block, which fail for anything but a string
  void assign(const Expr& target, const Value& value);
  void store(Symbol symbol, const Value& value);
  Value load(Symbol symbol, std::string_view name);

  // Expressions (evaluate.cc)
  Value evaluate(const Expr& e);
  Value evaluate_binary(const Expr& e);
  Value evaluate_compare(const Expr& e);
  bool compare(Compare op, const Value& a, const Value& b);
  Value evaluate_collection(const Expr& e);
  Value evaluate_concat(const Expr& e);
  Value evaluate_slice(const Expr& e);
  Value evaluate_filter(const Expr& e);
  Value evaluate_test(const Expr& e);
  Value evaluate_condition(const Expr& e);
  Value evaluate_call(const Expr& e, const Value& caller);
  void evaluate_arguments(const Expr& e, Args* args);
  Value call(const Value& callee, Args& args);
  Value call_macro(const Macro& macro, const Args& args);
  Value call_loop(Loop& loop, const Args& args);

  const Template& program_;
  Runtime& rt_;
  const std::vector<Value> context_;
  std::vector<Value> globals_;  // by symbol
  Scope* scope_ = nullptr;
  std::string* out_ = nullptr;
  const Symbol loop_symbol_, caller_symbol_, kwargs_symbol_, varargs_symbol_;
  Value block_text_;  // what the filters of a filter block or set block are applied to
};

}  // namespace nfp::jinja
