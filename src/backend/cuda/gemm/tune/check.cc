#include "backend/cuda/gemm/tune/check.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <set>

namespace nfp::cuda {

int64_t log_uniform(uint64_t* state, int64_t least, int64_t most) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  const double unit = static_cast<double>(z >> 11) * 0x1p-53;
  const auto low = static_cast<double>(least), high = static_cast<double>(most);
  return std::clamp<int64_t>(std::llround(low * std::exp(unit * std::log(high / low))), least, most);
}

std::vector<int> untuned_tokens(uint64_t seed, int count, int most, std::span<const int> tuned) {
  std::set<int> found;
  constexpr int kTries = 64;  // a number
  for (int i = 0; i < count * kTries && static_cast<int>(found.size()) < count; ++i) {
    const auto tokens = static_cast<int>(log_uniform(&seed, 1, most));
    if (std::find(tuned.begin(), tuned.end(), tokens) == tuned.end()) found.insert(tokens);
  }
  return {found.begin(), found.end()};
}

Result<Comparison> compare_with_choice(std::span<const Config> configs, double margin, const TakeTurns& take_turns) {
  assert(!configs.empty());
  NFP_ASSIGN_OR_RETURN(std::vector<double> times, take_turns(configs, false));
  const auto least = static_cast<size_t>(std::min_element(times.begin(), times.end()) - times.begin());
  Comparison found{configs.front(), configs[least], times.front(), times[least], false};
  if (found.chosen_time <= margin * found.fastest_time) return found;
  const std::array both = {found.chosen, found.fastest};
  NFP_ASSIGN_OR_RETURN(times, take_turns(both, true));
  found.chosen_time = times[0];
  found.fastest_time = times[1];
  found.is_slower = times[0] > margin * times[1];
  if (times[1] >= times[0]) {
    found.fastest = found.chosen;
    found.fastest_time = found.chosen_time;
  }
  return found;
}

void CheckReport::add(const Problem& problem, const Comparison& found) {
  OfMode& mode = modes_[problem.mode];
  const double ratio = found.chosen_time / found.fastest_time;
  ++mode.products;
  mode.slower += found.is_slower;
  mode.logs += std::log(ratio);
  if (ratio <= mode.worst) return;
  mode.worst = ratio;
  mode.worst_at = problem;
}

std::vector<std::string> CheckReport::lines() const {
  std::vector<std::string> out;
  for (const auto& [mode, of] : modes_) {
    out.push_back(
        fmt::format("{}: chosen / fastest {:.3f} (worst {:.3f}: {} tokens, n {}, k {}), {} of {} choices replaced",
                    name_of(mode), std::exp(of.logs / of.products), of.worst, of.worst_at.m, of.worst_at.n,
                    of.worst_at.k, of.slower, of.products));
  }
  return out;
}

}  // namespace nfp::cuda
