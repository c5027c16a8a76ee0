#include "backend/cpu/sampler.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend/race.h"

namespace nfp::cpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

bool likelier(const Candidate& a, const Candidate& b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; }

struct Logits {
  const KernelTable& kernels;
  const float* x;
  int32_t n;
};

// Candidates at or above a threshold, at least `wanted` of them where there are so many, in order of id. Steps down
// from the maximum: a peaked row (the usual one) yields a short list after one or two passes.
std::span<Candidate> gather(const Logits& logits, float maximum, float step, int32_t wanted, SampleScratch& scratch) {
  for (int steps = 1; steps < 64; steps *= 2) {
    const float down = static_cast<float>(steps) * step;
    const int32_t count =
        logits.kernels.at_least(logits.x, logits.n, maximum - down, scratch.candidates.data(), logits.n);
    if (count >= wanted) return {scratch.candidates.data(), static_cast<size_t>(count)};
  }
  const int32_t count =
      logits.kernels.at_least(logits.x, logits.n, kMinusInfinity, scratch.candidates.data(), logits.n);
  return {scratch.candidates.data(), static_cast<size_t>(count)};
}

std::span<Candidate> copy_of(std::span<const Candidate> candidates, SampleScratch& scratch) {
  std::copy(candidates.begin(), candidates.end(), scratch.ordered.begin());
  return {scratch.ordered.data(), candidates.size()};
}

// Keeps, in their order, the candidates that are not less likely than `last`.
std::span<Candidate> keep_down_to(std::span<Candidate> candidates, const Candidate& last) {
  const auto end =
      std::remove_if(candidates.begin(), candidates.end(), [&](const Candidate& c) { return likelier(last, c); });
  return {candidates.begin(), end};
}

std::span<Candidate> keep_top_k(std::span<Candidate> candidates, int32_t k, SampleScratch& scratch) {
  if (static_cast<size_t>(k) >= candidates.size()) return candidates;
  const std::span<Candidate> ordered = copy_of(candidates, scratch);
  std::nth_element(ordered.begin(), ordered.begin() + (k - 1), ordered.end(), likelier);
  return keep_down_to(candidates, ordered[static_cast<size_t>(k - 1)]);
}

// A row's race (race.h).
class Race {
 public:
  Race(const Logits& logits, const SamplingRow& row, int32_t best, float factor)
      : logits_(logits),
        row_(row),
        maximum_(logits.x[best]),
        factor_(factor),
        best_(best),
        key_(race_key(row.seed, row.draw)) {}

  // What those of the candidates weigh that are likelier than `cut`.
  double weigh_likelier(std::span<const Candidate> candidates, const Candidate& cut) const {
    double sum = 0;
    for (const Candidate& c : candidates) sum += likelier(c, cut) ? weight_of(c) : 0.0;
    return sum;
  }

  // Who arrives first of those of the candidates, in order of id, that are likelier than `cut`.
  Candidate first_of(std::span<const Candidate> candidates, const Candidate& cut) const {
    Winner winner = likeliest();
    for (const Candidate& c : candidates) offer(c, cut, winner);
    return winner.candidate;
  }
  // The same of the whole row.
  Candidate first_of_all(const Candidate& cut, std::span<Candidate> scratch) const {
    constexpr int32_t kBlock = 1024;
    Winner winner = likeliest();
    RacePass pass{.logits = logits_.x, .key = key_, .maximum = maximum_, .factor = factor_};
    for (pass.first = 0; pass.first < logits_.n; pass.first = pass.end) {
      pass.end = std::min(pass.first + kBlock, logits_.n);
      pass.latest = static_cast<float>(std::log2(winner.arrival));
      const int32_t count = logits_.kernels.racers(pass, scratch.data());
      for (int32_t i = 0; i < count; ++i) offer(scratch[static_cast<size_t>(i)], cut, winner);
    }
    return winner.candidate;
  }

 private:
  struct Winner {
    Candidate candidate;
    double arrival;
  };
  double weight_of(const Candidate& c) const {
    return std::exp((static_cast<double>(c.logit) - static_cast<double>(maximum_)) * static_cast<double>(factor_));
  }
  // No limit takes it away.
  Winner likeliest() const {
    const Candidate c{maximum_, best_};
    return {c, arrival_of(race_word(key_, best_), c.logit, maximum_, factor_)};
  }
  void offer(const Candidate& c, const Candidate& cut, Winner& winner) const {
    if (!likelier(c, cut)) return;
    if (row_.min_p > 0.0f && c.logit < maximum_ && weight_of(c) < static_cast<double>(row_.min_p)) return;
    const double arrival = arrival_of(race_word(key_, c.id), c.logit, maximum_, factor_);
    if (arrival < winner.arrival || (arrival == winner.arrival && c.id < winner.candidate.id)) winner = {c, arrival};
  }

  const Logits& logits_;
  const SamplingRow& row_;
  float maximum_;
  float factor_;
  int32_t best_;
  RaceKey key_;
};

// Bias, mask and penalties, in a copy of the row where there are any.
const float* adjusted(const SampleArgs& args, int32_t row, SampleScratch& scratch) {
  const SamplingRow& s = args.row[row];
  const float* raw = args.logits + static_cast<size_t>(row) * static_cast<size_t>(args.vocab);
  const int32_t slot = args.history != nullptr ? s.history_slot : -1;
  const bool penalised =
      slot >= 0 && (s.repetition_penalty != 1.0f || s.presence_penalty != 0.0f || s.frequency_penalty != 0.0f);
  if (!penalised && s.bias_count == 0 && s.allowed_row < 0) return raw;
  float* x = scratch.logits.data();
  std::memcpy(x, raw, static_cast<size_t>(args.vocab) * sizeof(float));
  for (int32_t i = s.bias_first; i < s.bias_first + s.bias_count; ++i) {
    const LogitBias& bias = args.bias[i];
    if (bias.token >= 0 && bias.token < args.vocab) x[bias.token] += bias.value;
  }
  if (s.allowed_row >= 0) {
    const uint32_t* words = args.allowed + static_cast<size_t>(s.allowed_row) * static_cast<size_t>(args.allowed_words);
    for (int32_t v = 0; v < args.vocab; v += 32) {
      const uint32_t word = v / 32 < args.allowed_words ? words[v / 32] : 0;
      if (word == 0xffffffffu) continue;
      for (int32_t bit = 0; bit < 32 && v + bit < args.vocab; ++bit) {
        if (((word >> bit) & 1u) == 0) x[v + bit] = kMinusInfinity;
      }
    }
  }
  if (penalised) {
    const auto& history = static_cast<const CpuTokenHistory&>(*args.history);
    for (const int32_t token : history.seen(slot)) {
      float& logit = x[token];
      logit = logit > 0 ? logit / s.repetition_penalty : logit * s.repetition_penalty;
      const uint32_t count = history.generated(slot, token);
      if (count > 0) logit -= s.presence_penalty + s.frequency_penalty * static_cast<float>(count);
    }
  }
  return x;
}

int32_t choose(const KernelTable& kernels, const SampleArgs& args, int32_t row, SampleScratch& scratch) {
  const SamplingRow& s = args.row[row];
  const Logits logits{kernels, adjusted(args, row, scratch), args.vocab};
  const int32_t best = kernels.argmax(logits.x, logits.n);
  const float temperature = s.temperature;
  const float maximum = logits.x[best];
  args.out[row].not_finite = std::isfinite(maximum) ? 0 : 1;
  if (!(temperature > 0.0f) || !std::isfinite(maximum)) return best;
  const float factor = 1.0f / temperature;
  if (!std::isfinite(factor)) return best;
  const Race race(logits, s, best, factor);
  const bool is_list = s.top_k > 0 && s.top_k < logits.n;
  std::span<Candidate> list;
  if (is_list) list = keep_top_k(gather(logits, maximum, 4.0f * temperature, s.top_k, scratch), s.top_k, scratch);
  Candidate cut{kMinusInfinity, logits.n};
  double target = 0;
  if (s.top_p < 1.0f) {
    target = static_cast<double>(s.top_p) *
             (is_list ? race.weigh_likelier(list, cut) : kernels.sum_exp(logits.x, logits.n, maximum, factor));
  }
  // Top-p keeps the likeliest, until they weigh enough: the winner, if those likelier do not. Where they do it keeps
  // nobody who is as unlikely as the winner, and the others' race is run again: 1 + ln(1 / top_p) times on average,
  // since the winner is as likely in any place of the weight.
  while (true) {
    const Candidate winner = is_list ? race.first_of(list, cut) : race.first_of_all(cut, scratch.ordered);
    if (!(s.top_p < 1.0f) || winner.id == best) return winner.id;
    std::span<const Candidate> likely = list;
    if (!is_list) {
      const int32_t count = kernels.at_least(logits.x, logits.n, winner.logit, scratch.candidates.data(), logits.n);
      likely = {scratch.candidates.data(), static_cast<size_t>(count)};
    }
    if (race.weigh_likelier(likely, winner) < target) return winner.id;
    cut = winner;
  }
}

// Of the raw logits: log-probability and rank of `out.token`, and the top_n likeliest (-1 and -infinity where the
// vocabulary is smaller).
void report(const Logits& logits, SampledRow& out, int32_t top_n, TokenLogprob* top, SampleScratch& scratch) {
  const float maximum = logits.x[logits.kernels.argmax(logits.x, logits.n)];
  out.not_finite = std::isfinite(maximum) ? 0 : 1;
  double log_total = 0;
  if (std::isfinite(maximum)) log_total = std::log(logits.kernels.sum_exp(logits.x, logits.n, maximum, 1.0f));
  const auto logprob_of = [&](float logit) {
    if (!std::isfinite(maximum) || !(logit > kMinusInfinity)) return kMinusInfinity;
    return static_cast<float>(static_cast<double>(logit) - maximum - log_total);
  };
  const float own = logits.x[out.token];
  out.logprob = logprob_of(own);
  const float threshold = own > kMinusInfinity ? own : kMinusInfinity;
  const int32_t above = logits.kernels.at_least(logits.x, logits.n, threshold, scratch.candidates.data(), logits.n);
  out.rank = 1;
  for (int32_t i = 0; i < above; ++i) {
    out.rank += likelier(scratch.candidates[static_cast<size_t>(i)], {threshold, out.token});
  }
  if (top_n == 0) return;
  const std::span<Candidate> found =
      copy_of(gather(logits, std::isfinite(maximum) ? maximum : 0.0f, 4.0f, top_n, scratch), scratch);
  const size_t count = std::min(found.size(), static_cast<size_t>(top_n));
  std::partial_sort(found.begin(), found.begin() + static_cast<ptrdiff_t>(count), found.end(), likelier);
  for (size_t i = 0; i < static_cast<size_t>(top_n); ++i) {
    top[i].token = i < count ? found[i].id : -1;
    top[i].logprob = i < count ? logprob_of(found[i].logit) : kMinusInfinity;
  }
}

}  // namespace

void SampleScratch::reserve(int32_t vocab) {
  const auto n = static_cast<size_t>(vocab);
  if (logits.size() >= n) return;
  logits.resize(n);
  candidates.resize(n);
  ordered.resize(n);
}

void sample_row(const KernelTable& kernels, const SampleArgs& args, int32_t row, SampleScratch& scratch) {
  SampledRow& out = args.out[row];
  out.token = choose(kernels, args, row, scratch);
  const int32_t top_n = args.row[row].report;
  if (top_n < 0) return;
  assert(top_n <= kMaxTopLogprobs);
  const auto at = static_cast<size_t>(row);
  report({kernels, args.logits + at * static_cast<size_t>(args.vocab), args.vocab}, out, top_n,
         args.top + at * kMaxTopLogprobs, scratch);
}

void score_row(const KernelTable& kernels, const ScoreArgs& args, int32_t row, SampleScratch& scratch) {
  assert(args.target[row] >= 0 && args.target[row] < args.vocab);
  SampledRow& out = args.out[row];
  out.token = args.target[row];
  const auto at = static_cast<size_t>(row);
  report({kernels, args.logits + at * static_cast<size_t>(args.vocab), args.vocab}, out, args.top_n,
         args.top + at * static_cast<size_t>(args.top_n), scratch);
}

}  // namespace nfp::cpu
