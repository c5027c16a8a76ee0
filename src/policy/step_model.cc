#include "policy/step_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace nfp {
namespace {

// Least squares with coefficients of at least zero, by coordinate descent on the normal equations: small, and exact
// enough after some thousand rounds for tables of some hundred rows.
std::vector<double> solve_nonnegative(const std::vector<std::vector<double>>& rows, const std::vector<double>& wanted) {
  const size_t n = rows.front().size();
  std::vector<std::vector<double>> product(n, std::vector<double>(n, 0.0));
  std::vector<double> right(n, 0.0), x(n, 0.0);
  for (size_t r = 0; r < rows.size(); ++r) {
    for (size_t i = 0; i < n; ++i) {
      if (rows[r][i] == 0) continue;
      right[i] += rows[r][i] * wanted[r];
      for (size_t j = 0; j < n; ++j) product[i][j] += rows[r][i] * rows[r][j];
    }
  }
  for (int round = 0; round < 20000; ++round) {
    double moved = 0;
    for (size_t i = 0; i < n; ++i) {
      if (product[i][i] <= 0) continue;
      double gradient = right[i];
      for (size_t j = 0; j < n; ++j) gradient -= product[i][j] * x[j];
      const double next = std::max(0.0, x[i] + gradient / product[i][i]);
      moved = std::max(moved, std::abs(next - x[i]) * std::sqrt(product[i][i]));
      x[i] = next;
    }
    if (moved < 1e-9) break;
  }
  return x;
}

// Counts of tokens that were measured; those closer than 12 % share a knot, which tells noise from shape.
std::vector<double> knots_of(const StepTable& table) {
  std::vector<double> counts;
  for (const StepTime& step : table.steps) counts.push_back(step.tokens());
  std::sort(counts.begin(), counts.end());
  std::vector<double> knots;
  for (const double count : counts) {
    if (knots.empty() || count > knots.back() * 1.12) knots.push_back(count);
  }
  return knots;
}

}  // namespace

StepWork work_of(const StepTime& step) {
  StepWork work;
  if (step.prefill_tokens > 0) work.add(step.prefill_tokens, step.prefill_context);
  work.singles += step.decode_sequences;
  work.tokens += step.decode_sequences;
  work.sequences += step.decode_sequences;
  work.decode_keys += static_cast<double>(step.decode_sequences) * step.decode_context;
  return work;
}

namespace {

// How strongly attention is wished to be cheap, by what the longest measured one took.
struct AttentionWeights {
  double pairs, keys;
};
AttentionWeights attention_weights(const StepTable& table) {
  double most_pairs = 0, pairs_ms = 1, most_keys = 1000, keys_ms = 1;
  bool told_apart = false;
  for (const StepTime& step : table.steps) {
    const StepWork work = work_of(step);
    told_apart = told_apart || step.prefill_context > 0;
    if (work.prefill_pairs > most_pairs) most_pairs = work.prefill_pairs, pairs_ms = step.ms;
    if (work.decode_keys > 0) keys_ms = std::max(keys_ms, step.ms), most_keys = std::max(most_keys, work.decode_keys);
  }
  return {(told_apart ? 0.02 : 0.5) * most_pairs / pairs_ms, 0.02 * most_keys / keys_ms};
}

}  // namespace

Result<StepModel> StepModel::fit(const StepTable& table) {
  StepModel model;
  model.levels_ = table.levels;
  model.knots_ = knots_of(table);
  const size_t levels = table.levels.size(), knots = model.knots_.size();
  std::vector<int> of_level(levels, 0);
  for (const StepTime& step : table.steps) ++of_level[step.level];
  for (size_t level = 0; level < levels; ++level) {
    if (of_level[level] >= 2) continue;
    return error(ErrorCode::kInvalidInput,
                 "the step times of '{}' at level {} have {} steps, and at least 2 are needed to predict others; "
                 "measure more with nestedfp bench MODEL steps",
                 table.model, table.levels[level].name(), of_level[level]);
  }

  // Columns: for each level the time of the first knot, then the slope between each two; pairs, keys, sequences.
  const size_t own = knots, shared = levels * own, columns = shared + 3;
  std::vector<double> scale(columns, 1.0);
  std::vector<std::vector<double>> rows;
  std::vector<double> wanted;
  for (const StepTime& step : table.steps) {
    const StepWork work = work_of(step);
    std::vector<double>& row = rows.emplace_back(columns, 0.0);
    const double weight = 1.0 / step.ms;  // errors count by their share of the step
    row[step.level * own] = weight;
    for (size_t k = 0; k + 1 < knots; ++k) {
      const double reached = std::min<double>(work.tokens, model.knots_[k + 1]) - model.knots_[k];
      if (reached > 0) row[step.level * own + k + 1] = weight * reached;
    }
    row[shared] = weight * work.prefill_pairs;
    row[shared + 1] = weight * work.keys();
    row[shared + 2] = weight * work.sequences;
    wanted.push_back(1.0);
  }
  // A weak wish for equal slopes on both sides of a knot, for what a level was not measured at.
  for (size_t level = 0; level < levels; ++level) {
    for (size_t k = 1; k + 1 < knots; ++k) {
      std::vector<double>& row = rows.emplace_back(columns, 0.0);
      double typical = 0;  // ms at the end of the level's table
      for (const StepTime& step : table.steps) {
        if (step.level == level) typical = std::max(typical, step.ms);
      }
      const double weight = 0.003 * model.knots_[k + 1] / typical;
      row[level * own + k] = weight;
      row[level * own + k + 1] = -weight;
      wanted.push_back(0.0);
    }
  }
  // And one for cheap attention: where every prompt was measured from its start, or all contexts were short, the data
  // cannot tell it from what tokens cost.
  const AttentionWeights cheap = attention_weights(table);
  rows.emplace_back(columns, 0.0)[shared] = cheap.pairs;
  rows.emplace_back(columns, 0.0)[shared + 1] = cheap.keys;
  wanted.insert(wanted.end(), 2, 0.0);
  for (size_t c = 0; c < columns; ++c) {  // columns of one size, so that coordinate descent converges
    double square = 0;
    for (const auto& row : rows) square += row[c] * row[c];
    scale[c] = square > 0 ? 1.0 / std::sqrt(square) : 0.0;
    for (auto& row : rows) row[c] *= scale[c];
  }
  const std::vector<double> x = solve_nonnegative(rows, wanted);
  const auto value = [&](size_t c) { return x[c] * scale[c] * 1e-3; };
  for (size_t level = 0; level < levels; ++level) {
    std::vector<double>& at = model.linear_.emplace_back();
    at.push_back(value(level * own));
    for (size_t k = 0; k + 1 < knots; ++k) {
      at.push_back(at.back() + value(level * own + k + 1) * (model.knots_[k + 1] - model.knots_[k]));
    }
  }
  model.per_pair_ = value(shared);
  model.per_key_ = value(shared + 1);
  model.per_sequence_ = value(shared + 2);
  model.factor_.assign(levels, std::vector<double>(kSizes, 1.0));
  return model;
}

size_t StepModel::find_level(Precision precision, double fp8_share) const {
  const auto distance = [&](size_t i) { return std::abs(levels_[i].fp8_share - fp8_share); };
  size_t best = levels_.size();
  for (size_t i = 0; i < levels_.size(); ++i) {
    if (levels_[i].precision != precision || levels_[i].fp8_share < fp8_share - 0.006) continue;
    if (best == levels_.size() || distance(i) < distance(best)) best = i;
  }
  return best;
}

StepModel StepModel::at_shares(std::span<const double> shares) const {
  StepModel model = *this;
  model.levels_.clear();
  model.linear_.clear();
  // Measured levels by share, FP16 first. Tables have one kind of FP8.
  std::vector<size_t> known(levels_.size());
  std::iota(known.begin(), known.end(), 0);
  std::stable_sort(known.begin(), known.end(),
                   [&](size_t a, size_t b) { return levels_[a].fp8_share < levels_[b].fp8_share; });
  const auto take = [&](double share) {
    const auto above =
        std::find_if(known.begin(), known.end(), [&](size_t i) { return levels_[i].fp8_share >= share - 1e-9; });
    if (above == known.end()) return;
    const bool measured = levels_[*above].fp8_share <= share + 1e-9;
    if (!measured && above == known.begin()) return;
    const size_t right = *above, left = measured ? right : *(above - 1);
    const double wide = levels_[right].fp8_share - levels_[left].fp8_share;
    const double part = measured ? 1.0 : (share - levels_[left].fp8_share) / wide;
    model.levels_.push_back({levels_[right].precision, share});
    std::vector<double>& at = model.linear_.emplace_back(knots_.size());
    for (size_t k = 0; k < at.size(); ++k) at[k] = linear_[left][k] + part * (linear_[right][k] - linear_[left][k]);
  };
  take(0);
  for (const double share : shares) take(share);
  model.drift_ = model.pair_factor_ = model.key_factor_ = 1;
  model.error_ = {};
  model.lasts_ = {};
  model.factor_.assign(model.levels_.size(), std::vector<double>(kSizes, 1.0));
  return model;
}

double StepModel::linear_seconds(size_t level, double tokens) const {
  const std::vector<double>& at = linear_[level];
  if (tokens <= knots_.front() || knots_.size() == 1) return at.front();
  const auto above = std::upper_bound(knots_.begin(), knots_.end(), tokens);
  const auto right = std::min<size_t>(static_cast<size_t>(above - knots_.begin()), knots_.size() - 1);
  const size_t left = right - 1;
  const double slope = (at[right] - at[left]) / (knots_[right] - knots_[left]);
  return at[left] + slope * (tokens - knots_[left]);
}

namespace {

// The two launches of a step whose single tokens are computed apart.
bool two_launches(const StepWork& work) { return work.apart && work.singles > 0 && work.singles < work.tokens; }
StepWork singles_of(const StepWork& work) {
  StepWork part;
  part.tokens = part.sequences = part.singles = work.singles;
  part.decode_keys = work.decode_keys;
  return part;
}
StepWork chunks_of(const StepWork& work) {
  StepWork part;
  part.tokens = work.tokens - work.singles;
  part.sequences = work.sequences - work.singles;
  part.prefill_pairs = work.prefill_pairs;
  part.prefill_keys = work.prefill_keys;
  return part;
}

}  // namespace

double StepModel::table_seconds(size_t level, const StepWork& work) const {
  if (two_launches(work)) return table_seconds(exact_level(), singles_of(work)) + table_seconds(level, chunks_of(work));
  return linear_seconds(level, work.tokens) + per_pair_ * work.prefill_pairs + per_key_ * work.keys() +
         per_sequence_ * work.sequences;
}

int StepModel::size_of(int32_t tokens) {
  return std::min<int>(std::bit_width(static_cast<uint32_t>(std::max(tokens, 1))) - 1, kSizes - 1);
}

StepModel::Terms StepModel::terms(size_t level, const StepWork& work) const {
  // Between two sizes the factor is interpolated: a prediction must not jump where a bucket ends.
  const double place = std::log2(std::max(work.tokens, 1));
  const auto low = static_cast<size_t>(std::min<double>(place, kSizes - 1));
  const size_t high = std::min<size_t>(low + 1, kSizes - 1);
  const double share = std::min(place - static_cast<double>(low), 1.0);
  const std::vector<double>& factor = factor_[level];
  return {.linear = linear_seconds(level, work.tokens) * (factor[low] + share * (factor[high] - factor[low])),
          .pairs = per_pair_ * work.prefill_pairs * pair_factor_,
          .keys = per_key_ * work.keys() * key_factor_,
          .sequences = per_sequence_ * work.sequences};
}

double StepModel::seconds(size_t level, const StepWork& work) const {
  if (two_launches(work)) return seconds(exact_level(), singles_of(work)) + seconds(level, chunks_of(work));
  return terms(level, work).sum() * drift_;
}

int32_t StepModel::largest_chunk(size_t level, const StepWork& work, int32_t context, int32_t most,
                                 double limit_s) const {
  const auto fits = [&](int32_t count) {
    StepWork both = work;
    both.add(count, context);
    return seconds(level, both) <= limit_s;
  };
  if (most < 1 || !fits(1)) return 0;
  if (fits(most)) return most;
  int32_t low = 1, high = most;  // low fits, high does not
  while (high - low > std::max(1, low / 64)) {
    const int32_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return low;
}

void StepModel::observe(size_t level, const StepWork& work, double measured) {
  if (level >= levels_.size() || work.tokens < 1 || !(measured > 0) || !std::isfinite(measured)) return;
  const double predicted = seconds(level, work);
  if (!(predicted > 0)) return;
  const double off = std::abs(predicted - measured) / measured;
  error_.steps += 1;
  error_.mean += (off - error_.mean) / static_cast<double>(std::min<uint64_t>(error_.steps, 100));
  const auto moved = [](double& factor, double by, double most) {
    factor = std::clamp(factor * std::exp(by), 1.0 / most, most);
  };
  constexpr double kMostFactor = 2;  // of one size beside the others
  constexpr double kMostMachine = kMostDrift / kMostFactor;
  const double far = std::log(measured / predicted);
  lasts_[static_cast<size_t>((error_.steps - 1) % kLasts)] = far + std::log(drift_);
  const double to_median = median_of_lasts() - std::log(drift_);
  if (error_.steps <= kFirstSteps) {
    moved(drift_, to_median, kMostMachine);
    return;
  }
  // Half of the last steps that are all far off are another program that came or went, or another clock rate.
  if (std::abs(to_median) > kFarOff) {
    moved(drift_, 0.5 * to_median, kMostMachine);
    return;
  }
  // Clipped before it counts: a step that waited for something else says nothing about the next.
  const double ratio = std::clamp(far, -0.15, 0.15);
  // A normalised gradient step: each factor moves by its share of the prediction, all together by a fifth of the error.
  const bool two = two_launches(work);
  const StepWork main = two ? chunks_of(work) : work;
  Terms parts = terms(level, main);
  const double linear = parts.linear * drift_ / predicted;
  if (two) parts.keys += terms(exact_level(), singles_of(work)).keys;
  const double pairs = parts.pairs * drift_ / predicted, keys = parts.keys * drift_ / predicted;
  const double by = 0.2 * ratio / (1 + linear * linear + pairs * pairs + keys * keys);
  moved(drift_, by, kMostMachine);
  moved(factor_[level][static_cast<size_t>(size_of(main.tokens))], by * linear, kMostFactor);
  moved(pair_factor_, by * pairs, kMostFactor);
  moved(key_factor_, by * keys, kMostFactor);
}

double StepModel::median_of_lasts() const {
  std::array<double, kLasts + 1> sorted = {};
  size_t count = std::min<size_t>(error_.steps, kLasts);
  std::copy_n(lasts_.begin(), count, sorted.begin());
  // At first the table counts as a step too, so that one that is measured wrongly moves nothing.
  if (error_.steps <= kFirstSteps) sorted[count++] = 0;
  std::sort(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(count));
  const double upper = sorted[count / 2], lower = sorted[(count - 1) / 2];
  return std::abs(lower) < std::abs(upper) ? lower : upper;
}

double StepModel::prompt_seconds(size_t level, int32_t tokens, int32_t context, int32_t max_step_tokens) const {
  double sum = 0;
  for (int32_t done = 0; done < tokens;) {
    StepWork work;
    const int32_t count = std::min(tokens - done, max_step_tokens);
    work.add(count, context + done);
    sum += seconds(level, work);
    done += count;
  }
  return sum;
}

StepModel::FitError StepModel::FitError::of(std::vector<double> errors) {
  FitError found;
  if (errors.empty()) return found;
  std::sort(errors.begin(), errors.end());
  for (const double e : errors) found.mean += e / static_cast<double>(errors.size());
  found.p95 = errors[std::min(errors.size() - 1, errors.size() * 95 / 100)];
  found.worst = errors.back();
  return found;
}

StepModel::FitError StepModel::error_on(std::span<const StepTime> steps) const {
  std::vector<double> errors;
  for (const StepTime& step : steps) {
    errors.push_back(std::abs(table_seconds(step.level, work_of(step)) * 1e3 - step.ms) / step.ms);
  }
  return FitError::of(std::move(errors));
}

void StepModel::scale(double factor) {
  for (auto& level : linear_) {
    for (double& seconds : level) seconds *= factor;
  }
  per_pair_ *= factor;
  per_key_ *= factor;
  per_sequence_ *= factor;
}

}  // namespace nfp
