#include "text/jinja/expression_parser.h"

#include <algorithm>

#include "text/jinja/unicode_text.h"

namespace nfp::jinja {
namespace {

// Expressions within expressions; Python gives up at about the same depth.
constexpr int kMaxNesting = 300;

bool is_end(const TokenStream& stream, std::string_view end_name) {
  return stream.at(Token::kVariableEnd) || stream.at(Token::kBlockEnd) || stream.at(Token::kRParen) ||
         (!end_name.empty() && stream.at_name(end_name));
}

}  // namespace

class ExpressionParser::Nest {
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

Expr* ExpressionParser::primary(bool with_namespace) {
  const TokenData& token = stream_.current();
  const int line = token.line;
  switch (token.kind) {
    case Token::kName: {
      stream_.take();
      if (token.text == "true" || token.text == "True") return constant(Value::boolean(true), line);
      if (token.text == "false" || token.text == "False") return constant(Value::boolean(false), line);
      if (token.text == "none" || token.text == "None") return constant(Value::none(), line);
      size_t pos = 0;
      if (unicode::is_numeric(unicode::next(token.text, pos))) stream_.fail("Invalid character in identifier");
      Expr* e = make(ExprKind::kName, line);
      e->symbol = out_.intern(token.text);
      e->name = out_.symbol_names[e->symbol];
      if (with_namespace && stream_.skip_if(Token::kDot)) {
        e->kind = ExprKind::kNamespaceName;
        e->name = out_.symbol_names[out_.intern(stream_.expect(Token::kName, "a name").text)];
      } else if (!with_namespace) {
        note_read(e->symbol, e->name);
      }
      return e;
    }
    case Token::kString: {
      std::string text = stream_.take().text;
      while (stream_.at(Token::kString)) text += stream_.take().text;
      return constant(Value::string(out_.constants.string(std::move(text))), line);
    }
    case Token::kInteger:
      return constant(Value::integer(stream_.take().integer), line);
    case Token::kFloat:
      return constant(Value::real(stream_.take().real), line);
    case Token::kLParen: {
      const Nest nest(*this);
      stream_.take();
      Expr* e = tuple(true, {}, true);
      stream_.expect(Token::kRParen, "')'");
      return e;
    }
    case Token::kLBracket: {
      stream_.take();
      std::vector<Expr*> items;
      while (!stream_.at(Token::kRBracket)) {
        if (!items.empty()) {
          stream_.expect(Token::kComma, "','");
          if (stream_.at(Token::kRBracket)) break;
        }
        items.push_back(expression());
      }
      stream_.expect(Token::kRBracket, "']'");
      return make(ExprKind::kList, line, std::move(items));
    }
    case Token::kLBrace: {
      stream_.take();
      std::vector<Expr*> items;
      while (!stream_.at(Token::kRBrace)) {
        if (!items.empty()) {
          stream_.expect(Token::kComma, "','");
          if (stream_.at(Token::kRBrace)) break;
        }
        items.push_back(expression());
        stream_.expect(Token::kColon, "':'");
        items.push_back(expression());
      }
      stream_.expect(Token::kRBrace, "'}'");
      return make(ExprKind::kDict, line, std::move(items));
    }
    default:
      stream_.fail(fmt::format("unexpected '{}'", describe(token)));
  }
}

Expr* ExpressionParser::postfix(Expr* value) {
  for (;;) {
    if (stream_.at(Token::kDot) || stream_.at(Token::kLBracket)) {
      value = subscript(value);
    } else if (stream_.at(Token::kLParen)) {
      value = call(value);
    } else {
      return value;
    }
  }
}

Expr* ExpressionParser::filters_and_tests(Expr* value) {
  for (;;) {
    if (stream_.at(Token::kPipe)) {
      value = filters(value, false);
    } else if (stream_.at_name("is")) {
      value = test(value);
    } else if (stream_.at(Token::kLParen)) {
      value = call(value);
    } else {
      return value;
    }
  }
}

Expr* ExpressionParser::subscript(Expr* value) {
  const int line = stream_.current().line;
  if (stream_.skip_if(Token::kDot)) {
    const TokenData& token = stream_.take();
    if (token.kind == Token::kName) {
      Expr* e = make(ExprKind::kAttribute, line, {value});
      e->name = out_.symbol_names[out_.intern(token.text)];
      return e;
    }
    if (token.kind != Token::kInteger) stream_.fail("expected name or number");
    return make(ExprKind::kItem, line, {value, constant(Value::integer(token.integer), token.line)});
  }
  stream_.expect(Token::kLBracket, "'['");
  std::vector<Expr*> keys;
  bool is_slice = false;
  while (!stream_.at(Token::kRBracket)) {
    if (!keys.empty()) stream_.expect(Token::kComma, "','");
    if (is_slice) stream_.fail("a slice cannot be one of several indices");
    Expr* start = stream_.at(Token::kColon) ? nullptr : expression();
    if (!stream_.at(Token::kColon)) {
      keys.push_back(start);
      continue;
    }
    if (!keys.empty()) stream_.fail("a slice cannot be one of several indices");
    is_slice = true;
    stream_.take();
    const auto part = [&]() -> Expr* {
      return stream_.at(Token::kColon) || stream_.at(Token::kRBracket) || stream_.at(Token::kComma) ? nullptr
                                                                                                    : expression();
    };
    Expr* stop = part();
    Expr* step = stream_.skip_if(Token::kColon) ? part() : nullptr;
    keys = {value, start, stop, step};
  }
  stream_.expect(Token::kRBracket, "']'");
  if (is_slice) return make(ExprKind::kSlice, line, std::move(keys));
  Expr* key = keys.size() == 1 ? keys[0] : make(ExprKind::kTuple, line, std::move(keys));
  return make(ExprKind::kItem, line, {value, key});
}

void ExpressionParser::arguments(Expr* into) {
  stream_.expect(Token::kLParen, "'('");
  const auto require = [this](bool condition) {
    if (!condition) stream_.fail("invalid syntax for function call expression");
  };
  bool first = true;
  while (!stream_.at(Token::kRParen)) {
    if (!first) {
      stream_.expect(Token::kComma, "','");
      if (stream_.at(Token::kRParen)) break;
    }
    first = false;
    Expr* value = nullptr;
    if (stream_.skip_if(Token::kMul)) {
      require(into->star == nullptr && into->double_star == nullptr);
      value = into->star = expression();
    } else if (stream_.skip_if(Token::kPow)) {
      require(into->double_star == nullptr);
      value = into->double_star = expression();
    } else if (stream_.at(Token::kName) && stream_.look().kind == Token::kAssign) {
      require(into->double_star == nullptr);
      const std::string_view name = out_.symbol_names[out_.intern(stream_.take().text)];
      stream_.take();
      value = expression();
      for (const auto& [other, ignored] : into->named) {
        if (other == name) stream_.fail(fmt::format("keyword argument repeated: {}", name));
      }
      into->named.emplace_back(name, value);
    } else {
      require(into->star == nullptr && into->double_star == nullptr && into->named.empty());
      value = expression();
      into->items.push_back(value);
    }
    into->depth = std::max(into->depth, value->depth + 1);
  }
  stream_.expect(Token::kRParen, "')'");
}

Expr* ExpressionParser::call(Expr* callee) {
  Expr* e = make(ExprKind::kCall, stream_.current().line, {callee});
  arguments(e);
  return e;
}

std::string ExpressionParser::dotted_name() {
  std::string name = stream_.expect(Token::kName, "a name").text;
  while (stream_.skip_if(Token::kDot)) name += "." + stream_.expect(Token::kName, "a name").text;
  return name;
}

Expr* ExpressionParser::filters(Expr* value, bool inline_start) {
  while (inline_start || stream_.at(Token::kPipe)) {
    if (!inline_start) stream_.take();
    inline_start = false;
    Expr* e = make(ExprKind::kFilter, stream_.current().line, {value});
    const std::string name = dotted_name();
    e->name = out_.symbol_names[out_.intern(name)];
    e->filter = find_filter(name);
    if (stream_.at(Token::kLParen)) arguments(e);
    value = e;
  }
  return value;
}

Expr* ExpressionParser::test(Expr* value) {
  const int line = stream_.take().line;
  const bool negated = stream_.skip_if_name("not");
  Expr* e = make(ExprKind::kTest, line, {value});
  const std::string name = dotted_name();
  e->name = out_.symbol_names[out_.intern(name)];
  e->test = find_test(name);
  if (stream_.at(Token::kLParen)) {
    arguments(e);
  } else if ((stream_.at(Token::kName) && !stream_.at_name("else") && !stream_.at_name("or") &&
              !stream_.at_name("and")) ||
             stream_.at(Token::kString) || stream_.at(Token::kInteger) || stream_.at(Token::kFloat) ||
             stream_.at(Token::kLBracket) || stream_.at(Token::kLBrace)) {
    if (stream_.at_name("is")) stream_.fail("You cannot chain multiple tests with is");
    Expr* argument = postfix(primary(false));
    e->items.push_back(argument);
    e->depth = std::max(e->depth, argument->depth + 1);
  }
  return negated ? make(ExprKind::kNot, line, {e}) : e;
}

}  // namespace nfp::jinja
