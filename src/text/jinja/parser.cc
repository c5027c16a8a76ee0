// From tokens to a tree. jinja2's expressions, from loosest to tightest binding: a if b else c; or; and; not;
// comparisons, in; + -; ~; * / // %; **, from the left; unary - and +; calls, attributes and items; filters and tests.
#include "text/jinja/parser.h"

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <span>

#include "text/jinja/lexer.h"
#include "text/jinja/scopes.h"
#include "text/utf8.h"

namespace nfp::jinja {
namespace {

constexpr size_t kMaxSourceBytes = 1u << 20;
constexpr int kMaxBlockNesting = 100;
constexpr int kMaxNesting = 300;  // expressions within expressions; Python gives up at about the same depth
constexpr size_t kMaxArguments = 255;

std::optional<Value> literal_of(std::string_view name) {
  if (name == "true" || name == "True") return Value::boolean(true);
  if (name == "false" || name == "False") return Value::boolean(false);
  if (name == "none" || name == "None") return Value::none();
  return std::nullopt;
}

class Parser {
 public:
  Parser(Template& out, std::vector<TokenData> tokens) : out_(out), tokens_(std::move(tokens)) {}

  void run() {
    out_.body = statements({});
    if (!at(Token::kEnd)) fail(fmt::format("unexpected '{}'", here()));
  }

 private:
  // One level of expressions within expressions, while what it returns lives.
  [[nodiscard]] Restore<int> nest() {
    if (nesting_ >= kMaxNesting) fail("expressions are nested too deeply");
    return Restore<int>(nesting_, nesting_ + 1);
  }

  // --- Tokens

  const TokenData& current() const { return tokens_[at_]; }
  const TokenData& look() const { return tokens_[at_ + 1 < tokens_.size() ? at_ + 1 : at_]; }
  bool at(Token kind) const { return current().kind == kind; }
  bool at(std::string_view op) const { return at(Token::kOperator) && current().text == op; }
  bool at_name(std::string_view name) const { return at(Token::kName) && current().text == name; }
  // Which of these operators the current token is.
  template <typename Op>
  std::optional<Op> operator_of(std::span<const std::string_view> symbols, Op first) const {
    const auto it = std::find(symbols.begin(), symbols.end(), current().text);
    if (it == symbols.end() || !(at(Token::kOperator) || at(Token::kName))) return std::nullopt;
    return static_cast<Op>(static_cast<size_t>(first) + static_cast<size_t>(it - symbols.begin()));
  }
  // The current token, stepping behind it; the last one stays.
  const TokenData& take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool skip_if(std::string_view op) { return at(op) && (take(), true); }
  bool skip_if_name(std::string_view name) { return at_name(name) && (take(), true); }
  std::string here() const { return current().text.substr(0, 50); }
  [[noreturn]] void fail(std::string message) const {
    throw Failure{ErrorCode::kInvalidInput, std::move(message), current().line};
  }
  [[noreturn]] void unsupported(std::string_view what) const {
    fail(fmt::format("{} not supported in chat templates", what));
  }
  const TokenData& expect(Token kind, std::string_view what) {
    if (!at(kind)) fail(fmt::format("expected {}, got '{}'", what, here()));
    return take();
  }
  void expect(std::string_view op) {
    if (!skip_if(op)) fail(fmt::format("expected '{}', got '{}'", op, here()));
  }

  // --- Statements

  Stmt* make(StmtKind kind, int line) {
    Stmt& s = out_.stmts.emplace_back();
    s.kind = kind;
    s.line = line;
    return &s;
  }

  // Statements up to one of the tags in `ends`, which stays current (its "{%" is taken); at the top, up to the end.
  std::vector<Stmt*> statements(std::initializer_list<std::string_view> ends) {
    if (++blocks_ > kMaxBlockNesting) fail("blocks are nested too deeply");
    std::vector<Stmt*> body;
    while (!at(Token::kEnd) || ends.size() != 0) {
      const int line = current().line;
      if (at(Token::kText)) {
        body.push_back(make(StmtKind::kText, line));
        body.back()->text = take().text;
      } else if (at(Token::kVariableBegin)) {
        take();
        body.push_back(make(StmtKind::kPrint, line));
        body.back()->expr = tuple();
        expect(Token::kVariableEnd, "'}}'");
      } else if (at(Token::kBlockBegin)) {
        take();
        if (at(Token::kName) && std::find(ends.begin(), ends.end(), current().text) != ends.end()) break;
        body.push_back(statement());
        expect(Token::kBlockEnd, "'%}'");
      } else if (at(Token::kEnd)) {
        fail(fmt::format("unexpected end of the template: '{}' is missing", *(ends.end() - 1)));
      } else {
        fail(fmt::format("unexpected '{}'", here()));
      }
    }
    --blocks_;
    return body;
  }

  // The body of a block tag: from behind its head to `ends`.
  std::vector<Stmt*> body(std::initializer_list<std::string_view> ends) {
    skip_if(":");
    expect(Token::kBlockEnd, "'%}'");
    return statements(ends);
  }
  std::vector<Stmt*> body_to(std::string_view end) {
    std::vector<Stmt*> result = body({end});
    take();
    return result;
  }
  // A body that runs as a function of its own: no break out of it.
  std::vector<Stmt*> function_body(std::string_view end) {
    const Restore<int> loops(loops_, 0);
    return body_to(end);
  }
  void macro_body(Stmt* s, std::string_view end) {
    const Stmt::Extras outside = std::exchange(reads_, {});
    s->body = function_body(end);
    s->reads = reads_;
    reads_.caller |= outside.caller;
    reads_.varargs |= outside.varargs;
    reads_.kwargs |= outside.kwargs;
  }

  Stmt* statement() {
    const TokenData& tag = expect(Token::kName, "a tag name");
    const int line = tag.line;
    if (tag.text == "if") return parse_if(line);
    if (tag.text == "for") return parse_for(line);
    if (tag.text == "set") return parse_set(line);
    if (tag.text == "macro") return parse_macro(line);
    if (tag.text == "call") return parse_call(line);
    if (tag.text == "filter") return parse_filter(line);
    if (tag.text == "with") return parse_with(line);
    if (tag.text == "generation") {
      Stmt* s = make(StmtKind::kGeneration, line);
      macro_body(s, "endgeneration");
      return s;
    }
    if (tag.text == "break" || tag.text == "continue") {
      if (loops_ == 0) fail(fmt::format("'{}' outside loop", tag.text));
      return make(tag.text == "break" ? StmtKind::kBreak : StmtKind::kContinue, line);
    }
    for (const std::string_view other :
         {"include", "import", "from", "extends", "block", "autoescape", "print", "do", "trans", "debug"}) {
      if (tag.text == other) unsupported(fmt::format("the tag '{}' is", other));
    }
    fail(fmt::format("Encountered unknown tag '{}'.", tag.text));
  }

  Stmt* parse_if(int line) {
    Stmt* s = make(StmtKind::kIf, line);
    for (;;) {
      Stmt::Branch branch;
      branch.condition = tuple(false);
      branch.body = body({"elif", "else", "endif"});
      s->branches.push_back(std::move(branch));
      const std::string& tag = take().text;
      if (tag == "elif") continue;
      if (tag == "else") s->other = body_to("endif");
      return s;
    }
  }

  Stmt* parse_for(int line) {
    Stmt* s = make(StmtKind::kFor, line);
    s->target = target("in", false);
    if (!skip_if_name("in")) fail("expected 'in'");
    s->expr = tuple(false, "recursive");
    if (skip_if_name("if")) s->condition = expression();
    s->recursive = skip_if_name("recursive");
    ++loops_;
    s->body = body({"else", "endfor"});
    --loops_;
    if (take().text == "else") s->other = body_to("endfor");
    return s;
  }

  Stmt* parse_set(int line) {
    Expr* assigned = target({}, true);
    Stmt* s = make(at("=") ? StmtKind::kSet : StmtKind::kSetBlock, line);
    s->target = assigned;
    if (skip_if("=")) {
      s->expr = tuple();
    } else {
      s->expr = filters(nullptr);
      s->body = body_to("endset");
    }
    return s;
  }

  Stmt* parse_filter(int line) {
    Stmt* s = make(StmtKind::kFilter, line);
    s->expr = filters(filter(nullptr));
    s->body = body_to("endfilter");
    return s;
  }

  Stmt* parse_with(int line) {
    Stmt* s = make(StmtKind::kWith, line);
    std::vector<Expr*> targets, values;
    while (!at(Token::kBlockEnd)) {
      if (!targets.empty()) expect(",");
      targets.push_back(target({}, false));
      expect("=");
      values.push_back(expression());
    }
    s->target = make(ExprKind::kTuple, line, std::move(targets));
    s->expr = make(ExprKind::kTuple, line, std::move(values));
    s->body = body_to("endwith");
    return s;
  }

  Stmt* parse_macro(int line) {
    Stmt* s = make(StmtKind::kMacro, line);
    const Expr* name = name_target();
    s->symbol = name->symbol;
    s->name = name->name;
    signature(s);
    macro_body(s, "endmacro");
    settle_extras(s);
    return s;
  }

  Stmt* parse_call(int line) {
    Stmt* s = make(StmtKind::kCallBlock, line);
    s->name = "caller";
    if (at("(")) signature(s);
    s->expr = expression();
    if (s->expr->kind != ExprKind::kCall) fail("expected call");
    macro_body(s, "endcall");
    settle_extras(s);
    return s;
  }

  void signature(Stmt* s) {
    expect("(");
    while (!at(")")) {
      if (!s->parameters.empty()) expect(",");
      if (s->parameters.size() == kMaxArguments) fail("a macro has too many parameters");
      s->parameters.push_back(parameter(*s));
    }
    take();
  }

  // A parameter of such a name is an argument like others.
  void settle_extras(Stmt* macro) {
    for (const Stmt::Parameter& parameter : macro->parameters) {
      if (parameter.name == "varargs") macro->reads.varargs = false;
      if (parameter.name == "kwargs") macro->reads.kwargs = false;
      if (!macro->reads.caller || parameter.name != "caller") continue;
      if (parameter.default_value == nullptr) fail("the argument 'caller' of a macro must be given a default");
      macro->reads.caller = false;
    }
  }

  Stmt::Parameter parameter(const Stmt& macro) {
    const Expr* name = name_target();
    Stmt::Parameter result{name->symbol, name->name};
    for (const Stmt::Parameter& other : macro.parameters) {
      if (other.symbol == result.symbol) fail(fmt::format("duplicate argument '{}'", result.name));
    }
    if (skip_if("=")) {
      result.default_value = expression();
    } else if (!macro.parameters.empty() && macro.parameters.back().default_value != nullptr) {
      fail("non-default argument follows default argument");
    }
    return result;
  }

  // --- Expressions

  Expr* make(ExprKind kind, int line, std::vector<Expr*> items = {}) {
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
  Expr* constant(Value value, int line) {
    Expr* e = make(ExprKind::kConstant, line);
    e->constant = value;
    return e;
  }
  Expr* name(const TokenData& token) {
    Expr* e = make(ExprKind::kName, token.line);
    e->symbol = out_.intern(token.text);
    e->name = out_.symbol_names[e->symbol];
    return e;
  }

  void note_read(const Expr& variable) {
    out_.read[variable.symbol] = true;
    if (variable.name == "caller") reads_.caller = true;
    if (variable.name == "varargs") reads_.varargs = true;
    if (variable.name == "kwargs") reads_.kwargs = true;
  }

  // Comma-separated items make a tuple. `end_name` is a name that ends it, as `in` does a for's targets.
  template <typename Item>
  Expr* tuple_of(const Item& item, std::string_view end_name, bool may_be_empty) {
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
    if (items.empty() && !may_be_empty) fail(fmt::format("Expected an expression, got '{}'", here()));
    return make(ExprKind::kTuple, line, std::move(items));
  }
  Expr* tuple(bool with_condition = true, std::string_view end_name = {}, bool in_parentheses = false) {
    return tuple_of([&] { return with_condition ? expression() : disjunction(); }, end_name, in_parentheses);
  }

  void check_target(const Expr* target) {
    if (target->kind == ExprKind::kTuple) {
      for (const Expr* item : target->items) check_target(item);
    } else if (target->kind == ExprKind::kName) {
      if (target->name == "loop") unsupported("assigning to 'loop' is");
    } else if (target->kind != ExprKind::kNamespaceName) {
      fail("can't assign to this expression");
    }
  }
  // What can be assigned to: a name, a tuple of targets, or (in a set) an attribute of a namespace.
  Expr* target(std::string_view end_name, bool with_namespace) {
    Expr* e = tuple_of([&] { return primary(with_namespace); }, end_name, false);
    check_target(e);
    return e;
  }
  Expr* name_target() {
    const TokenData& token = expect(Token::kName, "a name");
    if (literal_of(token.text)) fail(fmt::format("can't assign to '{}'", token.text));
    Expr* e = name(token);
    check_target(e);
    return e;
  }

  Expr* expression() {
    const auto nesting = nest();
    const int line = current().line;
    Expr* value = disjunction();
    while (skip_if_name("if")) {
      Expr* test = disjunction();
      Expr* otherwise = skip_if_name("else") ? expression() : nullptr;
      value = make(ExprKind::kCondition, line, {value, test, otherwise});
    }
    return value;
  }

  // Parts with a word between them, from the left.
  Expr* chain(std::string_view word, ExprKind kind, Expr* (Parser::*part)()) {
    const int line = current().line;
    Expr* left = (this->*part)();
    while (skip_if_name(word)) {
      Expr* right = (this->*part)();
      left = make(kind, line, {left, right});
    }
    return left;
  }
  Expr* disjunction() { return chain("or", ExprKind::kOr, &Parser::conjunction); }
  Expr* conjunction() { return chain("and", ExprKind::kAnd, &Parser::negation); }

  Expr* negation() {
    const auto nesting = nest();
    const int line = current().line;
    if (skip_if_name("not")) return make(ExprKind::kNot, line, {negation()});
    return comparison();
  }

  Expr* comparison() {
    const int line = current().line;
    std::vector<Expr*> items = {sum()};
    std::vector<Compare> compares;
    while (const std::optional<Compare> op = operator_of(kCompareSymbols, Compare::kEqual)) {
      if (*op == Compare::kNotIn) {
        if (look().kind != Token::kName || look().text != "in") break;
        take();
      }
      take();
      compares.push_back(*op);
      items.push_back(sum());
    }
    if (compares.empty()) return items[0];
    Expr* e = make(ExprKind::kCompare, line, std::move(items));
    e->compares = std::move(compares);
    return e;
  }

  // Parts with operators from `first` to `last` between them, from the left.
  Expr* arithmetic(Binary first, Binary last, Expr* (Parser::*part)()) {
    const auto from = static_cast<size_t>(first), to = static_cast<size_t>(last) + 1;
    const auto symbols = std::span(kBinarySymbols).subspan(from, to - from);
    Expr* left = (this->*part)();
    while (const std::optional<Binary> op = operator_of(symbols, first)) {
      const int line = take().line;
      Expr* right = (this->*part)();
      left = make(ExprKind::kBinary, line, {left, right});
      left->binary = *op;
    }
    return left;
  }
  Expr* sum() { return arithmetic(Binary::kAdd, Binary::kSubtract, &Parser::concatenation); }
  Expr* product() { return arithmetic(Binary::kMultiply, Binary::kModulo, &Parser::factor); }

  Expr* concatenation() {
    const int line = current().line;
    std::vector<Expr*> items = {product()};
    while (skip_if("~")) items.push_back(product());
    return items.size() == 1 ? items[0] : make(ExprKind::kConcat, line, std::move(items));
  }

  Expr* factor() { return arithmetic(Binary::kPower, Binary::kPower, &Parser::operand); }
  Expr* operand() { return filters_and_tests(unary()); }

  Expr* unary() {
    const auto nesting = nest();
    const int line = current().line;
    // The number as it is, and no other value: it is negated twice.
    if (skip_if("+")) return postfix(make(ExprKind::kNegate, line, {make(ExprKind::kNegate, line, {unary()})}));
    return postfix(skip_if("-") ? make(ExprKind::kNegate, line, {unary()}) : primary(false));
  }

  Expr* name_or_constant(bool with_namespace) {
    const TokenData& token = take();
    if (const std::optional<Value> literal = literal_of(token.text)) return constant(*literal, token.line);
    Expr* e = name(token);
    if (with_namespace && skip_if(".")) {
      e->kind = ExprKind::kNamespaceName;
      e->name = out_.name_of(expect(Token::kName, "a name").text);
    } else if (!with_namespace) {
      note_read(*e);
    }
    return e;
  }

  // What stands in a list or dict literal, with its brackets.
  std::vector<Expr*> collection(std::string_view end, bool pairs) {
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

  Expr* primary(bool with_namespace) {
    const int line = current().line;
    if (at(Token::kName)) return name_or_constant(with_namespace);
    if (at(Token::kInteger)) return constant(Value::integer(take().integer), line);
    if (at(Token::kFloat)) return constant(Value::real(take().real), line);
    if (at(Token::kString)) {
      std::string text = take().text;
      while (at(Token::kString)) text += take().text;
      return constant(out_.constants.string(std::move(text)), line);
    }
    if (at("[")) return make(ExprKind::kList, line, collection("]", false));
    if (at("{")) return make(ExprKind::kDict, line, collection("}", true));
    if (!at("(")) fail(fmt::format("unexpected '{}'", here()));
    const auto nesting = nest();
    take();
    Expr* e = tuple(true, {}, true);
    expect(")");
    return e;
  }

  Expr* postfix(Expr* value) {
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
  Expr* filters_and_tests(Expr* value) {
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

  Expr* subscript(Expr* value) {
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
    if (skip_if("]")) return make(ExprKind::kItem, line, {value, key});
    std::vector<Expr*> parts = {value, key, nullptr, nullptr};
    for (size_t i = 2; i < 4 && skip_if(":"); ++i) {
      if (!at(":") && !at("]")) parts[i] = expression();
    }
    expect("]");
    return make(ExprKind::kSlice, line, std::move(parts));
  }

  void arguments(Expr* into) {
    expect("(");
    for (bool first = true; !at(")"); first = false) {
      if (!first) {
        expect(",");
        if (at(")")) break;
      }
      if (into->items.size() + into->named.size() > kMaxArguments) fail("a call has too many arguments");
      if (into->more_named != nullptr) fail("invalid syntax for function call expression");
      if (at("*") || at("**")) {
        Expr*& more = take().text == "*" ? into->more : into->more_named;
        if (into->more != nullptr && &more == &into->more) fail("invalid syntax for function call expression");
        more = expression();
        into->depth = std::max(into->depth, more->depth + 1);
        continue;
      }
      const bool named = at(Token::kName) && look().kind == Token::kOperator && look().text == "=";
      if (!named && (!into->named.empty() || into->more != nullptr))
        fail("invalid syntax for function call expression");
      std::string_view name;
      if (named) {
        name = out_.name_of(take().text);
        take();
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

  Expr* call(Expr* callee) {
    Expr* e = make(ExprKind::kCall, current().line, {callee});
    arguments(e);
    return e;
  }

  // Those behind `|`; `value` where there are none.
  Expr* filters(Expr* value) {
    while (skip_if("|")) value = filter(value);
    return value;
  }
  Expr* filter(Expr* value) {
    Expr* e = make(ExprKind::kFilter, current().line, {value});
    e->name = out_.name_of(expect(Token::kName, "a name").text);
    if (at("(")) arguments(e);
    return e;
  }

  Expr* test(Expr* value) {
    const int line = take().line;
    const bool negated = skip_if_name("not");
    Expr* e = make(ExprKind::kTest, line, {value});
    e->name = out_.name_of(expect(Token::kName, "a name").text);
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

  Template& out_;
  const std::vector<TokenData> tokens_;
  size_t at_ = 0;
  int nesting_ = 0;     // expressions around the place
  int blocks_ = 0;      // block tags around it
  int loops_ = 0;       // for loops around it, within the innermost macro
  Stmt::Extras reads_;  // what the body that is read asks for
};

}  // namespace

Result<std::shared_ptr<const Template>> parse_template(const std::string& source, std::string name) {
  if (source.size() > kMaxSourceBytes) {
    return error(ErrorCode::kInvalidInput, "chat template '{}' has {} bytes; at most {} are supported", name,
                 source.size(), kMaxSourceBytes);
  }
  if (!text::is_utf8(source)) return error(ErrorCode::kInvalidInput, "chat template '{}' is not valid UTF-8", name);
  auto out = std::make_shared<Template>();
  out->name = std::move(name);
  try {
    Parser(*out, tokenize(source)).run();
    find_unset(*out);
  } catch (const Failure& failure) {
    return error(failure.code, "chat template '{}' line {}: syntax error: {}", out->name, failure.line,
                 failure.message);
  }
  return std::shared_ptr<const Template>(std::move(out));
}

}  // namespace nfp::jinja
