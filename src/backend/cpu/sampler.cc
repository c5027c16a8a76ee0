#include "backend/cpu/sampler.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend/philox.h"

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

double weight_of(const Candidate& c, float maximum, double factor) {
  return std::exp((static_cast<double>(c.logit) - maximum) * factor);
}

// The shortest prefix, likeliest first, whose weight reaches `target`. By halving: the likelier half is either enough,
// or all kept.
std::span<Candidate> keep_mass(std::span<Candidate> candidates, double target, float maximum, double factor,
                               SampleScratch& scratch) {
  if (candidates.empty()) return candidates;
  const std::span<Candidate> ordered = copy_of(candidates, scratch);
  size_t begin = 0, end = ordered.size();
  double kept = 0;
  while (end - begin > 32) {
    const size_t middle = (begin + end) / 2;
    std::nth_element(ordered.begin() + static_cast<ptrdiff_t>(begin), ordered.begin() + static_cast<ptrdiff_t>(middle),
                     ordered.begin() + static_cast<ptrdiff_t>(end), likelier);
    double mass = 0;
    for (size_t i = begin; i < middle; ++i) mass += weight_of(ordered[i], maximum, factor);
    if (kept + mass >= target) {
      end = middle;
    } else {
      kept += mass;
      begin = middle;
    }
  }
  std::sort(ordered.begin() + static_cast<ptrdiff_t>(begin), ordered.begin() + static_cast<ptrdiff_t>(end), likelier);
  size_t last = begin;
  for (; last < end; ++last) {
    kept += weight_of(ordered[last], maximum, factor);
    if (kept >= target) break;
  }
  return keep_down_to(candidates, ordered[std::min(last, end - 1)]);
}

// Where the running sum of weights first passes u times their total.
int32_t draw_from(std::span<const Candidate> candidates, float maximum, double factor, double u) {
  double total = 0;
  for (const Candidate& c : candidates) total += weight_of(c, maximum, factor);
  double left = u * total;
  int32_t chosen = candidates.front().id;
  for (const Candidate& c : candidates) {
    const double w = weight_of(c, maximum, factor);
    if (w > 0) chosen = c.id;
    left -= w;
    if (left < 0) break;
  }
  return chosen;
}

// The same over a whole row, by blocks.
int32_t draw_from_all(const Logits& logits, float maximum, float factor, double u, SampleScratch& scratch) {
  constexpr int32_t kBlock = 1024;
  double total = 0;
  std::vector<float>& weights = scratch.weights;
  const int32_t blocks = (logits.n + kBlock - 1) / kBlock;
  const auto block_sum = [&](int32_t b) {
    return logits.kernels.sum_exp(logits.x + int64_t{b} * kBlock, std::min(kBlock, logits.n - b * kBlock), maximum,
                                  factor);
  };
  for (int32_t b = 0; b < blocks; ++b) {
    const double sum = block_sum(b);
    weights[static_cast<size_t>(b)] = static_cast<float>(sum);
    total += static_cast<double>(weights[static_cast<size_t>(b)]);
  }
  double left = u * total;
  int32_t b = 0;
  int32_t last_positive = 0;
  for (; b < blocks; ++b) {
    const auto sum = static_cast<double>(weights[static_cast<size_t>(b)]);
    if (sum > 0) last_positive = b;
    if (left < sum) break;
    left -= sum;
  }
  b = std::min(b, blocks - 1);
  if (weights[static_cast<size_t>(b)] <= 0) b = last_positive;
  const int32_t first = b * kBlock;
  const int32_t count = std::min(kBlock, logits.n - first);
  float* w = weights.data() + blocks;
  logits.kernels.exps(logits.x + first, count, maximum, factor, w);
  int32_t chosen = first;
  for (int32_t i = 0; i < count; ++i) {
    if (w[i] > 0) chosen = first + i;
    left -= static_cast<double>(w[i]);
    if (left < 0) break;
  }
  return chosen;
}

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
  const int32_t top_k = s.top_k;
  const float top_p = s.top_p;
  const float min_p = s.min_p;
  const double u = uniform(s.seed, s.draw);
  const bool limits_k = top_k > 0 && top_k < logits.n;
  const bool limits_p = top_p < 1.0f;
  if (!limits_k && !limits_p && !(min_p > 0.0f)) return draw_from_all(logits, maximum, factor, u, scratch);

  std::span<Candidate> candidates;
  const float step = 4.0f * temperature;
  if (limits_k) {
    candidates = keep_top_k(gather(logits, maximum, step, top_k, scratch), top_k, scratch);
    if (limits_p) {
      double total = 0;
      for (const Candidate& c : candidates) total += weight_of(c, maximum, factor);
      candidates = keep_mass(candidates, static_cast<double>(top_p) * total, maximum, factor, scratch);
    }
  } else if (limits_p) {
    const double target = static_cast<double>(top_p) * kernels.sum_exp(logits.x, logits.n, maximum, factor);
    int32_t wanted = 1;
    while (true) {
      candidates = gather(logits, maximum, step, wanted, scratch);
      double mass = 0;
      for (const Candidate& c : candidates) mass += weight_of(c, maximum, factor);
      if (mass >= target || wanted >= logits.n) break;
      wanted = static_cast<int32_t>(std::min<size_t>(2 * candidates.size(), static_cast<size_t>(logits.n)));
    }
    candidates = keep_mass(candidates, target, maximum, factor, scratch);
  } else {
    const float threshold = maximum + std::log(min_p) * temperature;
    const int32_t count =
        kernels.at_least(logits.x, logits.n, std::min(threshold, maximum), scratch.candidates.data(), logits.n);
    candidates = {scratch.candidates.data(), static_cast<size_t>(count)};
  }
  if (min_p > 0.0f) {
    const auto end = std::remove_if(candidates.begin(), candidates.end(), [&](const Candidate& c) {
      return c.logit < maximum && weight_of(c, maximum, factor) < static_cast<double>(min_p);
    });
    candidates = {candidates.begin(), end};
  }
  if (candidates.empty()) return best;
  return draw_from(candidates, maximum, factor, u);
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
  weights.resize(n / 1024 + 1 + 1024);
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
