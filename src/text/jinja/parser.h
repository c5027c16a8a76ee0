// From tokens to a tree: statements (parser.cc) and jinja2's expressions (expressions.cc), from loosest to tightest
// binding: a if b else c; or; and; not; comparisons, in; + -; ~; * / // %; unary + -; calls, attributes and items;
// filters and tests.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/ast.h"
#include "text/jinja/lexer.h"

namespace nfp::jinja {

class Parser {
 public:
  Parser(Template& out, std::vector<TokenData> tokens) : out_(out), tokens_(std::move(tokens)) {}
  void run();

 private:
  // Expressions within expressions; Python gives up at about the same depth.
  static constexpr int kMaxNesting = 300;
  static constexpr size_t kMaxArguments = 255;

  class Nest {
   public:
    explicit Nest(Parser& parser) : parser_(parser) {
      if (++parser_.nesting_ > kMaxNesting) parser_.fail("expressions are nested too deeply");
    }
    ~Nest() { --parser_.nesting_; }
    Nest(const Nest&) = delete;
    Nest& operator=(const Nest&) = delete;

   private:
    Parser& parser_;
  };

  // --- Tokens
  const TokenData& current() const { return tokens_[at_]; }
  const TokenData& look() const { return tokens_[at_ + 1 < tokens_.size() ? at_ + 1 : at_]; }
  bool at(Token kind) const { return current().kind == kind; }
  bool at(std::string_view op) const { return at(Token::kOperator) && current().text == op; }
  bool at_name(std::string_view name) const { return at(Token::kName) && current().text == name; }
  // The current token, stepping behind it; the last one stays.
  const TokenData& take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool skip_if(std::string_view op) {
    if (!at(op)) return false;
    take();
    return true;
  }
  bool skip_if_name(std::string_view name) {
    if (!at_name(name)) return false;
    take();
    return true;
  }
  const TokenData& expect(Token kind, std::string_view what);
  void expect(std::string_view op);
  [[noreturn]] void fail(std::string message) const;
  [[noreturn]] void unsupported(std::string_view what) const;

  // --- Statements (parser.cc)
  Stmt* make(StmtKind kind, int line);
  std::vector<Stmt*> statements(std::initializer_list<std::string_view> ends);
  std::vector<Stmt*> body(std::initializer_list<std::string_view> ends);
  std::vector<Stmt*> body_to(std::string_view end);
  std::vector<Stmt*> function_body(Stmt* s, std::string_view end);
  Stmt* statement();
  Stmt* parse_if(int line);
  Stmt* parse_for(int line);
  Stmt* parse_set(int line);
  Stmt* parse_macro(int line);
  Stmt* parse_generation(int line);
  void parse_parameters(Stmt* s);

  // --- Expressions (expressions.cc)
  Expr* make(ExprKind kind, int line, std::vector<Expr*> items = {});
  Expr* binary(Binary op, int line, Expr* left, Expr* right);
  Expr* constant(Value value, int line);
  Expr* expression(bool with_condition = true) { return with_condition ? condition() : disjunction(); }
  // Comma-separated expressions make a tuple. `end_name` is a name that ends it, as `in` does a for's targets.
  Expr* tuple(bool with_condition = true, std::string_view end_name = {}, bool in_parentheses = false);
  template <typename Item>
  Expr* tuple_of(const Item& item, std::string_view end_name, bool may_be_empty);
  // What can be assigned to: a name, a tuple of targets, or (in a set) an attribute of a namespace.
  Expr* target(std::string_view end_name, bool with_namespace);
  Expr* name_target();
  Expr* filters(Expr* value);  // those behind `|`; `value` where there are none
  Expr* condition();
  Expr* disjunction();
  Expr* conjunction();
  Expr* negation();
  Expr* comparison();
  Expr* sum();
  Expr* concatenation();
  Expr* product();
  Expr* chain(std::string_view word, ExprKind kind, Expr* (Parser::*part)());
  Expr* unary(bool with_filter);
  Expr* primary(bool with_namespace);
  Expr* name_or_constant(bool with_namespace);
  std::vector<Expr*> collection(std::string_view end, bool pairs);
  Expr* postfix(Expr* value);
  Expr* filters_and_tests(Expr* value);
  Expr* subscript(Expr* value);
  Expr* call(Expr* callee);
  Expr* test(Expr* value);
  void arguments(Expr* into);
  void check_target(const Expr* target);
  void note_read(Symbol symbol, std::string_view name);

  Template& out_;
  const std::vector<TokenData> tokens_;
  size_t at_ = 0;
  int nesting_ = 0;            // expressions around the place
  int blocks_ = 0;             // block tags around it
  int loops_ = 0;              // for loops around it, within the innermost macro
  int all_loops_ = 0;          // for loops around it in all
  std::vector<Stmt*> macros_;  // around it
};

}  // namespace nfp::jinja
