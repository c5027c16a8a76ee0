// In place of grammar_xgrammar.cc where the program is built without xgrammar.
#include "server/grammar/grammar.h"

namespace nfp::server {
namespace {

class NoGrammars final : public GrammarCompiler {
 public:
  Compiled find(const GrammarSpec&) override { return nullptr; }
  Result<Compiled> compile(const GrammarSpec& spec, const std::stop_token&) override {
    return error(ErrorCode::kUnsupported,
                 "'{}' needs xgrammar, which this program was built without (see docs/serving.md, \"Grammars\")",
                 spec.param);
  }
  const GrammarStats& stats() const override { return stats_; }

 private:
  GrammarStats stats_;
};

}  // namespace

bool grammars_available() { return false; }

void run_as_grammar_process(int, char**) {}

Result<std::unique_ptr<GrammarHost>> start_grammar_host() { return std::unique_ptr<GrammarHost>(); }

// NOLINTNEXTLINE(performance-unnecessary-value-param): grammar_xgrammar.cc keeps it
std::unique_ptr<GrammarCompiler> make_grammar_compiler(std::shared_ptr<const Tokenizer>, int32_t,
                                                       std::span<const int32_t>, std::unique_ptr<GrammarHost>,
                                                       GrammarLimits) {
  return std::make_unique<NoGrammars>();
}

}  // namespace nfp::server
