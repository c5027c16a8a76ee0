#include "backend/cuda/gemm/tune/check.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace nfp::cuda {
namespace {

TEST(Check, CountsAreRandomAndNotTuned) {
  const std::vector<int> tuned(kTokenBuckets.begin(), kTokenBuckets.end());
  const std::vector<int> counts = untuned_tokens(5, 200, 8192, tuned);
  ASSERT_EQ(counts.size(), 200u);
  EXPECT_TRUE(std::is_sorted(counts.begin(), counts.end()));
  EXPECT_EQ(std::adjacent_find(counts.begin(), counts.end()), counts.end());
  for (const int tokens : counts) {
    EXPECT_GE(tokens, 1);
    EXPECT_LE(tokens, 8192);
    EXPECT_EQ(std::find(tuned.begin(), tuned.end(), tokens), tuned.end()) << tokens;
  }
  // Log-uniform: half of them below 91, but that small numbers are there once each.
  EXPECT_GT(counts[100], 91);
  EXPECT_LT(counts[60], 200);
  EXPECT_EQ(untuned_tokens(5, 200, 8192, tuned), counts);
  EXPECT_NE(untuned_tokens(6, 200, 8192, tuned), counts);
  EXPECT_EQ(untuned_tokens(1, 8, 4, std::vector{1, 3}), (std::vector{2, 4}));
  EXPECT_TRUE(untuned_tokens(1, 8, 1, std::vector{1}).empty());
  EXPECT_TRUE(untuned_tokens(1, 0, 8192, {}).empty());
}

// Has times for what is asked of it, one set after the other.
struct Timer {
  std::vector<std::vector<double>> times;
  std::vector<std::vector<Config>> asked{};
  std::vector<bool> again{};
  TakeTurns take_turns() {
    return [this](std::span<const Config> configs, bool longer) -> Result<std::vector<double>> {
      asked.emplace_back(configs.begin(), configs.end());
      again.push_back(longer);
      if (asked.size() > times.size()) return error(ErrorCode::kDevice, "no more turns");
      return times[asked.size() - 1];
    };
  }
};

const std::vector<Config> kConfigs = {*parse_config("128x16 c1 b1"), *parse_config("128x16 c1 b1 split2"),
                                      *parse_config("64x16 c1 b1")};

TEST(Check, AChoiceThatIsFastEnoughStands) {
  Timer timer{{{10.2, 11.0, 10.0}}};
  const auto found = compare_with_choice(kConfigs, 1.03, timer.take_turns());
  ASSERT_TRUE(found.ok());
  EXPECT_FALSE(found->is_slower);
  EXPECT_EQ(found->chosen, kConfigs[0]);
  EXPECT_EQ(found->fastest, kConfigs[2]);
  EXPECT_EQ(found->chosen_time, 10.2);
  EXPECT_EQ(found->fastest_time, 10.0);
  EXPECT_EQ(timer.again, std::vector{false});
}

TEST(Check, WhatIsFasterTwiceIsKept) {
  Timer timer{{{10.5, 11.0, 10.0}, {10.6, 10.1}}};
  const auto found = compare_with_choice(kConfigs, 1.03, timer.take_turns());
  ASSERT_TRUE(found.ok());
  EXPECT_TRUE(found->is_slower);
  EXPECT_EQ(found->fastest, kConfigs[2]);
  EXPECT_EQ(found->chosen_time, 10.6);
  EXPECT_EQ(found->fastest_time, 10.1);
  EXPECT_EQ(timer.again, (std::vector{false, true}));
  EXPECT_EQ(timer.asked[1], (std::vector{kConfigs[0], kConfigs[2]}));
}

TEST(Check, LuckDoesNotDecide) {
  Timer little{{{10.5, 11.0, 10.0}, {10.3, 10.1}}};  // less than the margin, the second time
  const auto found = compare_with_choice(kConfigs, 1.03, little.take_turns());
  ASSERT_TRUE(found.ok());
  EXPECT_FALSE(found->is_slower);
  EXPECT_EQ(found->fastest, kConfigs[2]);
  EXPECT_EQ(found->chosen_time / found->fastest_time, 10.3 / 10.1);
  Timer none{{{10.5, 11.0, 10.0}, {10.0, 10.1}}};
  const auto same = compare_with_choice(kConfigs, 1.03, none.take_turns());
  ASSERT_TRUE(same.ok());
  EXPECT_FALSE(same->is_slower);
  EXPECT_EQ(same->fastest, kConfigs[0]);
  EXPECT_EQ(same->fastest_time, 10.0);
}

TEST(Check, FailuresArePassedOn) {
  Timer at_once{{}};
  EXPECT_EQ(compare_with_choice(kConfigs, 1.03, at_once.take_turns()).error().code, ErrorCode::kDevice);
  Timer later{{{10.5, 11.0, 10.0}}};
  EXPECT_EQ(compare_with_choice(kConfigs, 1.03, later.take_turns()).error().code, ErrorCode::kDevice);
}

TEST(Check, ReportsMeanWorstAndWhatWasReplaced) {
  CheckReport report;
  EXPECT_TRUE(report.lines().empty());
  const Config a = kConfigs[0], b = kConfigs[1];
  report.add({317, 5120, 4096, Mode::kF16}, {a, b, 12.1, 10.0, true});
  report.add({20, 4096, 4096, Mode::kF16}, {a, a, 10.0, 10.0, false});
  report.add({20, 4096, 4096, Mode::kE4M3}, {a, a, 7.0, 7.0, false});
  EXPECT_EQ(report.lines(),
            (std::vector<std::string>{
                "f16: chosen / fastest 1.100 (worst 1.210: 317 tokens, n 5120, k 4096), 1 of 2 choices replaced",
                "e4m3: chosen / fastest 1.000 (worst 1.000: 20 tokens, n 4096, k 4096), 0 of 1 choices replaced"}));
}

}  // namespace
}  // namespace nfp::cuda
