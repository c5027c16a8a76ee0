#include "text/jinja/interpreter.h"

#include <algorithm>

#include "text/jinja/filters.h"
#include "text/jinja/text.h"

namespace nfp::jinja {
namespace {

class Interpreter {
 public:
  Interpreter(const Template& program, Runtime& rt, std::vector<Value> context)
      : program_(program),
        rt_(rt),
        context_(std::move(context)),
        loop_symbol_(program.symbols.find("loop")),
        caller_symbol_(program.symbols.find("caller")),
        varargs_symbol_(program.symbols.find("varargs")),
        kwargs_symbol_(program.symbols.find("kwargs")) {}

  std::string run() {
    std::string out;
    out_ = &out;
    scope_ = make_scope(nullptr, program_.unset);
    run_body(program_.body);
    out_ = nullptr;
    return out;
  }

 private:
  enum class Flow { kNormal, kBreak, kContinue };

  // --- Variables

  Scope* make_scope(Scope* around, const std::vector<Symbol>& unset) {
    auto* scope = rt_.make<Scope>(around);
    for (const Symbol symbol : unset) {
      rt_.step();
      const std::string_view name = program_.symbol_names[symbol];
      if (context_[symbol].missing() && find_function(name) == nullptr) continue;  // is undefined by itself
      rt_.charge(sizeof(*scope->variables.begin()));
      scope->variables[symbol] = rt_.undefined(fmt::format("'{}' is undefined", short_name(name)));
    }
    return scope;
  }

  void store(Symbol symbol, const Value& value) {
    rt_.step();
    if (!scope_->variables.contains(symbol)) rt_.charge(sizeof(*scope_->variables.begin()));
    scope_->variables[symbol] = value;
  }

  Value load(Symbol symbol) {
    for (const Scope* scope = scope_; scope != nullptr; scope = scope->parent) {
      rt_.step();
      if (const auto it = scope->variables.find(symbol); it != scope->variables.end()) return it->second;
    }
    if (!context_[symbol].missing()) return context_[symbol];
    const std::string_view name = program_.symbol_names[symbol];
    if (const Callable* callable = find_function(name)) return context_[symbol] = function(rt_, callable);
    const std::string refused = why_no_function(name);
    return rt_.undefined(refused.empty() ? fmt::format("'{}' is undefined", short_name(name)) : refused);
  }

  void assign(const Expr& target, const Value& value) {
    if (target.kind == ExprKind::kName) return store(target.symbol, value);
    if (target.kind == ExprKind::kNamespaceName) {
      const Value space = load(target.symbol);
      if (!space.is(Kind::kNamespace)) rt_.fail("cannot assign attribute on non-namespace object");
      return rt_.set(space.as<Namespace>().attributes, rt_.string(target.name), value);
    }
    const auto nest = rt_.nest();
    const std::vector<Value> items = items_of(rt_, value);
    if (items.size() != target.items.size()) {
      rt_.fail("{} values to unpack (expected {}, got {})",
               items.size() > target.items.size() ? "too many" : "not enough", target.items.size(), items.size());
    }
    for (size_t i = 0; i < items.size(); ++i) assign(*target.items[i], items[i]);
  }

  // --- Statements

  void print(std::string_view text) {
    rt_.charge(text.size());
    rt_.check_output(out_->size() + text.size());
    *out_ += text;
  }

  Flow run_body(const std::vector<Stmt*>& body) {
    const auto nest = rt_.nest();
    for (const Stmt* s : body) {
      rt_.step();
      rt_.line = s->line;
      if (const Flow flow = run_statement(*s); flow != Flow::kNormal) return flow;
    }
    return Flow::kNormal;
  }

  Value macro_of(const Stmt& s) {
    auto* macro = rt_.make<Macro>();
    macro->node = &s;
    macro->scope = scope_;
    return Value::object(Kind::kMacro, macro);
  }

  // `caller`: what a call block gives to the macro that it calls.
  void store_extras(const Stmt::Extras& reads, const Value& caller, std::vector<Value> varargs, const Dict& kwargs) {
    if (reads.caller) {
      store(caller_symbol_->second, caller.none_or_missing() ? rt_.undefined("No caller defined") : caller);
    }
    if (reads.varargs) store(varargs_symbol_->second, rt_.list(std::move(varargs), Kind::kTuple));
    if (reads.kwargs) store(kwargs_symbol_->second, Value::object(Kind::kDict, rt_.make<Dict>(kwargs)));
  }

  // Runs a body in `scope` with its output kept apart.
  Flow capture(const std::vector<Stmt*>& body, Scope* scope, std::string* out) {
    const Restore<std::string*> restore_out(out_, out);
    const Restore<Scope*> restore_scope(scope_, scope);
    return run_body(body);
  }

  Flow run_statement(const Stmt& s) {
    switch (s.kind) {
      case StmtKind::kText:
        print(s.text);
        break;
      case StmtKind::kPrint: {
        const Value value = evaluate(*s.expr);
        print(value.is(Kind::kString) ? value.text() : std::string_view(to_text(rt_, value)));
        break;
      }
      case StmtKind::kIf:
        return run_if(s);
      case StmtKind::kFor:
        return run_for(s, evaluate(*s.expr), 0);
      case StmtKind::kSet:
        assign(*s.target, evaluate(*s.expr));
        break;
      case StmtKind::kSetBlock:
      case StmtKind::kFilter:
        return run_block(s);
      case StmtKind::kMacro:
        store(s.symbol, macro_of(s));
        break;
      case StmtKind::kCallBlock: {
        const Value value = evaluate_of_values(*s.expr, macro_of(s));
        if (!value.is(Kind::kString)) rt_.fail("a call block's call gave a value of type '{}'", type_name(value));
        print(value.text());
        break;
      }
      case StmtKind::kWith: {
        const Value values = evaluate(*s.expr);
        const Restore<Scope*> restore(scope_, make_scope(scope_, s.unset));
        assign(*s.target, values);
        return run_body(s.body);
      }
      case StmtKind::kGeneration: {
        const Restore<Scope*> restore(scope_, make_scope(scope_, s.unset));
        store_extras(s.reads, {}, {}, {});
        run_body(s.body);
        break;
      }
      case StmtKind::kBreak:
        return Flow::kBreak;
      case StmtKind::kContinue:
        return Flow::kContinue;
    }
    return Flow::kNormal;
  }

  Flow run_if(const Stmt& s) {
    for (const Stmt::Branch& branch : s.branches) {
      if (truthy(rt_, evaluate(*branch.condition))) return run_body(branch.body);
    }
    return run_body(s.other);
  }

  Flow run_for(const Stmt& s, const Value& iterable, Int depth0) {
    auto* loop = rt_.make<Loop>(rt_, iterable);
    rt_.charge(sizeof(Value), static_cast<Int>(loop->source.size()));
    Scope* const around = scope_;
    loop->depth0 = depth0;
    loop->node = &s;
    loop->around = around;
    if (s.condition != nullptr) {
      loop->accepts = [this, &s, around](const Value& item) {
        const Restore<Scope*> restore(scope_, rt_.make<Scope>(around));
        assign(*s.target, item);
        return truthy(rt_, evaluate(*s.condition));
      };
    }
    // In jinja2 the else of a loop runs unless some iteration reached the end of the body: a break or continue in each
    // of them lets it run.
    bool completed = false;
    for (; loop->reach(loop->index0); ++loop->index0) {
      const Restore<Scope*> restore(scope_, make_scope(around, s.unset));
      if (loop_symbol_ != program_.symbols.end()) store(loop_symbol_->second, Value::object(Kind::kLoop, loop));
      assign(*s.target, loop->items[loop->index0]);
      const Flow flow = run_body(s.body);
      if (flow == Flow::kBreak) break;
      completed = completed || flow == Flow::kNormal;
    }
    if (completed || s.other.empty()) return Flow::kNormal;
    const Restore<Scope*> restore(scope_, make_scope(around, s.unset_other));
    return run_body(s.other);  // a break in here ends the loop around
  }

  // A recursive loop called from within: its text over other items.
  Value call_loop(const Loop& loop, const Args& args) {
    if (!loop.node->recursive) rt_.fail("a loop without 'recursive' cannot be called");
    if (args.positional.size() != 1 || !args.named.empty()) rt_.fail("loop() takes one argument");
    std::string text;
    const Restore<std::string*> restore_out(out_, &text);
    const Restore<Scope*> restore_scope(scope_, loop.around);
    run_for(*loop.node, args.positional[0], loop.depth0 + 1);
    return rt_.string(std::move(text));
  }

  // A set or filter block.
  Flow run_block(const Stmt& s) {
    std::string text;
    Scope* scope = make_scope(scope_, s.unset);
    const Flow flow = capture(s.body, scope, &text);
    if (flow != Flow::kNormal) return flow;
    Value value = rt_.string(std::move(text));
    if (s.expr != nullptr) {
      const Restore<Value> restore(block_text_, value);
      const Restore<Scope*> restore_scope(scope_, scope);  // the body's variables are the filters' too
      value = evaluate(*s.expr);
    }
    if (s.kind == StmtKind::kSetBlock) {
      assign(*s.target, value);
    } else if (value.is(Kind::kString)) {
      print(value.text());
    } else {
      rt_.fail("a filter block's text became a value of type '{}'", type_name(value));
    }
    return Flow::kNormal;
  }

  // --- Expressions

  Value evaluate(const Expr& e) {
    const auto nest = rt_.nest();
    rt_.step();
    rt_.line = e.line;
    switch (e.kind) {
      case ExprKind::kConstant:
        return e.constant;
      case ExprKind::kName:
        return load(e.symbol);
      case ExprKind::kAnd:
      case ExprKind::kOr: {
        const Value left = evaluate(*e.items[0]);
        return truthy(rt_, left) == (e.kind == ExprKind::kAnd) ? evaluate(*e.items[1]) : left;
      }
      case ExprKind::kNot:
        return Value::boolean(!truthy(rt_, evaluate(*e.items[0])));
      case ExprKind::kCompare:
        return evaluate_compare(e);
      case ExprKind::kCondition:
        return evaluate_condition(e);
      case ExprKind::kDict:
        return evaluate_dict(e);
      default:
        return evaluate_of_values(e);
    }
  }

  // An expression of what all the expressions in it are worth. `caller`: a call's, of a call block.
  Value evaluate_of_values(const Expr& e, const Value& caller = {}) {
    std::vector<Value> v(e.items.size());
    for (size_t i = 0; i < v.size(); ++i) {
      if (e.items[i] != nullptr) v[i] = evaluate(*e.items[i]);
    }
    std::vector<std::pair<std::string_view, Value>> named;
    for (const auto& [name, expr] : e.named) named.emplace_back(name, evaluate(*expr));
    if (!caller.missing()) named.emplace_back("caller", caller);
    if (e.more != nullptr) {
      const std::vector<Value> more = items_of(rt_, evaluate(*e.more));
      v.insert(v.end(), more.begin(), more.end());
    }
    if (e.more_named != nullptr) add_named(evaluate(*e.more_named), named);
    rt_.line = e.line;
    switch (e.kind) {
      case ExprKind::kList:
      case ExprKind::kTuple:
        return rt_.list(std::move(v), e.kind == ExprKind::kList ? Kind::kList : Kind::kTuple);
      case ExprKind::kAttribute:
        return get_attribute(rt_, v[0], e.name);
      case ExprKind::kItem:
        return get_item(rt_, v[0], v[1]);
      case ExprKind::kSlice:
        return slice(rt_, v[0], v[1], v[2], v[3]);
      case ExprKind::kNegate:
        return negate(rt_, v[0]);
      case ExprKind::kBinary:
        return arithmetic(rt_, e.binary, v[0], v[1]);
      case ExprKind::kConcat: {
        std::string text;
        for (const Value& part : v) append_text(rt_, text, part);
        return rt_.string(std::move(text));
      }
      default:  // a call, filter or test
        return apply(e, e.items[0] == nullptr ? block_text_ : v[0], Args{{v.begin() + 1, v.end()}, std::move(named)});
    }
  }

  void add_named(const Value& dict, std::vector<std::pair<std::string_view, Value>>& named) {
    if (dict.undefined()) rt_.fail_undefined(dict);
    if (!dict.is(Kind::kDict)) rt_.fail("the argument after ** must be a mapping, not {}", type_name(dict));
    for (const Dict::Entry& entry : dict.as_dict().entries) {
      if (!entry.key.is(Kind::kString)) rt_.fail("keywords must be strings");
      for (const auto& [name, value] : named) {
        rt_.step();
        if (name == entry.key.text()) rt_.fail("got multiple values for keyword argument '{}'", short_name(name));
      }
      rt_.charge(sizeof(named.front()));
      named.emplace_back(entry.key.text(), entry.value);
    }
  }

  Value evaluate_compare(const Expr& e) {
    Value left = evaluate(*e.items[0]);
    for (size_t i = 0; i < e.compares.size(); ++i) {
      const Value right = evaluate(*e.items[i + 1]);
      rt_.line = e.line;
      if (!compare(rt_, e.compares[i], left, right)) return Value::boolean(false);
      left = right;
    }
    return Value::boolean(true);
  }

  Value evaluate_condition(const Expr& e) {
    if (truthy(rt_, evaluate(*e.items[1]))) return evaluate(*e.items[0]);
    if (e.items[2] != nullptr) return evaluate(*e.items[2]);
    return rt_.undefined(
        fmt::format("the inline if-expression on line {} evaluated to false and no else section was defined.", e.line));
  }

  Value evaluate_dict(const Expr& e) {
    auto* dict = rt_.make<Dict>();
    for (size_t i = 0; i + 1 < e.items.size(); i += 2) {
      const Value key = evaluate(*e.items[i]);
      rt_.set(*dict, key, evaluate(*e.items[i + 1]));
    }
    return Value::object(Kind::kDict, dict);
  }

  Value apply(const Expr& e, const Value& subject, const Args& args) {
    if (e.kind == ExprKind::kFilter) return invoke(rt_, find_filter(rt_, e.name), subject, args);
    if (e.kind == ExprKind::kTest) return invoke(rt_, find_test(rt_, e.name), subject, args);
    if (subject.undefined()) rt_.fail_undefined(subject);
    if (subject.is(Kind::kLoop)) return call_loop(subject.as<Loop>(), args);
    if (subject.is(Kind::kMacro)) return call_macro(*subject.as<Macro>().node, subject.as<Macro>().scope, args);
    if (!subject.is(Kind::kFunction)) rt_.fail("'{}' object is not callable", type_name(subject));
    return invoke(rt_, *subject.as<Function>().callable, subject.as<Function>().self, args);
  }

  Value call_macro(const Stmt& s, Scope* defined_in, const Args& args) {
    Scope* scope = make_scope(defined_in, s.unset);
    const Restore<Scope*> restore(scope_, scope);
    const auto taken = std::min(args.positional.size(), s.parameters.size());
    if (taken < args.positional.size() && !s.reads.varargs) {
      rt_.fail("macro '{}' takes not more than {} argument(s)", s.name, s.parameters.size());
    }
    const auto rest = args.positional.begin() + static_cast<std::ptrdiff_t>(taken);
    std::vector<Value> given(args.positional.begin(), rest);
    given.resize(s.parameters.size());
    Value caller;
    Dict kwargs;
    for (const auto& [name, value] : args.named) {
      if (s.reads.caller && name == "caller") {
        caller = value;
        continue;
      }
      size_t i = 0;
      while (i < given.size() && s.parameters[i].name != name) ++i;
      if (i == given.size() || !given[i].missing()) {
        if (s.reads.kwargs) {
          rt_.set(kwargs, rt_.string(name), value);
          continue;
        }
        rt_.fail("macro '{}' takes no keyword argument '{}'", s.name, name);
      }
      given[i] = value;
    }
    store_extras(s.reads, caller, {rest, args.positional.end()}, kwargs);
    for (size_t i = 0; i < given.size(); ++i) {  // a default may use the parameters before it
      const Stmt::Parameter& parameter = s.parameters[i];
      if (given[i].missing()) {
        given[i] = parameter.default_value != nullptr
                       ? evaluate(*parameter.default_value)
                       : rt_.undefined(fmt::format("parameter '{}' was not provided", short_name(parameter.name)));
      }
      store(parameter.symbol, given[i]);
    }
    std::string text;
    capture(s.body, scope, &text);
    return rt_.string(std::move(text));
  }

  const Template& program_;
  Runtime& rt_;
  std::vector<Value> context_;  // by symbol: what the template was given, and the functions that it has asked for
  Scope* scope_ = nullptr;
  std::string* out_ = nullptr;
  const std::map<std::string_view, Symbol>::const_iterator loop_symbol_, caller_symbol_, varargs_symbol_,
      kwargs_symbol_;
  Value block_text_;  // what the filters of a block are applied to
};

}  // namespace

bool Loop::reach(size_t index) {
  while (items.size() <= index && next < source.size()) {
    const Value& item = source[next++];
    if (!accepts || accepts(item)) items.push_back(item);
  }
  return index < items.size();
}

Value Loop::attribute(Runtime& rt, std::string_view name) {
  const auto length = [&] {
    reach(source.size());
    return items.size();
  };
  const auto number = [](size_t n) { return Value::integer(static_cast<Int>(n)); };
  if (name == "index") return number(index0 + 1);
  if (name == "index0") return number(index0);
  if (name == "first") return Value::boolean(index0 == 0);
  if (name == "last") return Value::boolean(!reach(index0 + 1));
  if (name == "length") return number(length());
  if (name == "depth") return Value::integer(depth0 + 1);
  if (name == "depth0") return Value::integer(depth0);
  if (name == "revindex") return number(length() - index0);
  if (name == "revindex0") return number(length() - index0 - 1);
  if (name == "previtem") return index0 == 0 ? rt.undefined("there is no previous item") : items[index0 - 1];
  if (name == "nextitem") return reach(index0 + 1) ? items[index0 + 1] : rt.undefined("there is no next item");
  return {};
}

std::string run_template(const Template& program, Runtime& rt, std::vector<Value> context) {
  return Interpreter(program, rt, std::move(context)).run();
}

}  // namespace nfp::jinja
