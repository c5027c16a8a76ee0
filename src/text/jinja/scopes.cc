#include "text/jinja/scopes.h"

#include <map>

namespace nfp::jinja {
namespace {

// The names that a scope has, and whether they are unset where it begins.
class Names {
 public:
  explicit Names(const Names* around) : around_(around) {}

  void load(Symbol symbol) {
    if (!find(symbol)) unset_.emplace(symbol, false);
  }
  void store(Symbol symbol) { unset_.emplace(symbol, around_ == nullptr || !around_->find(symbol)); }
  void declare(Symbol symbol) { unset_[symbol] = false; }

  std::vector<Symbol> unset() const {
    std::vector<Symbol> out;
    for (const auto& [symbol, unset] : unset_) {
      if (unset) out.push_back(symbol);
    }
    return out;
  }

 private:
  bool find(Symbol symbol) const { return unset_.contains(symbol) || (around_ != nullptr && around_->find(symbol)); }

  const Names* around_;
  std::map<Symbol, bool> unset_;
};

// All that an expression reads.
void load(const Expr* e, Names& names) {
  if (e == nullptr) return;
  if (e->kind == ExprKind::kName) names.load(e->symbol);
  for (const Expr* item : e->items) load(item, names);
  for (const auto& [name, value] : e->named) load(value, names);
  load(e->more, names);
  load(e->more_named, names);
}

void store(const Expr* target, Names& names, bool in_if) {
  if (target->kind == ExprKind::kName) {
    // Another branch may not assign it, and then it is looked for outside.
    return in_if ? names.load(target->symbol) : names.store(target->symbol);
  }
  if (target->kind == ExprKind::kNamespaceName) return names.load(target->symbol);
  for (const Expr* item : target->items) store(item, names, in_if);
}

void declare(const Expr* target, Names& names) {
  if (target->kind == ExprKind::kName) names.declare(target->symbol);
  for (const Expr* item : target->items) declare(item, names);
}

// What happens in the scope itself, not in the scopes within: jinja2's FrameSymbolVisitor.
void visit(const std::vector<Stmt*>& body, Names& names, bool in_if = false) {
  for (const Stmt* s : body) {
    if (s->kind != StmtKind::kSetBlock) load(s->expr, names);
    if (s->kind == StmtKind::kMacro) in_if ? names.load(s->symbol) : names.store(s->symbol);
    if (s->kind == StmtKind::kSet || s->kind == StmtKind::kSetBlock) store(s->target, names, in_if);
    if (s->kind != StmtKind::kIf) continue;
    for (const Stmt::Branch& branch : s->branches) {
      load(branch.condition, names);
      visit(branch.body, names, /*in_if=*/true);
    }
    visit(s->other, names, /*in_if=*/true);
  }
}

void visit_within(const std::vector<Stmt*>& body, const Names& names);

std::vector<Symbol> visit_scope(const std::vector<Stmt*>& body, Names& names) {
  visit(body, names);
  visit_within(body, names);
  return names.unset();
}

// The scopes that begin in a body.
void visit_within(const std::vector<Stmt*>& body, const Names& names) {
  for (Stmt* s : body) {
    if (s->kind == StmtKind::kIf) {
      for (const Stmt::Branch& branch : s->branches) visit_within(branch.body, names);
      visit_within(s->other, names);
      continue;
    }
    Names inside(&names);
    if (s->kind == StmtKind::kWith) declare(s->target, inside);
    if (s->kind == StmtKind::kFor) {
      declare(s->target, inside);
      Names other(&names);
      s->unset_other = visit_scope(s->other, other);
    }
    for (const Stmt::Parameter& parameter : s->parameters) inside.declare(parameter.symbol);
    for (const Stmt::Parameter& parameter : s->parameters) load(parameter.default_value, inside);
    s->unset = visit_scope(s->body, inside);
  }
}

}  // namespace

void find_unset(Template& program) {
  Names names(nullptr);
  program.unset = visit_scope(program.body, names);
}

}  // namespace nfp::jinja
