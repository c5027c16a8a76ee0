#include "backend/cuda/experts/grouped_plan.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "backend/cuda/experts/grouped_unit.h"

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

// What an expert needs that `mean` tokens go to on the average, with the given variance.
struct Expected {
  double tiles = 0;
  double tokens = 0;  // that are multiplied: whole units (grouped.cuh)
};
Expected expected(double mean, double variance, int tile) {
  const int unit = grouped_unit(tile);
  const auto whole_units = [unit](double tokens) { return std::ceil(tokens / unit - 1e-9) * unit; };
  constexpr double kSpread[] = {-1.5, -0.9, -0.3,
                                0.3,  0.9,  1.5};  // none at the mean, which whole tiles may hold just so
  constexpr double kShare = 1.0 / std::size(kSpread);
  Expected sum;
  for (const double z : kSpread) {
    const double count = std::max(mean + z * std::sqrt(variance), 0.0);
    const double tiles = count < 1 ? count : std::ceil(count / tile - 1e-9);
    const double each = whole_units(count / std::max(tiles, 1.0));
    sum.tiles += tiles * kShare;
    sum.tokens += (count < 1 ? count * unit : (tiles - 1) * each + whole_units(count - (tiles - 1) * each)) * kShare;
  }
  return sum;
}

double cost(const GroupedProblem& p, int tile) {
  const double share = static_cast<double>(p.top) / p.experts, rows = static_cast<double>(p.rows);
  const double active = p.experts * (1 - std::pow(1 - share, rows));
  const Expected each = expected(rows * share, rows * share * (1 - share), tile);
  const double tiles = std::max(p.experts * each.tiles, active);
  const double tokens = std::max(p.experts * each.tokens, active * grouped_unit(tile));
  const double bytes = static_cast<double>(p.n * p.k) * (reads_lower(p.mode) ? 2 : 1);
  const double reading = active * bytes / kBytesPerMicrosecond * (1 + kReadAgain * (tiles / active - 1));
  const StepTime step = step_time(p.mode);
  const double steps = std::ceil(static_cast<double>(p.n) / 128) * std::ceil(static_cast<double>(p.k) / step_k(p.mode));
  const double arithmetic = steps * (tiles * step.fixed + tokens * step.token) / kSms;
  return std::max(reading, arithmetic) + kNotHidden * std::min(reading, arithmetic);
}

}  // namespace

int grouped_tile(const GroupedProblem& problem, std::span<const int> tiles) {
  return *std::min_element(tiles.begin(), tiles.end(),
                           [&](int a, int b) { return cost(problem, a) < cost(problem, b); });
}

Result<int> choose_grouped_tile(const GroupedProblem& problem, int asked, std::span<const int> tiles) {
  if (asked == 0) return grouped_tile(problem, tiles);
  if (std::find(tiles.begin(), tiles.end(), asked) != tiles.end()) return asked;
  return error(ErrorCode::kUsage, "expert_linear: tile_tokens {} is none of the tiles of these products: {}", asked,
               fmt::join(tiles, ", "));
}

}  // namespace nfp::cuda
