// A parsed template. Nodes point at each other with plain pointers; the Template owns them all.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "text/jinja/callables.h"
#include "text/jinja/filters.h"
#include "text/jinja/value.h"

namespace nfp::jinja {

using Symbol = uint32_t;  // an interned variable name

enum class ExprKind : uint8_t {
  kConstant,
  kName,
  kNamespaceName,  // target `symbol.name` of a set
  kList,           // items
  kTuple,
  kDict,       // items: key, value, key, value ...
  kAttribute,  // items[0].name
  kItem,       // items[0][items[1]]
  kSlice,      // items[0][items[1]:items[2]:items[3]], each of the three may be null
  kCall,       // items[0](items[1..], named, *star, **double_star)
  kFilter,     // items[0]|filter(items[1..], ...); items[0] is null in a filter block: the block's text
  kTest,       // items[0] is test(items[1..], ...)
  kNot,
  kNegate,
  kPlus,
  kBinary,
  kAnd,
  kOr,
  kCompare,  // items[0] compares[0] items[1] compares[1] items[2] ...
  kConcat,
  kCondition,  // items[0] if items[1] else items[2], which may be null
};

enum class Binary : uint8_t { kAdd, kSubtract, kMultiply, kDivide, kFloorDivide, kModulo, kPower };
enum class Compare : uint8_t { kEqual, kNotEqual, kLess, kLessEqual, kGreater, kGreaterEqual, kIn, kNotIn };

struct Expr {
  ExprKind kind = ExprKind::kConstant;
  Binary binary = Binary::kAdd;
  int line = 0;
  int depth = 1;  // longest way down to a leaf
  Symbol symbol = 0;
  std::string_view name;  // of an attribute, filter or test
  Value constant;
  FilterFunction filter = nullptr;  // null: no such filter, which is an error once it runs, as in jinja2's ifs
  TestFunction test = nullptr;
  std::vector<Expr*> items;
  std::vector<Compare> compares;
  std::vector<std::pair<std::string_view, Expr*>> named;
  Expr* star = nullptr;
  Expr* double_star = nullptr;
};

enum class StmtKind : uint8_t {
  kText,
  kPrint,       // expr
  kIf,          // branches, other
  kFor,         // for target in expr if condition: body else other
  kSet,         // target = expr
  kSetBlock,    // target = body, through the filters of expr (may be null)
  kMacro,       // symbol(parameters): body
  kCall,        // a call block: expr is the call, body what caller(parameters) prints
  kFilter,      // body through the filters of expr
  kWith,        // targets = values: body
  kGeneration,  // transformers' {% generation %}: body in a scope of its own
  kBreak,
  kContinue,
};

struct Stmt {
  struct Branch {
    Expr* condition = nullptr;
    std::vector<Stmt*> body;
  };
  struct Parameter {
    Symbol symbol = 0;
    std::string_view name;
    Expr* default_value = nullptr;  // null: must be given, else Undefined
  };

  StmtKind kind = StmtKind::kText;
  int line = 0;
  bool recursive = false;                                               // of a for
  bool uses_caller = false, uses_kwargs = false, uses_varargs = false;  // of a macro or call block
  Symbol symbol = 0;
  std::string_view name;
  std::string text;
  Expr* expr = nullptr;
  Expr* target = nullptr;
  Expr* condition = nullptr;
  std::vector<Stmt*> body;
  std::vector<Stmt*> other;
  std::vector<Branch> branches;
  std::vector<Parameter> parameters;
  std::vector<std::pair<Expr*, Expr*>> bindings;  // of a with
  std::vector<Symbol> hidden, other_hidden;       // names that body and other hide from the start (see scoping.h)
};

struct Template {
  std::string name;
  std::vector<Stmt*> body;
  std::vector<Symbol> hidden;  // names that the body hides from the start (see scoping.h)

  std::deque<Expr> exprs;
  std::deque<Stmt> stmts;
  std::deque<std::string> symbol_names;
  std::unordered_map<std::string_view, Symbol> symbols;
  std::vector<bool> read;  // by symbol: whether any expression reads the variable
  Heap constants;

  Symbol intern(std::string_view text) {
    if (const auto it = symbols.find(text); it != symbols.end()) return it->second;
    symbol_names.emplace_back(text);
    const auto symbol = static_cast<Symbol>(symbol_names.size() - 1);
    symbols.emplace(symbol_names.back(), symbol);
    read.push_back(false);
    return symbol;
  }
};

}  // namespace nfp::jinja
