#include "policy/draft_length.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>

namespace nfp {
namespace {

constexpr int32_t kLearnt = 4;       // plain steps before the first draft
constexpr int32_t kEarly = 2;        // steps of a kind that tell nothing: they load what is loaded late, and capture
constexpr int32_t kAgain = 64;       // steps that draft, after which a plain one is measured
constexpr int32_t kTryLast = 256;    // plain steps after which drafts are tried at the latest
constexpr double kWorth = 1.03;      // tokens a plain step's time, for drafts to be worth it
constexpr double kFirstGuess = 0.7;  // an FP8 step beside an FP16 one
constexpr double kNew = 0.25;        // weight of the newest time
constexpr double kNewTried = 0.01;   // weight of the newest draft, once there were many,
constexpr double kTryWeight = 0.05;  // of one where none is worth it, as there are few;
constexpr int32_t kGuessed = 10;     // and drafts that the first guess of their acceptance stands for

// Tokens of a step with so many drafts.
double expected_tokens(double acceptance, int32_t drafts) {
  double tokens = 1, all_right = 1;
  for (int32_t d = 0; d < drafts; ++d) tokens += all_right *= acceptance;
  return tokens;
}

}  // namespace

void DraftLength::Mean::add(double newest) {
  value = value == 0 ? newest : value + kNew * (std::min(newest, last) - value);
  last = newest;
}

size_t DraftLength::index_of(int32_t sequences) {
  const auto index = static_cast<size_t>(std::bit_width(static_cast<uint32_t>(std::max(1, sequences) - 1)));
  return std::min(index, std::tuple_size_v<decltype(batches_)> - 1);
}

double DraftLength::ratio_of(const Batch& batch, int32_t drafts) const {
  // Of a length that was not tried: in proportion, by the nearest one that was.
  int32_t nearest = 0;
  for (int32_t d = 1; d < static_cast<int32_t>(batch.ratio.size()); ++d) {
    if (batch.ratio[static_cast<size_t>(d)].value == 0) continue;
    if (nearest == 0 || std::abs(d - drafts) < std::abs(nearest - drafts)) nearest = d;
  }
  const double each = nearest == 0 ? kFirstGuess : (batch.ratio[static_cast<size_t>(nearest)].value - 1) / nearest;
  return std::max(1.0, 1 + each * drafts);
}

int32_t DraftLength::best_of(const Batch& batch, int32_t sequences, int32_t drafting, int32_t most) const {
  int32_t best = 0;
  double best_gain = kWorth;
  for (int32_t drafts = 1; drafts <= most; ++drafts) {
    const double more = (expected_tokens(acceptance_, drafts) - 1) * drafting / sequences;
    const double gain = (1 + more) / ratio_of(batch, drafts);
    if (gain > best_gain) best = drafts, best_gain = gain;
  }
  return best;
}

int32_t DraftLength::choose(int32_t sequences, int32_t drafting, int32_t most) const {
  most = std::min(most, most_);
  if (always_) return std::max(0, most);
  const Batch& batch = batches_[index_of(sequences)];
  if (most <= 0 || batch.plains < kLearnt || batch.since_plain >= kAgain) return 0;
  const int32_t best = best_of(batch, sequences, drafting, most);
  return best == 0 && batch.since_drafted >= batch.try_after ? std::min(2, most) : best;
}

void DraftLength::plain(int32_t sequences, double seconds) {
  Batch& batch = batches_[index_of(sequences)];
  if (batch.plains <= kEarly) batch.plain_s = {};
  batch.plain_s.add(seconds);
  batch.plains = std::min(batch.plains + 1, kLearnt);
  batch.since_plain = 0;
  batch.since_drafted = std::min(batch.since_drafted + 1, kTryLast);
}

void DraftLength::drafted(int32_t sequences, int32_t drafts, int32_t tried, int32_t accepted, double seconds) {
  Batch& batch = batches_[index_of(sequences)];
  const auto gains = [&] { return best_of(batch, sequences, sequences, most_) > 0; };
  if (tried > 0) {
    const double newest = std::max(gains() ? kNewTried : kTryWeight, 1.0 / (kGuessed + tried_));
    acceptance_ += (1 - std::pow(1 - newest, tried)) * (1.0 * accepted / tried - acceptance_);
    tried_ = std::min(tried_ + tried, static_cast<int32_t>(1 / kNewTried));
  }
  batch.since_plain = std::min(batch.since_plain + 1, kAgain);
  const auto at = static_cast<size_t>(drafts);
  if (batch.ratio.size() <= at) {
    batch.ratio.resize(at + 1);
    batch.tries.resize(at + 1);
  }
  batch.tries[at] = std::min(batch.tries[at] + 1, kEarly + 1);
  if (batch.tries[at] <= kEarly) return;
  batch.since_drafted = 0;
  if (batch.plain_s.value > 0) batch.ratio[at].add(seconds / batch.plain_s.value);
  const bool all_right = accepted == tried;  // perhaps the text is another one now
  batch.try_after = gains() || all_right ? kTryAfter : std::min(2 * batch.try_after, kTryLast);
}

}  // namespace nfp
