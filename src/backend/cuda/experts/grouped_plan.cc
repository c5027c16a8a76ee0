#include "backend/cuda/experts/grouped_plan.h"

#include <algorithm>
#include <cmath>

namespace nfp::cuda {
namespace {

// Fitted to the order of 237 times of seven tiles on an H200 (bench/results/experts-h200.jsonl), not to the times.
struct StepTime {  // microseconds of 128 rows by step_k() on an SM
  double fixed, token;
};
constexpr StepTime step_time(Mode mode) {
  if (mode == Mode::kE4M3) return {0.0954, 0.00379};
  if (mode == Mode::kW8A16) return {0.4711, 0.00508};  // 128 of k
  return {0.3219, 0.00354};
}
constexpr double kBytesPerMicrosecond = 4.3e6;
constexpr double kReadAgain = 0.57;  // what an expert's further tiles cost of reading its weights
constexpr double kNotHidden = 0.115;
constexpr int kSms = 132;

// Tiles of an expert that `mean` tokens go to on the average, with the given variance.
double expected_tiles(double mean, double variance, int tokens) {
  double sum = 0;
  constexpr double kSpread[] = {-1.5, -0.9, -0.3,
                                0.3,  0.9,  1.5};  // none at the mean, which whole tiles may hold just so
  for (const double z : kSpread) {
    const double count = std::max(mean + z * std::sqrt(variance), 0.0);
    sum += count < 1 ? count : std::ceil(count / tokens - 1e-9);
  }
  return sum / std::size(kSpread);
}

double cost(const GroupedProblem& p, int tokens) {
  const double share = static_cast<double>(p.top) / p.experts, rows = static_cast<double>(p.rows);
  const double active = p.experts * (1 - std::pow(1 - share, rows));
  const double tiles = std::max(p.experts * expected_tiles(rows * share, rows * share * (1 - share), tokens), active);
  const double bytes = static_cast<double>(p.n * p.k) * (reads_lower(p.mode) ? 2 : 1);
  const double reading = active * bytes / kBytesPerMicrosecond * (1 + kReadAgain * (tiles / active - 1));
  const StepTime step = step_time(p.mode);
  const double steps =
      tiles * std::ceil(static_cast<double>(p.n) / 128) * std::ceil(static_cast<double>(p.k) / step_k(p.mode));
  const double arithmetic = steps * (step.fixed + step.token * tokens) / kSms;
  return std::max(reading, arithmetic) + kNotHidden * std::min(reading, arithmetic);
}

}  // namespace

int grouped_tile(const GroupedProblem& problem, std::span<const int> tiles) {
  return *std::min_element(tiles.begin(), tiles.end(),
                           [&](int a, int b) { return cost(problem, a) < cost(problem, b); });
}

}  // namespace nfp::cuda
