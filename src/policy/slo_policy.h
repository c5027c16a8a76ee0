// Keeps as many deadlines as it can with as much FP16 as it can: chooses tokens, their order and the precision of a
// step together, from predicted step times. docs/slo.md explains the method and where its parts come from.
#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "policy/policy.h"

namespace nfp {

struct SloOptions {
  enum class Levels : uint8_t { kAll, kFp16Only, kFp8Only };  // the last two are for comparison
  Levels levels = Levels::kAll;
  // What becomes of requests whose first token cannot come in time even at the fastest level.
  enum class Missed : uint8_t {
    kLast,        // they go behind those that can be in time, to a second deadline
    kShed,        // those of which nothing has been computed are refused at once
    kAsTheyCome,  // they keep their place, and may make others late
  };
  Missed missed = Missed::kLast;
  // A prefill's precision is lowered where FP16 would leave less than this share of its target as a reserve for
  // requests that have not come yet.
  double reserve = 0.1;
  // The same before a step goes back to less FP8 than the one before it had.
  double reserve_to_return = 0.4;
  // And at least this for a level with FP8 in a part of the weights: one that keeps the deadlines by a hair lets the
  // queue stay, and more of the tokens lose FP16 in the end.
  double reserve_partial = 0.25;
  // No step is planned that makes a decoding sequence wait longer than this many of its target between two tokens, less
  // so many times the mean error of recent predictions.
  double longest_gap = 1.9;
  double longest_gap_errors = 2;
  // A step takes no more than this share of the shortest of recent TTFT targets: whoever comes while it runs must wait
  // for its end. Where steps are planned ahead, all that such a one waits for shares this.
  double step_share = 0.5;
  // Steps need never be shorter than this share of the target gap for a decoding sequence's sake: shorter ones cost
  // more for each prompt token.
  double catch_up = 1;
  double itl_margin = 0.02;  // share of the target gap that is not planned with
  // Predictions are wrong, and a step that is planned to end at a deadline then ends after it half of the time. So, in
  // times of the mean error of recent predictions: this share of what is left to the deadline of a prompt that ends in
  // the step is kept free, catch_up is lower and itl_margin larger.
  double end_errors = 2;
  double catch_up_errors = 3;
  double itl_margin_errors = 0.5;
  double most_error = 0.2;   // no larger error is planned with
  int32_t least_chunk = 16;  // prompt tokens of a step at least, where there are any
  // Whether prompts may be in FP8 while what decodes beside them stays in FP16, in a launch of its own: where that is
  // faster than FP16 for all and in time, it comes before FP8 for all. What decodes then gives up less FP16 and prompts
  // more, as two launches take longer than one (docs/slo.md has figures).
  bool exact_decode = false;
  // A prompt that what decodes beside it cuts into this many steps gets a deadline of its own from then on: it should
  // not take longer than alone in FP16 by more than this share, and FP8 pays for the sharing where it does. Steps end
  // after so many target gaps then, as short ones are cheap in FP8 and what disturbs the machine makes some half as
  // long again.
  double many_steps = 32;
  double most_longer = 0.05;
  double shared_gap = 1.2;
  int shared_steps = 8;  // before its level changes again
  // Where more than the first of these shares of the last requests were lost that FP8 alone would have kept, FP16 had
  // used the time that they needed: then, while FP8 alone would have prompts to compute, the reserves grow, and what
  // decodes must take a smaller share of its target gap, up to these where it is more than the second one.
  double few_lost = 0.008, many_lost = 0.02;
  double reserve_of_many = 0.5, reserve_to_return_of_many = 0.8, decode_share_of_many = 0.1;
  double requests_remembered = 150;
  // A request whose deadline is lost gets this many times the target as its next one.
  double grace = 2;
  // One that loses that too gets this as its last one, or twice the second one where that is later.
  double longest_wait_s = 10;
  // An answer that preemption stopped has the deadlines of a prompt that came with its last token, and goes before all
  // prompts once it has waited this long.
  double longest_pause_s = 2;
  // More FP8 than the last step had must be faster by this share, or by the mean error of recent predictions: of levels
  // that are about as fast, now one and now another is predicted to be the fastest.
  double least_gain = 0.03;
  // What can be in time no more is no reason for FP8, until it has waited this long. And one that then lacks room in
  // the KV cache, which shorter ones keep taking, is let in before all other prompts: once in so long a time.
  double patience_s = 30;
};

// An error where the model has no FP16, or none of the levels that the options ask for.
Result<std::unique_ptr<PrecisionPolicy>> make_slo_policy(StepModel model, const SloOptions& options);

// "last", "shed", "as-they-come".
std::optional<SloOptions::Missed> parse_slo_missed(std::string_view text);

// Whether parse_slo_levels takes this text: "slo", and for comparison "slo-fp16" and "slo-fp8", which plan by deadline
// but compute in one precision.
std::optional<SloOptions::Levels> parse_slo_levels(std::string_view text);

}  // namespace nfp
