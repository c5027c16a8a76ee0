#include "text/jinja/interpreter.h"

#include "text/jinja/filters.h"
#include "text/jinja/text.h"

namespace nfp::jinja {
namespace {

constexpr Symbol kNoSymbol = static_cast<Symbol>(-1);

Symbol symbol_of(const Template& program, std::string_view name) {
  const auto it = program.symbols.find(name);
  return it == program.symbols.end() ? kNoSymbol : it->second;
}

// Goes back to a member's old value when a block is left, also by an exception.
template <typename T>
class Restore {
 public:
  Restore(T& member, T value) : member_(member), old_(std::exchange(member, std::move(value))) {}
  ~Restore() { member_ = std::move(old_); }
  Restore(const Restore&) = delete;
  Restore& operator=(const Restore&) = delete;

 private:
  T& member_;
  T old_;
};

}  // namespace

bool Loop::pull(Value* item) {
  while (cursor.next(item)) {
    if (!accepts || accepts(*item)) return true;
  }
  return false;
}

bool Loop::advance(Value* item) {
  if (!ahead.empty()) {
    *item = ahead.front();
    ahead.pop_front();
  } else if (!pull(item)) {
    return false;
  }
  ++index0;
  previous = current;
  current = *item;
  return true;
}

const Value* Loop::peek(Runtime& rt) {
  if (ahead.empty()) {
    Value item;
    if (!pull(&item)) return nullptr;
    rt.charge(sizeof(Value));
    ahead.push_back(item);
  }
  return &ahead.front();
}

Int Loop::length(Runtime& rt) {
  if (known_length) return *known_length;
  if (!accepts) known_length = try_length(rt, iterable);
  if (!known_length) {
    for (Value item; pull(&item);) {
      rt.charge(sizeof(Value));
      ahead.push_back(item);
    }
    known_length = static_cast<Int>(ahead.size()) + index0 + 1;
  }
  return *known_length;
}

Value Loop::attribute(Runtime& rt, std::string_view name) {
  if (name == "index") return Value::integer(index0 + 1);
  if (name == "index0") return Value::integer(index0);
  if (name == "first") return Value::boolean(index0 == 0);
  if (name == "last") return Value::boolean(peek(rt) == nullptr);
  if (name == "length") return Value::integer(length(rt));
  if (name == "revindex") return Value::integer(length(rt) - index0);
  if (name == "revindex0") return Value::integer(length(rt) - index0 - 1);
  if (name == "depth" || name == "depth0") return Value::integer(name == "depth" ? 1 : 0);
  if (name == "previtem") return index0 == 0 ? rt.undefined("there is no previous item") : previous;
  if (name == "nextitem") {
    const Value* next = peek(rt);
    return next == nullptr ? rt.undefined("there is no next item") : *next;
  }
  return {};
}

Interpreter::Interpreter(const Template& program, Runtime& rt, std::vector<Value> context)
    : program_(program),
      rt_(rt),
      context_(std::move(context)),
      globals_(program.symbol_names.size()),
      loop_symbol_(symbol_of(program, "loop")) {
  for (size_t i = 0; i < globals_.size(); ++i) {
    if (const Callable* callable = find_function(program.symbol_names[i])) {
      auto* function = rt.make<Function>();
      function->callable = callable;
      globals_[i] = Value::object(Kind::kFunction, function);
    }
  }
}

std::string Interpreter::run() {
  std::string out;
  out_ = &out;
  scope_ = make_scope(nullptr, program_.hidden);
  run_body(program_.body);
  out_ = nullptr;
  return out;
}

Scope* Interpreter::make_scope(Scope* around, const std::vector<Symbol>& hidden) {
  auto* scope = rt_.make<Scope>(around);
  for (const Symbol symbol : hidden) {
    rt_.charge(sizeof(scope->variables[0]));
    scope->variables.emplace_back(symbol, Value());
  }
  return scope;
}

void Interpreter::print(std::string_view text) {
  rt_.charge(text.size());
  rt_.check_output(out_->size() + text.size());
  *out_ += text;
}

// What a search through a scope costs, so that thousands of variables do not come for free.
void Interpreter::pay_for(const Scope& scope) { rt_.work(scope.variables.size() * sizeof(Symbol)); }

void Interpreter::store(Symbol symbol, const Value& value) {
  pay_for(*scope_);
  for (auto& [name, slot] : scope_->variables) {
    if (name == symbol) {
      slot = value;
      return;
    }
  }
  rt_.charge(sizeof(scope_->variables[0]));
  scope_->variables.emplace_back(symbol, value);
}

Value Interpreter::load(Symbol symbol, std::string_view name) {
  for (const Scope* scope = scope_; scope != nullptr; scope = scope->parent) {
    rt_.step();
    pay_for(*scope);
    for (const auto& [variable, value] : scope->variables) {
      if (variable != symbol) continue;
      return value.missing() ? rt_.undefined(fmt::format("'{}' is undefined", name)) : value;
    }
  }
  if (!context_[symbol].missing()) return context_[symbol];
  if (!globals_[symbol].missing()) return globals_[symbol];
  return rt_.undefined(fmt::format("'{}' is undefined", name));
}

void Interpreter::assign(const Expr& target, const Value& value) {
  switch (target.kind) {
    case ExprKind::kName:
      store(target.symbol, value);
      return;
    case ExprKind::kNamespaceName: {
      const Value space = load(target.symbol, program_.symbol_names[target.symbol]);
      if (!space.is(Kind::kNamespace)) rt_.fail("cannot assign attribute on non-namespace object");
      rt_.set(space.as<Namespace>().attributes, rt_.string(target.name), value);
      return;
    }
    default: {  // a tuple
      const Runtime::Nest nest(rt_);
      const std::vector<Value> items = items_of(rt_, value);
      if (items.size() != target.items.size()) {
        rt_.fail("{} values to unpack (expected {}, got {})",
                 items.size() > target.items.size() ? "too many" : "not enough", target.items.size(), items.size());
      }
      for (size_t i = 0; i < items.size(); ++i) assign(*target.items[i], items[i]);
    }
  }
}

Interpreter::Flow Interpreter::run_body(const std::vector<Stmt*>& body) {
  const Runtime::Nest nest(rt_);
  for (const Stmt* s : body) {
    rt_.step();
    rt_.line = s->line;
    if (const Flow flow = run_statement(*s); flow != Flow::kNormal) return flow;
  }
  return Flow::kNormal;
}

Interpreter::Flow Interpreter::run_statement(const Stmt& s) {
  switch (s.kind) {
    case StmtKind::kText:
      print(s.text);
      break;
    case StmtKind::kPrint: {
      const Value value = evaluate(*s.expr);
      if (value.is(Kind::kString)) {
        print(value.text());
      } else {
        print(to_text(rt_, value));
      }
      break;
    }
    case StmtKind::kIf:
      return run_if(s);
    case StmtKind::kFor:
      return run_for(s, evaluate(*s.expr));
    case StmtKind::kSet:
      assign(*s.target, evaluate(*s.expr));
      break;
    case StmtKind::kSetBlock:
      return run_set_block(s);
    case StmtKind::kMacro:
      run_macro_definition(s);
      break;
    case StmtKind::kGeneration:
      run_generation(s);
      break;
    case StmtKind::kBreak:
      return Flow::kBreak;
    case StmtKind::kContinue:
      return Flow::kContinue;
  }
  return Flow::kNormal;
}

Interpreter::Flow Interpreter::run_if(const Stmt& s) {
  for (const Stmt::Branch& branch : s.branches) {
    if (truthy(rt_, evaluate(*branch.condition))) return run_body(branch.body);
  }
  return run_body(s.other);
}

Interpreter::Flow Interpreter::run_for(const Stmt& s, const Value& iterable) {
  auto* loop = rt_.make<Loop>(rt_, iterable);
  Scope* const around = scope_;
  if (s.condition != nullptr) {
    // Asked only when the loop gets there: the condition may depend on what the loop does.
    loop->accepts = [this, &s, around](const Value& item) {
      const Restore<Scope*> restore(scope_, rt_.make<Scope>(around));
      assign(*s.target, item);
      return truthy(rt_, evaluate(*s.condition));
    };
  }
  const Value loop_value = Value::object(Kind::kLoop, loop);
  // In jinja2 the else of a loop runs unless some iteration reached the end of the body: a break or continue in each
  // of them lets it run.
  bool completed = false;
  for (Value item; loop->advance(&item);) {
    const Restore<Scope*> restore(scope_, make_scope(around, s.hidden));
    if (loop_symbol_ != kNoSymbol) store(loop_symbol_, loop_value);
    assign(*s.target, item);
    const Flow flow = run_body(s.body);
    if (flow == Flow::kBreak) break;
    completed = completed || flow == Flow::kNormal;
  }
  if (!completed && !s.other.empty()) {
    const Restore<Scope*> restore(scope_, make_scope(around, s.other_hidden));
    return run_body(s.other);  // a break in here ends the loop around
  }
  return Flow::kNormal;
}

Interpreter::Flow Interpreter::capture(const std::vector<Stmt*>& body, Scope* scope, std::string* out) {
  const Restore<std::string*> restore_out(out_, out);
  const Restore<Scope*> restore_scope(scope_, scope);
  return run_body(body);
}

Interpreter::Flow Interpreter::run_set_block(const Stmt& s) {
  std::string text;
  const Flow flow = capture(s.body, make_scope(scope_, s.hidden), &text);
  if (flow != Flow::kNormal) return flow;
  Value value = rt_.string(std::move(text));
  if (s.expr != nullptr) {
    const Restore<Value> restore(block_text_, value);
    value = evaluate(*s.expr);
  }
  assign(*s.target, value);
  return Flow::kNormal;
}

void Interpreter::run_generation(const Stmt& s) {
  const Restore<Scope*> restore(scope_, make_scope(scope_, s.hidden));
  run_body(s.body);
}

void Interpreter::run_macro_definition(const Stmt& s) {
  auto* macro = rt_.make<Macro>();
  macro->node = &s;
  macro->scope = scope_;
  macro->name = s.name;
  store(s.symbol, Value::object(Kind::kMacro, macro));
}

Value Interpreter::call_macro(const Macro& macro, const Args& args) {
  const Stmt& s = *macro.node;
  Scope* scope = make_scope(macro.scope, s.hidden);
  const Restore<Scope*> restore(scope_, scope);
  std::vector<std::pair<std::string_view, Value>> named = args.named;
  const auto take_named = [&named](std::string_view name) {
    for (auto it = named.begin(); it != named.end(); ++it) {
      if (it->first == name) {
        const Value value = it->second;
        named.erase(it);
        return value;
      }
    }
    return Value();
  };
  std::vector<bool> given(s.parameters.size());
  for (size_t i = 0; i < s.parameters.size(); ++i) {
    const Value value = i < args.positional.size() ? args.positional[i] : take_named(s.parameters[i].name);
    given[i] = !value.missing();
    store(s.parameters[i].symbol, value);
  }
  if (!named.empty()) rt_.fail("macro '{}' takes no keyword argument '{}'", macro.name, named[0].first);
  if (args.positional.size() > s.parameters.size()) {
    rt_.fail("macro '{}' takes not more than {} argument(s)", macro.name, s.parameters.size());
  }
  for (size_t i = 0; i < s.parameters.size(); ++i) {
    if (given[i]) continue;
    const Stmt::Parameter& parameter = s.parameters[i];
    store(parameter.symbol, parameter.default_value != nullptr
                                ? evaluate(*parameter.default_value)
                                : rt_.undefined(fmt::format("parameter '{}' was not provided", parameter.name)));
  }
  std::string text;
  capture(s.body, scope, &text);
  return rt_.string(std::move(text));
}

}  // namespace nfp::jinja
