// jinja2's expressions, from loosest to tightest binding: a if b else c; or; and; not; comparisons, in; + -; ~; * / //
// %;
// **; unary + -; calls, attributes and items; filters and tests.
#pragma once

#include <string_view>
#include <vector>

#include "text/jinja/ast.h"
#include "text/jinja/token_stream.h"

namespace nfp::jinja {

class ExpressionParser {
 public:
  ExpressionParser(Template& out, TokenStream& stream) : out_(out), stream_(stream) {}

  Expr* expression(bool with_condition = true);
  // Comma-separated expressions make a tuple. `end_name` is a name that ends it, as `in` does a for's targets.
  Expr* tuple(bool with_condition = true, std::string_view end_name = {}, bool in_parentheses = false);
  // What can be assigned to: a name, a tuple of targets, or (in a set) an attribute of a namespace.
  Expr* target(std::string_view end_name, bool with_namespace);
  Expr* name_target();
  // The filters behind `|`, or behind `{% filter` when `inline_start`; null when there are none.
  Expr* filters(Expr* value, bool inline_start);

  Expr* make(ExprKind kind, int line, std::vector<Expr*> items = {});

  // Macros around the place that is parsed, for which caller, kwargs and varargs are special once they are read.
  std::vector<Stmt*> macros;
  int loops = 0;      // for loops around the place, within the innermost macro
  int all_loops = 0;  // for loops around it in all

 private:
  // Expressions within expressions; Python gives up at about the same depth.
  static constexpr int kMaxNesting = 300;

  class Nest {
   public:
    explicit Nest(ExpressionParser& parser) : parser_(parser) {
      if (++parser_.nesting_ > kMaxNesting) parser_.stream_.fail("expressions are nested too deeply");
    }
    ~Nest() { --parser_.nesting_; }
    Nest(const Nest&) = delete;
    Nest& operator=(const Nest&) = delete;

   private:
    ExpressionParser& parser_;
  };

  Expr* condition();
  Expr* disjunction();
  Expr* conjunction();
  Expr* negation();
  Expr* comparison();
  Expr* sum();
  Expr* concatenation();
  Expr* product();
  Expr* power();
  Expr* unary(bool with_filter);
  Expr* primary(bool with_namespace);
  Expr* simple_tuple(std::string_view end_name, bool with_namespace);
  Expr* postfix(Expr* value);
  Expr* filters_and_tests(Expr* value);
  Expr* subscript(Expr* value);
  Expr* call(Expr* callee);
  Expr* test(Expr* value);
  void arguments(Expr* into);
  std::string dotted_name();
  void check_target(const Expr* target);
  void note_read(Symbol symbol, std::string_view name);
  Expr* constant(Value value, int line);

  Template& out_;
  TokenStream& stream_;
  int nesting_ = 0;
};

}  // namespace nfp::jinja
