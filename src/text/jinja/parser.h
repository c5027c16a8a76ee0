// A parsed template. Nodes point at each other with plain pointers; the Template owns them all.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
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
  kCall,       // items[0](items[1..], named)
  kFilter,     // items[0]|filter(items[1..], named); items[0] is null at a block: the block's text
  kTest,       // items[0] is test(items[1..])
  kNot,
  kNegate,
  kBinary,
  kAnd,
  kOr,
  kCompare,  // items[0] compares[0] items[1] compares[1] items[2] ...
  kConcat,
  kCondition,  // items[0] if items[1] else items[2], which may be null
};

struct Expr {
  ExprKind kind = ExprKind::kConstant;
  Binary binary = Binary::kAdd;
  int line = 0;
  int depth = 1;  // longest way down to a leaf
  Symbol symbol = 0;
  std::string_view
      name;  // of an attribute, or of a filter or test, which is an error only once it runs, as in jinja2's ifs
  Value constant;
  std::vector<Expr*> items;
  std::vector<Compare> compares;
  std::vector<std::pair<std::string_view, Expr*>> named;
  Expr* more = nullptr;        // of a call, filter or test: `*more`, further arguments
  Expr* more_named = nullptr;  // `**more_named`, further named ones
};

enum class StmtKind : uint8_t {
  kText,
  kPrint,       // expr
  kIf,          // branches, other
  kFor,         // for target in expr if condition: body else other
  kSet,         // target = expr
  kSetBlock,    // target = body, through the filters of expr (may be null)
  kFilter,      // body through the filters of expr
  kWith,        // body in a scope of its own, with target = expr, both tuples
  kMacro,       // symbol(parameters): body
  kCallBlock,   // expr, a call of a macro that gets caller(parameters): body
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
  std::vector<Symbol> unset;        // variables without a value where `body` begins (scopes.h)
  std::vector<Symbol> unset_other;  // where a for's `other` does
  // What a macro gets beside its parameters, where something in its body asks for it and no parameter has the name.
  struct Extras {
    bool caller = false;   // the body of the call block that calls it
    bool varargs = false;  // arguments beyond its parameters
    bool kwargs = false;   // named arguments that are none of its parameters
  };
  Extras reads;
  bool recursive = false;  // a for whose `loop` may be called with what to loop over in the same way
};

struct Template {
  std::string name;
  std::vector<Stmt*> body;
  std::vector<Symbol> unset;  // as a Stmt's

  std::deque<Expr> exprs;
  std::deque<Stmt> stmts;
  std::deque<std::string> symbol_names;
  std::map<std::string_view, Symbol> symbols;  // a tree: hashes of names from outside could be made to collide
  std::vector<bool> read;                      // by symbol: whether any expression reads the variable
  Heap constants;

  Symbol intern(std::string_view text) {
    if (const auto it = symbols.find(text); it != symbols.end()) return it->second;
    symbol_names.emplace_back(text);
    const auto symbol = static_cast<Symbol>(symbol_names.size() - 1);
    symbols.emplace(symbol_names.back(), symbol);
    read.push_back(false);
    return symbol;
  }
  std::string_view name_of(std::string_view text) { return symbol_names[intern(text)]; }
};

// `name` appears in errors, as the template's.
Result<std::shared_ptr<const Template>> parse_template(const std::string& source, std::string name);

}  // namespace nfp::jinja
