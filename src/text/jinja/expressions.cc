#include <algorithm>
#include <optional>

#include "text/jinja/parser.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace nfp::jinja {
namespace {

constexpr std::pair<std::string_view, Compare> kCompares[] = {{"==", Compare::kEqual},  {"!=", Compare::kNotEqual},
                                                              {"<", Compare::kLess},    {"<=", Compare::kLessEqual},
                                                              {">", Compare::kGreater}, {">=", Compare::kGreaterEqual}};
constexpr std::pair<std::string_view, Binary> kProducts[] = {
    {"*", Binary::kMultiply}, {"/", Binary::kDivide}, {"//", Binary::kFloorDivide}, {"%", Binary::kModulo}};

template <typename T, size_t N>
std::optional<T> find_op(const std::pair<std::string_view, T> (&table)[N], const TokenData& token) {
  for (const auto& [text, op] : table) {
    if (token.kind == Token::kOperator && token.text == text) return op;
  }
  return std::nullopt;
}

std::optional<Value> literal_of(std::string_view name) {
  if (name == "true" || name == "True") return Value::boolean(true);
  if (name == "false" || name == "False") return Value::boolean(false);
  if (name == "none" || name == "None") return Value::none();
  return std::nullopt;
}

}  // namespace

Expr* Parser::make(ExprKind kind, int line, std::vector<Expr*> items) {
  Expr& e = out_.exprs.emplace_back();
  e.kind = kind;
  e.line = line;
  for (const Expr* item : items) {
    if (item != nullptr) e.depth = std::max(e.depth, item->depth + 1);
  }
  // A chain such as a + b + c ... is parsed by a loop, but evaluated by recursion.
  if (e.depth > kMaxNesting) fail("an expression is too long; split it with {% set %}");
  e.items = std::move(items);
  return &e;
}

Expr* Parser::binary(Binary op, int line, Expr* left, Expr* right) {
  Expr* e = make(ExprKind::kBinary, line, {left, right});
  e->binary = op;
  return e;
}

Expr* Parser::constant(Value value, int line) {
  Expr* e = make(ExprKind::kConstant, line);
  e->constant = value;
  return e;
}

void Parser::note_read(Symbol symbol, std::string_view name) {
  out_.read[symbol] = true;
  if (macros_.empty()) return;
  if (name == "varargs" || name == "kwargs" || name == "caller") {
    for (const Stmt::Parameter& parameter : macros_.back()->parameters) {
      if (parameter.name == name) return;
    }
    unsupported("varargs, kwargs and caller of macros are");
  }
}

template <typename Item>
Expr* Parser::tuple_of(const Item& item, std::string_view end_name, bool may_be_empty) {
  const int line = current().line;
  std::vector<Expr*> items;
  bool is_tuple = false;
  for (;;) {
    if (!items.empty()) expect(",");
    if (at(Token::kVariableEnd) || at(Token::kBlockEnd) || at(")") || (!end_name.empty() && at_name(end_name))) {
      break;
    }
    items.push_back(item());
    if (!at(",")) break;
    is_tuple = true;
  }
  if (!is_tuple && !items.empty()) return items[0];
  if (items.empty() && !may_be_empty) fail(fmt::format("Expected an expression, got '{}'", describe(current())));
  return make(ExprKind::kTuple, line, std::move(items));
}

Expr* Parser::tuple(bool with_condition, std::string_view end_name, bool in_parentheses) {
  return tuple_of([&] { return expression(with_condition); }, end_name, in_parentheses);
}

void Parser::check_target(const Expr* target) {
  if (target->kind == ExprKind::kTuple) {
    for (const Expr* item : target->items) check_target(item);
  } else if (target->kind == ExprKind::kName) {
    if (all_loops_ > 0 && target->name == "loop") fail("Can't assign to special loop variable in for-loop target");
  } else if (target->kind != ExprKind::kNamespaceName) {
    fail("can't assign to this expression");
  }
}

Expr* Parser::target(std::string_view end_name, bool with_namespace) {
  Expr* e = tuple_of([&] { return primary(with_namespace); }, end_name, false);
  check_target(e);
  return e;
}

Expr* Parser::name_target() {
  const TokenData& token = expect(Token::kName, "a name");
  if (literal_of(token.text)) fail(fmt::format("can't assign to '{}'", token.text));
  Expr* e = make(ExprKind::kName, token.line);
  e->symbol = out_.intern(token.text);
  e->name = out_.symbol_names[e->symbol];
  check_target(e);
  return e;
}

Expr* Parser::condition() {
  const Nest nest(*this);
  const int line = current().line;
  Expr* value = disjunction();
  while (skip_if_name("if")) {
    Expr* test = disjunction();
    Expr* otherwise = skip_if_name("else") ? condition() : nullptr;
    value = make(ExprKind::kCondition, line, {value, test, otherwise});
  }
  return value;
}

// Parts with a word between them, from the left.
Expr* Parser::chain(std::string_view word, ExprKind kind, Expr* (Parser::*part)()) {
  const int line = current().line;
  Expr* left = (this->*part)();
  while (skip_if_name(word)) {
    Expr* right = (this->*part)();
    left = make(kind, line, {left, right});
  }
  return left;
}
Expr* Parser::disjunction() { return chain("or", ExprKind::kOr, &Parser::conjunction); }
Expr* Parser::conjunction() { return chain("and", ExprKind::kAnd, &Parser::negation); }

Expr* Parser::negation() {
  const Nest nest(*this);
  const int line = current().line;
  if (skip_if_name("not")) return make(ExprKind::kNot, line, {negation()});
  return comparison();
}

Expr* Parser::comparison() {
  const int line = current().line;
  std::vector<Expr*> items = {sum()};
  std::vector<Compare> compares;
  for (;;) {
    std::optional<Compare> op = find_op(kCompares, current());
    if (at_name("in")) op = Compare::kIn;
    if (at_name("not") && look().kind == Token::kName && look().text == "in") {
      take();
      op = Compare::kNotIn;
    }
    if (!op) break;
    take();
    compares.push_back(*op);
    items.push_back(sum());
  }
  if (compares.empty()) return items[0];
  Expr* e = make(ExprKind::kCompare, line, std::move(items));
  e->compares = std::move(compares);
  return e;
}

Expr* Parser::sum() {
  Expr* left = concatenation();
  while (at("+") || at("-")) {
    const TokenData& op = take();
    Expr* right = concatenation();
    left = binary(op.text == "+" ? Binary::kAdd : Binary::kSubtract, op.line, left, right);
  }
  return left;
}

Expr* Parser::concatenation() {
  const int line = current().line;
  std::vector<Expr*> items = {product()};
  while (skip_if("~")) items.push_back(product());
  return items.size() == 1 ? items[0] : make(ExprKind::kConcat, line, std::move(items));
}

Expr* Parser::product() {
  Expr* left = unary(true);
  while (const std::optional<Binary> op = find_op(kProducts, current())) {
    const int line = take().line;
    Expr* right = unary(true);
    left = binary(*op, line, left, right);
  }
  if (at("**")) unsupported("the operator ** is");
  return left;
}

Expr* Parser::unary(bool with_filter) {
  const Nest nest(*this);
  const int line = current().line;
  Expr* e = nullptr;
  if (skip_if("-")) {
    e = make(ExprKind::kNegate, line, {unary(false)});
  } else if (at("+")) {
    unsupported("unary + is");
  } else {
    e = primary(false);
  }
  e = postfix(e);
  return with_filter ? filters_and_tests(e) : e;
}

Expr* Parser::name_or_constant(bool with_namespace) {
  const TokenData& token = take();
  if (const std::optional<Value> literal = literal_of(token.text)) return constant(*literal, token.line);
  size_t pos = 0;
  if (text::is_numeric(text::next_code_point(token.text, pos))) fail("Invalid character in identifier");
  Expr* e = make(ExprKind::kName, token.line);
  e->symbol = out_.intern(token.text);
  e->name = out_.symbol_names[e->symbol];
  if (with_namespace && skip_if(".")) {
    e->kind = ExprKind::kNamespaceName;
    e->name = out_.name_of(expect(Token::kName, "a name").text);
  } else if (!with_namespace) {
    note_read(e->symbol, e->name);
  }
  return e;
}

// What stands in a list or dict literal, with its closing bracket.
std::vector<Expr*> Parser::collection(std::string_view end, bool pairs) {
  take();
  std::vector<Expr*> items;
  while (!at(end)) {
    if (!items.empty()) {
      expect(",");
      if (at(end)) break;
    }
    items.push_back(expression());
    if (pairs) {
      expect(":");
      items.push_back(expression());
    }
  }
  take();
  return items;
}

Expr* Parser::primary(bool with_namespace) {
  const int line = current().line;
  switch (current().kind) {
    case Token::kName:
      return name_or_constant(with_namespace);
    case Token::kString: {
      std::string text = take().text;
      while (at(Token::kString)) text += take().text;
      return constant(out_.constants.string(std::move(text)), line);
    }
    case Token::kInteger:
      return constant(Value::integer(take().integer), line);
    case Token::kFloat:
      return constant(Value::real(take().real), line);
    default:
      break;
  }
  if (at("[")) return make(ExprKind::kList, line, collection("]", false));
  if (at("{")) return make(ExprKind::kDict, line, collection("}", true));
  if (!at("(")) fail(fmt::format("unexpected '{}'", describe(current())));
  const Nest nest(*this);
  take();
  Expr* e = tuple(true, {}, true);
  expect(")");
  return e;
}

Expr* Parser::postfix(Expr* value) {
  for (;;) {
    if (at(".") || at("[")) {
      value = subscript(value);
    } else if (at("(")) {
      value = call(value);
    } else {
      return value;
    }
  }
}

Expr* Parser::filters_and_tests(Expr* value) {
  for (;;) {
    if (at("|")) {
      value = filters(value);
    } else if (at_name("is")) {
      value = test(value);
    } else if (at("(")) {
      value = call(value);
    } else {
      return value;
    }
  }
}

Expr* Parser::subscript(Expr* value) {
  const int line = current().line;
  if (skip_if(".")) {
    const TokenData& token = take();
    if (token.kind == Token::kInteger) {
      return make(ExprKind::kItem, line, {value, constant(Value::integer(token.integer), line)});
    }
    if (token.kind != Token::kName) fail("expected name or number");
    Expr* e = make(ExprKind::kAttribute, line, {value});
    e->name = out_.name_of(token.text);
    return e;
  }
  take();
  Expr* key = at(":") ? nullptr : expression();
  if (at(",")) unsupported("several indices are");
  if (!at(":")) {
    expect("]");
    return make(ExprKind::kItem, line, {value, key});
  }
  std::vector<Expr*> parts = {value, key, nullptr, nullptr};
  for (size_t i = 2; i < 4 && skip_if(":"); ++i) {
    if (!at(":") && !at("]")) parts[i] = expression();
  }
  expect("]");
  return make(ExprKind::kSlice, line, std::move(parts));
}

void Parser::arguments(Expr* into) {
  expect("(");
  for (bool first = true; !at(")"); first = false) {
    if (!first) {
      expect(",");
      if (at(")")) break;
    }
    if (into->items.size() + into->named.size() > kMaxArguments) fail("a call has too many arguments");
    if (at("*") || at("**")) unsupported("arguments with * or ** are");
    const bool named = at(Token::kName) && look().kind == Token::kOperator && look().text == "=";
    if (!named && !into->named.empty()) fail("invalid syntax for function call expression");
    std::string_view name;
    if (named) {
      name = out_.name_of(take().text);
      take();
      for (const auto& [other, ignored] : into->named) {
        if (other == name) fail(fmt::format("keyword argument repeated: {}", name));
      }
    }
    Expr* value = expression();
    into->depth = std::max(into->depth, value->depth + 1);
    if (named) {
      into->named.emplace_back(name, value);
    } else {
      into->items.push_back(value);
    }
  }
  take();
}

Expr* Parser::call(Expr* callee) {
  Expr* e = make(ExprKind::kCall, current().line, {callee});
  arguments(e);
  return e;
}

Expr* Parser::filters(Expr* value) {
  while (skip_if("|")) {
    Expr* e = make(ExprKind::kFilter, current().line, {value});
    e->name = out_.name_of(expect(Token::kName, "a name").text);
    e->filter = find_filter(e->name);
    if (at("(")) arguments(e);
    value = e;
  }
  return value;
}

Expr* Parser::test(Expr* value) {
  const int line = take().line;
  const bool negated = skip_if_name("not");
  Expr* e = make(ExprKind::kTest, line, {value});
  e->name = out_.name_of(expect(Token::kName, "a name").text);
  e->test = find_test(e->name);
  const bool argument_follows = (at(Token::kName) && !at_name("else") && !at_name("or") && !at_name("and")) ||
                                at(Token::kString) || at(Token::kInteger) || at(Token::kFloat) || at("[") || at("{");
  if (at("(")) {
    arguments(e);
  } else if (argument_follows) {
    if (at_name("is")) fail("You cannot chain multiple tests with is");
    Expr* argument = postfix(primary(false));
    e->items.push_back(argument);
    e->depth = std::max(e->depth, argument->depth + 1);
  }
  return negated ? make(ExprKind::kNot, line, {e}) : e;
}

}  // namespace nfp::jinja
