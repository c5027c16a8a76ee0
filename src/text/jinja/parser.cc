#include "text/jinja/parser.h"

#include <algorithm>
#include <initializer_list>

#include "text/jinja/expression_parser.h"
#include "text/jinja/scoping.h"
#include "text/jinja/unicode_text.h"

namespace nfp::jinja {
namespace {

constexpr size_t kMaxSourceBytes = 4u << 20;
constexpr int kMaxBlockNesting = 100;

class Parser {
 public:
  Parser(Template& out, const std::string& source) : out_(out), stream_(tokenize(source)), expressions_(out, stream_) {}

  void run() {
    out_.body = statements({});
    if (!stream_.at(Token::kEnd)) stream_.fail(fmt::format("unexpected '{}'", describe(stream_.current())));
  }

 private:
  Stmt* make(StmtKind kind, int line) {
    Stmt& s = out_.stmts.emplace_back();
    s.kind = kind;
    s.line = line;
    return &s;
  }

  // Statements up to one of the tags in `ends`, which stays current (its "{%" is taken); at the top, up to the end.
  std::vector<Stmt*> statements(std::initializer_list<std::string_view> ends) {
    if (++nesting_ > kMaxBlockNesting) stream_.fail("blocks are nested too deeply");
    std::vector<Stmt*> body;
    for (;;) {
      const TokenData& token = stream_.current();
      if (token.kind == Token::kText) {
        Stmt* s = make(StmtKind::kText, token.line);
        s->text = token.text;
        body.push_back(s);
        stream_.take();
      } else if (token.kind == Token::kVariableBegin) {
        stream_.take();
        Stmt* s = make(StmtKind::kPrint, token.line);
        s->expr = expressions_.tuple();
        stream_.expect(Token::kVariableEnd, "'}}'");
        body.push_back(s);
      } else if (token.kind == Token::kBlockBegin) {
        stream_.take();
        if (stream_.at(Token::kName) && std::find(ends.begin(), ends.end(), stream_.current().text) != ends.end()) {
          break;
        }
        if (Stmt* s = statement()) body.push_back(s);
        stream_.expect(Token::kBlockEnd, "'%}'");
      } else if (token.kind == Token::kEnd) {
        if (ends.size() != 0)
          stream_.fail(fmt::format("unexpected end of the template: '{}' is missing", *(ends.end() - 1)));
        break;
      } else {
        stream_.fail(fmt::format("unexpected '{}'", describe(token)));
      }
    }
    --nesting_;
    return body;
  }

  // The body of a block tag: from behind its head to `ends`.
  std::vector<Stmt*> body(std::initializer_list<std::string_view> ends) {
    stream_.skip_if(Token::kColon);
    stream_.expect(Token::kBlockEnd, "'%}'");
    return statements(ends);
  }
  std::vector<Stmt*> body_to(std::string_view end) {
    std::vector<Stmt*> result = body({end});
    stream_.take();
    return result;
  }

  Stmt* statement() {
    const TokenData& tag = stream_.expect(Token::kName, "a tag name");
    const int line = tag.line;
    if (tag.text == "if") return parse_if(line);
    if (tag.text == "for") return parse_for(line);
    if (tag.text == "set") return parse_set(line);
    if (tag.text == "macro") return parse_macro(line);
    if (tag.text == "call") return parse_call(line);
    if (tag.text == "filter") return parse_filter(line);
    if (tag.text == "with") return parse_with(line);
    if (tag.text == "generation") return parse_generation(line);
    if (tag.text == "print") return parse_print(line);
    if (tag.text == "break" || tag.text == "continue") {
      if (expressions_.loops == 0) stream_.fail(fmt::format("'{}' outside loop", tag.text));
      return make(tag.text == "break" ? StmtKind::kBreak : StmtKind::kContinue, line);
    }
    for (const std::string_view other : {"include", "import", "from", "extends", "block", "autoescape"}) {
      if (tag.text == other) stream_.fail(fmt::format("the tag '{}' is not supported in chat templates", other));
    }
    stream_.fail(fmt::format("Encountered unknown tag '{}'.", tag.text));
  }

  Stmt* parse_if(int line) {
    Stmt* s = make(StmtKind::kIf, line);
    for (;;) {
      Stmt::Branch branch;
      branch.condition = expressions_.tuple(false);
      branch.body = body({"elif", "else", "endif"});
      s->branches.push_back(std::move(branch));
      const std::string& tag = stream_.take().text;
      if (tag == "elif") continue;
      if (tag == "else") s->other = body_to("endif");
      return s;
    }
  }

  Stmt* parse_for(int line) {
    Stmt* s = make(StmtKind::kFor, line);
    ++expressions_.all_loops;
    s->target = expressions_.target("in", false);
    if (!stream_.skip_if_name("in")) stream_.fail("expected 'in'");
    s->expr = expressions_.tuple(false, "recursive");
    if (stream_.skip_if_name("if")) s->condition = expressions_.expression();
    s->recursive = stream_.skip_if_name("recursive");
    ++expressions_.loops;
    s->body = body({"else", "endfor"});
    --expressions_.loops;
    if (stream_.take().text == "else") s->other = body_to("endfor");
    --expressions_.all_loops;
    return s;
  }

  Stmt* parse_set(int line) {
    Expr* target = expressions_.target({}, true);
    if (stream_.skip_if(Token::kAssign)) {
      Stmt* s = make(StmtKind::kSet, line);
      s->target = target;
      s->expr = expressions_.tuple();
      return s;
    }
    Stmt* s = make(StmtKind::kSetBlock, line);
    s->target = target;
    s->expr = expressions_.filters(nullptr, false);
    s->body = body_to("endset");
    return s;
  }

  void parse_parameters(Stmt* s) {
    stream_.expect(Token::kLParen, "'('");
    while (!stream_.at(Token::kRParen)) {
      if (!s->parameters.empty()) stream_.expect(Token::kComma, "','");
      Stmt::Parameter parameter;
      const Expr* name = expressions_.name_target();
      parameter.symbol = name->symbol;
      parameter.name = name->name;
      for (const Stmt::Parameter& other : s->parameters) {
        if (other.symbol == parameter.symbol) stream_.fail(fmt::format("duplicate argument '{}'", parameter.name));
      }
      if (stream_.skip_if(Token::kAssign)) {
        parameter.default_value = expressions_.expression();
      } else if (!s->parameters.empty() && s->parameters.back().default_value != nullptr) {
        stream_.fail("non-default argument follows default argument");
      }
      s->parameters.push_back(parameter);
    }
    stream_.expect(Token::kRParen, "')'");
  }

  // A body that runs as a function of its own: no break out of it.
  std::vector<Stmt*> function_body(Stmt* s, std::string_view end) {
    const int loops = std::exchange(expressions_.loops, 0);
    expressions_.macros.push_back(s);
    std::vector<Stmt*> result = body_to(end);
    expressions_.macros.pop_back();
    expressions_.loops = loops;
    for (const Stmt::Parameter& parameter : s->parameters) {
      if (parameter.name == "caller") s->uses_caller = false;
      if (parameter.name == "kwargs") s->uses_kwargs = false;
      if (parameter.name == "varargs") s->uses_varargs = false;
    }
    return result;
  }

  Stmt* parse_macro(int line) {
    Stmt* s = make(StmtKind::kMacro, line);
    const Expr* name = expressions_.name_target();
    s->symbol = name->symbol;
    s->name = name->name;
    parse_parameters(s);
    s->body = function_body(s, "endmacro");
    return s;
  }

  Stmt* parse_call(int line) {
    Stmt* s = make(StmtKind::kCall, line);
    if (stream_.at(Token::kLParen)) parse_parameters(s);
    s->expr = expressions_.expression();
    if (s->expr->kind != ExprKind::kCall) stream_.fail("expected call");
    s->body = function_body(s, "endcall");
    return s;
  }

  Stmt* parse_filter(int line) {
    Stmt* s = make(StmtKind::kFilter, line);
    s->expr = expressions_.filters(nullptr, true);
    s->body = body_to("endfilter");
    return s;
  }

  Stmt* parse_with(int line) {
    Stmt* s = make(StmtKind::kWith, line);
    while (!stream_.at(Token::kBlockEnd)) {
      if (!s->bindings.empty()) stream_.expect(Token::kComma, "','");
      Expr* target = expressions_.target({}, false);
      stream_.expect(Token::kAssign, "'='");
      s->bindings.emplace_back(target, expressions_.expression());
    }
    s->body = body_to("endwith");
    return s;
  }

  Stmt* parse_generation(int line) {
    Stmt* s = make(StmtKind::kGeneration, line);
    s->body = function_body(s, "endgeneration");
    return s;
  }

  Stmt* parse_print(int line) {
    Stmt* s = make(StmtKind::kPrint, line);
    std::vector<Expr*> items;
    while (!stream_.at(Token::kBlockEnd)) {
      if (!items.empty()) stream_.expect(Token::kComma, "','");
      items.push_back(expressions_.expression());
    }
    if (items.empty()) return nullptr;
    // Printed one after another, which is what joining them with ~ does.
    s->expr = items.size() == 1 ? items[0] : expressions_.make(ExprKind::kConcat, line, std::move(items));
    return s;
  }

  Template& out_;
  TokenStream stream_;
  ExpressionParser expressions_;
  int nesting_ = 0;
};

}  // namespace

Result<std::shared_ptr<const Template>> parse_template(const std::string& source, std::string name) {
  if (source.size() > kMaxSourceBytes) {
    return error(ErrorCode::kInvalidInput, "chat template '{}' has {} bytes; at most {} are supported", name,
                 source.size(), kMaxSourceBytes);
  }
  if (!unicode::is_valid(source)) {
    return error(ErrorCode::kInvalidInput, "chat template '{}' is not valid UTF-8", name);
  }
  auto out = std::make_shared<Template>();
  out->name = std::move(name);
  try {
    Parser(*out, source).run();
    find_hidden_names(*out);
  } catch (const Failure& failure) {
    return error(failure.code, "chat template '{}' line {}: syntax error: {}", out->name, failure.line,
                 failure.message);
  }
  return std::shared_ptr<const Template>(std::move(out));
}

}  // namespace nfp::jinja
