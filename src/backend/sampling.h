// Sampling as the host plans it and the device reads it: fixed-size structs in arrays at fixed addresses, one download
// a step. Part of backend.h; plain enough for a CUDA file to include.
#pragma once

#include <cstdint>

namespace nfp {

inline constexpr int32_t kMaxTopLogprobs = 128;

// Parameters of one sampled row. The defaults are greedy, without anything else; padding rows keep them.
// Order of effects: bias, mask, penalties, temperature, top-k, top-p, min-p, draw (as vLLM orders them). Reported
// log-probabilities are those of the raw logits, before any of it.
struct SamplingRow {
  uint64_t seed = 0;                // with `draw` all that decides a row's random numbers (race.h): its place in a
  uint64_t draw = 0;                //   batch does not
  float temperature = 0.0f;         // 0 = greedy (lowest id wins a tie)
  float top_p = 1.0f;               // 1 = off, 0 = the likeliest token alone
  float min_p = 0.0f;               // 0 = off
  float repetition_penalty = 1.0f;  // 1 = off (CTRL paper, section 4.1; prompt and output tokens)
  float presence_penalty = 0.0f;    // 0 = off; output tokens, as OpenAI defines it
  float frequency_penalty = 0.0f;   // 0 = off; output tokens
  int32_t top_k = 0;                // 0 = off
  int32_t history_slot = -1;  // slot in TokenHistory, which penalties read and the sampled token is added to; -1 =
                              //   none
  int32_t bias_first = 0;     // entries bias_first .. bias_first + bias_count - 1 of the step's LogitBias array,
  int32_t bias_count = 0;     //   each token at most once
  int32_t allowed_row = -1;   // row of the step's token masks (grammars); -1 = unrestricted
  int32_t report = -1;        // -1 = only the token; else its log-probability and rank too, and so many of the
                              //   likeliest tokens (0..kMaxTopLogprobs)
};
static_assert(sizeof(SamplingRow) == 64);

struct LogitBias {
  int32_t token = 0;
  float value = 0.0f;  // added to the logit; -infinity forbids
};

// What a sampled or scored row gives back.
struct SampledRow {
  int32_t token = 0;
  float logprob = 0.0f;  // natural logarithm, of the raw logits; written where asked for
  int32_t rank = 0;      // 1 = the likeliest; likewise
  // Not 0: the largest logit (of those that may be sampled) is infinite or no number, and so all of them: what the head
  // reads overflowed. The token is a valid one all the same.
  int32_t not_finite = 0;
};
static_assert(sizeof(SampledRow) == 16);

struct TokenLogprob {
  int32_t token = 0;  // -1 where the vocabulary is smaller than what was asked for
  float logprob = 0;
};

// What the rows of a step need at most, known to the host: part of a captured step's identity, so that a backend may
// leave out what no row needs. Bits.
struct SamplingNeeds {
  enum : uint32_t {
    kDraw = 1,       // a temperature above 0
    kLimits = 2,     // top-k, top-p or min-p, with a draw
    kPenalties = 4,  // a history slot
    kBias = 8,
    kMask = 16,
    kReport = 32,
  };
};

}  // namespace nfp
