// In place of grammar_xgrammar.cc where the program is built without xgrammar.
#include "server/grammar/grammar.h"

namespace nfp::server {
namespace {

class NoGrammars final : public GrammarCompiler {
 public:
  Result<std::shared_ptr<const CompiledConstraint>> compile(const GrammarSpec& spec) override {
    return error(ErrorCode::kUnsupported,
                 "'{}' needs xgrammar, which this program was built without (see docs/serving.md, \"Grammars\")",
                 spec.param);
  }
};

}  // namespace

bool grammars_available() { return false; }

std::unique_ptr<GrammarCompiler> make_grammar_compiler(std::shared_ptr<const Tokenizer>, int32_t,
                                                       std::span<const int32_t>) {
  return std::make_unique<NoGrammars>();
}

}  // namespace nfp::server
