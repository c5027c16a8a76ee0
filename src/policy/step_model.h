// Predicts how long a step takes, from a table of measured ones.
//
//   T(level, step) = linear layers at that level, by the tokens of the step: piecewise linear between measured counts
//                    (a table, since tiles and caches make steps of it)
//                  + attention of prompts, by pairs of a query and a key
//                  + attention by keys read, of decoding sequences and, once a chunk, of prompts
//                  + a fixed share for each sequence (sampling, block tables)
//
// All coefficients are at least zero, so a prediction never falls when a step grows. Those of attention are shared by
// the levels: precision is of the linear layers. What the table does not know (a busier machine, a warmer chip) is
// learnt from steps that ran, as factors that stay within bounds.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "policy/step_table.h"

namespace nfp {

// What a step's time depends on.
struct StepWork {
  int32_t tokens = 0;        // of all sequences
  int32_t sequences = 0;     // with at least one token
  int32_t singles = 0;       // of these, with one
  double prefill_pairs = 0;  // (query, key) pairs of chunks of more than one token
  double prefill_keys = 0;   // keys that these chunks attend to, themselves included
  double decode_keys = 0;    // the same of single tokens
  double keys() const { return prefill_keys + decode_keys; }
  // Two launches: the single tokens in FP16, then the chunks at the step's level (StepPlan::exact_singles).
  bool apart = false;

  // A chunk of `count` tokens behind `context` tokens in the cache.
  void add(int32_t count, int32_t context) {
    tokens += count;
    sequences += 1;
    if (count == 1) {
      singles += 1;
      decode_keys += context + 1;
    } else {
      prefill_pairs += static_cast<double>(count) * (context + 0.5 * (count + 1));
      prefill_keys += context + count;
    }
  }
};
StepWork work_of(const StepTime& step);

class StepModel {
 public:
  // An error where the table is too small to tell anything.
  static Result<StepModel> fit(const StepTable& table);

  const std::vector<StepLevel>& levels() const { return levels_; }
  // The same machine with these levels: FP16, and the FP8 of the table in each of these shares of the weights (above
  // 0). A share that was not measured takes as long as its part of the way from the levels around it: the linear layers
  // run one after the other, so what some of them save adds up. Nothing that was learnt is kept. Shares above the
  // largest that was measured are left out.
  StepModel at_shares(std::span<const double> shares) const;

  // The level of this precision whose share is the nearest at or above `fp8_share`; levels().size() = none.
  size_t find_level(Precision precision, double fp8_share) const;
  size_t exact_level() const { return find_level(Precision::kFp16, 0); }

  double seconds(size_t level, const StepWork& work) const;
  // As measured, without what was learnt since.
  double table_seconds(size_t level, const StepWork& work) const;
  // A prompt's `tokens` behind `context` of its own, alone on the machine, in steps of at most max_step_tokens.
  double prompt_seconds(size_t level, int32_t tokens, int32_t context, int32_t max_step_tokens) const;
  // The most tokens of a chunk behind `context` tokens that can join `work` within `limit_s`; 0 = none.
  int32_t largest_chunk(size_t level, const StepWork& work, int32_t context, int32_t most, double limit_s) const;

  // Learns from a step that took `seconds`. How fast this machine is now is the median over the last kLasts steps, at
  // once for the first kFirstSteps, and later where it is further off than kFarOff (a logarithm). After the first steps
  // one outlier moves a prediction by 3 % at most, and what moves are the terms that the prediction was made of: the
  // machine, the size of the step, attention. All together move it by a factor of kMostDrift at most.
  void observe(size_t level, const StepWork& work, double seconds);
  static constexpr double kMostDrift = 1000;
  static constexpr uint64_t kFirstSteps = 32;
  static constexpr size_t kLasts = 9;
  static constexpr double kFarOff = 0.25;

  struct Error {
    double mean = 0;     // of |predicted - measured| / measured over about the last 100 steps
    uint64_t steps = 0;  // observed
  };
  const Error& recent_error() const { return error_; }
  struct FitError {
    double mean = 0, p95 = 0, worst = 0;             // of |predicted - measured| / measured
    static FitError of(std::vector<double> errors);  // zeros where there are none
  };
  // Of the table's predictions (not of what was learnt) for these steps, whose levels are this model's.
  FitError error_on(std::span<const StepTime> steps) const;

  // Every second `factor` times as long: for a machine that is so much slower than the one of the table.
  void scale(double factor);

 private:
  static constexpr int kSizes = 24;  // buckets by the logarithm of a step's tokens
  static int size_of(int32_t tokens);
  double linear_seconds(size_t level, double tokens) const;
  // The terms of one launch with what was learnt, all but that of the machine.
  struct Terms {
    double linear = 0, pairs = 0, keys = 0, sequences = 0;
    double sum() const { return linear + pairs + keys + sequences; }
  };
  Terms terms(size_t level, const StepWork& work) const;
  double median_of_lasts() const;

  std::vector<StepLevel> levels_;
  std::vector<double> knots_;                // tokens, ascending
  std::vector<std::vector<double>> linear_;  // [level][knot] seconds
  double per_pair_ = 0;                      // seconds
  double per_key_ = 0;
  double per_sequence_ = 0;
  double drift_ = 1;                         // of the machine, all levels
  std::vector<std::vector<double>> factor_;  // [level][size] of linear layers, beside drift_
  double pair_factor_ = 1, key_factor_ = 1;  // of attention, likewise
  std::array<double, kLasts> lasts_{};       // log(measured / predicted without drift_) of the last steps, in any order
  Error error_;
};

}  // namespace nfp
