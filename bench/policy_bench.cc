// What a decision of the policy slo costs, by sequences: half of them decode, 512 at most, the others are prompts that
// wait. Prints a line of JSON for each: the mean, the median, and the slowest of a hundredth of the decisions.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <string_view>
#include <vector>

#include "policy/slo_policy.h"
#include "policy/testing/step_tables.h"

namespace nfp {
namespace {

struct Prompts {
  std::string_view are;
  double oldest_s = 0, newest_s = 0;  // since they came
};

void measure(int32_t sequences, const Prompts& prompts, std::span<const double> shares) {
  const StepModel model = std::move(StepModel::fit(testing::synthetic_table())).value().at_shares(shares);
  const auto policy = std::move(make_slo_policy(model, {})).value();
  std::mt19937 random(1);
  std::uniform_real_distribution<double> unit(0, 1);
  std::vector<SequenceState> all(static_cast<size_t>(sequences));
  for (size_t i = 0; i < all.size(); ++i) {
    SequenceState& s = all[i];
    s.serial = i;
    s.running = i < std::min<size_t>(all.size() / 2, 512);
    s.ttft_s = 0.2 + unit(random);
    s.itl_s = 0.05;
    s.arrival_s = -prompts.newest_s - (prompts.oldest_s - prompts.newest_s) * unit(random);
    s.missing = s.running ? 1 : 1 + static_cast<int32_t>(2000 * unit(random));
    s.context = s.running ? 500 : 0;
    s.emitted = s.running ? 10 : 0;
    s.due_s = s.running ? 0.02 + 0.1 * unit(random) : s.arrival_s + s.ttft_s;
  }
  StepState state;
  state.sequences = all;
  state.max_step_tokens = 2048;
  state.max_sequences = sequences;
  state.free_tokens = 1 << 24;
  std::vector<double> us;
  for (int i = 0; i < 2000; ++i) {
    state.now_s = 1e-5 * i;
    const auto start = std::chrono::steady_clock::now();
    const StepDecision decision = policy->decide(state);
    const double taken = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (!decision.chunks.empty()) us.push_back(1e6 * taken);
  }
  std::sort(us.begin(), us.end());
  double mean = 0;
  for (const double one : us) mean += one / static_cast<double>(us.size());
  fmt::print(
      "{{\"sequences\":{},\"prompts\":\"{}\",\"levels\":{},\"mean_us\":{:.1f},\"median_us\":{:.1f},\"p99_us\":{:.1f}}}"
      "\n",
      sequences, prompts.are, model.levels().size(), mean, us[us.size() / 2], us[us.size() * 99 / 100]);
}

}  // namespace
}  // namespace nfp

int main() {
  const std::vector<double> shares = {0.5, 0.88, 1};
  // Of late ones some are given up and every level is tried; lost ones have no deadline left.
  for (const nfp::Prompts& prompts : {nfp::Prompts{"in time", 0.01, 0}, {"late", 1, 0}, {"lost", 20, 12}}) {
    for (const int32_t sequences : {16, 64, 256, 1024, 8192}) nfp::measure(sequences, prompts, shares);
  }
}
