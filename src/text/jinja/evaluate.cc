#include "text/jinja/callables.h"
#include "text/jinja/interpreter.h"
#include "text/jinja/operators.h"

namespace nfp::jinja {

Value Interpreter::evaluate(const Expr& e) {
  const Runtime::Nest nest(rt_);
  rt_.step();
  rt_.line = e.line;
  switch (e.kind) {
    case ExprKind::kConstant:
      return e.constant;
    case ExprKind::kName:
      return load(e.symbol, e.name);
    case ExprKind::kNamespaceName:
      break;  // only a target
    case ExprKind::kList:
    case ExprKind::kTuple:
    case ExprKind::kDict:
      return evaluate_collection(e);
    case ExprKind::kAttribute: {
      const Value object = evaluate(*e.items[0]);
      rt_.line = e.line;
      return get_attribute(rt_, object, e.name);
    }
    case ExprKind::kItem: {
      const Value object = evaluate(*e.items[0]);
      const Value key = evaluate(*e.items[1]);
      rt_.line = e.line;
      return get_item(rt_, object, key);
    }
    case ExprKind::kSlice:
      return evaluate_slice(e);
    case ExprKind::kCall:
      return evaluate_call(e, Value());
    case ExprKind::kFilter:
      return evaluate_filter(e);
    case ExprKind::kTest:
      return evaluate_test(e);
    case ExprKind::kNot:
      return Value::boolean(!truthy(rt_, evaluate(*e.items[0])));
    case ExprKind::kNegate:
      return negate(rt_, evaluate(*e.items[0]));
    case ExprKind::kPlus:
      return plus(rt_, evaluate(*e.items[0]));
    case ExprKind::kBinary:
      return evaluate_binary(e);
    case ExprKind::kAnd: {
      const Value left = evaluate(*e.items[0]);
      return truthy(rt_, left) ? evaluate(*e.items[1]) : left;
    }
    case ExprKind::kOr: {
      const Value left = evaluate(*e.items[0]);
      return truthy(rt_, left) ? left : evaluate(*e.items[1]);
    }
    case ExprKind::kCompare:
      return evaluate_compare(e);
    case ExprKind::kConcat:
      return evaluate_concat(e);
    case ExprKind::kCondition:
      return evaluate_condition(e);
  }
  rt_.fail("an expression that cannot be evaluated");
}

Value Interpreter::evaluate_binary(const Expr& e) {
  const Value a = evaluate(*e.items[0]);
  const Value b = evaluate(*e.items[1]);
  rt_.line = e.line;
  switch (e.binary) {
    case Binary::kAdd:
      return add(rt_, a, b);
    case Binary::kSubtract:
      return subtract(rt_, a, b);
    case Binary::kMultiply:
      return multiply(rt_, a, b);
    case Binary::kDivide:
      return divide(rt_, a, b);
    case Binary::kFloorDivide:
      return floor_divide(rt_, a, b);
    case Binary::kModulo:
      return modulo(rt_, a, b);
    case Binary::kPower:
      return power(rt_, a, b);
  }
  return {};
}

bool Interpreter::compare(Compare op, const Value& a, const Value& b) {
  switch (op) {
    case Compare::kEqual:
      return equals(rt_, a, b);
    case Compare::kNotEqual:
      return !equals(rt_, a, b);
    case Compare::kLess:
      return ordered(rt_, Order::kLess, a, b);
    case Compare::kLessEqual:
      return ordered(rt_, Order::kLessEqual, a, b);
    case Compare::kGreater:
      return ordered(rt_, Order::kGreater, a, b);
    case Compare::kGreaterEqual:
      return ordered(rt_, Order::kGreaterEqual, a, b);
    case Compare::kIn:
      return contains(rt_, b, a);
    case Compare::kNotIn:
      return !contains(rt_, b, a);
  }
  return false;
}

Value Interpreter::evaluate_compare(const Expr& e) {
  Value left = evaluate(*e.items[0]);
  for (size_t i = 0; i < e.compares.size(); ++i) {
    const Value right = evaluate(*e.items[i + 1]);
    rt_.line = e.line;
    if (!compare(e.compares[i], left, right)) return Value::boolean(false);
    left = right;
  }
  return Value::boolean(true);
}

Value Interpreter::evaluate_collection(const Expr& e) {
  if (e.kind == ExprKind::kDict) {
    auto* dict = rt_.make<Dict>();
    for (size_t i = 0; i + 1 < e.items.size(); i += 2) {
      const Value key = evaluate(*e.items[i]);
      rt_.set(*dict, key, evaluate(*e.items[i + 1]));
    }
    return Value::dict(dict);
  }
  auto* list = rt_.make<List>();
  for (const Expr* item : e.items) rt_.push(*list, evaluate(*item));
  return e.kind == ExprKind::kList ? Value::list(list) : Value::tuple(list);
}

Value Interpreter::evaluate_concat(const Expr& e) {
  std::vector<Value> parts;
  parts.reserve(e.items.size());
  for (const Expr* item : e.items) parts.push_back(evaluate(*item));
  std::string text;
  for (const Value& part : parts) append_text(rt_, text, part);
  return rt_.string(std::move(text));
}

Value Interpreter::evaluate_slice(const Expr& e) {
  const Value object = evaluate(*e.items[0]);
  Value bounds[3];
  for (size_t i = 0; i < 3; ++i) {
    if (e.items[i + 1] != nullptr) bounds[i] = evaluate(*e.items[i + 1]);
  }
  rt_.line = e.line;
  return slice(rt_, object, bounds[0], bounds[1], bounds[2]);
}

void Interpreter::evaluate_arguments(const Expr& e, Args* args) {
  for (size_t i = 1; i < e.items.size(); ++i) args->positional.push_back(evaluate(*e.items[i]));
  for (const auto& [name, expr] : e.named) args->named.emplace_back(name, evaluate(*expr));
  if (e.star != nullptr) {
    const std::vector<Value> more = items_of(rt_, evaluate(*e.star));
    args->positional.insert(args->positional.end(), more.begin(), more.end());
  }
  if (e.double_star != nullptr) {
    const Value more = evaluate(*e.double_star);
    if (!more.is(Kind::kDict)) rt_.fail("argument after ** must be a mapping, not {}", type_name(more));
    for (const Dict::Entry& entry : more.as_dict().entries) {
      if (!entry.key.is(Kind::kString)) rt_.fail("keywords must be strings");
      for (const auto& [name, ignored] : args->named) {
        if (name == entry.key.text()) rt_.fail("got multiple values for keyword argument '{}'", name);
      }
      rt_.charge(sizeof(args->named[0]));
      args->named.emplace_back(entry.key.text(), entry.value);
    }
  }
}

Value Interpreter::evaluate_filter(const Expr& e) {
  const Value value = e.items[0] == nullptr ? block_text_ : evaluate(*e.items[0]);
  Args args;
  evaluate_arguments(e, &args);
  rt_.line = e.line;
  if (e.filter == nullptr) rt_.fail("No filter named '{}'.", e.name);
  return e.filter(rt_, value, args);
}

Value Interpreter::evaluate_test(const Expr& e) {
  const Value value = evaluate(*e.items[0]);
  Args args;
  evaluate_arguments(e, &args);
  rt_.line = e.line;
  if (e.test == nullptr) rt_.fail("No test named '{}'.", e.name);
  return Value::boolean(e.test(rt_, value, args));
}

Value Interpreter::evaluate_condition(const Expr& e) {
  if (truthy(rt_, evaluate(*e.items[1]))) return evaluate(*e.items[0]);
  if (e.items[2] != nullptr) return evaluate(*e.items[2]);
  return rt_.undefined(
      fmt::format("the inline if-expression on line {} evaluated to false and no else section was defined.", e.line));
}

Value Interpreter::evaluate_call(const Expr& e, const Value& caller) {
  const Value callee = evaluate(*e.items[0]);
  Args args;
  evaluate_arguments(e, &args);
  if (!caller.missing()) args.named.emplace_back("caller", caller);
  rt_.line = e.line;
  const Value result = call(callee, args);
  rt_.line = e.line;
  return result;
}

Value Interpreter::call(const Value& callee, Args& args) {
  switch (callee.kind()) {
    case Kind::kMacro:
      return call_macro(callee.as<Macro>(), args);
    case Kind::kFunction:
      return call_function(rt_, callee.as_function(), args);
    case Kind::kMethod:
      return call_method(rt_, callee.self(), callee.as_method(), args);
    case Kind::kLoop:
      return call_loop(callee.as<Loop>(), args);
    case Kind::kJoiner: {
      expect_positional(rt_, "joiner", args, 0, 0);
      Joiner& joiner = callee.as<Joiner>();
      if (joiner.used) return joiner.separator;
      joiner.used = true;
      return rt_.string("");
    }
    case Kind::kUndefined:
      fail_undefined(rt_, callee);
    default:
      rt_.fail("'{}' object is not callable", type_name(callee));
  }
}

}  // namespace nfp::jinja
