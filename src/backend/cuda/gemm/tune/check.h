// Whether what is chosen for numbers of tokens that nothing was tuned with is the fastest: the logic of
// `nestedfp tune --check`. Plain C++, tested without a GPU.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "backend/cuda/gemm/plan/config.h"
#include "backend/cuda/gemm/plan/tuning_table.h"
#include "base/result.h"

namespace nfp::cuda {

// Log-uniform in `least` to `most`. (splitmix64: the same everywhere, unlike the standard library's distributions.)
int64_t log_uniform(uint64_t* state, int64_t least, int64_t most);
// `count` numbers of tokens, log-uniform in 1 to `most`, ascending, each once and none of `tuned`; fewer where there
// are no more.
std::vector<int> untuned_tokens(uint64_t seed, int count, int most, std::span<const int> tuned);

// How the kernel that is chosen for a product compares with others.
struct Comparison {
  Config chosen, fastest;
  double chosen_time = 0, fastest_time = 0;
  bool is_slower = false;  // by more than the margin, each time that it was measured
};
// Each kernel's time, in one unit; they take turns in random order. `again`: in longer turns.
using TakeTurns = std::function<Result<std::vector<double>>(std::span<const Config> configs, bool again)>;
// Of `configs` the first is what is chosen. Where another is faster by more than `margin` (1.03: 3 %) the two of them
// take turns again, so that the luck of the fastest of many does not decide.
Result<Comparison> compare_with_choice(std::span<const Config> configs, double margin, const TakeTurns& take_turns);

// What a product's choice may lose before the fastest is kept.
inline constexpr double kCheckMargin = 1.03;

class CheckReport {
 public:
  void add(const Problem& problem, const Comparison& found);
  // Of each mode "f16: chosen / fastest 1.012 (worst 1.081: 317 tokens, n 5120, k 4096), 2 of 12 choices replaced".
  std::vector<std::string> lines() const;

 private:
  struct OfMode {
    int products = 0, slower = 0;
    double logs = 0, worst = 0;
    Problem worst_at;
  };
  std::map<Mode, OfMode> modes_;
};

// What tuning gives.
struct Tuned {
  TuningTable table;
  CheckReport check;
};

}  // namespace nfp::cuda
