// What a caller asks of the engine and what it gets back.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/sampling.h"
#include "base/result.h"
#include "engine/prefix_key.h"
#include "nested/precision.h"

namespace nfp {

class AllowedTokens;

struct SamplingParams {
  float temperature = 1.0f;         // 0 = greedy
  int32_t top_k = 0;                // 0 = off
  float top_p = 1.0f;               // [0, 1]; 0 = the likeliest token alone
  float min_p = 0.0f;               // [0, 1]
  float repetition_penalty = 1.0f;  // > 0; prompt and output tokens
  float presence_penalty = 0.0f;    // [-2, 2]; output tokens
  float frequency_penalty = 0.0f;   // [-2, 2]; output tokens
  std::optional<uint64_t> seed;     // absent = drawn by the engine
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::shared_ptr<const AllowedTokens> allowed;  // null = all tokens may come (engine/allowed_tokens.h)

  std::optional<int32_t> max_tokens;       // absent = default_max_tokens, or less where the context is full before
  int32_t default_max_tokens = INT32_MAX;  // at least 1
  // Stop strings do not count before, and end-of-generation and stop ids are forbidden; these not where there is a
  // constraint, which alone knows whether the text may go on.
  int32_t min_tokens = 0;
  std::vector<std::string> stop;  // generation ends before the first of these appears in the text
  std::vector<int32_t> stop_token_ids;
  bool include_stop = false;  // leave the stop string (or stop token's text) in the output
  bool ignore_eos = false;    // but for the end of a constraint's text

  bool logprobs = false;                   // report each token's log-probability
  int32_t top_logprobs = 0;                // and this many likeliest alternatives
  std::optional<int32_t> prompt_logprobs;  // the same for the prompt: absent = no, 0 = the prompt's own tokens only
};

// Whether what is sampled depends on which tokens came before, and how often.
inline bool has_penalties(const SamplingParams& p) {
  return p.repetition_penalty != 1.0f || p.presence_penalty != 0.0f || p.frequency_penalty != 0.0f;
}

// Entries of logit_bias, and end-of-generation and stop ids, that one request may have together.
inline constexpr int32_t kMaxRowBias = 4096;

// What of the hidden states after the final norm a request wants, instead of an answer.
enum class Pooling : uint8_t {
  kNone,  // an answer
  kLast,  // the last token's
  kMean,  // the mean over all tokens
};

// What a model and an engine allow a request.
struct RequestBounds {
  int32_t vocab = 0;                  // token ids are 0 to vocab - 1
  int32_t max_context = 0;            // tokens of prompt and answer together
  int32_t hidden = 0;                 // size of a hidden state; 0 = the runner gives none, and pooling is refused
  std::vector<int32_t> end_ids = {};  // tokens that end an answer
};

// What is wrong with a request.
struct RequestError {
  std::string field;      // of SamplingParams, or "prompt"
  std::string message;    // names the field too
  bool too_long = false;  // prompt and answer do not fit into the context
};

// Of an id that is not in the vocabulary.
std::optional<RequestError> check_token(std::string_view field, int32_t token, int32_t vocab);

// The one validation of a request: ranges of every field, token ids, and whether prompt and answer fit. A pooled
// request has no answer, nor has one that wants its prompt only: the prompt may fill the context.
std::optional<RequestError> validate(std::span<const int32_t> prompt, const SamplingParams& sampling,
                                     const RequestBounds& bounds, Pooling pooling = Pooling::kNone,
                                     bool prompt_only = false);

// What a request allows its steps to be computed in.
enum class PrecisionClass : uint8_t {
  kAuto,   // as the policy decides
  kExact,  // FP16 steps only, and no cached prefix that an FP8 step had a part in
  kFast,   // FP8 whenever no other request of the step asks for more
};
// Their names in this order, as requests and traces have them.
inline constexpr std::array<std::pair<std::string_view, PrecisionClass>, 3> kPrecisionClassNames = {
    {{"auto", PrecisionClass::kAuto}, {"exact", PrecisionClass::kExact}, {"fast", PrecisionClass::kFast}}};
std::string_view name_of(PrecisionClass precision);
std::optional<PrecisionClass> precision_class_from_name(std::string_view name);

// Restricts which tokens may come next (a grammar). Used by the engine's thread only.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;
  // Whether fill() would return at once, after waiting for that at most so long. A sequence that is not ready sits out
  // steps until it is.
  virtual bool ready(std::chrono::microseconds wait) {
    (void)wait;
    return true;
  }
  // Writes the allowed tokens: bit v % 32 of mask[v / 32]. False = everything is allowed now (mask untouched).
  virtual bool fill(std::span<uint32_t> mask) = 0;
  // Takes the token that was chosen. False = it was not allowed (the request ends with an error).
  virtual bool accept(int32_t token) = 0;
  // Why this constraint can no longer be followed; empty = it can. From then on fill() allows everything and accept()
  // nothing.
  virtual std::string_view failure() const { return {}; }
  // Whose fault that is.
  virtual ErrorCode failure_code() const { return ErrorCode::kInvalidInput; }
};

struct Request {
  std::string id;               // chosen by the caller, unique among the requests in flight
  std::vector<int32_t> prompt;  // at least one token
  SamplingParams sampling;
  PrecisionClass precision = PrecisionClass::kAuto;
  bool skip_special_tokens = true;  // in the text
  bool skip_special_end = false;    // the same for one that ends it, where others stay and include_stop is set
  // What the client wants of latency, seconds; absent = the engine's targets.
  std::optional<double> slo_ttft_s, slo_itl_s;
  int32_t priority = 0;              // lower goes first
  Pooling pooling = Pooling::kNone;  // anything else: the prompt is computed, and nothing sampled
  // The prompt's log-probabilities are wanted, and no answer: it ends with one token, whatever max_tokens is, which the
  // caller drops.
  bool prompt_only = false;
  // When it came, on the engine's clock; absent = when it is submitted.
  std::optional<std::chrono::steady_clock::time_point> arrival;
  PrefixKey cache_scope;  // cached prefixes are reused only within one scope
  std::unique_ptr<TokenConstraint> constraint;
};

enum class FinishReason : uint8_t { kStop, kLength, kCancelled, kError };
std::string_view name_of(
    FinishReason reason);  // as OpenAI's and vLLM's APIs have it: "stop", "length", "abort", "error"

struct OutputToken {
  int32_t token = 0;
  Precision precision = Precision::kFp16;  // of the step that computed it
  float logprob = 0;                       // if asked for
  int32_t rank = 0;                        // 1 = likeliest, if asked for
  std::vector<TokenLogprob> top;           // likeliest first, if asked for
  bool finite = true;                      // the logits that it was chosen by, or is scored by
  bool has_choice = true;                  // some token was allowed; false = this one is none of the answer
};

// Tokens by the precision of the step that computed them (for prompt tokens: their keys and values).
struct PrecisionCounts {
  int32_t fp16 = 0;
  int32_t fp8 = 0;
  void add(Precision precision, int32_t tokens) { (is_exact(precision) ? fp16 : fp8) += tokens; }
};

struct Usage {
  int32_t prompt_tokens = 0;
  int32_t cached_tokens = 0;  // of the prompt, taken from the prefix cache
  int32_t completion_tokens = 0;
  PrecisionCounts prompt;  // cached tokens count as they were computed
  PrecisionCounts completion;
  std::optional<bool> slo_met;  // once it has ended: first token and mean gap were within its targets
};

// One piece of an answer. Pieces of a request come in order; the last one has `finish`.
struct RequestOutput {
  std::string id;
  std::string text;                 // new text, whole UTF-8 sequences, stop strings removed
  std::vector<OutputToken> tokens;  // new tokens; their text may come in a later piece
  // With the first piece, if asked for: [i] is prompt token i given those before it; entry 0 has no probability.
  std::vector<OutputToken> prompt_logprobs;
  std::vector<float> embedding;  // [hidden] of a pooled request, with its only piece
  std::optional<FinishReason> finish;
  std::optional<int32_t> stop_token;                // which end-of-generation or stop id ended it
  std::optional<std::string> stop_string;           // which stop string ended it
  std::string error;                                // for kError: what happened,
  ErrorCode error_code = ErrorCode::kInvalidInput;  // and whose fault it was
  bool shed = false;                                // it was refused, as its first token could not come in time;
  double retry_after_s = 0;                         // when it may be worth to try again, 0 = never
  Usage usage;                                      // so far
};

}  // namespace nfp
