#include "text/jinja/interpreter.h"
#include "text/jinja/text.h"

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
      return evaluate_call(e);
    case ExprKind::kFilter:
      return evaluate_filter(e);
    case ExprKind::kTest:
      return evaluate_test(e);
    case ExprKind::kNot:
      return Value::boolean(!truthy(rt_, evaluate(*e.items[0])));
    case ExprKind::kNegate:
      return negate(rt_, evaluate(*e.items[0]));
    case ExprKind::kBinary: {
      const Value a = evaluate(*e.items[0]);
      const Value b = evaluate(*e.items[1]);
      rt_.line = e.line;
      return arithmetic(rt_, e.binary, a, b);
    }
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

Value Interpreter::evaluate_compare(const Expr& e) {
  Value left = evaluate(*e.items[0]);
  for (size_t i = 0; i < e.compares.size(); ++i) {
    const Value right = evaluate(*e.items[i + 1]);
    rt_.line = e.line;
    if (!compare(rt_, e.compares[i], left, right)) return Value::boolean(false);
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
    return Value::object(Kind::kDict, dict);
  }
  std::vector<Value> items;
  for (const Expr* item : e.items) items.push_back(evaluate(*item));
  return rt_.list(std::move(items), e.kind == ExprKind::kList ? Kind::kList : Kind::kTuple);
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

Args Interpreter::evaluate_arguments(const Expr& e) {
  Args args;
  for (size_t i = 1; i < e.items.size(); ++i) args.positional.push_back(evaluate(*e.items[i]));
  for (const auto& [name, expr] : e.named) args.named.emplace_back(name, evaluate(*expr));
  return args;
}

Value Interpreter::evaluate_filter(const Expr& e) {
  const Value value = e.items[0] == nullptr ? block_text_ : evaluate(*e.items[0]);
  const Args args = evaluate_arguments(e);
  rt_.line = e.line;
  if (e.filter == nullptr) rt_.fail("the filter {} is not supported in chat templates", e.name);
  return e.filter->call(rt_, value, args);
}

Value Interpreter::evaluate_test(const Expr& e) {
  const Value value = evaluate(*e.items[0]);
  const Args args = evaluate_arguments(e);
  rt_.line = e.line;
  if (e.test == nullptr) rt_.fail("the test {} is not supported in chat templates", e.name);
  expect_positional(rt_, e.name, args, e.test->has_argument, e.test->has_argument);
  return Value::boolean(e.test->holds(rt_, value, e.test->has_argument ? args.positional[0] : Value()));
}

Value Interpreter::evaluate_condition(const Expr& e) {
  if (truthy(rt_, evaluate(*e.items[1]))) return evaluate(*e.items[0]);
  if (e.items[2] != nullptr) return evaluate(*e.items[2]);
  return rt_.undefined(
      fmt::format("the inline if-expression on line {} evaluated to false and no else section was defined.", e.line));
}

Value Interpreter::evaluate_call(const Expr& e) {
  const Value callee = evaluate(*e.items[0]);
  const Args args = evaluate_arguments(e);
  rt_.line = e.line;
  const Value result = call(callee, args);
  rt_.line = e.line;
  return result;
}

Value Interpreter::call(const Value& callee, const Args& args) {
  if (callee.undefined()) rt_.fail_undefined(callee);
  if (callee.is(Kind::kMacro)) return call_macro(callee.as<Macro>(), args);
  if (!callee.is(Kind::kFunction)) rt_.fail("'{}' object is not callable", type_name(callee));
  const auto& function = callee.as<Function>();
  if (function.callable->call != nullptr) return function.callable->call(rt_, function.self, args);
  if (function.self.missing()) {
    rt_.fail("the function {} is not supported in chat templates", function.callable->name);
  }
  rt_.fail("the method {} of {} is not supported in chat templates", function.callable->name, type_name(function.self));
}

}  // namespace nfp::jinja
