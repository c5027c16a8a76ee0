#include "backend/cpu/thread_count.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace nfp::cpu {
namespace {

std::vector<CpuPlace> machine(int cores, int threads_a_core) {
  std::vector<CpuPlace> places;
  for (int t = 0; t < threads_a_core; ++t) {
    for (int c = 0; c < cores; ++c) places.push_back({t * cores + c, c, 0});
  }
  return places;
}

TEST(ThreadCount, Candidates) {
  EXPECT_EQ(thread_candidates(machine(2, 1), 0), (std::vector<int>{2}));
  EXPECT_EQ(thread_candidates(machine(1, 2), 0), (std::vector<int>{2, 1}));
  EXPECT_EQ(thread_candidates(machine(8, 2), 0), (std::vector<int>{16, 8, 4}));
  EXPECT_EQ(thread_candidates(machine(32, 1), 0), (std::vector<int>{32, 16, 8}));
  EXPECT_EQ(thread_candidates(machine(32, 2), 3), (std::vector<int>{3}));
}

TEST(ThreadCount, TheFewestThatAreAsFastAsTheBest) {
  const std::vector<ThreadRate> useless_hyper_threads = {{16, 60, 800}, {8, 60, 800}, {4, 58, 400}};
  EXPECT_EQ(best_thread_count(useless_hyper_threads), 8);
  const std::vector<ThreadRate> useful_hyper_threads = {{16, 60, 1000}, {8, 60, 800}, {4, 58, 400}};
  EXPECT_EQ(best_thread_count(useful_hyper_threads), 16);
  const std::vector<ThreadRate> slower_together = {{64, 90, 3000}, {32, 120, 2900}, {16, 100, 1500}};
  EXPECT_EQ(best_thread_count(slower_together), 32);
}

TEST(ThreadCount, OfThisMachine) {
  const auto places = usable_cpus();
  const auto count = choose_thread_count(places, scalar_kernels());
  ASSERT_TRUE(count.ok()) << count.error().message;
  const auto candidates = thread_candidates(places, cpu_quota());
  EXPECT_NE(std::find(candidates.begin(), candidates.end(), *count), candidates.end());
}

}  // namespace
}  // namespace nfp::cpu
