// Grammars that restrict what a model may write: JSON, JSON schemas, regular expressions, EBNF, lists of choices. The
// work is xgrammar's (Dong et al., "XGrammar", MLSys 2025), in processes of their own (grammar_worker.h), so that no
// grammar can hold anybody up; a build without it answers every request for one with a clear error.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "engine/request.h"
#include "server/api/generation_request.h"
#include "server/metrics/histogram.h"
#include "text/tokenizer.h"

namespace nfp::server {

struct GrammarLimits {
  // CPU time, so that a busy machine does not refuse what an idle one compiles. By the clock a grammar that gives way
  // to the server may take so much longer.
  std::chrono::milliseconds compile_time{10'000}, compile_patience{60'000};
  // While others wait to compile, whoever has had this much is stopped in their favour.
  std::chrono::milliseconds compile_share{1'000};
  // CPU time of an answer's masks: what one token may take, and what may be taken for each token in the long run.
  std::chrono::milliseconds token_burst{500};
  std::chrono::microseconds token_mean{10'000};
  uint64_t memory_bytes = 1u << 30;   // of one grammar's process
  uint64_t cache_bytes = 256u << 20;  // compiled grammars that nobody uses now
};

struct GrammarStats {
  std::atomic<int32_t> compiling{0};
  std::atomic<uint64_t> hits{0};  // found compiled
  std::atomic<uint64_t> cached_bytes{0};
  std::atomic<uint64_t> refused_time{0}, refused_busy{0}, refused_invalid{0}, refused_failed{0};
  std::atomic<uint64_t> cancelled{0};
  std::atomic<uint64_t> answers_stopped{0};  // whose masks took too long
  std::atomic<uint64_t> restarts{0};         // of processes that had ended
  static constexpr double kSeconds[] = {0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0};
  Histogram compile_seconds{kSeconds};  // also of those that failed
};

// Makes as many constraints as there are answers to one request.
class CompiledConstraint {
 public:
  virtual ~CompiledConstraint() = default;
  virtual std::unique_ptr<TokenConstraint> instantiate() const = 0;
};
using Compiled = std::shared_ptr<const CompiledConstraint>;

class GrammarCompiler {
 public:
  virtual ~GrammarCompiler() = default;
  // The grammar where it is compiled already, else null. Never waits.
  virtual Compiled find(const GrammarSpec& spec) = 0;
  // From any thread; equal grammars are compiled once. Waits, up to GrammarLimits::compile_time and
  // compile_patience, or until `stop`. Errors: kInvalidInput (not a schema, not a grammar, too costly), kUnsupported,
  // kResource (others wait, the machine is too busy, or the system gives no process), kCancelled.
  virtual Result<Compiled> compile(const GrammarSpec& spec, const std::stop_token& stop = {}) = 0;
  virtual const GrammarStats& stats() const = 0;
};

// First of all in the main() of a program that compiles grammars, which starts itself again for them: where this
// process is such a one, does its work and never returns.
void run_as_grammar_process(int argc, char** argv);

// The first grammar process, which is started again should it end.
class GrammarHost {
 public:
  virtual ~GrammarHost() = default;  // ends all grammar processes
};
// Null in a build without xgrammar.
Result<std::unique_ptr<GrammarHost>> start_grammar_host();

// Whether this program was built with xgrammar.
bool grammars_available();

// `vocab` is the number of logits (at least the tokenizer's ids); `end_ids` may come once the text is complete. Without
// a `host` one is started.
std::unique_ptr<GrammarCompiler> make_grammar_compiler(std::shared_ptr<const Tokenizer> tokenizer, int32_t vocab,
                                                       std::span<const int32_t> end_ids,
                                                       std::unique_ptr<GrammarHost> host = nullptr,
                                                       GrammarLimits limits = {});

// A constraint that also forbids `end_ids` for the first `min_tokens` tokens, except where `inner` allows nothing else:
// a grammar's text is complete when it is complete. `inner` may not be null.
std::unique_ptr<TokenConstraint> with_min_tokens(std::unique_ptr<TokenConstraint> inner, int32_t min_tokens,
                                                 std::vector<int32_t> end_ids);
// What `inner` says, of JSON, or a call that begins with `mark`: what follows that is free. Where no tokens of this
// model's make the mark in a way that no JSON begins, `inner` alone.
std::unique_ptr<TokenConstraint> or_call(std::unique_ptr<TokenConstraint> inner, std::string_view mark,
                                         const Tokenizer& tokenizer);

}  // namespace nfp::server
