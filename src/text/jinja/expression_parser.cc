#include "text/jinja/expression_parser.h"

#include <algorithm>

namespace nfp::jinja {
namespace {

bool is_end(const TokenStream& stream, std::string_view end_name) {
  return stream.at(Token::kVariableEnd) || stream.at(Token::kBlockEnd) || stream.at(Token::kRParen) ||
         (!end_name.empty() && stream.at_name(end_name));
}

}  // namespace

Expr* ExpressionParser::make(ExprKind kind, int line, std::vector<Expr*> items) {
  Expr& e = out_.exprs.emplace_back();
  e.kind = kind;
  e.line = line;
  for (const Expr* item : items) {
    if (item != nullptr) e.depth = std::max(e.depth, item->depth + 1);
  }
  // A chain such as a + b + c ... is parsed by a loop, but evaluated by recursion.
  if (e.depth > kMaxNesting) stream_.fail("an expression is too long; split it with {% set %}");
  e.items = std::move(items);
  return &e;
}

Expr* ExpressionParser::constant(Value value, int line) {
  Expr* e = make(ExprKind::kConstant, line);
  e->constant = value;
  return e;
}

void ExpressionParser::note_read(Symbol symbol, std::string_view name) {
  out_.read[symbol] = true;
  for (Stmt* macro : macros) {
    macro->uses_caller = macro->uses_caller || name == "caller";
    macro->uses_kwargs = macro->uses_kwargs || name == "kwargs";
    macro->uses_varargs = macro->uses_varargs || name == "varargs";
  }
}

Expr* ExpressionParser::expression(bool with_condition) { return with_condition ? condition() : disjunction(); }

Expr* ExpressionParser::tuple(bool with_condition, std::string_view end_name, bool in_parentheses) {
  const int line = stream_.current().line;
  std::vector<Expr*> items;
  bool is_tuple = false;
  for (;;) {
    if (!items.empty()) stream_.expect(Token::kComma, "','");
    if (is_end(stream_, end_name)) break;
    items.push_back(expression(with_condition));
    if (!stream_.at(Token::kComma)) break;
    is_tuple = true;
  }
  if (!is_tuple) {
    if (!items.empty()) return items[0];
    if (!in_parentheses) stream_.fail(fmt::format("Expected an expression, got '{}'", describe(stream_.current())));
  }
  return make(ExprKind::kTuple, line, std::move(items));
}

Expr* ExpressionParser::simple_tuple(std::string_view end_name, bool with_namespace) {
  const int line = stream_.current().line;
  std::vector<Expr*> items;
  bool is_tuple = false;
  for (;;) {
    if (!items.empty()) stream_.expect(Token::kComma, "','");
    if (is_end(stream_, end_name)) break;
    items.push_back(primary(with_namespace));
    if (!stream_.at(Token::kComma)) break;
    is_tuple = true;
  }
  if (!is_tuple) {
    if (items.empty()) stream_.fail(fmt::format("Expected an expression, got '{}'", describe(stream_.current())));
    return items[0];
  }
  return make(ExprKind::kTuple, line, std::move(items));
}

void ExpressionParser::check_target(const Expr* target) {
  if (target->kind == ExprKind::kTuple) {
    for (const Expr* item : target->items) check_target(item);
  } else if (target->kind == ExprKind::kName) {
    if (all_loops > 0 && out_.symbol_names[target->symbol] == "loop") {
      stream_.fail("Can't assign to special loop variable in for-loop target");
    }
  } else if (target->kind != ExprKind::kNamespaceName) {
    stream_.fail("can't assign to this expression");
  }
}

Expr* ExpressionParser::target(std::string_view end_name, bool with_namespace) {
  Expr* e = simple_tuple(end_name, with_namespace);
  check_target(e);
  return e;
}

Expr* ExpressionParser::name_target() {
  const TokenData& token = stream_.expect(Token::kName, "a name");
  Expr* e = make(ExprKind::kName, token.line);
  if (token.text == "true" || token.text == "false" || token.text == "none" || token.text == "True" ||
      token.text == "False" || token.text == "None") {
    stream_.fail(fmt::format("can't assign to '{}'", token.text));
  }
  e->symbol = out_.intern(token.text);
  e->name = out_.symbol_names[e->symbol];
  check_target(e);
  return e;
}

Expr* ExpressionParser::condition() {
  const Nest nest(*this);
  const int line = stream_.current().line;
  Expr* value = disjunction();
  while (stream_.skip_if_name("if")) {
    Expr* test = disjunction();
    Expr* otherwise = stream_.skip_if_name("else") ? condition() : nullptr;
    value = make(ExprKind::kCondition, line, {value, test, otherwise});
  }
  return value;
}

Expr* ExpressionParser::disjunction() {
  const int line = stream_.current().line;
  Expr* left = conjunction();
  while (stream_.skip_if_name("or")) {
    Expr* right = conjunction();
    left = make(ExprKind::kOr, line, {left, right});
  }
  return left;
}

Expr* ExpressionParser::conjunction() {
  const int line = stream_.current().line;
  Expr* left = negation();
  while (stream_.skip_if_name("and")) {
    Expr* right = negation();
    left = make(ExprKind::kAnd, line, {left, right});
  }
  return left;
}

Expr* ExpressionParser::negation() {
  const Nest nest(*this);
  const int line = stream_.current().line;
  if (stream_.skip_if_name("not")) return make(ExprKind::kNot, line, {negation()});
  return comparison();
}

Expr* ExpressionParser::comparison() {
  const int line = stream_.current().line;
  std::vector<Expr*> items = {sum()};
  std::vector<Compare> compares;
  for (;;) {
    Compare compare = Compare::kEqual;
    if (stream_.skip_if(Token::kEq)) {
      compare = Compare::kEqual;
    } else if (stream_.skip_if(Token::kNe)) {
      compare = Compare::kNotEqual;
    } else if (stream_.skip_if(Token::kLt)) {
      compare = Compare::kLess;
    } else if (stream_.skip_if(Token::kLe)) {
      compare = Compare::kLessEqual;
    } else if (stream_.skip_if(Token::kGt)) {
      compare = Compare::kGreater;
    } else if (stream_.skip_if(Token::kGe)) {
      compare = Compare::kGreaterEqual;
    } else if (stream_.skip_if_name("in")) {
      compare = Compare::kIn;
    } else if (stream_.at_name("not") && stream_.look().kind == Token::kName && stream_.look().text == "in") {
      stream_.take();
      stream_.take();
      compare = Compare::kNotIn;
    } else {
      break;
    }
    compares.push_back(compare);
    items.push_back(sum());
  }
  if (compares.empty()) return items[0];
  Expr* e = make(ExprKind::kCompare, line, std::move(items));
  e->compares = std::move(compares);
  return e;
}

Expr* ExpressionParser::sum() {
  Expr* left = concatenation();
  while (stream_.at(Token::kAdd) || stream_.at(Token::kSub)) {
    const TokenData& op = stream_.take();
    const Binary binary = op.kind == Token::kAdd ? Binary::kAdd : Binary::kSubtract;
    const int line = op.line;
    Expr* right = concatenation();
    left = make(ExprKind::kBinary, line, {left, right});
    left->binary = binary;
  }
  return left;
}

Expr* ExpressionParser::concatenation() {
  const int line = stream_.current().line;
  std::vector<Expr*> items = {product()};
  while (stream_.skip_if(Token::kTilde)) items.push_back(product());
  return items.size() == 1 ? items[0] : make(ExprKind::kConcat, line, std::move(items));
}

Expr* ExpressionParser::product() {
  Expr* left = power();
  for (;;) {
    Binary binary = Binary::kMultiply;
    switch (stream_.current().kind) {
      case Token::kMul:
        binary = Binary::kMultiply;
        break;
      case Token::kDiv:
        binary = Binary::kDivide;
        break;
      case Token::kFloorDiv:
        binary = Binary::kFloorDivide;
        break;
      case Token::kMod:
        binary = Binary::kModulo;
        break;
      default:
        return left;
    }
    const int line = stream_.take().line;
    Expr* right = power();
    left = make(ExprKind::kBinary, line, {left, right});
    left->binary = binary;
  }
}

Expr* ExpressionParser::power() {
  Expr* left = unary(true);
  while (stream_.at(Token::kPow)) {
    const int line = stream_.take().line;
    Expr* right = unary(true);
    left = make(ExprKind::kBinary, line, {left, right});
    left->binary = Binary::kPower;
  }
  return left;
}

Expr* ExpressionParser::unary(bool with_filter) {
  const Nest nest(*this);
  const int line = stream_.current().line;
  Expr* e = nullptr;
  if (stream_.skip_if(Token::kSub)) {
    e = make(ExprKind::kNegate, line, {unary(false)});
  } else if (stream_.skip_if(Token::kAdd)) {
    e = make(ExprKind::kPlus, line, {unary(false)});
  } else {
    e = primary(false);
  }
  e = postfix(e);
  return with_filter ? filters_and_tests(e) : e;
}

}  // namespace nfp::jinja
