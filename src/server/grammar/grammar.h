// Grammars that restrict what a model may write: JSON, JSON schemas, regular expressions, EBNF, lists of choices. The
// work is xgrammar's (Dong et al., "XGrammar", MLSys 2025); a build without it answers every request for one with a
// clear error.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "engine/request.h"
#include "server/api/generation_request.h"
#include "text/tokenizer.h"

namespace nfp::server {

// Makes as many constraints as there are answers to one request.
class CompiledConstraint {
 public:
  virtual ~CompiledConstraint() = default;
  virtual std::unique_ptr<TokenConstraint> instantiate() const = 0;
};

class GrammarCompiler {
 public:
  virtual ~GrammarCompiler() = default;
  // From any thread; equal grammars are compiled once. Takes up to seconds for a large schema. Errors: kInvalidInput
  // (not a schema, not a grammar), kUnsupported.
  virtual Result<std::shared_ptr<const CompiledConstraint>> compile(const GrammarSpec& spec) = 0;
};

// Whether this program was built with xgrammar.
bool grammars_available();

// `vocab` is the number of logits (at least the tokenizer's ids); `end_ids` may come once the text is complete.
std::unique_ptr<GrammarCompiler> make_grammar_compiler(std::shared_ptr<const Tokenizer> tokenizer, int32_t vocab,
                                                       std::span<const int32_t> end_ids);

}  // namespace nfp::server
