// Which variables a block hides although it has not set them yet; see find_hidden_names in ast.h.
#include <unordered_set>

#include "text/jinja/ast.h"

namespace nfp::jinja {
namespace {

// The names that one block mentions.
struct Frame {
  explicit Frame(const Frame* around) : parent(around) {}

  bool knows(Symbol symbol) const {
    for (const Frame* frame = this; frame != nullptr; frame = frame->parent) {
      if (frame->names.count(symbol) != 0) return true;
    }
    return false;
  }
  void read(Symbol symbol) {
    if (!knows(symbol)) names.insert(symbol);
  }
  void declare(Symbol symbol) { names.insert(symbol); }
  // What is set in one branch of an `if` may stay unset, so it is looked up around the block all the same.
  void set(Symbol symbol, bool in_branch) {
    if (!in_branch && !knows(symbol)) hidden.push_back(symbol);
    names.insert(symbol);
  }

  const Frame* const parent;
  std::unordered_set<Symbol> names;
  std::vector<Symbol> hidden;
  std::vector<Stmt*> inner;  // statements with blocks of their own, which are looked at when this one is complete
};

void read_names(const Expr* e, Frame& frame) {
  if (e == nullptr) return;
  if (e->kind == ExprKind::kName || e->kind == ExprKind::kNamespaceName) frame.read(e->symbol);
  for (const Expr* item : e->items) read_names(item, frame);
  for (const auto& [name, value] : e->named) read_names(value, frame);
}

void set_names(const Expr& target, Frame& frame, bool in_branch) {
  if (target.kind == ExprKind::kName) {
    frame.set(target.symbol, in_branch);
  } else if (target.kind == ExprKind::kNamespaceName) {
    frame.read(target.symbol);
  } else {
    for (const Expr* item : target.items) set_names(*item, frame, in_branch);
  }
}

void declare_names(const Expr& target, Frame& frame) {
  if (target.kind == ExprKind::kName) frame.declare(target.symbol);
  for (const Expr* item : target.items) declare_names(*item, frame);
}

void visit_body(const std::vector<Stmt*>& body, Frame& frame, bool in_branch) {
  for (Stmt* s : body) {
    switch (s->kind) {
      case StmtKind::kText:
      case StmtKind::kBreak:
      case StmtKind::kContinue:
        break;
      case StmtKind::kPrint:
        read_names(s->expr, frame);
        break;
      case StmtKind::kIf:
        for (const Stmt::Branch& branch : s->branches) {
          read_names(branch.condition, frame);
          visit_body(branch.body, frame, true);
        }
        visit_body(s->other, frame, true);
        break;
      case StmtKind::kSet:
        read_names(s->expr, frame);
        set_names(*s->target, frame, in_branch);
        break;
      case StmtKind::kSetBlock:
        set_names(*s->target, frame, in_branch);
        frame.inner.push_back(s);
        break;
      case StmtKind::kMacro:
        frame.set(s->symbol, in_branch);
        frame.inner.push_back(s);
        break;
      case StmtKind::kFor:
        read_names(s->expr, frame);
        frame.inner.push_back(s);
        break;
      case StmtKind::kGeneration:
        frame.inner.push_back(s);
        break;
    }
  }
}

class Scoping {
 public:
  explicit Scoping(Template& program) : program_(program) {}

  void run() { program_.hidden = finish(program_.body, Frame(nullptr)); }

 private:
  // Looks at a block whose parameters are declared, then at those inside of it.
  std::vector<Symbol> finish(const std::vector<Stmt*>& body, Frame frame) {
    visit_body(body, frame, false);
    for (Stmt* s : frame.inner) enter(*s, frame);
    return std::move(frame.hidden);
  }

  void enter(Stmt& s, const Frame& around) {
    Frame frame(&around);
    if (s.kind == StmtKind::kFor) {
      declare_names(*s.target, frame);
      frame.declare(program_.intern("loop"));
      if (!s.other.empty()) s.other_hidden = finish(s.other, Frame(&around));
    }
    for (const Stmt::Parameter& parameter : s.parameters) frame.declare(parameter.symbol);
    for (const Stmt::Parameter& parameter : s.parameters) read_names(parameter.default_value, frame);
    s.hidden = finish(s.body, std::move(frame));
  }

  Template& program_;
};

}  // namespace

void find_hidden_names(Template& program) { Scoping(program).run(); }

}  // namespace nfp::jinja
