#include "backend/cpu/thread_count.h"

#include <algorithm>
#include <cmath>

#include "backend/cpu/ceilings.h"

namespace nfp::cpu {

std::vector<int> thread_candidates(const std::vector<CpuPlace>& places, int quota) {
  const auto cpus = static_cast<int>(places.size());
  const int most = std::max(1, quota > 0 ? std::min(quota, cpus) : cpus);
  const int cores = std::min(count_cores(places), most);
  std::vector<int> counts = {most, cores};
  if (cores >= 4) counts.push_back(cores / 2);
  if (cores >= 16) counts.push_back(cores / 4);
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  return counts;
}

int best_thread_count(std::span<const ThreadRate> rates) {
  const auto score = [](const ThreadRate& rate) { return std::sqrt(rate.read_gbs * rate.fma_gflops); };
  double best = 0;
  for (const ThreadRate& rate : rates) best = std::max(best, score(rate));
  int fewest = rates.front().threads;
  for (const ThreadRate& rate : rates) {
    if (score(rate) >= 0.97 * best) fewest = std::min(fewest, rate.threads);
  }
  return fewest;
}

Result<int> choose_thread_count(const std::vector<CpuPlace>& places, const KernelTable& kernels) {
  const std::vector<int> candidates = thread_candidates(places, cpu_quota());
  if (candidates.size() == 1) return candidates.front();
  NFP_ASSIGN_OR_RETURN(const std::vector<ThreadRate> rates, measure_thread_rates(candidates, places, kernels));
  return best_thread_count(rates);
}

}  // namespace nfp::cpu
