// The tightest-binding expressions: literals, names, attributes, items, calls, filters and tests.
#include <algorithm>

#include "text/jinja/expression_parser.h"
#include "text/jinja/unicode_text.h"

namespace nfp::jinja {

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
