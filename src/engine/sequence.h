// One request inside the engine: its tokens, how many of them are in the KV cache, and which blocks hold them.
//
// Steps run ahead of their results, so what a plan needs is counted apart from what is certain: `scheduled` tokens have
// been part of a submitted step, `computed` ones of a collected one. A token that a step in flight samples has its
// place in `tokens` already, as kPendingToken.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "engine/allowed_tokens.h"
#include "engine/block_manager.h"
#include "engine/request.h"

namespace nfp {

inline constexpr int32_t kPendingToken = -1;

struct Sequence {
  uint64_t serial = 0;  // order of arrival; a smaller one has priority
  Request request;
  std::vector<int32_t> tokens;                          // prompt, then output
  int32_t limit = std::numeric_limits<int32_t>::max();  // tokens in all at which it ends
  int32_t computed = 0;                                 // tokens whose keys and values are in the cache
  int32_t scheduled = 0;                                // >= computed: those of steps in flight too
  int32_t pending = 0;                                  // trailing tokens that steps in flight are sampling
  int32_t last_row = -1;                                // row of the last step that sampled for it
  uint32_t life = 0;            // counts preemptions: what was in flight before one has no blocks any more
  std::vector<int32_t> blocks;  // block table: token t is in block t / block_size
  // Everything computed so far, reused blocks included, came from FP16 steps.
  bool exact = true;
  std::vector<PrefixKey> keys;       // of its full blocks, as far as they were asked for; stay through preemption
  size_t published = 0;              // full blocks that are computed
  std::vector<int32_t> fp16_tokens;  // of each block, of those computed so far: how many FP16 steps computed
  size_t found = 0;                  // while it waits: of its first blocks, how many the prefix cache had last
  // What a policy is told besides, in seconds on its clock; the engine's to set. Targets: from arrival to first token,
  // and from token to token.
  double arrival_s = 0, ttft_target_s = 0, itl_target_s = 0;
  bool no_drafts = false;     // a step with drafts of its tokens failed
  int32_t history_slot = -1;  // place in the backend's TokenHistory while running
  uint64_t seed = 0;
  std::vector<int32_t> end_ids;  // tokens that end it, and that are forbidden before min_tokens
  bool admitted = false;         // has been scheduled before
  int32_t cached = 0;            // tokens found in the prefix cache when first admitted,
  int32_t reused = 0;            // when last admitted,
  int32_t reused_fp16 = 0;       // and of these, tokens computed in FP16

  int32_t prompt_size() const { return static_cast<int32_t>(request.prompt.size()); }
  int32_t size() const { return static_cast<int32_t>(tokens.size()); }
  int32_t output_size() const { return size() - prompt_size(); }
  const AllowedTokens* allowed() const { return request.sampling.allowed.get(); }  // null = all tokens
  // Whether the host must see each token before it can tell which ones may come next: for a grammar, and for bad words
  // of several tokens.
  bool awaits_token() const { return request.constraint || (allowed() != nullptr && allowed()->reads_output()); }
  // Whether the next step can be planned before the one in flight has told its token: not at its last token, and not
  // where that must be seen first.
  bool may_run_ahead() const { return size() < limit && !awaits_token(); }
  // Whether some tokens may be forbidden where one is sampled.
  bool masked() const { return request.constraint || allowed() != nullptr; }
  // Which tokens may come at this place of the answer, as TokenConstraint::fill() tells it.
  bool fill_mask(int32_t place, std::span<uint32_t> mask) const {
    const bool constrained = request.constraint && request.constraint->fill(mask);
    if (allowed() == nullptr) return constrained;
    if (!constrained) std::fill(mask.begin(), mask.end(), ~0u);
    std::span<const int32_t> output;
    if (allowed()->reads_output()) {
      output = std::span(tokens).subspan(request.prompt.size(), static_cast<size_t>(place));
    }
    allowed()->restrict(mask, output);
    return true;
  }
  bool pooled() const { return request.pooling != Pooling::kNone; }
  // All its tokens are in steps that were submitted: there is nothing to plan until one of them gives a token, or the
  // last one ends it.
  bool all_scheduled() const { return scheduled == size(); }
  bool wants_exact() const { return request.precision == PrecisionClass::kExact; }
};

}  // namespace nfp
