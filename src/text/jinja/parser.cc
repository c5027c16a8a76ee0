#include "text/jinja/parser.h"

#include <algorithm>

#include "text/utf8.h"

namespace nfp::jinja {
namespace {

constexpr size_t kMaxSourceBytes = 1u << 20;
constexpr int kMaxBlockNesting = 100;

}  // namespace

const TokenData& Parser::expect(Token kind, std::string_view what) {
  if (!at(kind)) fail(fmt::format("expected {}, got '{}'", what, describe(current())));
  return take();
}

void Parser::expect(std::string_view op) {
  if (!skip_if(op)) fail(fmt::format("expected '{}', got '{}'", op, describe(current())));
}

void Parser::fail(std::string message) const {
  throw Failure{ErrorCode::kInvalidInput, std::move(message), current().line};
}

void Parser::unsupported(std::string_view what) const { fail(fmt::format("{} not supported in chat templates", what)); }

void Parser::run() {
  out_.body = statements({});
  if (!at(Token::kEnd)) fail(fmt::format("unexpected '{}'", describe(current())));
}

Stmt* Parser::make(StmtKind kind, int line) {
  Stmt& s = out_.stmts.emplace_back();
  s.kind = kind;
  s.line = line;
  return &s;
}

// Statements up to one of the tags in `ends`, which stays current (its "{%" is taken); at the top, up to the end.
std::vector<Stmt*> Parser::statements(std::initializer_list<std::string_view> ends) {
  if (++blocks_ > kMaxBlockNesting) fail("blocks are nested too deeply");
  std::vector<Stmt*> body;
  for (;;) {
    const TokenData& token = current();
    if (token.kind == Token::kText) {
      Stmt* s = make(StmtKind::kText, token.line);
      s->text = token.text;
      body.push_back(s);
      take();
    } else if (token.kind == Token::kVariableBegin) {
      take();
      Stmt* s = make(StmtKind::kPrint, token.line);
      s->expr = tuple();
      expect(Token::kVariableEnd, "'}}'");
      body.push_back(s);
    } else if (token.kind == Token::kBlockBegin) {
      take();
      if (at(Token::kName) && std::find(ends.begin(), ends.end(), current().text) != ends.end()) break;
      body.push_back(statement());
      expect(Token::kBlockEnd, "'%}'");
    } else if (token.kind == Token::kEnd) {
      if (ends.size() != 0) fail(fmt::format("unexpected end of the template: '{}' is missing", *(ends.end() - 1)));
      break;
    } else {
      fail(fmt::format("unexpected '{}'", describe(token)));
    }
  }
  --blocks_;
  return body;
}

// The body of a block tag: from behind its head to `ends`.
std::vector<Stmt*> Parser::body(std::initializer_list<std::string_view> ends) {
  skip_if(":");
  expect(Token::kBlockEnd, "'%}'");
  return statements(ends);
}

std::vector<Stmt*> Parser::body_to(std::string_view end) {
  std::vector<Stmt*> result = body({end});
  take();
  return result;
}

// A body that runs as a function of its own: no break out of it.
std::vector<Stmt*> Parser::function_body(Stmt* s, std::string_view end) {
  const int loops = std::exchange(loops_, 0);
  macros_.push_back(s);
  std::vector<Stmt*> result = body_to(end);
  macros_.pop_back();
  loops_ = loops;
  return result;
}

Stmt* Parser::statement() {
  const TokenData& tag = expect(Token::kName, "a tag name");
  const int line = tag.line;
  if (tag.text == "if") return parse_if(line);
  if (tag.text == "for") return parse_for(line);
  if (tag.text == "set") return parse_set(line);
  if (tag.text == "macro") return parse_macro(line);
  if (tag.text == "generation") return parse_generation(line);
  if (tag.text == "break" || tag.text == "continue") {
    if (loops_ == 0) fail(fmt::format("'{}' outside loop", tag.text));
    return make(tag.text == "break" ? StmtKind::kBreak : StmtKind::kContinue, line);
  }
  for (const std::string_view other : {"call", "filter", "include", "import", "from", "extends", "block", "autoescape",
                                       "with", "print", "do", "trans", "debug"}) {
    if (tag.text == other) unsupported(fmt::format("the tag '{}' is", other));
  }
  fail(fmt::format("Encountered unknown tag '{}'.", tag.text));
}

Stmt* Parser::parse_if(int line) {
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

Stmt* Parser::parse_for(int line) {
  Stmt* s = make(StmtKind::kFor, line);
  ++all_loops_;
  s->target = target("in", false);
  if (!skip_if_name("in")) fail("expected 'in'");
  s->expr = tuple(false, "recursive");
  if (skip_if_name("if")) s->condition = expression();
  if (at_name("recursive")) unsupported("recursive loops are");
  ++loops_;
  s->body = body({"else", "endfor"});
  --loops_;
  if (take().text == "else") s->other = body_to("endfor");
  --all_loops_;
  return s;
}

Stmt* Parser::parse_set(int line) {
  Expr* assigned = target({}, true);
  if (skip_if("=")) {
    Stmt* s = make(StmtKind::kSet, line);
    s->target = assigned;
    s->expr = tuple();
    return s;
  }
  Stmt* s = make(StmtKind::kSetBlock, line);
  s->target = assigned;
  s->expr = filters(nullptr);
  s->body = body_to("endset");
  return s;
}

void Parser::parse_parameters(Stmt* s) {
  expect("(");
  while (!at(")")) {
    if (!s->parameters.empty()) expect(",");
    if (s->parameters.size() == kMaxArguments) fail("a macro has too many parameters");
    Stmt::Parameter parameter;
    const Expr* name = name_target();
    parameter.symbol = name->symbol;
    parameter.name = name->name;
    for (const Stmt::Parameter& other : s->parameters) {
      if (other.symbol == parameter.symbol) fail(fmt::format("duplicate argument '{}'", parameter.name));
    }
    if (skip_if("=")) {
      parameter.default_value = expression();
    } else if (!s->parameters.empty() && s->parameters.back().default_value != nullptr) {
      fail("non-default argument follows default argument");
    }
    s->parameters.push_back(parameter);
  }
  expect(")");
}

Stmt* Parser::parse_macro(int line) {
  Stmt* s = make(StmtKind::kMacro, line);
  const Expr* name = name_target();
  s->symbol = name->symbol;
  s->name = name->name;
  parse_parameters(s);
  s->body = function_body(s, "endmacro");
  return s;
}

Stmt* Parser::parse_generation(int line) {
  Stmt* s = make(StmtKind::kGeneration, line);
  s->body = function_body(s, "endgeneration");
  return s;
}

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
    find_hidden_names(*out);
  } catch (const Failure& failure) {
    return error(failure.code, "chat template '{}' line {}: syntax error: {}", out->name, failure.line,
                 failure.message);
  }
  return std::shared_ptr<const Template>(std::move(out));
}

}  // namespace nfp::jinja
